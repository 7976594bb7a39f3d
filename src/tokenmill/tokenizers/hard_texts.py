"""Short texts that expose errors of tokenizers. Every engine is compared with its reference on all of them."""

# Characters that look like others, in long lines, are the point of these texts.
# ruff: noqa: E501, RUF001

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence

# All white space that a pattern may know. Behind a newline, it is cut in many ways.
_SPACES = " \t\x0b\x0c\x1c\x85\u00a0\u1680\u2000\u2003\u2009\u2028\u2029\u202f\u205f\u3000"
_VIETNAMESE = "Tiếng Việt có dấu: ngữ pháp, đường phố"
_KOREAN = "한국어 문장입니다 각"
_JAPANESE = "がぎぐ パピプ 日本語の文"
_GREEK = "Ελληνικά ΐ ᾧ ΰ"
_LANGUAGES = (_VIETNAMESE, _KOREAN, _JAPANESE, _GREEK)

HARD_TEXTS: tuple[str, ...] = (
    # White space at the ends, alone, and in between.
    "", " ", "  ", "\n", "\n\n", "\t", "\r\n", " \n ", " a", "  a", "a ", "a  ", "a\n", "a\n\n", "\na", "a \n", "\ta\t",
    "def f(x):\n    if x:\n\t\treturn  x\n\n\n    pass\n", "a  b   c    d", "a\r\nb\r\n", "a\rb", "a\x0bb\x0cc",
    "a\n\u00a0", "a\n \u3000", "\u00a0a\u00a0b\u00a0", "\u3000a\u3000", "a\x85", "\x85a", "a\u2028b\u2029", "\x1ca\x1f",
    "\u2003a\u202fb\u205f", "a\n\u00a0b", " \u00a0 \u00a0", "▁", "▁a ▁ b▁", "a ▁▁ b", "\u1680a",
    *(f"a{newline}{space}" for newline in ("\n", "\n\n", "\r\n", " \n") for space in _SPACES),
    # What normalisers change: decomposed and composed, half and full width, ligatures.
    *(unicodedata.normalize(form, text) for text in _LANGUAGES for form in ("NFC", "NFD")),
    "ｶﾞｷﾞ ﾊﾟﾋﾟ ﾃｽﾄ", "ＡＢＣ１２３", "ﬁ ﬀ Ⅷ ½ ² ℃ ㍿ ㌔", "Å Å Å", "e\u0301e\u0301\u0323 o\u0302\u0323", "\u0301a", "İıßẞſ ŒŉĲ",
    # Marks that are not seen, emoji, and code points that are rare or nothing at all.
    "👩\u200d👩\u200d👧 👍🏽 🇩🇪 ❤\ufe0f", "a\u200bb\u200cc\u200dd", "\ufeffa\ufeff", "\u202ea\u202c", "\u00ad", "\ue000\uf8ff",
    "\u0378\U000e0001\U000fffff", "𐍈 𝔘𝔫𝔦 𠀀𪛕 🜁", "\ufdd0\ufffe\uffff", "\ufffd", "a\x00b\x00", "\x01\x7f\x80",
    "हिन्दी क्षत्रिय ไทยภาษา العربية لا עברית தமிழ் བོད",
    # Words, digits and names.
    "x" * 300, "ab" * 150, "漢" * 60, "aaaa aaaaa", "0123456789 1,234,567.89 2024-12-31", "١٢٣ १२३", "it's IT'S we'LL don’t",
    "camelCaseHTTPServer2x a_b-c/d", "!?...---###", "https://example.org/a?b=c&d=%20", "<|endoftext|>",
    "a<s>b</s> <unk><pad>", "<0x0A>[SEP] [CLS]<eos><|im_end|>", "日本語English混在テキスト。", "Привет, мир! Ёж",
)  # fmt: skip


def texts_around(tokens: Sequence[str]) -> Iterator[str]:
    """Texts about added tokens: alone, in words, in white space, in parts, decomposed, and beside one another."""
    for token, after in zip(tokens, (*tokens[1:], *tokens[:1]), strict=True):
        yield token
        yield f"a{token}b {token} {token}{token}\n{token}\n  {token}{after}{token[1:]} {token[:-1]}"
        yield " ".join(unicodedata.normalize(form, token) + "\u0301" for form in ("NFC", "NFD"))
