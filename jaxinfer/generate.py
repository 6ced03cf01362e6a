"""`python -m jaxinfer.generate`: prompts in, text out.

One prompt is streamed; several run together and are printed in their order. Text (or, with --json, one object a line)
goes to stdout, everything else to stderr. Exit codes: 0, 1 when some prompt of a file failed, 2 for a mistake in the
call, 130 after Ctrl-C, 141 when the reader of stdout has gone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jaxinfer
from jaxinfer.arguments import (
    OneLineParser,
    add_engine_arguments,
    add_sampling_arguments,
    connect,
    engine_arguments,
    keep_modules,
    prepare_backend,
    profiled,
    run_command,
    sampling_params,
)
from jaxinfer.core import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from jaxinfer.llm import LLM

EXAMPLES = """\
examples:
  python -m jaxinfer.generate --prompt "The capital of France is" --temperature 0
  python -m jaxinfer.generate --model path/to/model --chat --system "Be brief." --prompt "Why is the sky blue?"
  python -m jaxinfer.generate --interactive
  python -m jaxinfer.generate --prompts-file prompts.jsonl --json > answers.jsonl
"""


def make_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = OneLineParser(
        prog="python -m jaxinfer.generate",
        description="Generate text with a language model.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"jaxinfer {jaxinfer.__version__} (jax {version('jax')})"
    )
    group = parser.add_argument_group("prompts (or a prompt on stdin)")
    group.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated")
    group.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="a prompt a line; *.jsonl: an object a line with 'prompt' or 'prompt_token_ids'",
    )
    chat = parser.add_argument_group("chat")
    chat.add_argument("--chat", action="store_true", help="each prompt is a user's message: apply the chat template")
    chat.add_argument("--system", metavar="TEXT", help="the system's message; implies --chat")
    chat.add_argument("--chat-template", metavar="FILE", help="Jinja file in place of the model's; implies --chat")
    chat.add_argument("--interactive", action="store_true", help="a conversation at the terminal")
    group.add_argument("--json", action="store_true", help="print one JSON object a line and nothing else")
    add_sampling_arguments(parser)
    add_engine_arguments(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would tell that there is no PyTorch
    parser = make_parser()
    args = parser.parse_args(arguments)
    return run_command(parser, run, args)


def run(args: argparse.Namespace) -> int:
    """Loads the model, answers the prompts, prints.

    Raises:
      ValueError: a mistake in the call.
    """
    sampling_params(args, SamplingParams())  # a bad value is told before the model is loaded
    leads = connect(args)
    template = read_template(args.chat_template) if leads else None
    prompts = read_prompts(args) if leads and not args.interactive else []
    prepare_backend(args)
    from jaxinfer.interactive import converse  # here: --help and mistakes need no jax
    from jaxinfer.llm import LLM

    if __name__ == "__main__":  # not where tests or others call this
        keep_modules()
    with _compile_progress() as on_compile:
        llm = LLM(**engine_arguments(args), on_compile=on_compile)
        params = sampling_params(args, llm.get_default_sampling_params())
        if args.interactive:
            converse(llm, params, system=args.system, template=template)
            return 0
        if args.chat or args.system is not None or template is not None:
            prompts = [as_chat(llm, prompt, args, template) for prompt in prompts]
        with profiled(args.profile):
            return _answer(llm, prompts, params, args)


# -- prompts -------------------------------------------------------------------------------------


def read_prompts(args: argparse.Namespace) -> list[Any]:
    """Prompts from the flags, a file, or stdin.

    Raises:
      ValueError: none, an empty one, or a file that cannot be read.
    """
    if args.prompt and args.prompts_file is not None:
        raise ValueError("give --prompt or --prompts-file, not both")
    if args.prompts_file is not None:
        return _read_file(args.prompts_file)
    prompts = args.prompt
    if prompts is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError("no prompt: give --prompt, --prompts-file or text on stdin")
        prompts = [sys.stdin.read()]
    for number, prompt in enumerate(prompts):
        if not prompt.strip():
            raise ValueError(f"prompt {number} is empty")
    return prompts


def read_template(name: str | None) -> str | None:
    """A chat template's source.

    Raises:
      ValueError: the file cannot be read.
    """
    if name is None:
        return None
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--chat-template {name}: {error}") from None


def as_chat(llm: LLM, prompt: Any, args: argparse.Namespace, template: str | None) -> Any:
    """A prompt's text as a user's message; prompts without text, and broken ones, stay as they are.

    Raises:
      ValueError: the template refuses it; from a file, the error becomes the prompt's record.
    """
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    if not isinstance(text, str):
        return prompt
    beginning = [] if args.system is None else [{"role": "system", "content": args.system}]
    try:
        rendered = llm.render_chat([*beginning, {"role": "user", "content": text}], template)
    except ValueError as error:
        if args.prompts_file is None:
            raise
        return error
    return {**prompt, **rendered} if isinstance(prompt, dict) else rendered


def _read_file(name: str) -> list[Any]:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts-file {name}: {error}") from None
    lines = [line for line in text.split("\n") if line.strip()]  # splitlines would cut inside of prompts (U+2028)
    if not lines:
        raise ValueError(f"--prompts-file {name} has no prompts")
    return [_parse_line(line) for line in lines] if name.endswith(".jsonl") else lines


def _parse_line(line: str) -> Any:
    """A JSON line's prompt; a malformed one becomes an error record later."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        return ValueError(f"not valid JSON: {error}")
    if isinstance(entry, dict) and ("prompt" in entry or "prompt_token_ids" in entry):
        return entry
    return entry if isinstance(entry, str) else ValueError("neither a string nor an object with 'prompt'")


