"""Do the kernels agree with the reference, through the whole engine? `python scripts/check_agreement.py 0.6b|MODEL`.

An engine with the device's kernels answers prompts greedily: log-probabilities of the answers come from decode steps,
those of the prompts from mixed ones. The reference engine then scores the same tokens. Printed: positions, the largest
difference of the log-probability of a token, and how often the best token differs where the reference's best two
are at least MARGIN apart (there it must not). Exit code 1 if it does.
"""

import argparse
import sys
from dataclasses import dataclass

import numpy as np

from jaxinfer import SamplingParams
from jaxinfer.arguments import OneLineParser, prepare_backend, run_command
from jaxinfer.core import Logprob
from jaxinfer.measure import load_subject
from jaxinfer.metrics.shapes import SHAPES

MARGIN = 0.1
TEXTS = ("The capital of France is", "def fibonacci(n):\n", "Once upon a time, in a village by the sea,")


@dataclass
class Comparison:
    """What was seen of one kind of position."""

    num_positions: int = 0
    num_clear: int = 0
    num_flips: int = 0
    largest: float = 0.0

    def add(self, token: int, ours: dict[int, Logprob], theirs: dict[int, Logprob]) -> None:
        """Log-probabilities of the token and of the best two, by both."""
        self.num_positions += 1
        self.largest = max(self.largest, abs(ours[token].logprob - theirs[token].logprob))
        best = sorted(theirs, key=lambda id_: theirs[id_].rank)[:2]
        if theirs[best[0]].logprob - theirs[best[1]].logprob >= MARGIN:
            self.num_clear += 1
            self.num_flips += ours.get(best[0]) is None or ours[best[0]].rank != 1


def main() -> int:
    parser = OneLineParser(prog="python scripts/check_agreement.py", description=__doc__)
    parser.add_argument("model", help=f"a folder or file, or one of {', '.join(SHAPES)} with random weights")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--num-blocks", type=int, help="of both engines' KV caches; they live at the same time")
    parser.add_argument("--profile", help=argparse.SUPPRESS)
    return run_command(parser, run, parser.parse_args())


def run(args: argparse.Namespace) -> int:
    prepare_backend(args)
    config = args.model if args.model in SHAPES else None
    settings = {"max_num_seqs": 16, "max_model_len": 1024, "num_blocks": args.num_blocks, "memory_utilization": 0.4}
    settings |= {} if config else {"model": args.model}
    kernels = load_subject(config, dict(settings)).llm
    prompts = _prompts(kernels, args.num_prompts)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, logprobs=2, prompt_logprobs=2, ignore_eos=True)
    answers = kernels.generate(prompts, params)
    print(f"{args.model}: kernels {kernels.stats()['kernels']}")
    reference = load_subject(config, {**settings, "kernels": "reference"}).llm
    sequences = [[*answer.prompt_token_ids, *answer.outputs[0].token_ids] for answer in answers]
    scored = reference.generate(sequences, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2))
    prefill, decode = Comparison(), Comparison()
    for answer, score, sequence in zip(answers, scored, sequences, strict=True):
        theirs, ours = score.prompt_logprobs or [], answer.prompt_logprobs or []
        for position in range(1, len(ours)):
            prefill.add(sequence[position], ours[position], theirs[position])
        for position, one in enumerate(answer.outputs[0].logprobs or [], start=len(ours)):
            decode.add(sequence[position], one, theirs[position])
    for name, seen in (("prefill", prefill), ("decode", decode)):
        print(f"{name}: {seen.num_positions} positions, largest difference of a log-probability {seen.largest:.4f}, "
              f"{seen.num_flips} other best tokens at {seen.num_clear} margins of {MARGIN} or more")  # fmt: skip
    return 1 if prefill.num_flips + decode.num_flips else 0


def _prompts(llm, count: int) -> list[list[int]]:
    """Random ids of 5 to 400 tokens, and texts where there is a tokenizer."""
    rng, vocab = np.random.default_rng(0), llm.engine.model.vocab_size
    drawn = [rng.integers(0, vocab, length).tolist() for length in rng.integers(5, 400, count)]
    return drawn if llm.engine.tokenizer is None else [*drawn, *map(llm.tokenize, TEXTS)]


if __name__ == "__main__":
    sys.exit(main())
