"""The embedded model in float32 against transformers on the same dequantised weights, through the whole engine."""

from __future__ import annotations

import hashlib
import itertools
import json

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.loaders import embedded_model

KINDS = ("plain", "chat", "chinese", "code", "long")


@pytest.fixture(scope="module")
def golden(golden_folder):
    return json.loads((golden_folder / "smollm2.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def llm():
    with LLM(
        "smollm2", dtype="float32", max_num_seqs=8, max_num_batched_tokens=256, max_model_len=2048, compile_cache=None
    ) as llm:
        yield llm


def test_the_goldens_are_of_this_file(golden):
    assert hashlib.sha256(embedded_model().read_bytes()).hexdigest() == golden["gguf_sha256"]
    assert tuple(generation["name"] for generation in golden["generations"]) == KINDS


@pytest.mark.parametrize("kind", [*KINDS[:-1], pytest.param(KINDS[-1], marks=pytest.mark.slow)])
def test_greedy_ids_and_text_equal_transformers(golden, llm, kind):
    generation = next(entry for entry in golden["generations"] if entry["name"] == kind)
    assert generation["min_top2_gap"] >= 1e-3
    prompt = generation["prompt"] or generation["prompt_ids"]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    output = llm.generate([prompt], params)[0]
    assert output.prompt_token_ids == generation["prompt_ids"]
    assert output.outputs[0].token_ids == generation["output_ids"]
    assert output.outputs[0].text == generation["output_text"]


@pytest.mark.parametrize("kinds", [KINDS[:-1], pytest.param(KINDS, marks=pytest.mark.slow)], ids=["short", "all"])
def test_all_together_equal_transformers(golden, llm, kinds):
    """The long one is 1,800 tokens, and most of the time that all five take."""
    generations = [entry for entry in golden["generations"] if entry["name"] in kinds]
    prompts = [entry["prompt_ids"] for entry in generations]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    expected = [entry["output_ids"] for entry in generations]
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_streamed_text_is_the_whole_text(golden, llm):
    for entry in golden["generations"][2:4]:
        params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
        texts = [output.outputs[0].text for output in llm.stream(entry["prompt"], params)]
        assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))
        assert texts[-1] == entry["output_text"]


def test_tokenizer_equals_transformers(golden, llm):
    """On strings whose bytes the vocabulary has; 21 bytes are missing from it (see the goldens' README)."""
    tokenizer = llm.engine.tokenizer
    known = [entry for entry in golden["tokenizer_strings"] if entry["decoded"] == entry["text"]]
    assert len(known) >= 45
    for entry in known:
        assert tokenizer.encode(entry["text"]) == entry["ids"], entry["text"]
        assert tokenizer.decode(entry["ids"], skip_special_tokens=False) == entry["text"]


def test_chat_template_equals_transformers(golden, llm):
    tokenizer = llm.engine.tokenizer
    for chat in golden["chats"]:
        text = tokenizer.apply_chat_template(chat["messages"], add_generation_prompt=chat["add_generation_prompt"])
        assert text == chat["text"]
        assert tokenizer.encode(text, add_special_tokens=False) == chat["ids"]
