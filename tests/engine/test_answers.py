"""An answer's text is the same whether it grows with each token or in arrears; what a commit's tokens lead to."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import BOS, EOS, byte_tokenizer

from jaxinfer.core import FinishReason, Request, RequestStatus, SamplingParams
from jaxinfer.engine.state import TEXT_TURNS, Answer, RequestState, deliver
from jaxinfer.scheduler import Commit, Emission, check_token_stop
from jaxinfer.tokenizer import Tokenizer

PROMPT = [65, 66]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer(), eos_token_ids=[EOS])


def make(tokenizer: Tokenizer | None, *, is_streaming: bool = False, **params) -> RequestState:
    request = Request("r", list(PROMPT), SamplingParams(**params), 24, eos_token_ids=frozenset({EOS}))
    return RequestState([request], None, tokenizer, is_streaming=is_streaming)


def grow(state: RequestState, tokens: list[int], rng: random.Random, abort_after: int) -> None:
    """Gives the answer tokens as the scheduler would: one that is not watched is asked only where it may end."""
    answer, request = state.answers[0], state.request
    for number, token in enumerate(tokens):
        request.token_ids.append(token)
        may_end = check_token_stop(request) is not None
        request.stop_reason = None
        request.finish_reason = answer.check_stop() if request.is_watched or may_end or rng.random() < 0.2 else None
        if request.finish_reason is not None:
            break
        if number == abort_after:
            request.finish_reason = FinishReason.ABORT
            break
        if not request.is_watched and rng.random() < 0.3:
            answer.extend_text()
    answer.finish(0.0)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.sampled_from([*range(60, 70), 200, 226, 130, 172, BOS, EOS]), min_size=24, max_size=24),
    include=st.booleans(),
    skip=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 5]),
    stop_ids=st.sampled_from([[], [63], [63, 64]]),
    abort_after=st.integers(0, 60),
    seed=st.integers(0, 100),
)
def test_a_text_in_arrears_is_the_streamed_text(
    tokenizer, tokens, include, skip, min_tokens, stop_ids, abort_after, seed
):
    params = {"max_tokens": 24, "include_stop_str_in_output": include, "skip_special_tokens": skip,
              "min_tokens": min_tokens, "stop_token_ids": stop_ids}  # fmt: skip
    streamed, late = make(tokenizer, is_streaming=True, **params), make(tokenizer, **params)
    assert (streamed.request.is_watched, late.request.is_watched) == (True, False)
    for state in (streamed, late):
        grow(state, tokens, random.Random(seed), abort_after)
    one, other = streamed.answers[0].make_output(), late.answers[0].make_output()
    assert (one.text, one.token_ids, one.finish_reason, one.stop_reason) == (
        other.text,
        other.token_ids,
        other.finish_reason,
        other.stop_reason,
    )


@pytest.mark.parametrize(
    ("params", "is_streaming", "is_watched"),
    [({}, False, False), ({"stop": ["x"]}, False, True), ({"logprobs": 0}, False, True), ({}, True, True)],
)
def test_who_is_watched(tokenizer, params, is_streaming, is_watched):
    assert make(tokenizer, is_streaming=is_streaming, **params).request.is_watched == is_watched


def test_delivery(tokenizer):
    """Quiet tokens are timed and reach the text in their turn; others make outputs where somebody reads them."""
    quiet, streamed, ended = make(tokenizer), make(tokenizer, is_streaming=True), make(tokenizer)
    states = [quiet, streamed, ended]
    live: dict[Request, tuple[RequestState, Answer]] = {one.request: (one, one.answers[0]) for one in states}
    closed = []
    for turn in range(TEXT_TURNS):
        for state in states:
            state.request.token_ids.append(67)
        streamed.answers[0].check_stop()
        commit = Commit([Emission(streamed.request, [67], 1), Emission(ended.request, [67], 2)], [quiet.request])
        assert deliver(commit, None, live, closed.append, turn) == 3
        assert len(streamed.outputs) == turn + 1
        assert quiet.answers[0].timeline.num_output_tokens == turn + 1
        text = tokenizer.decode([67] * (turn + 1))
        assert streamed.outputs[-1].outputs[0].text == text
    assert quiet.answers[0].make_output().text == tokenizer.decode([67])  # its turn was the first
    assert not quiet.outputs
    assert not closed
    assert not ended.outputs
    ended.request.status, ended.request.finish_reason = RequestStatus.FINISHED, FinishReason.ERROR
    assert deliver(Commit([Emission(ended.request, [], 0)]), None, live, closed.append) == 0
    assert closed == ended.answers
    assert [output.finished for output in ended.outputs] == [True]
    assert "no token could be chosen" in (ended.error or "")
