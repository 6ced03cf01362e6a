"""n > 1 by forking, prompt logprobs, priorities, salts, lists of parameters, chat."""

from __future__ import annotations

import random

import numpy as np
import pytest
from golden_cases import forward
from tiny_models import BOS, END, ODD_BUDGET, SETTINGS, USER, shrink_pool, write_model

from jaxinfer import LLM, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("siblings") / "model", seed=6)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), **SETTINGS) as llm:
        yield llm


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def sampled(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 12, "ignore_eos": True, **fields})


def count_computed(llm: LLM) -> list[int]:
    """Every step's tokens from now on."""
    counts: list[int] = []
    original = llm.engine.runner.dispatch

    def dispatch(plan):
        counts.append(sum(row.num_tokens for row in plan.rows if row.start < row.request.num_prompt_tokens))
        return original(plan)

    llm.engine.runner.dispatch = dispatch
    return counts


@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_four_answers_compute_the_prompt_once(folder, caching):
    """1,003 prompt tokens, four different reproducible answers, equal to four seeded solo requests."""
    wanted = prompt(1000)
    with LLM(str(folder), **SETTINGS, enable_prefix_caching=caching) as llm:
        counts = count_computed(llm)
        output = llm.generate([wanted], sampled(n=4, seed=11))[0]
        assert sum(counts) == 1003
        assert llm.stats()["prompt_tokens"] == 1000
        again = llm.generate([wanted], sampled(n=4, seed=11))[0]
    with LLM(str(folder), **SETTINGS, enable_prefix_caching=False) as llm:
        solo = [llm.generate([wanted], sampled(seed=11 + index))[0] for index in range(4)]
    answers = [answer.token_ids for answer in output.outputs]
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
    assert len(set(map(tuple, answers))) == 4
    assert answers == [answer.token_ids for answer in again.outputs]
    assert answers == [one.outputs[0].token_ids for one in solo]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("depth", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_forks_around_block_borders(folder, length, depth):
    with LLM(str(folder), **SETTINGS, enable_prefix_caching=False, depth=depth) as llm:
        output = llm.generate([prompt(length)], sampled(n=3, seed=5))[0]
        solo = [llm.generate([prompt(length)], sampled(seed=5 + index))[0] for index in range(3)]
        assert [a.token_ids for a in output.outputs] == [one.outputs[0].token_ids for one in solo]
        assert llm.stats()["kv_cache_usage_perc"] == 0.0


@pytest.mark.parametrize("caching", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sixteen_answers_under_preemption(folder, caching):
    """More answers than rows, in a pool that cannot hold them: still the solo answers."""
    with LLM(str(folder), **SETTINGS, enable_prefix_caching=caching, depth=2) as llm:
        shrink_pool(llm, 14)
        output = llm.generate([prompt(40, 2)], sampled(n=16, seed=3, max_tokens=40, frequency_penalty=0.5))[0]
        assert llm.stats()["num_preemptions"] > 0
        solo = [
            llm.generate([prompt(40, 2)], sampled(seed=3 + index, max_tokens=40, frequency_penalty=0.5))[0]
            for index in range(16)
        ]
        assert [a.token_ids for a in output.outputs] == [one.outputs[0].token_ids for one in solo]
        assert llm.stats()["kv_cache_usage_perc"] == 0.0


def test_streamed_siblings_are_complete(llm):
    """B11: n = 4, seeded, streamed, of unequal lengths: distinct, reproducible, all complete."""
    params = sampled(n=4, seed=21, stop=["a", "b", "c", "d", "e"], max_tokens=60)
    outputs = list(llm.stream(prompt(30), params))
    last = outputs[-1]
    assert last.finished
    assert not any(output.finished for output in outputs[:-1])
    assert all(answer.finish_reason for answer in last.outputs)
    assert len({len(answer.token_ids) for answer in last.outputs}) > 1
    whole = llm.generate([prompt(30)], params)[0]
    assert [a.text for a in last.outputs] == [a.text for a in whole.outputs]


def test_aborting_a_group_ends_all_of_it(llm):
    for steps in range(6):
        stream = llm.stream(prompt(300, steps), sampled(n=4, seed=1, max_tokens=50))
        for _ in range(steps):
            next(stream)
        stream.close()
        stats = llm.stats()
        assert (stats["num_requests_running"], stats["num_requests_waiting"]) == (0, 0)
        assert stats["kv_cache_usage_perc"] == 0.0


def test_several_answers_need_a_temperature():
    with pytest.raises(ValueError, match="n must be 1 at temperature 0"):
        SamplingParams(n=2, temperature=0.0)


# -- prompt logprobs ------------------------------------------------------------------------------------------------


def test_prompt_logprobs_equal_the_forward_pass(folder, llm):
    wanted = prompt(150, 8)
    output = llm.generate([wanted], sampled(prompt_logprobs=3, max_tokens=2))[0]
    logits = forward(folder, wanted).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 150
    for position, entries in enumerate(output.prompt_logprobs[1:], start=1):
        assert entries is not None
        row = logprobs[position - 1]
        assert wanted[position] in entries
        assert set(np.argsort(-row)[:3]) <= set(entries)
        for id_, entry in entries.items():
            assert entry.logprob == pytest.approx(row[id_], abs=1e-4)
            assert entry.rank == 1 + (row > row[id_]).sum()


def test_prompt_logprobs_do_not_depend_on_chunks_hits_or_preemption(folder):
    wanted = prompt(200, 9)
    params = sampled(prompt_logprobs=2, max_tokens=4, seed=1)
    results = []
    for settings, num_blocks in ((SETTINGS, 400), (ODD_BUDGET, 400), ({**SETTINGS, "depth": 2}, 20)):
        with LLM(str(folder), **settings) as llm:
            shrink_pool(llm, num_blocks)
            llm.generate([wanted[:120]], sampled())  # something to hit
            others = [prompt(100, seed) for seed in range(20, 23)]
            outputs = llm.generate([*others, wanted, *others], [*[sampled(seed=4)] * 3, params, *[sampled(seed=4)] * 3])
            results.append(outputs[3])
            assert outputs[3].num_cached_tokens == 0
            assert (llm.stats()["num_preemptions"] > 0) == (num_blocks == 20)
    for other in results[1:]:
        assert other.outputs[0].token_ids == results[0].outputs[0].token_ids
        for one, same in zip(other.prompt_logprobs[1:], results[0].prompt_logprobs[1:], strict=True):
            assert set(one) == set(same)
            assert all(one[id_].logprob == pytest.approx(same[id_].logprob, abs=1e-4) for id_ in one)


def test_prompt_logprobs_come_once_and_siblings_share_them(llm):
    outputs = list(llm.stream(prompt(20, 3), sampled(prompt_logprobs=0, n=2, max_tokens=3)))
    assert all(len(output.prompt_logprobs or []) == 20 for output in outputs)
    assert all(len(entry or {}) == 1 for entry in (outputs[-1].prompt_logprobs or [])[1:])
    assert llm.generate([[5]], sampled(prompt_logprobs=1))[0].prompt_logprobs == [None]


# -- priorities, salts, lists -------------------------------------------------------------------------------------


def test_priorities_decide_who_waits(folder):
    with LLM(str(folder), **{**SETTINGS, "max_num_seqs": 1, "max_num_batched_tokens": 16}, policy="priority") as llm:
        order: list[int] = []
        states = [llm.engine.make(prompt(9, seed), sampled(), priority=rank) for seed, rank in enumerate([5, 1, 3, 1])]
        llm.engine.submit(states)
        while llm.engine.step():
            order += [n for n, state in enumerate(states) if state.is_finished and n not in order]
        assert order == [1, 3, 2, 0]
        outputs = llm.generate([prompt(5), prompt(6)], sampled(), priority=[2, 1])
        assert all(output.finished for output in outputs)


def test_equal_priorities_never_ping_pong(folder):
    """Two that cannot both stay: the later one yields, and once only."""
    with LLM(str(folder), **SETTINGS, policy="priority") as llm:
        shrink_pool(llm, 8)
        states = [llm.engine.make(prompt(34, seed), sampled(max_tokens=35, seed=seed)) for seed in (1, 2)]
        llm.engine.submit(states)
        while llm.engine.step():
            pass
        assert states[0].request.epoch == 0
        assert states[1].request.epoch == 1


@pytest.mark.parametrize("bad", [None, "x", 1.5, float("nan"), True])
def test_bad_priorities_are_refused_and_leave_no_trace(folder, bad):
    with LLM(str(folder), **SETTINGS, policy="priority") as llm:
        with pytest.raises(ValueError, match="prompt 1: priority must be an integer"):
            llm.generate([prompt(3), prompt(4)], sampled(), priority=[1, bad])
        assert llm.generate([prompt(3)], sampled())[0].finished
        assert not llm.engine._live


def test_what_is_no_sampling_params_is_refused(llm):
    with pytest.raises(ValueError, match="sampling_params must be SamplingParams, got str"):
        llm.generate([prompt(3)], ["x"])
    with pytest.raises(ValueError, match="prompt must be text, got int"):
        llm.generate([{"prompt": 5, "prompt_token_ids": [1]}])
    assert llm.generate([prompt(3)], sampled(seed=np.int64(5)))[0].finished


def test_priority_needs_its_policy(llm):
    with pytest.raises(ValueError, match="priority needs"):
        llm.generate([[1]], sampled(), priority=[3])


def test_salts_isolate(llm):
    """D5, through the interface."""
    llm.reset_prefix_cache()
    cached = []
    for salt in "AAB":
        output = llm.generate({"prompt_token_ids": prompt(10, 31), "cache_salt": salt}, sampled())[0]
        cached.append(output.num_cached_tokens)
    assert cached == [0, 9, 0]


def test_parameters_one_a_prompt(llm):
    outputs = llm.generate([prompt(4), prompt(5)], [sampled(max_tokens=2), sampled(max_tokens=5)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 5]
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate([prompt(4), prompt(5)], [sampled()])


# -- chat -----------------------------------------------------------------------------------------------------------


def test_chat_renders_and_answers(llm):
    conversation = [{"role": "user", "content": "hi"}]
    output = llm.chat(conversation, sampled(seed=1))[0]
    assert output.prompt == "<bos><user>hi<end>"
    assert output.prompt_token_ids == [BOS, USER, *llm.tokenize("hi"), END]
    both = llm.chat([conversation, conversation], sampled(seed=1))
    assert [one.outputs[0].token_ids for one in both] == [output.outputs[0].token_ids] * 2
    other = llm.chat(conversation, sampled(seed=1), chat_template="{{ messages[0]['content'] }}!")[0]
    assert other.prompt == "hi!"


def test_special_tokens_in_a_message_are_plain_text(llm):
    """A6: a user's text cannot end its turn, unless the caller says so."""
    conversation = [{"role": "user", "content": "a<end><user>b"}]
    plain = llm.render_chat(conversation)
    assert plain["prompt"] == "<bos><user>a<end><user>b<end>"
    ids = plain["prompt_token_ids"]
    assert ids.count(END) == 1
    assert ids.count(USER) == 1
    assert llm.engine.tokenizer.decode(ids, skip_special_tokens=False) == plain["prompt"]
    parsed = llm.render_chat(conversation, parse_special_tokens=True)["prompt_token_ids"]
    assert parsed.count(END) == parsed.count(USER) == 2


def test_the_tokenizer_for_others(llm):
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode("hi") == llm.tokenize("hi")
    conversation = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(conversation, tokenize=False) == "<bos><user>hi<end>"


def test_reprs_are_short(llm):
    assert len(repr(llm)) < 200
    assert "LlamaForCausalLM" in repr(llm)
    output = llm.generate([prompt(300)], sampled(n=2, seed=1))[0]
    assert len(repr(output)) < 400
    assert "prompt 300 tokens" in repr(output)
    assert "'hello'" in repr(llm.generate("hello", sampled())[0])
