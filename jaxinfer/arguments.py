"""Command-line arguments that the tools share, and how their mistakes are told: one line, exit code 2."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from jaxinfer.config import DTYPES, KERNELS, KV_CACHE_DTYPES, LOAD_FORMATS, EngineConfig
from jaxinfer.core import SamplingParams

INTERRUPTED, BROKEN_PIPE = 130, 141
"""Exit codes, as of a shell: after Ctrl-C, and when the reader of stdout has gone."""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The fields of `EngineConfig` that are worth a flag."""
    group = parser.add_argument_group("model and engine")
    group.add_argument(
        "--model", default="smollm2", help="a folder with safetensors, a GGUF file, or 'smollm2' (default)"
    )
    group.add_argument("--tokenizer", help="a folder or tokenizer.json; default: the model's")
    group.add_argument(
        "--dtype", choices=("auto", *DTYPES), default="auto", help="default: float32 on CPU, else bfloat16"
    )
    group.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="default: --dtype")
    group.add_argument("--load-format", choices=LOAD_FORMATS, default="auto", help="'dummy' makes random weights")
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt plus output, in tokens")
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="requests that run at once")
    group.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="tokens a step computes at most")
    group.add_argument("--block-size", type=int, metavar="N", help="tokens a KV-cache block")
    group.add_argument("--num-blocks", type=int, metavar="N", help="blocks of the KV cache; default: what fits")
    group.add_argument("--memory-utilization", type=float, metavar="X", help="share of device memory to use (0.9)")
    group.add_argument("--no-prefix-caching", action="store_true", help="never reuse equal prefixes")
    group.add_argument("--kernels", choices=KERNELS, default="auto", help="'reference' forces plain jnp")
    group.add_argument("--policy", choices=("fcfs", "priority"), help="order of waiting prompts (fcfs)")
    group.add_argument("--profile", metavar="DIR", help="write a trace of the device there, and print a summary")
    group.add_argument("--depth", type=int, metavar="N", help="steps in flight (1 on CPU, else 2; more with pipe=N)")
    group.add_argument("--decode-steps", type=int, metavar="N", help="decode steps a program runs at once")
    group.add_argument("--mesh", metavar="AXIS=N,...", help="devices to divide the model among, as in tensor=2")
    group.add_argument(
        "--pipe-layers", type=_numbers, metavar="N,...", help="layers of each stage of pipe=N (default: even)"
    )
    group = parser.add_argument_group("several processes (the same command in each; process 0 answers)")
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="where process 0 listens, or 'auto': what the cluster says"
    )
    group.add_argument("--num-processes", type=int, metavar="N", help="of the run")
    group.add_argument("--process-id", type=int, metavar="I", help="of this one, from 0")


def connect(args: argparse.Namespace) -> bool:
    """Joins the run of several processes that the flags name, if they name one; whether this process answers.

    Raises:
      ValueError: a mistake in the flags.
      SystemExit: another process did not come.
    """
    if args.coordinator is None:
        for name in ("num_processes", "process_id"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} needs --coordinator")
        return True
    prepare_backend(args)
    _keep_stdout()
    from jaxinfer.sharding.processes import connect_processes

    try:
        processes = connect_processes(args.coordinator, args.num_processes, args.process_id)
    except ConnectionError as error:
        raise SystemExit(str(error)) from None
    return processes is None or processes.leads


def _keep_stdout() -> None:
    """What libraries write to stdout goes to stderr: Gloo, with which CPUs exchange, tells each connection there."""
    with contextlib.suppress(OSError, ValueError):  # no such file: then nothing can write to it
        own = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        sys.stdout = open(own, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)  # noqa: SIM115


def prepare_backend(args: argparse.Namespace) -> None:
    """Settings that JAX reads when its backend starts; what the user has set stays.

    A command has the device for itself: JAX may have 95% of its memory (75% by default), the rest is for what XLA
    allocates beside it. A profile shows the steps as they run otherwise only with command buffers.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    flag = "--xla_enable_command_buffers_during_profiling"
    flags = os.environ.get("XLA_FLAGS", "")
    if args.profile is not None and flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}=true".strip()


def run_command(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], args: argparse.Namespace
) -> int:
    """Runs a command; its exit code. A mistake in the call is told in one line."""
    try:
        return run(args)
    except ValueError as error:
        print(f"{parser.prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        if getattr(args, "coordinator", None) is not None:
            _tell_others(error)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at exit
        return BROKEN_PIPE


def _tell_others(error: ValueError) -> None:
    """The other processes of a run end too, with the same exit code."""
    from jaxinfer.sharding.processes import current

    processes = current()
    if processes is not None:
        processes.fail(error, 2)


@contextmanager
def profiled(directory: str | None) -> Iterator[None]:
    """Traces the block into a folder, if one is named, and says on stderr what the device did."""
    if directory is None:
        yield
        return
    from jaxinfer.engine.profile import profile

    with profile(directory) as trace:
        yield
    print(trace.describe(), file=sys.stderr)


def keep_modules() -> None:
    """Takes what the imports made out of the garbage collector's sight: a full collection over it takes 0.2 s, in the
    middle of some step. For commands, once their modules are imported."""
    gc.collect()
    gc.freeze()


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Parsed flags -> keyword arguments of `LLM`; what was not given is left out."""
    names = {item.name for item in dataclasses.fields(EngineConfig)} - {"seed"}
    chosen = {name: value for name, value in vars(args).items() if name in names and value is not None}
    chosen["enable_prefix_caching"] = not args.no_prefix_caching
    return chosen


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Every field of `SamplingParams`."""
    group = parser.add_argument_group("sampling (defaults: the model's generation config)")
    group.add_argument("--n", type=int, metavar="N", help="answers a prompt")
    group.add_argument("--max-tokens", type=int, metavar="N", help="output tokens at most (128)")
    group.add_argument("--min-tokens", type=int, metavar="N")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--presence-penalty", type=float, metavar="X")
    group.add_argument("--frequency-penalty", type=float, metavar="X")
    group.add_argument("--repetition-penalty", type=float, metavar="X")
    group.add_argument("--logit-bias", type=_bias, action="append", metavar="ID=X", help="may be repeated")
    group.add_argument("--bad-word", dest="bad_words", action="append", metavar="TEXT", help="may be repeated")
    group.add_argument("--allowed-token-id", dest="allowed_token_ids", type=int, action="append", metavar="ID")
    group.add_argument("--stop", action="append", metavar="TEXT", help="may be repeated")
    group.add_argument("--stop-token-id", dest="stop_token_ids", type=int, action="append", metavar="ID")
    group.add_argument("--ignore-eos", action="store_true", default=None)
    group.add_argument("--include-stop-str-in-output", action="store_true", default=None)
    group.add_argument("--keep-special-tokens", dest="skip_special_tokens", action="store_false", default=None)
    group.add_argument("--logprobs", type=int, metavar="K", help="log-probabilities of the K best tokens")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")


def sampling_params(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """Parsed flags over the model's defaults.

    Raises:
      ValueError: a value out of its range.
    """
    names = {item.name for item in dataclasses.fields(SamplingParams)}
    chosen = {name: value for name, value in vars(args).items() if name in names and value is not None}
    if "logit_bias" in chosen:
        chosen["logit_bias"] = dict(chosen["logit_bias"])
    if "max_tokens" not in chosen and defaults.max_tokens == SamplingParams.max_tokens:
        chosen["max_tokens"] = max(128, chosen.get("min_tokens", 0))
    return dataclasses.replace(defaults, **chosen)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers such as 18,18") from None


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=VALUE") from None