# -- answering -----------------------------------------------------------------------------------


def _answer(llm: LLM, prompts: list[Any], params: SamplingParams, args: argparse.Namespace) -> int:
    """Answers all prompts; the exit code."""
    if args.prompts_file is not None:
        return _answer_file(llm, prompts, params, args)
    if len(prompts) == 1 and params.n == 1 and not args.json:
        outputs = [_stream(llm, prompts[0], params)]
    else:
        outputs = _answer_all(llm, prompts, params, as_json=args.json)
    if not args.json:
        print_table(outputs, _notice(llm, args))
    return 1 if any(output.error for output in outputs) else 0


def _stream(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    """Prints an answer as it comes."""
    shown, output = 0, None
    for output in llm.stream(prompt, params):
        text = output.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print(flush=True)
    assert output is not None
    if output.error:
        print(output.error, file=sys.stderr)
    return output


def _answer_all(llm: LLM, prompts: list[Any], params: SamplingParams, *, as_json: bool) -> list[RequestOutput]:
    outputs = []
    for index, output in enumerate(llm.generate_iter(prompts, params)):
        _print_answer(index, output, as_json=as_json)
        outputs.append(output)
    return outputs


def _answer_file(llm: LLM, prompts: list[Any], params: SamplingParams, args: argparse.Namespace) -> int:
    """Answers what can be answered; the others get an error record. 1 if there were such."""
    as_json = args.json
    good: dict[int, Any] = {}
    failed: dict[int, str] = {}
    for index, prompt in enumerate(prompts):
        try:
            if isinstance(prompt, ValueError):
                raise prompt
            llm.check(prompt, params)
            good[index] = prompt
        except ValueError as error:
            failed[index] = str(error)
    answers = iter(llm.generate_iter(list(good.values()), params))
    outputs = []
    for index, prompt in enumerate(prompts):
        if index in failed:
            _print_failure(index, prompt, failed[index], as_json=as_json)
            continue
        outputs.append(next(answers))
        _print_answer(index, outputs[-1], as_json=as_json)
    if outputs and not as_json:
        print_table(outputs, _notice(llm, args))
    return 1 if failed or any(output.error for output in outputs) else 0


def _print_answer(index: int, output: RequestOutput, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(to_record(index, output), ensure_ascii=False), flush=True)
        return
    for answer in output.outputs:
        name = f"[{index}]" if len(output.outputs) == 1 else f"[{index}.{answer.index}]"
        print(f"{name} {answer.text}", flush=True)
    if output.error:
        print(f"[{index}] {output.error}", file=sys.stderr)


def _print_failure(index: int, prompt: Any, message: str, *, as_json: bool) -> None:
    if as_json:
        shown = None if isinstance(prompt, ValueError) else prompt
        print(json.dumps({"index": index, "prompt": shown, "error": message}), flush=True)  # ASCII: it may be broken
    else:
        print(f"[{index}] error: {message}", file=sys.stderr)


def to_record(index: int, output: RequestOutput) -> dict[str, Any]:
    """What --json prints of one answer."""
    answer = output.outputs[0]
    record: dict[str, Any] = {
        "index": index,
        "prompt": output.prompt,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "metrics": output.metrics.to_dict() if output.metrics else None,
    }
    if answer.logprobs is not None:
        record["logprobs"] = [
            {str(id_): [entry.logprob, entry.rank, entry.decoded_token] for id_, entry in step.items()}
            for step in answer.logprobs
        ]
    if len(output.outputs) > 1:
        record["answers"] = [
            {
                "index": other.index,
                "text": other.text,
                "token_ids": other.token_ids,
                "finish_reason": other.finish_reason,
            }
            for other in output.outputs
        ]
    if output.error:
        record["error"] = output.error
    return record


# -- what goes to stderr -------------------------------------------------------------------------


@contextmanager
def _compile_progress() -> Iterator[Any]:
    """Says on a terminal how many programs are being compiled."""
    from rich.console import Console

    console = Console(stderr=True)
    status = console.status("")
    left = 0

    def report(count: int, is_done: bool) -> None:
        nonlocal left
        left += -1 if is_done else count
        if not console.is_terminal:
            return
        if left > 0:
            status.update(f"compiling {left} programs (kept for the next run)")
            status.start()
        else:
            status.stop()

    try:
        yield report
    finally:
        status.stop()


def _notice(llm: LLM, args: argparse.Namespace) -> str | None:
    """Says so when requests may be shorter than the model allows, though nobody asked for it."""
    longest, limit = llm.config.max_model_len or 0, llm.engine.model.max_position_embeddings
    if args.max_model_len is not None or longest >= limit:
        return None
    return f"requests may have {longest} tokens, what the KV cache holds (the model allows {limit})"


def print_table(outputs: Sequence[RequestOutput], notice: str | None = None) -> None:
    """Tokens and times of each answer, on stderr."""
    from rich.console import Console
    from rich.table import Table

    table = Table(caption=notice, caption_justify="left")
    for name in ("prompt", "prompt tokens", "cached", "output tokens", "TTFT ms", "TPOT ms", "tok/s", "end"):
        table.add_column(name, justify="left" if name in ("prompt", "end") else "right")
    for index, output in enumerate(outputs):
        table.add_row(str(index), *_cells(output))
    Console(stderr=True).print(table)


def _cells(output: RequestOutput) -> list[str]:
    metrics, answer = output.metrics, output.outputs[0]
    assert metrics is not None
    num_tokens = sum(len(answer.token_ids) for answer in output.outputs)
    rate = num_tokens / metrics.e2e_latency if metrics.e2e_latency else None
    ttft, tpot = metrics.time_to_first_token, metrics.time_per_output_token
    numbers = [None if ttft is None else ttft * 1e3, None if tpot is None else tpot * 1e3, rate]
    return [
        str(len(output.prompt_token_ids)),
        str(output.num_cached_tokens),
        str(num_tokens),
        *("-" if number is None else f"{number:.1f}" for number in numbers),
        str(answer.finish_reason),
    ]


if __name__ == "__main__":
    sys.exit(main())
