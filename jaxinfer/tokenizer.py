"""Text to ids, ids to text as they arrive, chat templates. No jax.

The `tokenizers` library does the work; transformers renders chat templates and is imported only then.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
FIRST_MARK, LAST_MARK = 0x10F000, 0x10FFFD
MARK = re.compile(f"([{chr(FIRST_MARK)}-{chr(LAST_MARK)}])")
"""Stand-ins for hidden literals: the end of a private-use plane."""
CONTROL, USER_DEFINED = 3, 4
"""Token types of GGUF metadata that are matched in text before anything else."""


class Tokenizer:
    """A tokenizer with its special ids and chat template.

    Args:
      backend: the `tokenizers` object.
      bos_token_id: put before a prompt when `add_bos`, unless the backend's post-processor does it.
      eos_token_ids: ids that end a generation.
      chat_template: Jinja source, or None.
      special_tokens: names that chat templates use, such as `bos_token`.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_token_id: int | None = None,
        add_bos: bool = False,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.bos_token_id = bos_token_id
        self.add_bos = add_bos
        self.eos_token_ids = frozenset(eos_token_ids)
        self.chat_template = chat_template
        self.special_tokens = special_tokens or {}

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; with special tokens, exactly one BOS where the model wants one.

        Raises:
          ValueError: the text holds half a character (a lone surrogate).
        """
        if not _is_unicode(text):
            raise ValueError(f"the text is not valid Unicode (a lone surrogate): {text[:40]!a}")
        ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self.add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids = [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text that generating `ids` one by one gives."""
        detokenizer = IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.push, ids)) + detokenizer.flush()

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
    ) -> str:
        """Renders a conversation. Encode the result without special tokens: templates print them.

        Raises:
          ValueError: there is no template, or it refuses the messages.
        """
        source = template or self.chat_template
        if source is None:
            raise ValueError("the model has no chat template")
        from transformers.utils.chat_template_utils import render_jinja_template

        names: dict[str, Any] = {**self.special_tokens}
        try:
            rendered, _ = render_jinja_template(
                [messages],
                chat_template=source,
                add_generation_prompt=add_generation_prompt,
                **names,
            )
        except Exception as error:  # a template is a program: besides its own errors it may raise any
            raise ValueError(f"the chat template refuses the messages: {error}") from None
        return rendered[0]

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        template: str | None = None,
        add_generation_prompt: bool = True,
        parse_special_tokens: bool = False,
    ) -> tuple[str, list[int]]:
        """A conversation's text and ids; special tokens come from the template alone unless `parse_special_tokens`.

        Literals of special tokens anywhere inside a message are hidden from the tokenizer while it looks for special
        tokens: each is replaced by its mark from a private-use plane, and encoded by itself as plain text.
        """
        literals = [] if parse_special_tokens else self._special_literals
        messages = [self._hide_literals(message) for message in messages] if literals else messages
        rendered = self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, template=template)
        text, ids = "", []
        for part in MARK.split(rendered) if literals else [rendered]:
            if len(part) == 1 and MARK.fullmatch(part):
                part = literals[ord(part) - FIRST_MARK]
                ids += self._encode_plain(part)
            else:
                ids += self.encode(part, add_special_tokens=False)
            text += part
        return text, ids

    @cached_property
    def _special_literals(self) -> list[str]:
        """Texts of the special tokens, the longest first; its numbers are the marks'."""
        literals = {token.content for token in self._added.values() if token.special}
        return sorted(literals, key=lambda text: (-len(text), text))[: LAST_MARK - FIRST_MARK + 1]

    @cached_property
    def _literal_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._special_literals)))

    def _hide_literals(self, value: Any) -> Any:
        """The same value with marks for literals in every string, however deep (message parts, names, tools)."""
        if isinstance(value, str):
            clean = MARK.sub("", value)  # the marks' own plane holds no text
            numbers = self._special_literals
            return self._literal_pattern.sub(lambda match: chr(FIRST_MARK + numbers.index(match[0])), clean)
        if isinstance(value, dict):
            return {key: self._hide_literals(item) for key, item in value.items()}
        return [self._hide_literals(item) for item in value] if isinstance(value, list | tuple) else value

    def _encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which nothing is special."""
        return self._plain_backend.encode(text, add_special_tokens=False).ids

    @cached_property
    def _plain_backend(self) -> Backend:
        """A copy that knows no special tokens: a switch on the one backend would show in other threads."""
        plain = Backend.from_str(self.backend.to_str())
        plain.encode_special_tokens = True
        return plain

    def save(self, folder: Path) -> None:
        """Writes what `load_tokenizer` reads."""
        self.backend.save(str(folder / "tokenizer.json"))
        config = {**self.special_tokens, "add_bos_token": self.add_bos, "chat_template": self.chat_template}
        (folder / "tokenizer_config.json").write_text(
            json.dumps(config, ensure_ascii=False, indent=2), encoding="utf-8"
        )

    def to_transformers(self) -> Any:
        """The same tokenizer as a `transformers.PreTrainedTokenizerFast`."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=self.backend, chat_template=self.chat_template, **self.special_tokens
        )

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(id_ for id_, token in self._added.items() if token.special)

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token stands for; None where that is not a property of the token alone."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._find_bytes(token_id)
        return self._bytes[token_id]

    @cached_property
    def _bytes(self) -> dict[int, bytes | None]:
        """What `token_bytes` has said: asking the tokenizer costs more than all else that a token costs the host."""
        return {}

    def _find_bytes(self, token_id: int) -> bytes | None:
        if token_id in self._added:
            return self._added[token_id].content.encode()
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""  # rows of a padded vocabulary
        if self._kind == "byte_level":
            table = _bytes_of_characters()
            return bytes(table[c] for c in token) if all(c in table for c in token) else token.encode()
        if self._kind == "byte_fallback":
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
            return token.replace("\u2581", " ").encode()
        return None

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        return self.backend.get_added_tokens_decoder()

    @cached_property
    def _kind(self) -> str:
        decoder = json.loads(self.backend.to_str())["decoder"]
        names = json.dumps(decoder)
        if '"ByteLevel"' in names:
            return "byte_level"
        return "byte_fallback" if '"ByteFallback"' in names else "other"


