"""Check and time the sampling kernels on the GPU at hand: `python scripts/bench_sampling.py [WORDS] [--no-baselines]`.

Every case is run on fresh random logits and its tokens compared with the reference's, then timed. A line gives the time
of one call, its share of the floor (reading the logits once, at the rate of a long sum measured in the same run), how
many rows took another token than the reference, and the reference's time. Rows may differ where two noisy scores are
within rounding; more than one in a hundred is marked WRONG.

Timing: the difference between long and short runs of calls that are dispatched ahead, median of 5. Calls alternate
between two sets of logits, so that none finds them in the L2 cache; small ones are chained, 8 to a program.
"""

import argparse
from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from bench_kernels import reading_roof, seconds_per_call

from jaxinfer.kernels.sampling import arg_specs, sample
from jaxinfer.kernels.sampling.arg_specs import Inputs, Spec

CHAIN = 8


def seconds(spec: Spec, sets: list[Inputs], implementation: str) -> float:
    """Of one call. Temperatures differ from call to call in a chain, so that none is left out as a repetition."""
    run = partial(sample, implementation=implementation)
    count = CHAIN if spec.num_bytes < 64e6 else 2
    temperatures = [sets[0].temperature * (1 + i / 64) for i in range(count)]

    @jax.jit
    def chain(sets: list[Inputs], temperatures: list[jax.Array]) -> list[jax.Array]:
        picks = [sets[i % 2] for i in range(count)]
        return [
            run(x.logits, temperature, x.seeds, x.positions, **x.cuts)
            for x, temperature in zip(picks, temperatures, strict=True)
        ]

    return seconds_per_call(chain, sets, temperatures) / count


def num_differing(inputs: Inputs) -> int:
    run = partial(sample, *inputs[:4], **inputs.cuts)
    return int(np.sum(np.asarray(run(implementation="mosaic_gpu")) != np.asarray(run(implementation="reference"))))


def attempt(function: Callable[[], float]) -> str:
    try:
        return f"{function() * 1e6:9,.1f} us"
    except Exception as problem:  # a baseline that cannot do a case must not end the run
        return f"none: {str(problem).splitlines()[0][:60]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only cases whose name holds one of these")
    parser.add_argument("--no-baselines", action="store_true")
    options = parser.parse_args()
    reading = reading_roof()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, reading {reading / 1e9:,.0f} GB/s")
    for name, spec in (arg_specs.BENCHMARKS | arg_specs.CUT_BENCHMARKS).items():
        if options.words and not any(word in name for word in options.words):
            continue
        sets = [arg_specs.make_inputs(spec, seed=seed) for seed in range(2)]
        time, differing = seconds(spec, sets, "mosaic_gpu"), num_differing(sets[0])
        line = f"{name:36s} {time * 1e6:9,.1f} us  floor {spec.num_bytes / reading / time:5.2f}  differing {differing}"
        if not options.no_baselines:
            line += f"  reference {attempt(partial(seconds, spec, sets, 'reference'))}"
        print(line + ("  WRONG" if differing * 100 > spec.num_rows else ""), flush=True)


if __name__ == "__main__":
    main()
