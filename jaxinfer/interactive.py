"""A conversation at a terminal: `python -m jaxinfer.generate --interactive`.

Ctrl-C stops an answer, not the program; /reset forgets the conversation; /exit, Ctrl-D, or Ctrl-C at an empty prompt
end it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from jaxinfer.core import SamplingParams
from jaxinfer.llm import LLM

HELP = "Ctrl-C stops an answer, /reset forgets the conversation, /exit or Ctrl-D ends."


def converse(
    llm: LLM,
    params: SamplingParams,
    *,
    system: str | None = None,
    template: str | None = None,
    read: Callable[[str], str] = input,
) -> None:
    """Reads a line, streams an answer, and so on; the conversation so far goes along each time.

    Raises:
      ValueError: the model has no chat template.
    """
    beginning: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    llm.render_chat([*beginning, {"role": "user", "content": "hello"}], template)  # tells a missing template at once
    history = list(beginning)
    print(HELP, file=sys.stderr)
    while True:
        try:
            line = read("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        if line == "/exit":
            return
        if line == "/reset":
            history = list(beginning)
        elif line:
            question = {"role": "user", "content": line}
            try:
                answer = _answer(llm, [*history, question], params, template)
            except ValueError as error:
                print(f"{error} (/reset starts anew)", file=sys.stderr)
                continue
            history += [question, {"role": "assistant", "content": answer}]


def _answer(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams, template: str | None) -> str:
    """Streams an answer to stdout; what was said until Ctrl-C is the answer."""
    text, stream = "", None
    try:
        stream = llm.stream(llm.render_chat(messages, template), params)
        for output in stream:
            new = output.outputs[0].text
            print(new[len(text) :], end="", flush=True)
            text = new
            if output.error:
                print(output.error, file=sys.stderr)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    finally:
        if stream is not None:
            stream.close()
    print(flush=True)
    return text