class IncrementalDetokenizer:
    """Text of one answer, token by token. Holds back only bytes that may still become a character.

    Tokens are turned into bytes and decoded as a stream, so the text does not depend on where tokens end. Where a
    tokenizer has no bytes a token, the difference of two decodings is taken, and a trailing U+FFFD waits.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._skip_special = skip_special_tokens
        self._pending: list[int] = []
        self._context: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that becomes certain with this token."""
        if token_id in self._skipped:
            return ""
        content = self._tokenizer.token_bytes(token_id)
        return self._push_window(token_id) if content is None else self._decoder.decode(content)

    def flush(self) -> str:
        """What was held: incomplete characters, as U+FFFD. Call once, at the end."""
        if self._pending:
            return self._emit_window()
        return self._decoder.decode(b"", final=True)

    def _push_window(self, token_id: int) -> str:
        self._pending.append(token_id)
        return "" if self._decode(self._context + self._pending).endswith("\ufffd") else self._emit_window()

    def _emit_window(self) -> str:
        before = self._decode(self._context)
        text = self._decode(self._context + self._pending)[len(before) :]
        self._context, self._pending = (self._context + self._pending)[-8:], []
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.backend.decode(ids, skip_special_tokens=self._skip_special)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@lru_cache
def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 characters are themselves, the others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(0x100 + number): byte for number, byte in enumerate(others)})
    return table


# -- where tokenizers come from ------------------------------------------------------------------


def load_tokenizer(path: Path) -> Tokenizer:
    """From a folder with `tokenizer.json` (and `tokenizer_config.json`), or from such a file.

    Raises:
      ValueError: it is not there or cannot be read.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path} has no tokenizer.json")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{file} is not a tokenizer: {error}") from None
    backend.no_truncation()  # settings of training, which would cut or fill prompts silently
    backend.no_padding()
    config = _read_optional_json(file.parent / "tokenizer_config.json")
    names = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
    template = config.get("chat_template")
    jinja = file.parent / "chat_template.jinja"
    if template is None and jinja.is_file():
        template = jinja.read_text(encoding="utf-8")
    if isinstance(template, list):  # named templates
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    bos, eos = (backend.token_to_id(names[key]) if key in names else None for key in ("bos_token", "eos_token"))
    return Tokenizer(
        backend,
        bos_token_id=bos,
        add_bos=bool(config.get("add_bos_token", False)),
        eos_token_ids=() if eos is None else (eos,),
        chat_template=template,
        special_tokens=names,
    )


def _read_optional_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def tokenizer_from_gguf(data: dict[str, Any]) -> Tokenizer:
    """Rebuilds a byte-level BPE tokenizer from a GGUF file's `tokenizer.*` metadata (prefix removed).

    Raises:
      ValueError: another kind of tokenizer, or another pre-tokenizer.
    """
    if data.get("ggml.model") != "gpt2":
        raise ValueError(
            f"GGUF tokenizer model {data.get('ggml.model')!r} is not supported; only 'gpt2' (byte-level BPE)"
        )
    pre = data.get("ggml.pre", "default")
    tokens: list[str] = data["ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in data["ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    types = data.get("ggml.token_type") or [1] * len(tokens)
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
    backend.add_tokens(added)
    bos, eos = data.get("ggml.bos_token_id"), data.get("ggml.eos_token_id")
    ends = [id_ for id_ in (eos, data.get("ggml.eot_token_id")) if id_ is not None]
    names = {"bos_token": bos, "eos_token": eos, "pad_token": data.get("ggml.padding_token_id")}
    return Tokenizer(
        backend,
        bos_token_id=bos,
        add_bos=bool(data.get("ggml.add_bos_token", pre == "llama-bpe")),
        eos_token_ids=ends,
        chat_template=data.get("chat_template"),
        special_tokens={key: tokens[id_] for key, id_ in names.items() if id_ is not None},
    )


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name == "smollm":
        with_regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), with_regex])
    patterns = {"llama-bpe": LLAMA3_PATTERN, "qwen2": QWEN2_PATTERN}
    if name not in patterns:
        raise ValueError(f"GGUF pre-tokenizer {name!r} is not supported; supported are smollm, llama-bpe, qwen2")
    split = pre_tokenizers.Split(Regex(patterns[name]), behavior="isolated")
    return pre_tokenizers.Sequence([split, byte_level])
