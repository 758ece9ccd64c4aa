"""One spelling for the many ways to typeset an answer."""

from __future__ import annotations

import re
from functools import lru_cache

_COMMAND = re.compile(r"\\(?:[a-zA-Z]+|.)", re.DOTALL)
_TEXT_COMMANDS = r"\\(?:text|textrm|textbf|textit|textnormal|mathrm|mathbf|mathit|mbox|operatorname)"
_TEXT = re.compile(_TEXT_COMMANDS + r"\s*\{([^{}]*)\}")
_OR = re.compile(rf",? ?(?:{_TEXT_COMMANDS} ?\{{ ?(?:or|and) ?\}}| (?:or|and) ) ?")
_UNIT_WORD = r"\\(?:text|textrm|textnormal|mathrm|mbox)\s*\{(?:[^\W\d_]|[ ./'])*\}"
_UNIT = re.compile(rf"(?:[/*]?{_UNIT_WORD}(?:\^(?:[0-9]|\{{-?[0-9]\}}))?)+")
_UNIT_START = re.compile(rf"[/*]?{_UNIT_WORD}")
_BARE_UNIT = re.compile(r"(?<=[0-9}])(?:mm|cm|dm|km|kg|mg|ml|mL|mph|ft)(?:\^[0-9])?$")
_VARIABLES = frozenset({"e", "i", "j", "k", "n", "x", "y", "z", "pi"})
_THIN_SPACE = re.compile(r"(\\[a-zA-Z]+)\x01+(?=[a-zA-Z])")
_COMMAND_SPACE = re.compile(r"(\\[a-zA-Z]+) (?=[a-zA-Z])")
_IDLE_SPACE = re.compile(r"(?<![0-9]) | (?![0-9])")
_SCALES = ("hundred", "thousand", "million", "billion", "trillion", "dozen")

_DROPPED = (
    *("\\left", "\\right", "\\displaystyle", "\\limits", "\\$", "\\%", "\\degree"),
    *("\\big", "\\Big", "\\bigl", "\\bigr", "\\Bigl", "\\Bigr"),
)
_SPACES = ("\\ ", "\\;", "\\:", "\\quad", "\\qquad", "\\\n")
_REPLACED = {
    **dict.fromkeys(("\\,", "\\!"), "\x01"),
    **dict.fromkeys(_DROPPED, ""),
    **dict.fromkeys(_SPACES, " "),
    **dict.fromkeys(("\\dfrac", "\\tfrac", "\\cfrac"), "\\frac"),
    **dict.fromkeys(("\\mid", "\\vert", "\\lvert", "\\rvert"), "|"),
    **dict.fromkeys(("\\dbinom", "\\tbinom"), "\\binom"),
    **dict.fromkeys(("\\le", "\\leqslant"), "\\leq"),
    **dict.fromkeys(("\\ge", "\\geqslant"), "\\geq"),
    "\\ne": "\\neq",
    "\\lt": "<",
    "\\gt": ">",
    "\\div": "/",
    "\\lbrace": "\\{",
    "\\rbrace": "\\}",
    "\\lbrack": "[",
    "\\rbrack": "]",
    "\\varnothing": "\\emptyset",
}
_PLAIN = str.maketrans(
    {
        **dict.fromkeys("$%°"), "−": "-", "~": " ", "≤": "\\leq ", "≥": "\\geq ", "≠": "\\neq ", "π": "\\pi ",
        "·": "\\cdot ", "∞": "\\infty ", "∪": "\\cup ", "∈": "\\in ", "±": "\\pm ",
    }
)  # fmt: skip


def normalize_answer(text: str) -> str:
    """One spelling for an answer: spacing, fractions, braces, text commands, units' marks."""
    return plain_text(tidy(text))


@lru_cache(maxsize=4096)  # a group of samples shares its gold answer
def tidy(text: str) -> str:
    """Everything of the normalisation that keeps a unit recognisable."""
    text = _COMMAND.sub(lambda match: _REPLACED.get(match[0], match[0]), text).translate(_PLAIN)
    text = text.replace("^{\\circ}", "").replace("^\\circ", "").replace("{,}", ",")
    text = _OR.sub(",", " ".join(text.split()))
    text = _THIN_SPACE.sub(r"\1 ", text).replace("\x01", "")
    text = _COMMAND_SPACE.sub("\\1\x00", text)
    text = _IDLE_SPACE.sub("", text).replace("\x00", " ")
    text = re.sub(r"\\frac ?([0-9a-zA-Z]|\\(?!frac|sqrt)[a-zA-Z]+) ?", r"\\frac{\1}", text)
    text = re.sub(r"(\\frac\{[^{}]*\})([0-9a-zA-Z]|\\(?!frac|sqrt)[a-zA-Z]+)", r"\1{\2}", text)
    text = re.sub(r"\\sqrt ?([0-9a-zA-Z])", r"\\sqrt{\1}", text)
    text = re.sub(r"([_^])\{([0-9a-zA-Z])\}", r"\1\2", text)
    text = re.sub(r"(?:^|(?<=[(\[{,;=<>]))\+", "", text)
    text = re.sub(r"\bnp\.(?=[a-z])", r"\\", text)
    return text.rstrip(".,;")


def plain_text(text: str) -> str:
    """The last step of the normalisation: text commands lose their braces, ``(C)`` its parentheses."""
    text = _TEXT.sub(r"\1", text).rstrip(".,;")
    return text[1:-1] if re.fullmatch(r"\([a-zA-Z]\)", text) else text


def split_unit(text: str) -> tuple[str, str]:
    """A quantity and its unit; the whole text and "" where no unit follows.

    Args:
        text: As :func:`tidy` leaves it.
    """
    start = _UNIT_START.search(text)
    if start is None:
        bare = _BARE_UNIT.search(text)
        return (text[: bare.start()], bare[0]) if bare else (text, "")
    value, unit = text[: start.start()], text[start.start() :]
    names = [name.strip().casefold() for name in _TEXT.findall(unit)]
    is_unit = _UNIT.fullmatch(unit) and _VARIABLES.isdisjoint(names) and not names[0].startswith(_SCALES)
    return (value, _TEXT.sub(r"\1", unit).replace(" ", "")) if value and is_unit else (text, "")
