r"""Functions, constants and powers spelled as code, ``sqrt(2)``, ``pi/3`` and ``x**2``, in the commands of LaTeX."""

from __future__ import annotations

import re

from exact_answers.spellings.words import TEXT_CONTENT

_AROUND = {  # what is written around the arguments instead of a name and brackets
    **{"sqrt": r"\sqrt{%s}", "cbrt": r"\sqrt[3]{%s}", "abs": "|%s|", "^": "^{%s}"},
    **{"floor": r"\lfloor %s\rfloor ", "ceil": r"\lceil %s\rceil "},
    **dict.fromkeys(("binom", "comb"), r"\binom{%s}{%s}"),
}
_CALLED = {  # names of functions only before a bracket
    **{"asin": r"\arcsin ", "acos": r"\arccos ", "atan": r"\arctan ", "sec": r"\sec "},
    **{"log2": r"\log_{2}", "log10": r"\log_{10}"},
}
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|csc|exp|log|ln"
_CONSTANTS = "pi|alpha|beta|gamma|delta|theta|lambda|sigma|omega"

_NAME = re.compile(
    rf"(?P<text>{TEXT_CONTENT.pattern})|(?<![a-zA-Z\\])(?:(?:np|numpy|math|sympy)\.)?(?:"
    rf"(?P<called>{'|'.join(_CALLED)})(?=[ \x02]*\()|(?P<infinity>inf|infinity|oo)(?![a-zA-Z])|"
    rf"(?P<command>(?:{_CONSTANTS})(?![a-zA-Z])|(?:{_FUNCTIONS})(?=[ \x02]*[(0-9\\|{{^_]| [a-z](?![a-zA-Z]))|"
    r"(?:sqrt|d?frac|binom)(?=\{)))"
)
_SOMETHING = re.compile(r"[a-z]{2}|\*\*|\^ ?\(")
_OPERATOR = re.compile(rf"\\(?:operatorname|mathrm|text) ?\{{ ?({_FUNCTIONS}|sec) ?\}}")
_POWER = re.compile(r"(?<=[\w)}\]]) ?\*\* ?(?:(?=\()|(-?[0-9]+(?![0-9.])|[a-zA-Z](?![a-zA-Z(])))")
_BRACKET = re.compile(  # x02 stands for \left
    r"(?:(?<![a-zA-Z])\\?(?:(?:np|numpy|math|sympy)\.)?(sqrt|cbrt|abs|floor|ceil|binom|comb)|(\^)|)[ \x02]*\(|\)"
)


def as_commands(text: str) -> str:
    r"""A text in which functions, constants and powers of code are written as in LaTeX."""
    if not _SOMETHING.search(text):
        return text
    text = _POWER.sub(lambda match: f"^{{{match[1]}}}" if match[1] else "^", text) if "**" in text else text
    text = _NAME.sub(_command, _OPERATOR.sub(r"\\\1 ", text) if "\\" in text else text).replace("  ", " ")
    return _with_braces(text) if "(" in text else text


def _command(match: re.Match[str]) -> str:
    if match["text"] is not None:
        return match[0]
    if match["called"]:
        return _CALLED[match["called"]]
    return "\\infty " if match["infinity"] else f"\\{match['command']} "


def _with_braces(text: str) -> str:
    r"""A text with the arguments of ``sqrt(2)``, ``abs(x)`` or ``x^(n+1)`` in the braces or bars of LaTeX."""
    pieces: list[str] = []
    opened: list[tuple[str, int]] = []  # the names before open brackets, and their places
    end = 0
    for match in _BRACKET.finditer(text):
        pieces.append(text[end : match.start()])
        end = match.end()
        if match[0] != ")":
            opened.append((match[1] or match[2] or "", len(pieces)))
            pieces.append(match[0])
            continue
        name, start = opened.pop() if opened else ("", len(pieces))
        arguments = "".join(pieces[start + 1 :])
        form = _AROUND.get(name, "")
        given = tuple(arguments.split(",")) if form.count("%s") > 1 else (arguments,)
        if form.count("%s") == len(given) and all(argument.strip() for argument in given):
            pieces[start:] = [form % given]
        else:
            pieces.append(")")
    return "".join(pieces) + text[end:]
