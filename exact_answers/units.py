r"""Units after a quantity: which words are units, which are the same unit, and which are none at all.

Any word in ``\text{}`` after a number may be its unit (``5\text{ apples}``), unless it qualifies the number
(``5\text{ squared}``, ``5\text{ million}``). Without ``\text{}`` the words listed here are units, and so are
nouns behind a space that cannot be a product of letters (``5 apples``).
"""

from __future__ import annotations

import re

from exact_answers.spellings.words import NO_NOUNS, NOUNS, OF, OTHERWISE, TEXT_CONTENT, TEXT_SPACE

_NAMES = {
    "m": "meter metre", "cm": "centimeter centimetre", "mm": "millimeter millimetre", "km": "kilometer kilometre",
    "dm": "decimeter decimetre", "kg": "kilogram", "g": "gram", "mg": "milligram", "L": "liter litre",
    "mL": "milliliter millilitre ml", "in": "inch inche", "ft": "foot feet", "yd": "yard", "mi": "mile",
    "s": "second sec", "min": "minute", "h": "hour hr", "day": "day", "week": "week", "month": "month", "year": "year",
    "cent": "cent", "dollar": "dollar usd", "degree": "degree deg", "radian": "radian rad", "unit": "unit",
    "percent": "percent", "N": "newton", "J": "joule", "W": "watt", "K": "kelvin", "V": "volt", "point": "point",
}  # fmt: skip
_SHORT = {form: short for short, names in _NAMES.items() for name in names.split() for form in (name, f"{name}s")}
_KNOWN = frozenset((*_SHORT, *_SHORT.values()))
_LONG = sorted((name for name in _SHORT if len(name) > 3), key=len, reverse=True)
_LISTED = "|".join([*(re.sub("s$", "s(?!ec|q)", name) for name in _LONG), "mm|cm|dm|km|kg|mg|mph"])  # newton seconds
_POWERS = {"square": "^2", "sq": "^2", "cubic": "^3"}
_NO_UNITS = frozenset(
    "e i j k n x y z pi not no is wrong plus minus times over squared cubed factorial half halves third thirds "
    "quarter quarters fourth fourths fifth fifths sixth sixths tenth tenths hundredths thousandths mod modulo base if "
    "or and more less fewer at least most negative positive pair pairs gross score scores kilo mega giga milli double "
    "triple zero one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty "
    "seventy eighty ninety".split()
)
_SCALES = ("hundred", "thousand", "million", "billion", "trillion", "dozen")
_ORDINAL = re.compile(r"(?!(?:month|width|length|depth|breadth|path|cloth|moth|booth|bath)s?$)\w{2,}th[s]?")  # eighths
_SPEEDS = {"mph": "mi/h", "kph": "km/h"}
_SQUARED = {"squared": "^2", "cubed": "^3"}
_MAY_BE_SQUARED = frozenset("m cm mm km dm in ft yd mi s min h unit".split())
_ANY_CASE = frozenset("cm km kg ft hr yd sq am pm day deg min rad sec per usd mph".split())  # Km means km

_WORD = rf"\\(?:text|textrm|textbf|textit|textnormal|mathrm|mbox)\{{(?:[^\W\d_]|[./'{TEXT_SPACE}])*\}}"
_POWER = r"(?:\^(?:[0-9]|\{-?[0-9]\}))"
_UNIT = re.compile(rf"(?:(?:[/*]|\\cdot ?)?{_WORD}{_POWER}?)+")
_START = re.compile(rf"[/*]?{_WORD}")
# a percent is not per cent: every text must parse as units in one way only, or many would parse in 2^n ways
_PER = "per(?!cent(?!imet))"
_BARE = re.compile(rf"(?<=[0-9}}])(?:(?:{_PER}|/)?(?:square|cubic|sq\.?)?(?:{_LISTED}|ml|mL|ft){_POWER}?)+$")
_LISTED_PIECE = re.compile(rf"{_PER}|{_LISTED}|ml|mL|ft|square|cubic|sq|{_POWER}|/")
_PIECE = re.compile(rf"[^\W\d_]+|{_POWER}|[/*]")
_NO_NAME = re.compile(OTHERWISE)
_BEHIND = re.compile(r"(?:(?<=[0-9})\x02])|(?<=\\pi)) ?((?: [a-zA-Z]+(?:\.|/[a-zA-Z]+)?){1,3})(?= *(?:[,;.]|$))")


