"""`python -m jaxinfer.bench`: how fast an engine is, beside the floor for the same work.

    throughput   a set of requests at once: tokens a second
    latency      batches of one size, one after the other: TTFT, TPOT, ITL, E2E
    load         requests that arrive at a rate or by a trace: the same, and goodput against objectives

Tables go to stdout; `--json FILE` writes the same as JSON (`--json -` to stdout, and the tables to stderr). The floor
is what the same requests take on an ideal engine whose steps are bound by the device's bandwidth and peak alone
(`jaxinfer/metrics/roofline.py`). Exit codes: 0, 1 when a request failed, 2 for a mistake in the call, 130 after Ctrl-C,
141 when the reader of stdout has gone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.arguments import (
    OneLineParser,
    add_engine_arguments,
    connect,
    engine_arguments,
    keep_modules,
    prepare_backend,
    profiled,
    run_command,
)
from jaxinfer.config import WARMUPS, EngineConfig
from jaxinfer.core import SamplingParams
from jaxinfer.metrics.goodput import Objectives
from jaxinfer.metrics.report import figures, floor_figures, shares
from jaxinfer.metrics.shapes import SHAPES
from jaxinfer.metrics.tables import print_tables
from jaxinfer.metrics.workload import (
    NANO_PROMPTS,
    Job,
    draw_arrivals,
    draw_fixed,
    draw_nano,
    draw_trace,
    read_trace,
)

if TYPE_CHECKING:
    from jaxinfer.measure import Run, Subject

EXAMPLES = """\
examples:
  python -m jaxinfer.bench throughput --config 0.6b --workload nano
  python -m jaxinfer.bench latency --config 8b --batch-size 32 --input-len 128 --output-len 128
  python -m jaxinfer.bench load --model path/to/model --input-len 512 --output-len 128 --request-rate 8 \\
      --slo ttft:200,tpot:50,e2e:5000
  python -m jaxinfer.bench load --config 0.6b --trace requests.jsonl --json result.json
