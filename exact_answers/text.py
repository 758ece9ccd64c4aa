"""Normalization: one spelling for the many ways to typeset an answer."""

from __future__ import annotations

import re
from functools import lru_cache

from exact_answers.spellings.marks import displayed, without_marks
from exact_answers.spellings.spelled import as_commands
from exact_answers.spellings.words import TEXT_COMMANDS, TEXT_CONTENT, TEXT_SPACE
from exact_answers.units import words_as_text

_THIN, _MARK = "\x01", "\x02"  # a thin space; the place of a dropped mark

_COMMAND = re.compile(r"\\(?:[a-zA-Z]+|.)", re.DOTALL)
_DOUBLED = re.compile(r"\\\\(?=[a-zA-Z{}()\[\]$%,;:!|])")
_ROW_END = re.compile(r"\\\\ *\[ *-?[0-9.]+ *[a-z]{2} *\]|(?<!\\)\\(?=\r?\n)|\\cr(?![a-zA-Z])")
_OR = re.compile(rf",? ?(?:{TEXT_COMMANDS} ?\{{ ?(or|and) ?\}}| (or|and) ) ?")
_INEQUALITY = re.compile(r"[<>]|\\[gl]eq")
_IDLE_MARK = re.compile(r"(\\[a-zA-Z]+)[\x01\x02]+(?=[a-zA-Z])")
_THOUSANDS = re.compile(r"(?<![0-9.\x01])[0-9]{1,3}(?:(?:\x01+|,\x01+ ?)[0-9]{3})+(?![0-9\x01])")
_SPACED_THOUSANDS = re.compile(  # only from five digits on: 1 234 may be two numbers
    r"(?<![0-9.,])(?<![0-9.,] )(?:[1-9][0-9]{1,2}(?: [0-9]{3})+|[1-9](?: [0-9]{3}){2,})(?! ?[0-9/])"
)
_LIST_COMMA = re.compile(r"(?<=[0-9])(?:[\x02 ]+,[\x02 ]*|,[\x02 ]+)(?=[0-9]{3}(?![0-9]))")
_PARTED_DIGITS = re.compile(r"(?<=[0-9])[ \x01\x02]+(?=[0-9])")
_COMMAND_SPACE = re.compile(r"(\\[a-zA-Z]+) (?=[a-zA-Z])")
_IDLE_SPACE = re.compile(r"(?<![0-9]) | (?![0-9])")
_CELSIUS = re.compile(r"(?:\^ ?\{? ?\\circ ?\}?|°) ?(?:\\(?:text|mathrm) ?\{ ?([CF]) ?\}|([CF])(?![a-zA-Z]))")
_CIRCLE = re.compile(r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![a-zA-Z]))")
_INCHES = re.compile(r"(?<=[0-9])(?:''|\^\{ ?\\prime ?\\prime ?\}|\^\{''\})$")
_OVER = re.compile(r"\{([^{}]*)\\(over|choose)(?![a-zA-Z])([^{}]*)\}|^([^{}]*)\\(over|choose)(?![a-zA-Z])([^{}]*)$")
_SCRIPT = r"(?:[0-9a-zA-Z]|\\[a-zA-Z]+|\{(?:[^{}]|\{[^{}]*\})*\})"
_SCRIPTS = re.compile(rf"((?:(?<!\\)\b|(?<![a-zA-Z\\]))(?:\\[a-zA-Z]+|[a-zA-Z]))('+|\^{_SCRIPT})_({_SCRIPT})(?![0-9])")
_HALF_DAY = re.compile(r"(?<=[0-9])([aApP])\.?[mM]$")

_DROPPED = (
    r"\left \right \displaystyle \textstyle \limits \$ \% \degree \boxed \fbox \big \Big \bigl \bigr \Bigl \Bigr "
    r"\boldsymbol \bm \pmb \underline \large \Large \( \) \[ \] \hline"
).split()
_SPACES = ("\\ ", "\\;", "\\:", "\\\n")
_REPLACED = {
    **dict.fromkeys(("\\,", "\\!"), _THIN),
    **dict.fromkeys(_DROPPED, _MARK),
    **dict.fromkeys(_SPACES, " "),
    **dict.fromkeys(("\\quad", "\\qquad"), f" {_MARK} "),  # never within a number
    **dict.fromkeys(("\\dfrac", "\\tfrac", "\\cfrac"), "\\frac"),
    **dict.fromkeys(("\\mid", "\\vert", "\\lvert", "\\rvert"), "|"),
    **dict.fromkeys(("\\dbinom", "\\tbinom"), "\\binom"),
    **dict.fromkeys(("\\le", "\\leqslant"), "\\leq"),
    **dict.fromkeys(("\\ge", "\\geqslant"), "\\geq"),
    "\\ne": "\\neq", "\\lt": "<", "\\gt": ">", "\\div": "/", "\\colon": ":", "\\langle": "(", "\\rangle": ")",
    "\\lbrace": "\\{", "\\rbrace": "\\}", "\\lbrack": "[", "\\rbrack": "]", "\\varnothing": "\\emptyset",
    "\\rightarrow": "\\to",
}  # fmt: skip
_NOT_OURS = dict.fromkeys(map(ord, "\x00\x01\x02"), "\ufffd")  # characters reserved for internal use
_PLAIN = str.maketrans(
    {
        **dict.fromkeys("$%°", _MARK), "−": "-", "~": " ", "≤": "\\leq ", "≥": "\\geq ", "≠": "\\neq ", "π": "\\pi ",
        "·": "\\cdot ", "⋅": "\\cdot ", "×": "\\times ", "÷": "/", "∞": "\\infty ", "∪": "\\cup ", "∈": "\\in ",
        "±": "\\pm ", "√": "\\sqrt ", "²": "^2", "³": "^3", "∅": "\\emptyset ", "\u211d": "\\mathbb{R}",
        "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "λ": "\\lambda ", "½": "\\frac12",
    }
)  # fmt: skip


