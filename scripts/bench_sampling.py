"""Check and time the sampling kernels on the GPU at hand: `python scripts/bench_sampling.py [WORDS] [--no-baselines]`.

Every case is run on fresh random logits and its tokens compared with the reference's, then timed. A line gives the time
of one call, its share of the floor (reading the logits once, at the rate of a long sum measured in the same run), how
many rows took another token than the reference, and the reference's time. Rows may differ where two noisy scores are
within rounding; more than one in a hundred is marked WRONG.

Timing: the difference between long and short runs of calls that are dispatched ahead, median of 5. Calls alternate
between two sets of logits, so that large ones do not find theirs in the L2 cache; small ones are chained, 32 to a
program, since dispatching a program takes longer than they do.
"""

import argparse
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from bench_kernels import reading_roof, seconds_per_call

from jaxinfer.kernels.sampling import Slots, arg_specs, sample, sample_slots
from jaxinfer.kernels.sampling.arg_specs import Inputs, Spec

CHAIN = 32
type Call = Callable[[Inputs, Slots], tuple[jax.Array, Slots]]


def make_call(spec: Spec, implementation: str) -> Call:
    """The program of the engine: with its slots where nothing is cut."""
    slot_ids, ones = jnp.arange(spec.num_rows, dtype=jnp.int32), jnp.ones(spec.num_rows, jnp.int32)

    def plain(inputs: Inputs, slots: Slots) -> tuple[jax.Array, Slots]:
        return sample_slots(inputs.logits, slot_ids, ones > 0, ones, slots, implementation=implementation)

    def cut(inputs: Inputs, slots: Slots) -> tuple[jax.Array, Slots]:
        rows = (slots.temperature, slots.seeds, slots.num_computed)
        tokens = sample(inputs.logits, *rows, **inputs.cuts, implementation=implementation)
        return tokens, slots._replace(last_tokens=tokens, num_computed=slots.num_computed + 1)

    return plain if spec.min_p is spec.top_k is spec.top_p is None else cut


def make_slots(inputs: Inputs) -> Slots:
    return Slots(jnp.zeros_like(inputs.positions), inputs.positions, inputs.temperature, inputs.seeds)


def seconds(spec: Spec, sets: list[Inputs], implementation: str) -> float:
    """Of one call."""
    call, count = make_call(spec, implementation), CHAIN if spec.num_bytes < 64e6 else 2

    # Temperatures differ from call to call: XLA leaves out a pass over the same logits at the same temperature.
    temperatures = [sets[0].temperature * (1 + i / 64) for i in range(count)]

    @jax.jit
    def chain(sets: list[Inputs], temperatures: list[jax.Array], slots: Slots) -> tuple[list[jax.Array], Slots]:
        tokens = []
        for i, temperature in enumerate(temperatures):
            found, slots = call(sets[i % 2], slots._replace(temperature=temperature))
            tokens.append(found)
        return tokens, slots

    return seconds_per_call(chain, sets, temperatures, make_slots(sets[0])) / count


def num_differing(spec: Spec, inputs: Inputs) -> int:
    slots = make_slots(inputs)
    tokens = (np.asarray(jax.jit(make_call(spec, name))(inputs, slots)[0]) for name in ("mosaic_gpu", "reference"))
    return int(np.sum(np.not_equal(*tokens)))


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
        time, differing = seconds(spec, sets, "mosaic_gpu"), num_differing(spec, sets[0])
        line = f"{name:36s} {time * 1e6:9,.1f} us  floor {spec.num_bytes / reading / time:5.2f}  differing {differing}"
        if not options.no_baselines:
            line += f"  reference {attempt(partial(seconds, spec, sets, 'reference'))}"
        print(line + ("  WRONG" if differing * 100 > spec.num_rows else ""), flush=True)


if __name__ == "__main__":
    main()