"""

type Draw = Callable[[int], list[Job]]
"""Vocabulary size -> jobs."""


@dataclass(frozen=True)
class Workload:
    """How to draw the jobs of each round, what the report says of them, and whether they bring arrivals."""

    rounds: Sequence[Draw]
    description: dict[str, Any]
    has_arrivals: bool = False


# -- arguments -----------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = OneLineParser(
        prog="python -m jaxinfer.bench",
        description="Measure an engine, beside the floor for the same work.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="throughput|latency|load")
    throughput = commands.add_parser("throughput", help="all requests at once: tokens a second")
    _add_workload(throughput)
    latency = commands.add_parser("latency", help="batches of one size: TTFT, TPOT, ITL, E2E")
    latency.add_argument("--batch-size", type=_count, default=1, metavar="B", help="requests at once (1)")
    latency.add_argument("--input-len", type=_count, default=128, metavar="I", help="tokens a prompt (128)")
    latency.add_argument("--output-len", type=_count, default=128, metavar="O", help="tokens an answer (128)")
    latency.add_argument("--iterations", type=_count, default=5, metavar="N", help="measured batches (5)")
    load = commands.add_parser("load", help="requests arriving in real time: latencies and goodput")
    _add_workload(load)
    load.add_argument(
        "--request-rate", type=_rate, metavar="R", help="Poisson arrivals a second, or 'inf': all at once"
    )
    load.add_argument(
        "--slo", type=_objectives, metavar="NAME:MS,...", help="objectives of goodput, as in ttft:200,tpot:50,e2e:5000"
    )
    for command in (throughput, latency, load):
        _add_common(command)
    return parser


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload (one of --workload, --trace, --input-len with --output-len)")
    group.add_argument(
        "--workload", choices=("nano",), help="nano-vllm's bench: 256 prompts and answers of 100 to 1,024"
    )
    group.add_argument(
        "--trace", metavar="FILE", help="an object a line: input_len, output_len, optional arrival, prompt_token_ids"
    )
    group.add_argument("--input-len", type=_count, metavar="I", help="tokens a prompt")
    group.add_argument("--output-len", type=_count, metavar="O", help="tokens an answer")
    group.add_argument(
        "--num-prompts", type=_count, metavar="N", help=f"requests (default: {NANO_PROMPTS}, or the whole trace)"
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("benchmark")
    group.add_argument("--config", choices=tuple(SHAPES), help="a Qwen3's dimensions with random weights, not --model")
    group.add_argument("--json", metavar="FILE", help="write the result as JSON; '-' is stdout")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (0)")
    group.add_argument("--temperature", type=float, default=0.6, metavar="T", help="0 is greedy (0.6)")
    group.add_argument("--warmup", choices=WARMUPS, help="'lazy' compiles only what the workload can reach")
    add_engine_arguments(parser)
    parser.set_defaults(model=None)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number or inf")
    return rate


def _objectives(text: str) -> Objectives:
    try:
        return Objectives.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# -- the command ---------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    return run_command(parser, run, args)


def run(args: argparse.Namespace) -> int:
    """Loads the model, warms up, measures, prints.

    Raises:
      ValueError: a mistake in the call.
    """
    workload, options = read_workload(args), read_options(args)
    params = SamplingParams(temperature=args.temperature, ignore_eos=True)
    if connect(args):
        check_output(args.json)
    prepare_backend(args)
    from jaxinfer.measure import load_subject, measure  # here: --help and mistakes need no jax

    if __name__ == "__main__":  # not where tests or others call this
        keep_modules()
    with _status() as tell:
        tell("loading")
        subject = load_subject(args.config, {**options, "on_compile": _compile_teller(tell)})
        with subject.llm:
            check_batch(args, subject)
            rounds = [draw(subject.vocab_size) for draw in workload.rounds]
            tell("warming up, then measuring")
            result = measure(subject, rounds, params, partial(profiled, args.profile))
        report = make_report(args, subject, workload, rounds[0], result)
    write_json(args.json, report)
    print_tables(report, to_stderr=args.json == "-")
    return 1 if report["measured"]["throughput"]["num_failed"] else 0


def make_report(
    args: argparse.Namespace, subject: Subject, workload: Workload, jobs: Sequence[Job], result: Run
) -> dict[str, Any]:
    """Everything that is printed, as JSON values."""
    from jaxinfer.measure import describe, floor_of, roof_here

    objectives = getattr(args, "slo", None)
    # of arrivals the makespan is the requests' own; elsewhere a clock around everything is the honest one
    measured = figures(result.records, None if args.command == "load" else result.seconds, objectives)
    roof = roof_here(subject.num_devices)
    floor = None
    if roof is not None:
        floor = floor_figures(floor_of(subject, jobs, result.records[: len(jobs)], roof), objectives)
    errors = sorted({record.error for record in result.records if record.error is not None})
    return {
        "command": args.command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **describe(subject),
        "workload": {**workload.description, "temperature": args.temperature},
        "objectives_ms": None if objectives is None else objectives.to_dict(),
        "measured": {**measured, "seconds": result.seconds, "counts": result.counts, "errors": errors},
        "roof": None if roof is None else asdict(roof),
        "floor": floor,
        "share_of_floor": None if floor is None else shares(measured, floor),
    }


# -- the workload --------------------------------------------------------------------------------


def read_workload(args: argparse.Namespace) -> Workload:
    """The jobs of a call.

    Raises:
      ValueError: no workload, two, a trace that cannot be read, or no arrivals where they are needed.
    """
    if args.command == "latency":
        return _read_batches(args)
    workload = _read_requests(args)
    if args.command == "throughput":
        return replace(workload, rounds=[lambda vocab: _all_at_once(workload.rounds[0](vocab))])
    return _read_arrivals(args, workload)


def _read_batches(args: argparse.Namespace) -> Workload:
    names = ("batch_size", "input_len", "output_len", "iterations", "seed")
    description = {"name": "batches", **{name: getattr(args, name) for name in names}}

    def draw(number: int, vocab: int) -> list[Job]:
        return draw_fixed(vocab, args.batch_size, args.input_len, args.output_len, f"{args.seed} {number}")

    return Workload([partial(draw, number) for number in range(args.iterations)], description)


def _read_requests(args: argparse.Namespace) -> Workload:
    has_lengths = args.input_len is not None or args.output_len is not None
    if (args.workload is not None) + (args.trace is not None) + has_lengths != 1:
        raise ValueError("say what to run: one of --workload nano, --trace FILE, --input-len I with --output-len O")
    seed, count = args.seed, args.num_prompts or NANO_PROMPTS
    if args.trace is not None:
        entries = read_trace(args.trace)[: args.num_prompts]
        description = {"name": "trace", "file": args.trace, "num_prompts": len(entries), "seed": seed}
        return Workload([lambda vocab: draw_trace(entries, vocab, seed)], description, entries[0].arrival is not None)
    if args.workload is not None:
        description = {"name": args.workload, "num_prompts": count, "seed": seed}
        return Workload([lambda vocab: draw_nano(vocab, count, seed)], description)
    input_len, output_len = args.input_len, args.output_len
    if input_len is None or output_len is None:
        raise ValueError("--input-len and --output-len go together")
    lengths = {"input_len": input_len, "output_len": output_len}
    description = {"name": "fixed", "num_prompts": count, **lengths, "seed": seed}
    return Workload([lambda vocab: draw_fixed(vocab, count, input_len, output_len, seed)], description)


def _all_at_once(jobs: list[Job]) -> list[Job]:
    return [replace(job, arrival=0.0) for job in jobs]


def _read_arrivals(args: argparse.Namespace, workload: Workload) -> Workload:
    rate = args.request_rate
    if workload.has_arrivals:
        if rate is not None:
            raise ValueError(f"the trace {args.trace} has arrivals: leave --request-rate out")
        return replace(workload, description={**workload.description, "arrivals": "trace"})
    if rate is None:
        raise ValueError("when do requests arrive? give --request-rate, or a --trace with arrivals")
    said = {"arrivals": "poisson", "request_rate": "inf" if math.isinf(rate) else rate}
    return Workload(
        [lambda vocab: draw_arrivals(workload.rounds[0](vocab), rate, args.seed)], {**workload.description, **said}
    )


# -- checks --------------------------------------------------------------------------------------


def read_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `LLM`.

    Raises:
      ValueError: a setting out of its range, or a model named twice.
    """
    if args.config is not None:
        if args.model is not None:
            raise ValueError(f"--config {args.config} and --model {args.model}: give one of them")
        if args.load_format not in ("auto", "dummy"):
            raise ValueError(f"--config has random weights: --load-format {args.load_format} cannot be had")
    options = engine_arguments(args)
    EngineConfig.from_kwargs(**options)  # a bad value is told before anything is loaded
    return options


