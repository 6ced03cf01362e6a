"""The engine's table for one model in one process: `python scripts/bench_engine.py 0.6b|8b [CASES] [--profile DIR]`.

Random weights, default settings, prompts of random ids, temperature 0.6. A line gives the measured figure, the floor
of the same work, and the goal on an H200. Start-up is from the first line of this script to an engine that is warm:
run it twice for the figure with a warm compilation cache. `python -m jaxinfer.bench` measures each case by itself.
"""

import time

START = time.perf_counter()

import argparse  # noqa: E402
import dataclasses  # noqa: E402
from statistics import median  # noqa: E402

from jaxinfer.arguments import keep_modules, prepare_backend  # noqa: E402

BATCHES = {"b1": (1, 128, 128), "b32": (32, 128, 128), "b256": (256, 1024, 128), "ttft": (1, 2048, 8)}
"""Case -> requests, prompt and output tokens."""
GOALS = {
    "0.6b": {"b1": 1.2, "b32": 1.6, "b256": 9.2, "ttft": 20, "nano": 26_000},
    "8b": {"b1": 4.7, "b32": 5.2, "b256": 16, "ttft": 48, "nano": 10_300},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", choices=GOALS)
    parser.add_argument("cases", nargs="*", default=[*BATCHES, "nano"],
                        help="b1, b32, b256, ttft, nano (default: all); nanos: nano for each replica")  # fmt: skip
    parser.add_argument("--profile", metavar="DIR", help="also trace each batch, and summarise it")
    parser.add_argument("--depth", type=int)
    parser.add_argument("--decode-steps", type=int)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--mesh", help="such as tensor=2; goals are those of one device")
    parser.add_argument(
        "--warmup", choices=("full", "lazy"), default="full", help="'lazy' compiles what the cases reach"
    )
    parser.add_argument("--linear", choices=("mosaic_gpu", "reference"), help="by what products of few rows are made")
    args = parser.parse_args()
    prepare_backend(args)
    import jax

    from jaxinfer.engine import build
    from jaxinfer.measure import load_subject

    if args.linear:
        chosen = build.choose_kernels
        build.choose_kernels = lambda *of: dataclasses.replace(chosen(*of), linear=args.linear)

    keep_modules()
    subject = load_subject(
        args.config, {name: getattr(args, name) for name in ("depth", "decode_steps", "kernels", "mesh", "warmup")}
    )
    engine, stats = subject.llm.engine, subject.llm.stats()
    print(f"{args.config} on {jax.devices()[0].device_kind}, jax {jax.__version__}, kernels {stats['kernels']}")
    print(f"start-up {time.perf_counter() - START:.1f} s, {stats['num_programs']} programs "
          f"({stats['num_programs_loaded']} found), {engine.config.num_blocks} blocks")  # fmt: skip
    print(engine.account.describe(), flush=True)
    for case in args.cases:
        run_nano(subject, case, args) if case in ("nano", "nanos") else run_batch(subject, case, args)
    print({name: value for name, value in subject.llm.stats().items() if "failed" in name or "while" in name})


def run_batch(subject, case: str, args: argparse.Namespace) -> None:
    """Median TTFT and TPOT of a batch, of three rounds."""
    from jaxinfer.engine.profile import profile
    from jaxinfer.measure import floor_of, measure, roof_here
    from jaxinfer.metrics.workload import draw_fixed

    size, input_len, output_len = BATCHES[case]
    rounds = [draw_fixed(subject.vocab_size, size, input_len, output_len, f"{case} {n}") for n in range(3)]
    result = measure(subject, rounds, params())
    roof = roof_here(subject.num_devices)
    ideal = floor_of(subject, rounds[0], result.records[:size], roof).records if roof else []
    name = "TTFT" if case == "ttft" else "TPOT"
    for what in dict.fromkeys(["TTFT", name]):
        milliseconds = [1e3 * median(getattr(record, what.lower()) for record in part)
                        for part in (result.records, ideal) if part]  # fmt: skip
        goal = GOALS[args.config][case] if what == name else "-"
        print(f"{case}: {what} {milliseconds[0]:.3f} ms, floor {milliseconds[-1]:.3f}, goal {goal}", flush=True)
    gaps = [1e3 * gap for record in result.records for gap in record.itl]
    print(f"{case}: ITL {median(gaps):.3f} ms (no other request's prompt in between)", flush=True)
    if args.profile is not None:
        with profile(f"{args.profile}/{case}") as trace:
            measure(subject, [draw_fixed(subject.vocab_size, size, input_len, min(output_len, 32), case)], params())
        print(trace.describe(20), flush=True)


def run_nano(subject, case: str, args: argparse.Namespace) -> None:
    """Output tokens a second of the nano-bench workload, twice, and the device's idle share in a traced third run.

    The named case gives all replicas together the workload's requests, "nanos" gives them to each.
    """
    from jaxinfer.engine.profile import profile
    from jaxinfer.measure import floor_of, measure, roof_here
    from jaxinfer.metrics.workload import draw_nano

    count = subject.llm.engine.num_replicas if case == "nanos" else 1
    jobs = [job for seed in range(count) for job in draw_nano(subject.vocab_size, seed=seed)]
    num_tokens = sum(job.output_len for job in jobs)
    result = measure(subject, [jobs, jobs], params())
    roof = roof_here(subject.num_devices)
    floor = floor_of(subject, jobs, result.records[: len(jobs)], roof).seconds if roof else float("nan")
    print(
        f"{case}: {2 * num_tokens / result.seconds:,.0f} tok/s, {result.seconds / 2:.2f} s a round, "
        f"floor {floor:.2f} s ({num_tokens / floor:,.0f} tok/s), goal {GOALS[args.config]['nano']:,}, {result.counts}",
        flush=True,
    )
    if args.profile is not None:
        with profile(f"{args.profile}/{case}") as trace:
            measure(subject, [jobs], params())
        print(trace.describe(20), flush=True)


def params():
    from jaxinfer.core import SamplingParams

    return SamplingParams(temperature=0.6, ignore_eos=True)


if __name__ == "__main__":
    main()
