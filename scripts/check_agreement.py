"""Are the kernels as right as the reference, through the whole engine? `python scripts/check_agreement.py 0.6b|MODEL`.

An engine with the device's kernels answers prompts greedily: log-probabilities of the answers come from decode steps,
those of the prompts from mixed ones. Two reference engines then score the same tokens: one in the same dtype, one in
float32, which is taken for the truth. What bf16 itself moves differs from model to model and text to text, so the
kernels are held against what the reference in their dtype does.

Printed for both: the mean, 99th percentile and largest error of a token's log-probability, and at how many of the
positions where the truth's best two tokens are MARGIN or more apart another token is best. Exit code 1 if the kernels'
mean error exceeds the reference's by more than SLACK, or they have notably more of such flips.
"""

import argparse
import gc
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jaxinfer import SamplingParams
from jaxinfer.arguments import OneLineParser, prepare_backend, run_command
from jaxinfer.core import Logprob
from jaxinfer.measure import load_subject
from jaxinfer.metrics.shapes import SHAPES

MARGIN = 0.1
SLACK = 1.2
TEXTS = ("The capital of France is", "def fibonacci(n):\n", "Once upon a time, in a village by the sea,")

type Position = dict[int, Logprob]
"""Log-probabilities at a position, of its token and of the best two."""


@dataclass
class Errors:
    """Of one kind of positions against the truth."""

    values: list[float] = field(default_factory=list)
    num_clear: int = 0
    num_flips: int = 0

    def add(self, token: int, ours: Position, truth: Position) -> None:
        self.values.append(abs(ours[token].logprob - truth[token].logprob))
        best, second = sorted(truth, key=lambda id_: truth[id_].rank)[:2]
        if truth[best].logprob - truth[second].logprob >= MARGIN:
            self.num_clear += 1
            self.num_flips += best not in ours or ours[best].rank != 1

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    def __str__(self) -> str:
        high, most = np.quantile(self.values, 0.99), max(self.values)
        return (
            f"mean {self.mean:.4f}, 99% below {high:.3f}, largest {most:.3f}; "
            f"{self.num_flips} other best tokens at {self.num_clear} clear positions"
        )


def main() -> int:
    parser = OneLineParser(prog="python scripts/check_agreement.py", description=__doc__)
    parser.add_argument("model", help=f"a folder or file, or one of {', '.join(SHAPES)} with random weights")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--dtype", default="bfloat16", help="of the kernels and of the reference held against them")
    parser.add_argument("--num-blocks", type=int, help="of each engine's KV cache")
    parser.add_argument("--profile", help=argparse.SUPPRESS)
    return run_command(parser, run, parser.parse_args())


def run(args: argparse.Namespace) -> int:
    prepare_backend(args)
    config = args.model if args.model in SHAPES else None
    settings = {"max_num_seqs": 16, "max_model_len": 1024, "num_blocks": args.num_blocks}
    settings |= {} if config else {"model": args.model}
    kernels = load_subject(config, {**settings, "dtype": args.dtype}).llm
    prompts = _prompts(kernels, args.num_prompts)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, logprobs=2, prompt_logprobs=2, ignore_eos=True)
    answers = kernels.generate(prompts, params)
    print(f"{args.model} in {args.dtype}: kernels {kernels.stats()['kernels']}", flush=True)
    sequences = [[*answer.prompt_token_ids, *answer.outputs[0].token_ids] for answer in answers]
    ours = [_positions(answer) for answer in answers]
    del kernels
    reference, truth = (_scores(config, {**settings, "dtype": dtype}, sequences) for dtype in (args.dtype, "float32"))
    is_right = True
    for name in ("prompts", "answers"):
        by_kernels, by_reference = Errors(), Errors()
        for answer, *of_sequence, sequence in zip(answers, ours, reference, truth, sequences, strict=True):
            length = len(answer.prompt_token_ids)
            for position in range(1, length) if name == "prompts" else range(length, len(sequence)):
                at_kernels, at_reference, exact = (scores[position] for scores in of_sequence)
                by_kernels.add(sequence[position], at_kernels, exact)
                by_reference.add(sequence[position], at_reference, exact)
        print(f"{name}, {len(by_kernels.values)} positions, errors of log-probabilities against float32")
        print(f"  kernels    {by_kernels}\n  reference  {by_reference}", flush=True)
        is_right &= by_kernels.mean <= SLACK * by_reference.mean
        is_right &= by_kernels.num_flips <= SLACK * by_reference.num_flips + 5
    print("agree" if is_right else "DIFFER")
    return 0 if is_right else 1


def _positions(answer) -> list[Position]:
    """One for each token of the prompt and of the answer; the first has none."""
    return [*(answer.prompt_logprobs or []), *(answer.outputs[0].logprobs or [])]


def _scores(config: str | None, settings: dict, sequences: list[list[int]]) -> list[list[Position]]:
    gc.collect()  # the engine before gives its memory back
    llm = load_subject(config, {**settings, "kernels": "reference"}).llm
    scored = llm.generate(sequences, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2))
    return [answer.prompt_logprobs or [] for answer in scored]


def _prompts(llm, count: int) -> list[list[int]]:
    """Pieces of this project's documentation of 5 to 400 tokens; random ids where there is no tokenizer."""
    rng, vocab = np.random.default_rng(0), llm.engine.model.vocab_size
    lengths = rng.integers(5, 400, count).tolist()
    if llm.engine.tokenizer is None:
        return [rng.integers(0, vocab, length).tolist() for length in lengths]
    folder = Path(__file__).parent.parent
    text = "\n".join(
        path.read_text(encoding="utf-8") for path in [folder / "README.md", *sorted(folder.glob("docs/*.md"))]
    )
    starts = rng.integers(0, len(text) - 4000, count).tolist()
    pieces = [llm.tokenize(text[start : start + 4000])[:length] for start, length in zip(starts, lengths, strict=True)]
    return [*pieces, *map(llm.tokenize, TEXTS)]


if __name__ == "__main__":
    sys.exit(main())