def split_unit(text: str) -> tuple[str, str]:
    """A tidied quantity and its unit in one spelling; the whole text and "" if no unit follows."""
    start = _START.search(text)
    if start is None:
        bare = _BARE.search(text)
        return (text[: bare.start()], _one_spelling(_LISTED_PIECE.findall(bare[0]))) if bare else (text, "")
    value, unit = text[: start.start()], text[start.start() :]
    words = [word for name in TEXT_CONTENT.findall(unit) for word in re.findall(r"[^\W\d_]+", name)]
    if not (value and words and _UNIT.fullmatch(unit)) or any(map(_is_no_unit, _without_squared(words))):
        return text, ""
    return value, _one_spelling(_PIECE.findall(TEXT_CONTENT.sub(r" \1 ", unit.replace("\\cdot", "*"))))


def words_as_text(text: str) -> str:
    r"""An answer whose counted nouns and units stand in ``\text{}``, ``5\text{ apples}`` for ``5 apples``."""
    if " " not in text:
        return text
    return _BEHIND.sub(lambda match: rf"\text{{{match[1]}}}" if _is_counted(match[1]) else match[0], text)


def _is_counted(phrase: str) -> bool:
    """Whether words are a noun or a unit, and neither a sentence nor letters that are multiplied."""
    words = re.findall("[a-zA-Z]+", phrase)
    above, _, below = phrase.strip().partition("/")
    is_rate = len(above) > 1 and above in _KNOWN and below in _KNOWN
    return is_rate or (words[-1] not in OF and all(word in OF or _is_noun(word) for word in words))


def _is_noun(word: str) -> bool:
    """Whether a word is a unit or a listed noun, or has five letters that no product would have in this order."""
    folded = word.casefold()
    if (len(word) > 1 and (word in _KNOWN or folded in _KNOWN)) or folded in NOUNS:
        return True
    is_product = folded == "".join(sorted(set(folded))) or not set("aeiouy") & set(folded)
    return not (len(word) < 5 or is_product or folded in NO_NOUNS or _is_no_unit(word))


def _without_squared(words: list[str]) -> list[str]:
    """The words without ``squared`` and ``cubed`` if these qualify the unit, not the number."""
    before = ("", *map(_one_name, words))
    return [
        word for word, unit in zip(words, before, strict=False) if not (word in _SQUARED and unit in _MAY_BE_SQUARED)
    ]


def _is_no_unit(word: str) -> bool:
    """Whether a word qualifies the number itself."""
    word = word if len(word) == 1 else word.casefold()
    if word in _NO_UNITS or word.startswith(_SCALES) or _ORDINAL.fullmatch(word):
        return True
    return bool(_NO_NAME.fullmatch(word)) and word not in _SQUARED


def _one_name(word: str) -> str:
    """The short name of a unit, ``m`` for ``metres``; a symbol keeps its capitals, as ``MW`` is not ``mW``."""
    folded = word.casefold()
    if not (len(word) > 3 or (len(word) == 3 and word.istitle()) or folded in _ANY_CASE):
        return _SHORT.get(word, word)
    return _SHORT.get(folded, folded.removesuffix("s") if len(word) > 3 else folded)


def _one_spelling(pieces: list[str]) -> str:
    """The unit in one spelling, ``m^2/s`` for ``square meters per second``."""
    unit, power = "", ""
    for piece in pieces:
        word = _one_name(piece)
        if word in _POWERS:
            power = _POWERS[word]
        elif word[0].isalpha() and word not in ("per", *_SQUARED):
            unit, power = unit + word + power, ""
        elif word != "*" or unit == "m":  # a newton meter is Nm, but a meter second is not ms
            unit += {"per": "/", **_SQUARED}.get(word, word)
    return _SPEEDS.get(unit, unit)
