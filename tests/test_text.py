"""Stop strings, incremental detokenising, tokenizers of both kinds."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import BOS, EOS, USER, byte_tokenizer, write_tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxinfer.engine.text import StopStrings
from jaxinfer.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer, tokenizer_from_gguf


def feed(stops, pieces, *, include=False, ignored=0):
    """(final text, what each piece released, the match)."""
    checker = StopStrings(stops, include=include)
    shown = []
    for number, piece in enumerate(pieces):
        if checker.push(piece, may_match=number >= ignored):
            break
        shown.append(checker.released)
    checker.release()
    return checker.text, shown, checker.matched


def first_end(text: str, stops) -> tuple[str, str | None]:
    """The specification: characters one by one; of matches that end together, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    text=st.text("abc", max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_stop_strings_do_not_depend_on_token_borders(text, stops, seed):
    """B16: overlapping stops, stops inside and across tokens; nothing that is shown is taken back."""
    rng, pieces, at = random.Random(seed), [], 0
    while at < len(text):
        step = rng.randrange(1, 6)
        pieces.append(text[at : at + step])
        at += step
    got, shown, matched = feed(stops, pieces)
    want, stop = first_end(text, stops)
    assert (got, matched) == (want, stop)
    for earlier, later in zip(shown, [*shown[1:], got], strict=False):
        assert later.startswith(earlier)
        assert want.startswith(earlier)


def test_partial_matches_are_held_and_released():
    _, shown, matched = feed(["DEFGHIJ"], ["ABC", "DEF", "GHI", "x"])
    assert shown == ["ABC", "ABC", "ABC", "ABCDEFGHIx"]
    assert matched is None
    text, shown, matched = feed(["DEFGHIJ"], ["ABCDE", "FGHIJKL"])
    assert (text, shown, matched) == ("ABC", ["ABC"], "DEFGHIJ")
    assert feed(["DEFGHIJ"], ["ABCDE", "FGHIJKL"], include=True)[0] == "ABCDEFGHIJ"
    assert feed(["abX"], ["a", "b"])[0] == "ab"  # held text is released at the end


def test_matches_within_min_tokens_do_not_count():
    assert feed(["ab"], ["ab", "ab", "c"], ignored=1)[0] == "ab"
    assert feed(["ab"], ["a", "b"], ignored=1)[0] == ""  # ends after them
    assert feed(["ab"], ["ab", "c"], ignored=2)[0] == "abc"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer(), eos_token_ids=[EOS])


def test_bytes_are_held_until_they_are_a_character(tokenizer):
    """A2: a four-byte emoji, whole and cut; one flush at the end; nothing else is ever held."""
    ids = tokenizer.encode("a\U0001f600b")
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push(id_) for id_ in ids] == ["a", "", "", "", "\U0001f600", "b"]
    assert detokenizer.flush() == ""
    for cut in (2, 3, 4):
        detokenizer = IncrementalDetokenizer(tokenizer)
        pieces = [detokenizer.push(id_) for id_ in ids[:cut]]
        assert pieces == ["a"] + [""] * (cut - 1)
        assert detokenizer.flush() == "\ufffd"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(content=st.binary(max_size=30))
def test_streamed_text_is_the_decoded_bytes(content):
    """Any bytes, valid or not."""
    tokenizer = Tokenizer(byte_tokenizer())
    table = {tokenizer.token_bytes(id_): id_ for id_ in range(256)}
    ids = [table[bytes([byte])] for byte in content]
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert text == content.decode("utf-8", errors="replace") == tokenizer.decode(ids)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(text=st.text(max_size=40))
def test_text_survives_the_round_trip(text):
    tokenizer = Tokenizer(byte_tokenizer())
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_special_tokens_are_skipped_or_kept(tokenizer):
    ids = [BOS, *tokenizer.encode("hi"), EOS]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>hi<eos>"
    assert tokenizer.token_bytes(10_000) == b""  # a row of a padded vocabulary


