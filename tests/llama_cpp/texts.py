"""200 texts whose tokens two tokenizers must agree on."""

from __future__ import annotations

import random

PIECES = (
    "Once upon a time", "I'll", "WE'VE", "don't", "it's", "'s", " ", "  ", "    ", "\n", "\n\n\n",
    "\t", " \n ", "\r\n", "123", "1234567", "3.14", "²½", "٣٤", "naïve", "Ünïcödé", "Straße",
    "你好，世界", "こんにちは", "カタカナ", "안녕하세요", "Привет, мир", "हिन्दी", "ไทย", "عربي",
    "e\u0301", "👍🏽", "🙂", "—", "…", "“quoted”", "a_b-c", "x==y!=z", '{"a": [1, 2]}', "<html>",
    "def f(x):\n    return x+1\n", "https://a.b/c?d=e&f", "<|im_start|>", "<|im_end|>",
    "<|endoftext|>", "<s>", "</s>", "<unk>", "<0x0A>", "▁", "▁▁x", "\u00a0", "\u3000", "\u200b",
    "\u0085", "$5", "C++", "#include", "~|^<>+=", "camelCaseWords", "ALLCAPS", "MiXeD", ".", ",",
    "!?", "\\n", "`code`", "tab\there", "ﬁ", "Ⅷ", "\U0001d54f", "ß", "ǅ", "the cat sat on the mat",
)  # fmt: skip


def texts(count: int = 200) -> list[str]:
    """Texts of one to twelve pieces; the same each time."""
    rng = random.Random(7)
    made = ["", " ", "\n", *PIECES]
    while len(made) < count:
        between = rng.choice(["", " ", "", "\n"])
        made.append(between.join(rng.choices(PIECES, k=rng.randint(2, 12))))
    return made[:count]