def normalize_answer(text: str) -> str:
    """One spelling of an answer: spacing, fractions, braces, text commands, unit marks."""
    return plain_text(tidy(text))


@lru_cache(maxsize=4096)  # a group of samples shares its gold answer
def tidy(text: str) -> str:
    """The part of the normalization that keeps units recognizable."""
    text = without_marks(displayed(_single_backslashes(text.translate(_NOT_OURS))))
    text = _CELSIUS.sub(lambda match: rf"\text{{deg {match[1] or match[2]}}}", text)
    text = _COMMAND.sub(lambda match: _REPLACED.get(match[0], match[0]), text).translate(_PLAIN)
    text = _CIRCLE.sub(_MARK, text).replace("{,}", f",{_THIN}").replace("{:}", ":")
    text = words_as_text(as_commands(_split_words(" ".join(text.split()))))
    text = TEXT_CONTENT.sub(_keep_spaces, text)
    text = _INCHES.sub(r"\\text{in}", text)
    text = _THOUSANDS.sub(lambda match: match[0].replace(_THIN, "").replace(" ", ""), text)
    if "," in text:
        text = _LIST_COMMA.sub(";", text)
    if " " in text:
        text = _SPACED_THOUSANDS.sub(lambda match: match[0].replace(" ", ""), text)
    text = _IDLE_MARK.sub(r"\1 ", _PARTED_DIGITS.sub(" ", text)).replace(_MARK, "").replace(_THIN, "")
    text = _COMMAND_SPACE.sub("\\1\x00", text)
    text = _IDLE_SPACE.sub("", text).replace("\x00", " ")
    if "\\over" in text or "\\choose" in text:
        text = _OVER.sub(_old_fraction, text)
    if "\\" in text:
        text = re.sub(r"\\(frac|binom) ?([0-9a-zA-Z]|\\(?!frac|sqrt)[a-zA-Z]+) ?", r"\\\1{\2}", text)
        text = re.sub(r"(\\(?:frac|binom)\{[^{}]*\})([0-9a-zA-Z]|\\(?!frac|sqrt)[a-zA-Z]+)", r"\1{\2}", text)
        text = re.sub(r"\\sqrt ?([0-9a-zA-Z])", r"\\sqrt{\1}", text)
        text = re.sub(r"\\pmod ?([0-9]+|[a-zA-Z])", r"\\pmod{\1}", text)
    text = re.sub(r"([_^])\{([0-9a-zA-Z])\}(?![0-9])", r"\1\2", text)
    if "^" in text or "'_" in text:
        text = _SCRIPTS.sub(r"\1_\3\2", text)
    text = re.sub(r"(?:^|(?<=[(\[{,;=<>]))\+", "", text)
    return text.replace("\\{\\}", "\\emptyset").rstrip(".,;")


def plain_text(text: str) -> str:
    """The last step of the normalization: text commands lose their braces, ``(C)`` its parentheses."""
    text = TEXT_CONTENT.sub(r"\1", text).replace(TEXT_SPACE, "").rstrip(".,;")
    text = _HALF_DAY.sub(lambda match: f"{match[1].lower()}m", text)
    return text[1:-1] if re.fullmatch(r"\([a-zA-Z]\)", text) else text


def _single_backslashes(text: str) -> str:
    r"""``\\\\frac``, escaped once too often, as ``\frac``; two backslashes end a row only within a matrix."""
    if "\\begin" in text.replace("\\\\", ""):
        return _ROW_END.sub(r"\\\\", text)
    if "\\\\" not in text:
        return text
    return _DOUBLED.sub(r"\\", text) if "\\\\begin" not in text else text.replace("\\\\", "\\")


def _split_words(text: str) -> str:
    """Turn ``or`` and ``and`` into commas of a list; between inequalities ``or`` becomes a union."""
    union = "\\cup " if _INEQUALITY.search(text) else ", "
    return _OR.sub(lambda match: union if "or" in match.groups() else ", ", text)


def _keep_spaces(match: re.Match[str]) -> str:
    """A text command with its spaces protected; a list inside one becomes a list."""
    content = without_marks(match[1])
    if "," in content:
        return content
    words = TEXT_SPACE.join(content.replace(_MARK, "").replace(_THIN, " ").split())
    command = match[0].partition("{")[0].rstrip()
    return f"{command}{{{words}}}" if words else _MARK


def _old_fraction(match: re.Match[str]) -> str:
    r"""``{a \over b}`` and ``{n \choose k}`` as commands with two arguments."""
    above, name, below = (one or other or "" for one, other in zip(match.groups()[:3], match.groups()[3:], strict=True))
    return rf"\{'frac' if name == 'over' else 'binom'}{{{above}}}{{{below}}}"
