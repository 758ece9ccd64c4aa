r"""What stands around an answer and is no part of it: markdown, quotation marks, fences, an environment for display."""

from __future__ import annotations

import re

_AROUND = (  # the longer ones first
    *(("```", "```"), ("**", "**"), ("__", "__"), ("``", "''"), ("*", "*"), ("_", "_"), ("`", "`")),
    *(('"', '"'), ("“", "”"), ("\u2018", "\u2019"), ("'", "'")),
)
_FIRST = frozenset(opening[0] for opening, _ in _AROUND)
_BOLD = re.compile(r"(?<![\w)\]}*])(\*\*|__)(?=[^\s*_])([^*_]*?[^\s*_])\1(?![\w(\[{*])")
_LANGUAGE = re.compile(r"\A```(?:latex|tex|math|text|plaintext|python)\s")
_DISPLAY = re.compile(
    r"\\begin\{((?:equation|align|aligned|alignat|gather|gathered|split|math|displaymath|cases)\*?)\}(.*)"
    r"\\end\{\1\}\s*\.?",
    re.DOTALL,
)
_ALIGNED = re.compile(r"&\s*(?=[=<>]|\\[gln]eq?)|(?<=[=<>])\s*&")


def without_marks(text: str) -> str:
    """An answer without the marks around the whole of it, and without bold type inside."""
    text, whole = text.strip(), ""
    while text[:1] in _FIRST and text != whole:
        whole, text = text, _inside(_LANGUAGE.sub("```", text))
    return _BOLD.sub(r"\2", text) if "**" in text or "__" in text else text


def displayed(text: str) -> str:
    r"""The formula of an environment around the whole of an answer; several rows of it are a list.

    An environment whose rows have columns beside their relations, such as ``cases`` with conditions, is left as it is.
    """
    match = _DISPLAY.fullmatch(text.strip(" \n$")) if "\\begin" in text else None
    if match is None:
        return text
    inside = _ALIGNED.sub("", match[2])
    if "\\begin" in inside:
        return inside if "\\\\" not in inside.partition("\\begin")[0] + inside.rpartition("\\end")[2] else text
    rows = [row.strip(" \n.,;") for row in inside.split("\\\\")]
    return text if "&" in inside else ", ".join(row for row in rows if row)


def _inside(text: str) -> str:
    """What stands between one pair of marks around a text; the text itself where there is none, or more than one."""
    for opening, closing in _AROUND:
        inner = text[len(opening) : len(text) - len(closing)]
        if text.startswith(opening) and text.endswith(closing) and closing not in inner:
            return inner.strip() or text
    return text
