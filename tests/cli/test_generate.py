"""`python -m jaxinfer.generate`: outputs, mistakes, interrupts, pipes."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_models import write_model

from jaxinfer import arguments, generate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("cli") / "model", seed=4, num_hidden_layers=1)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def flags(folder):
    return ["--model", str(folder), "--num-blocks", "64", "--max-num-seqs", "4", "--temperature", "0"]


def call(flags, *more) -> int:
    try:
        return generate.main([*flags, *more])
    except SystemExit as stop:
        return int(stop.code or 0)


def test_one_prompt_is_streamed_and_a_table_ends_it(flags, capsys):
    assert call(flags, "--prompt", "hello", "--max-tokens", "5") == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    for column in ("prompt tokens", "cached", "output tokens", "TTFT", "TPOT", "tok/s"):
        assert all(word in err for word in column.split())
    assert "requests may have 1008 tokens" in " ".join(err.split())


def test_several_prompts_keep_their_order(flags, capsys):
    assert call(flags, "--prompt", "one", "--prompt", "two", "--max-tokens", "3") == 0
    out = capsys.readouterr().out
    assert out.index("[0] ") < out.index("[1] ")


@pytest.mark.slow
def test_replicas_answer_alike(flags, capsys):
    outputs = []
    for mesh in ([], ["--mesh", "data=2"]):
        assert call([*flags, *mesh], "--prompt", "one", "--prompt", "two", "--max-tokens", "3") == 0
        outputs.append(capsys.readouterr().out)
        assert call([*flags, *mesh], "--prompt", "three", "--max-tokens", "3") == 0  # streamed
        outputs[-1] += capsys.readouterr().out
    assert outputs[0] == outputs[1]


def test_json_is_one_object_a_line(flags, capsys):
    assert call(flags, "--prompt", "one", "--prompt", "two", "--max-tokens", "3", "--json", "--logprobs", "1") == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["index"] for record in records] == [0, 1]
    assert [record["prompt"] for record in records] == ["one", "two"]
    for record in records:
        assert len(record["token_ids"]) == 3 == len(record["logprobs"])
        assert record["finish_reason"] == "length"
        assert record["metrics"]["time_to_first_token"] > 0


def test_a_file_of_prompts_goes_on_past_bad_ones(flags, tmp_path, capsys):
    lines = [
        {"prompt": "good"},
        {"prompt_token_ids": [1, 2, 999]},
        "plain string",
        {"nothing": 1},
        {"prompt_token_ids": [1, 2]},
        {"prompt": "x" * 2000},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n{broken\n")
    assert call(flags, "--prompts-file", str(path), "--json", "--max-tokens", "2") == 1
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["index"] for record in records] == list(range(7))
    assert ["error" in record for record in records] == [False, True, False, True, False, True, True]
    assert "999" in records[1]["error"]
    assert "2000 tokens" in records[5]["error"]


def test_line_ends_inside_prompts_and_broken_characters(flags, tmp_path, capsys):
    """Only a line feed ends a line; half a character is a record of its own, not the end of the run."""
    lines = [{"prompt": "a\u2028b\u0085c"}, {"prompt": "x\ud83d"}, {"prompt": "last"}]
    path = tmp_path / "p.jsonl"
    texts = [json.dumps(line, ensure_ascii=number == 1) for number, line in enumerate(lines)]
    path.write_text("\n".join(texts), encoding="utf-8")
    assert call(flags, "--prompts-file", str(path), "--json", "--max-tokens", "1") == 1
    records = [json.loads(line) for line in capsys.readouterr().out.split("\n") if line]
    assert ["error" in record for record in records] == [False, True, False]
    assert "not valid Unicode" in records[1]["error"]
    assert call(flags, "--prompt", "x\udcff") == 2
    assert "not valid Unicode" in capsys.readouterr().err


def test_a_template_may_refuse_one_prompt_of_a_file(flags, tmp_path, capsys):
    template, path = tmp_path / "t.jinja", tmp_path / "p.txt"
    template.write_text(
        "{% if messages[0].content == 'no' %}{{ raise_exception('never') }}{% endif %}{{ messages[0].content }}"
    )
    path.write_text("yes\nno\nalso\n")
    more = ["--prompts-file", str(path), "--chat-template", str(template), "--json", "--max-tokens", "1"]
    assert call(flags, *more) == 1
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ["error" in record for record in records] == [False, True, False]
    assert "never" in records[1]["error"]


def test_a_file_of_lines(flags, tmp_path, capsys):
    path = tmp_path / "prompts.txt"
    path.write_text("first\n\nsecond\n")
    assert call(flags, "--prompts-file", str(path), "--max-tokens", "2") == 0
    assert "[1] " in capsys.readouterr().out


def test_stdin_is_a_prompt(flags, monkeypatch, capsys):
    read, write = os.pipe()
    os.write(write, b"from a pipe")
    os.close(write)
    with os.fdopen(read) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert call(flags, "--json", "--max-tokens", "1") == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "from a pipe"


MISTAKES = {
    "empty prompt": (["--prompt", "a", "--prompt", "  "], "prompt 1 is empty"),
    "no number": (["--prompt", "a", "--top-k", "x"], "argument --top-k: invalid int value: 'x'"),
    "unknown flag": (["--prompt", "a", "--frob"], "unrecognized arguments: --frob"),
    "senseless value": (["--prompt", "a", "--top-p", "0"], "top_p must be in (0, 1], got 0.0"),
    "nan": (["--prompt", "a", "--temperature", "nan"], "temperature must be a finite number >= 0, got nan"),
    "bias": (["--prompt", "a", "--logit-bias", "5"], "'5' is not ID=VALUE"),
    "both sources": (["--prompt", "a", "--prompts-file", "f"], "not both"),
    "absent file": (["--prompts-file", "/nonexistent/f"], "No such file"),
    "absent model": (["--prompt", "a", "--model", "/nonexistent"], "no such file or folder"),
    "choice": (["--prompt", "a", "--dtype", "int3"], "invalid choice: 'int3'"),
    "too long": (["--prompt", "a" * 1200], "error: the prompt has 1200 tokens"),
    "bad one of many": (["--prompt", "a", "--prompt", "b" * 1200], "prompt 1: the prompt has 1200 tokens"),
    "token": (["--prompt", "a", "--stop-token-id", "260"], "error: stop_token_ids: token id 260"),
    "pool": (["--prompt", "a", "--max-model-len", "3000"], "does not fit in the KV cache of 1008 tokens"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(flags, name, capsys):
    more, message = MISTAKES[name]
    assert call(flags, *more) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert message in err


def test_no_prompt_on_a_terminal(flags, monkeypatch, capsys):
    _, terminal = pty.openpty()
    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert call(flags) == 2
    assert "no prompt" in capsys.readouterr().err


def test_version_and_help(capsys):
    assert call([], "--version") == 0
    assert capsys.readouterr().out.startswith("jaxinfer ")
    assert call([], "--help") == 0
    out = capsys.readouterr().out
    for flag in (
        "--prompt",
        "--prompts-file",
        "--json",
        "--seed",
        "--num-blocks",
        "--no-prefix-caching",
        "--kernels",
    ):
        assert flag in out


def test_help_is_what_was_agreed(capsys, monkeypatch):
    """A snapshot: groups, flags, examples (words only: versions of Python break lines differently)."""
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        generate.main(["--help"])
    snapshot = Path(__file__).parents[1] / "goldens" / "help.txt"
    assert capsys.readouterr().out.split() == snapshot.read_text(encoding="utf-8").split()


def test_chat_and_several_answers(flags, tmp_path, capsys):
    more = ["--prompt", "hi", "--max-tokens", "2", "--json"]
    assert call(flags, *more, "--chat") == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "<bos><user>hi<end>"
    assert call(flags, *more, "--system", "s") == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "<bos><user>s<end><user>hi<end>"
    template = tmp_path / "t.jinja"
    template.write_text("[{{ messages[0]['content'] }}]")
    assert call(flags, *more, "--chat-template", str(template)) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "[hi]"
    assert call(flags, *more, "--chat-template", str(tmp_path / "none")) == 2
    assert "No such file" in capsys.readouterr().err
    assert call(flags, *more, "--n", "2", "--temperature", "1", "--seed", "1") == 0
    assert len(json.loads(capsys.readouterr().out)["answers"]) == 2
    assert call(flags, "--prompt", "hi", "--max-tokens", "2", "--n", "2", "--temperature", "1") == 0
    assert "[0.1] " in capsys.readouterr().out
    assert call(flags, *more, "--n", "2") == 2
    assert "n must be 1 at temperature 0" in capsys.readouterr().err


def command(flags) -> list[str]:
    return [sys.executable, "-m", "jaxinfer.generate", *flags]


def test_interrupt_ends_cleanly(flags):
    """Ctrl-C in the middle of an answer: one word, no trace, code 130."""
    more = ["--prompt", "a", "--max-tokens", "900", "--ignore-eos"]
    process = subprocess.Popen(command(flags + more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == arguments.INTERRUPTED
    assert err.strip() == "interrupted"


def test_broken_pipe_is_silent(flags):
    more = ["--prompt", "a", "--max-tokens", "900", "--ignore-eos"]
    process = subprocess.Popen(command(flags + more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == arguments.BROKEN_PIPE
    assert err == ""


def test_progress_shows_on_a_terminal_only(flags):
    """Compiling is told on a terminal; a pipe sees nothing of it."""
    leader, terminal = pty.openpty()
    more = ["--prompt", "a", "--max-tokens", "2"]
    environment = {**os.environ, "TERM": "xterm", "XDG_CACHE_HOME": "/nonexistent-cache"}
    process = subprocess.Popen(command(flags + more), stdout=subprocess.DEVNULL, stderr=terminal, env=environment)
    os.close(terminal)
    seen = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            part = os.read(leader, 4096)
        except OSError:  # the other side closed
            break
        seen += part
    os.close(leader)
    assert process.wait(timeout=60) == 0
    assert b"compiling" in seen
