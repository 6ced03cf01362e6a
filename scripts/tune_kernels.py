"""Find the kernels' parameters for the GPU at hand: `python scripts/tune_kernels.py [--seconds N] [--only WORDS ...]`.

For every head_dim and cache, each set of parameters that fits into shared memory is checked against float32 attention
and timed on one case of decode and one of prefill. The fastest go to `kernels/paged_attention/tuned/<device>.json`,
from which the engine reads them; entries that the time did not suffice for stay as they were, and a device without a
file has those of an H200. What is left of the time goes to `bench_linear.py --tune`, which does the same for the
products of few rows.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from bench_kernels import MAX_ERROR, AttentionCase

from jaxinfer.kernels.paged_attention import arg_specs, mosaic_gpu
from jaxinfer.kernels.paged_attention.arg_specs import Spec
from jaxinfer.kernels.paged_attention.mosaic_gpu import DecodeParams, Params, PrefillParams

KERNELS = pathlib.Path(__file__).resolve().parents[1] / "kernels"
SMEM = 226 * 1024  # of an SM, less what the launches of its CTAs need
OPS = ("decode", "prefill")
MARGIN = 0.98  # of the best time so far: what is less than this better may be chance
AHEAD = 4  # programs that are compiled while another is timed
LINEAR_SECONDS = 60.0
"""Least time worth starting `bench_linear.py` for."""


def decode_smem(params: DecodeParams, head_dim: int, itemsize: int) -> int:
    """Bytes of shared memory of a decode CTA with a group of at most 8, barriers apart."""
    tile = params.block_kv * head_dim
    widened = 2 * tile * 2 if itemsize == 1 else 0
    return params.num_stages * 2 * tile * itemsize + widened + 8 * (4 * head_dim + params.block_kv) * 2 + 4096


def decode_candidates(tuned: DecodeParams, head_dim: int, itemsize: int) -> Iterator[DecodeParams]:
    ways = (False, True) if itemsize == 1 and head_dim % 32 == 0 else (False,)
    for stages, ctas, in_registers in itertools.product((2, 3, 4, 6), (1, 2), ways):
        params = dataclasses.replace(tuned, num_stages=stages, ctas_per_sm=ctas, keys_in_registers=in_registers)
        if decode_smem(params, head_dim, itemsize) * ctas <= SMEM:
            yield params


def prefill_candidates(tuned: PrefillParams, head_dim: int) -> Iterator[PrefillParams]:
    for block_kv, stages, buffers in itertools.product((64, 128), (2, 3, 4), (1, 2)):
        queries = 2 * buffers * 64 * head_dim * 2
        if queries + stages * 2 * block_kv * head_dim * 2 <= SMEM:
            yield dataclasses.replace(tuned, block_kv=block_kv, num_stages=stages, q_buffers=buffers)


@dataclasses.dataclass(frozen=True)
class Task:
    """One entry of the table: a kernel, a head_dim and a kind of cache."""

    op: str
    head_dim: int
    is_fp8: bool

    @property
    def key(self) -> str:
        return f"{self.head_dim} fp8" if self.is_fp8 else str(self.head_dim)

    @property
    def spec(self) -> Spec:
        cache = arg_specs.FP8 if self.is_fp8 else {}
        if self.op == "decode":
            return arg_specs.decode(96, 1024, head_dim=self.head_dim, **cache)
        return arg_specs.prefill(1, 4096, head_dim=self.head_dim, **cache)

    def candidates(self, num_sms: int) -> list[Params]:
        """The ones in use first, so that a search cut short does not choose worse ones."""
        tuned = mosaic_gpu.tuned_params(self.head_dim, is_fp8=self.is_fp8)
        tuned = Params(*(dataclasses.replace(getattr(tuned, op), num_sms=num_sms) for op in OPS))
        if self.op == "decode":
            found = decode_candidates(tuned.decode, self.head_dim, self.spec.kv_dtype.itemsize)
            others = [dataclasses.replace(tuned, decode=params) for params in found]
        else:
            others = [dataclasses.replace(tuned, prefill=x) for x in prefill_candidates(tuned.prefill, self.head_dim)]
        return [tuned, *(params for params in others if params != tuned)]


def fields_of(params: DecodeParams | PrefillParams) -> dict[str, Any]:
    """The fields that differ from their defaults: an entry of the table."""
    fields = dataclasses.fields(params)
    return {x.name: getattr(params, x.name) for x in fields if getattr(params, x.name) != x.default}


def tune(task: Task, num_sms: int, deadline: float) -> dict | None:
    """The fastest parameters of those that time suffices for; None if none was right."""
    sets = AttentionCase(task.spec).make_inputs()
    best, fastest, count = None, float("inf"), 0
    waiting = [AttentionCase(task.spec, params, chain=8) for params in task.candidates(num_sms)]
    compiling: list[tuple[AttentionCase, Future]] = []
    with ThreadPoolExecutor(AHEAD) as pool:
        while (waiting or compiling) and (best is None or time.monotonic() < deadline):
            while waiting and len(compiling) <= AHEAD:
                case = waiting.pop(0)
                compiling.append((case, pool.submit(lambda case=case: case.lower().compile())))
            case, program = compiling.pop(0)
            shown = fields_of(getattr(case.params, task.op))
            try:
                result = case.measure(program.result(), sets)
            except Exception as problem:  # too much shared memory, too many registers, no such case
                print(f"  {shown}: {str(problem).splitlines()[0][:60]}", flush=True)
                continue
            count += 1
            if result.error < MAX_ERROR and result.seconds < MARGIN * fastest:
                best, fastest = shown, result.seconds
        pool.shutdown(cancel_futures=True)
    print(f"{task.op:8s} {task.key:8s} {fastest * 1e6:9,.1f} us  {best}, of {count}", flush=True)
    return best


def write(path: pathlib.Path, table: dict[str, dict[str, dict]]) -> None:
    """The table, an entry a line, by head_dim."""
    lines = []
    for key in sorted(table, key=lambda key: (int(key.split()[0]), key)):
        ops = ",\n".join(f'    "{op}": {json.dumps(table[key][op])}' for op in sorted(table[key]))
        lines.append(f'  "{key}": {{\n{ops}\n  }}')
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def file_name(device_kind: str) -> str:
    return f"{device_kind.lower().replace(' ', '_')}.json"


def tune_attention(path: pathlib.Path, words: list[str], num_sms: int, deadline: float) -> None:
    known = path if path.exists() else path.with_name(file_name(mosaic_gpu.DEFAULT_DEVICE))
    table = json.loads(known.read_text())
    dims = sorted(mosaic_gpu.HEAD_DIMS, key=lambda dim: dim not in (128, 64))  # the most used first
    tasks = [Task(op, dim, fp8) for dim in dims for fp8 in (False, True) for op in OPS]
    tasks = [task for task in tasks if not words or any(word in f"{task.op} {task.key}".split() for word in words)]
    for number, task in enumerate(tasks):
        now = time.monotonic()
        if now > deadline:
            print(f"no time left for {len(tasks) - number} of {len(tasks)} entries")
            break
        share = (deadline - now) / (len(tasks) - number)
        best = tune(task, num_sms, now + share)
        if best is not None:
            table.setdefault(task.key, {})[task.op] = best
            write(path, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="stop after about this long (default: %(default)s)")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="WORD", help="decode, prefill, a head_dim, fp8, linear"
    )
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit("tune_kernels: needs a GPU")
    name = file_name(device.device_kind)
    wants_linear = not options.only or "linear" in options.only
    words = [word for word in options.only if word != "linear"]
    if words or not options.only:
        reserve = options.seconds / 4 if wants_linear else 0
        tune_attention(KERNELS / "paged_attention" / "tuned" / name, words, device.core_count, deadline - reserve)
    left = deadline - time.monotonic()
    if wants_linear and left > LINEAR_SECONDS:
        script = pathlib.Path(__file__).with_name("bench_linear.py")
        command = [sys.executable, str(script), "--tune", str(KERNELS / "linear" / "tuned" / name)]
        try:
            subprocess.run(command, timeout=left, check=True)
        except subprocess.TimeoutExpired:
            print("no time left for linear")


if __name__ == "__main__":
    main()