def check_output(name: str | None) -> None:
    """Refuses, before anything is run, a file that cannot be written.

    Raises:
      ValueError: names it.
    """
    if name is not None and name != "-":
        path = Path(name)
        if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"--json {name}: it cannot be written")


def check_batch(args: argparse.Namespace, subject: Subject) -> None:
    """Refuses a batch that would not run as one.

    Raises:
      ValueError: more requests than the engine runs at once.
    """
    most = subject.limits.max_num_seqs
    if args.command == "latency" and args.batch_size > most:
        raise ValueError(f"--batch-size {args.batch_size} needs --max-num-seqs {args.batch_size}; it is {most}")


# -- output --------------------------------------------------------------------------------------


def write_json(name: str | None, report: dict[str, Any]) -> None:
    """The report as JSON into a file, or to stdout for "-"."""
    if name is None:
        return
    text = json.dumps(report, indent=2, allow_nan=False) + "\n"
    if name == "-":
        print(text, end="", flush=True)
    else:
        Path(name).write_text(text, encoding="utf-8")


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """Says on a terminal what is being done."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update


def _compile_teller(tell: Callable[[str], None]) -> Callable[[int, bool], None]:
    """What an engine calls before and after compiling."""
    left = 0

    def report(count: int, is_done: bool) -> None:
        nonlocal left
        left += -1 if is_done else count
        tell(f"compiling {left} programs (kept for the next run)" if left > 0 else "warming up, then measuring")

    return report


if __name__ == "__main__":
    sys.exit(main())