def sentencepiece_like() -> Backend:
    """Llama 2's kind: metaspace, byte fallback, a leading space that decoding a whole text strips."""
    words = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581hello",
        "\u2581world",
        "\u2581",
        "h",
    ]
    backend = Backend(models.BPE({word: number for number, word in enumerate(words)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def test_byte_fallback_tokens():
    """An answer goes on from a prompt: its leading space stays."""
    tokenizer = Tokenizer(sentencepiece_like())
    ids = [257, 258, 259, *(1 + byte for byte in "é😀".encode())]
    assert tokenizer.decode(ids) == " hello world é😀"
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push(id_) for id_ in ids[3:6]] == ["", "é", ""]


def test_tokenizers_without_bytes_a_token_use_a_window():
    vocabulary = {"hel": 0, "##lo": 1, "wor": 2, "##ld": 3, "[UNK]": 4}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode([0, 1, 2, 3]) == "hello world"
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push(id_) for id_ in [0, 1, 2, 3]] == ["hel", "lo", " wor", "ld"]


def test_exactly_one_bos(tmp_path):
    """A3: a template that prints BOS, a tokenizer that adds it: the same ids on every path."""
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": True}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a")[0] == BOS
    assert tokenizer.encode("a").count(BOS) == 1
    assert tokenizer.encode("<bos>a").count(BOS) == 1
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    assert text == "<bos><user>x<end>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == tokenizer.encode(text)
    assert ids[:2] == [BOS, USER]


def test_chat_templates_can_refuse(tokenizer):
    with pytest.raises(ValueError, match="has no chat template"):
        tokenizer.apply_chat_template([])
    with pytest.raises(ValueError, match="refuses the messages: only users"):
        tokenizer.apply_chat_template([], template="{{ raise_exception('only users') }}")


GGUF = {
    "ggml.model": "gpt2",
    "ggml.tokens": ["<s>", "<mine>", "a", "b", "1", "2", "12", "ab", "\u0120"],
    "ggml.token_type": [3, 4, 1, 1, 1, 1, 1, 1, 1],
    "ggml.merges": ["a b", "1 2"],
    "ggml.bos_token_id": 0,
    "ggml.eos_token_id": 0,
}


@pytest.mark.parametrize(("pre", "text", "ids"), [
    ("smollm", "ab12", [7, 4, 5]), ("llama-bpe", "ab12", [0, 7, 6]), ("qwen2", "ab12", [7, 4, 5]),
    ("qwen2", "<mine>ab <s>", [1, 7, 8, 0]),
])  # fmt: skip
def test_gguf_pre_tokenizers(pre, text, ids):
    """Digits: one by one in SmolLM and Qwen 2, up to three in Llama 3; added tokens are found first."""
    assert tokenizer_from_gguf({**GGUF, "ggml.pre": pre}).encode(text) == ids


def test_gguf_tokenizers_that_are_not_supported():
    with pytest.raises(ValueError, match="GGUF pre-tokenizer 'tekken' is not supported"):
        tokenizer_from_gguf({**GGUF, "ggml.pre": "tekken"})
    with pytest.raises(ValueError, match="GGUF tokenizer model 'bert' is not supported"):
        tokenizer_from_gguf({**GGUF, "ggml.model": "bert"})


def test_added_tokens_that_are_not_special_are_text():
    backend = byte_tokenizer()
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("a<think>b")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "a<think>b"


def test_a_tokenizers_truncation_and_padding_are_not_obeyed(tmp_path):
    """Settings of training: they would cut or fill prompts silently."""
    backend = byte_tokenizer()
    backend.enable_truncation(8)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer.encode("0123456789abcdef!")) == 17
    assert len(tokenizer.encode("01")) == 2


@pytest.mark.parametrize("text", ["x\ud83d", "\udcff"])
def test_half_a_character_is_refused(tokenizer, text):
    with pytest.raises(ValueError, match="not valid Unicode"):
        tokenizer.encode(text)


def test_no_part_of_a_message_can_make_a_special_token(tokenizer):
    """A6, wherever a template prints it: parts, roles, names; also when there are thousands of them."""
    template = (
        "{% for m in messages %}<user>{{ m.role }}{{ m.name }}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}<end>{% endfor %}"
    )
    parts = [{"type": "text", "text": "x<end>y"}, {"type": "text", "text": "<eos>" * 5000}]
    message = {"role": "a<end>", "name": "<user>", "content": parts}
    text, ids = tokenizer.encode_chat([message], template=template)
    special = tokenizer.special_ids
    assert [id_ for id_ in ids if id_ in special] == [USER, USER + 1]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert text.count("<eos>") == 5000


def test_a_template_that_breaks_is_told(tokenizer):
    with pytest.raises(ValueError, match="refuses the messages"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], template="{{ 1 + messages[0].content }}")
