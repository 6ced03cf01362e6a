"""Traces of what the device does, for Perfetto or XProf, and a summary of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxinfer.metrics.device_trace import DeviceTrace, KernelTime, Span, summarise_spans


class Profile:
    """Filled when the `with` block of `profile` ends."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.trace = DeviceTrace(0.0, 0.0, 0, ())

    def describe(self, count: int = 12) -> str:
        """The idle share and the kernels that took most of the time, a line each."""
        trace = self.trace
        if trace.idle_share is None:
            return f"no kernel ran; the trace is in {self.directory}"
        head = (
            f"device: {trace.seconds * 1e3:.1f} ms, idle {trace.idle_share:.1%}, {trace.num_kernels} kernels; "
            f"the trace is in {self.directory}"
        )
        return "\n".join([head, *map(_line, trace.kernels[:count])])


def _line(kernel: KernelTime) -> str:
    mean = kernel.seconds / kernel.count * 1e6
    return f"{kernel.seconds * 1e3:9.2f} ms {kernel.count:7d} x {mean:9.2f} us  {kernel.name}"


@contextmanager
def profile(directory: str | Path) -> Iterator[Profile]:
    """Writes a trace of the block into `directory` (open `*.xplane.pb` in XProf, `*.trace.json.gz` in Perfetto).

    On a GPU, XLA runs without command buffers while it is traced unless the flag
    `--xla_enable_command_buffers_during_profiling=true` was in XLA_FLAGS when the backend started; the command lines
    set it. Python's own frames are not traced: they would slow the step loop down.

    Raises:
      ValueError: the folder cannot be made.
    """
    result = Profile(Path(directory))
    try:
        result.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write a profile to {directory}: {error}") from None
    before = set(result.directory.rglob("*.xplane.pb"))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(result.directory), profiler_options=options):
        yield result
    written = sorted(set(result.directory.rglob("*.xplane.pb")) - before)
    result.trace = summarise_spans(span for path in written for span in read_spans(path))


def read_spans(path: Path) -> Iterator[Span]:
    """The kernels in a trace file: a GPU's streams, a TPU's operations, or what XLA's threads ran on a CPU."""
    data = jax.profiler.ProfileData.from_file(str(path))
    planes = list(data.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    for plane in devices or planes:
        for line in plane.lines:
            is_device = line.name.startswith(("Stream", "XLA Ops"))
            for event in line.events:
                if is_device or (not devices and _is_operation(event)):
                    yield Span(event.name, event.start_ns, event.duration_ns)


def _is_operation(event: Any) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the extension's iterator type lacks a module name
        return any(name == "hlo_op" for name, _ in event.stats)
