"""Texts that `scripts/make_goldens.py` gives to SmolLM2 and to its tokenizer."""

import itertools
from collections.abc import Iterator

PLAIN_PROMPT = "The most important thing to remember about learning a new language is"
CHINESE_PROMPT = "我们今天学习数学，"
CODE_PROMPT = 'def is_prime(n: int) -> bool:\n    """Return True if n is a prime number."""\n    if n < 2:\n'

LOG_TITLE = "The log of the lighthouse keeper\n\n"

CONVERSATIONS: dict[str, list[dict[str, str]]] = {
    "system_user": [
        {"role": "system", "content": "You are a patient teacher. Answer in one short paragraph."},
        {"role": "user", "content": "Why does ice float on water?"},
    ],
    "user_only": [{"role": "user", "content": "  Name three colours.\n\nOne a line, please.  "}],
    "many_turns": [
        {"role": "user", "content": "Bonjour ! Ça va ? 你好吗？"},
        {"role": "assistant", "content": "Très bien, merci 😊"},
        {"role": "user", "content": "Write `x = 1` in C. Don't add <|im_end|> or <b>tags</b>."},
        {"role": "assistant", "content": "```c\nint x = 1;\n```"},
        {"role": "user", "content": ""},
    ],
}


def log_entries() -> Iterator[str]:
    """Endless entries of a lighthouse keeper's log; no two of the first thousand are alike."""
    winds = (
        "a soft wind from the west",
        "no wind at all",
        "a hard gale out of the north",
        "a warm southern breeze",
    )
    ships = (
        "a grain barge",
        "two fishing boats",
        "the mail steamer",
        "a schooner with torn sails",
        "a coal ship",
    )
    chores = (
        "I cleaned the great lens and trimmed the wick",
        "I painted the railing and mended the stairs",
        "I counted the oil barrels and wrote to the harbour master",
        "I repaired the fog bell, which had begun to crack",
        "I carried fresh water up from the well before breakfast",
        "I planted beans in the small garden behind the tower",
        "I taught the boy how to read the barometer",
    )
    sights = (
        "seals were sleeping on the rocks",
        "the gulls were louder than I have ever heard them",
        "the stars came out one after another over the bay",
        "a rainbow stood for a moment above the eastern cliffs",
        "the moon rose red and very large",
        "a thick fog hid the village until noon",
        "rain fell so hard that I could not see the sea",
        "porpoises followed the tide into the channel",
        "frost covered the windows of the lamp room",
    )
    for day in itertools.count():
        yield (
            f"Day {day + 1}. We had {winds[day % len(winds)]}, and "
            f"{ships[day % len(ships)]} passed the point. "
            f"{chores[day % len(chores)]}. In the evening {sights[day % len(sights)]}.\n"
        )


# Varied text for tokenizers. Invisible and right-to-left characters are escaped.
TOKENIZER_STRINGS = (
    "",
    " ",
    "   ",
    "\n",
    "\n\n\n",
    "\t\tindented\twith\ttabs",
    "Hello, world!",
    " leading space",
    "    four leading spaces",
    "trailing spaces   ",
    "two  spaces   three    four",
    "line one\nline two\r\nline three\n\n  line four",
    "I'm sure they've said it's what we'd do; she'll DON'T can't",
    "antidisestablishmentarianism and pneumonoultramicroscopicsilicovolcanoconiosis",
    "CamelCaseIdentifier snake_case_identifier SCREAMING_CASE kebab-case",
    "3.14159265358979",
    "1234567890 on 2024-02-29 at 07:05:59",
    "+1 (555) 010-9999, $1,234.56, 99.9%, 1e-5, 0xFF",
    "a  1 b   22 c\n3 d\n\n44 e\t5",  # spaces before digits: `smollm` splits them apart from the digit
    "x² + y³ = ½ ⅷ ٣٤٥ ९ ①",  # numeric but not ASCII digits
    "def f(x):\n    return [i ** 2 for i in range(x) if i % 2 == 0]\n",
    'for (int i = 0; i < n; ++i) {\n\tprintf("%d\\n", a[i]);\n}\n',
    '<!DOCTYPE html><p class="a">it\'s &amp; that</p><!-- c -->',
    '{"key": [1, 2.5, null, true], "nested": {"a": "b"}}',
    "SELECT * FROM t WHERE a >= 10 AND b LIKE '%x%';",
    "https://example.com/path?q=1&r=two#frag user@example.org",
    "中文分词测试：今天天气很好。",
    "日本語のテキスト、カタカナとひらがな。",
    "한국어 문장도 하나 넣어 봅시다.",
    "Привет, мир! Ελληνικά κείμενα",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645 \u05e9\u05dc\u05d5\u05dd",
    "हिन्दी में एक वाक्य ภาษาไทย",
    "Größe naïve café Ångström Dvořák İstanbul ß",
    # combining characters
    "e\u0301 a\u0308 n\u0303 o\u0302\u0323 Z\u0351\u036b\u0343\u036a\u0302\u036b",
    "\u00e9 versus e\u0301; \ufb01 ligature; \u2460 \uff21\uff22\uff23",  # NFKC would change these
    "emoji 😀 🎉🎉 👍🏽 ❤\ufe0f",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f3\ufe0f\u200d\U0001f308",
    "\U0001f1eb\U0001f1f7 \U0001f469\U0001f3fe\u200d\U0001f4bb",
    "mixed English和中文 и русский 123テスト",
    "quotes “curly” ‘single’ «guillemets» — dash … ellipsis",
    "non\u00a0breaking\u2003em\u200bzero\u2028line\ufeffbom\u3000ideographic",
    "math ∀x∈ℝ: ∑ᵢ xᵢ² ≤ ∞ ⇒ √2 ≠ π",
    "<|im_start|>user\nHi<|im_end|>\n",
    "a<|endoftext|>b <|im_start|> c<|im_end|><|im_end|>",
    "<repo_name>org/name<file_sep>main.py<jupyter_code>x<empty_output>",
    "almost special: <|im_start| > <|im_ end|> <|IM_END|> <|pad|> <s> </s> <unk>",
    "control \u0001 \u0004 \u0007 \u001b[31m \u007f end",  # the byte 0x04 is not in the vocabulary
    "plane 15 \U000f0000 and tag \U000e0041 and plane 3 \U00020000 \U00040000",  # nor is the byte 0xf1
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "!!!???...---===***###@@@ ~~~ ^^^ |||",
    "\\n \\t \\u0041 C:\\Users\\name %20 \\\\server",
)
