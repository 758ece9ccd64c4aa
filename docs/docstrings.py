"""Docstrings as Markdown: what a class says about itself and about each of its arguments."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin

SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Example|Attributes)::?$", re.MULTILINE)
ARGUMENT = re.compile(r"^    (\*{0,2}\w+):\s", re.MULTILINE)
ROLE = re.compile(r":\w+:`(?:[^`<]*<)?~?([^`>]+)>?`")
RULE = re.compile(r"^=+(?: +=+)+$")


@dataclass(frozen=True)
class Argument:
    """One argument of a class, as a configuration sets it."""

    name: str
    values: str  # its type
    default: str  # as YAML writes it; "required" where there is none
    meaning: str


def summary(thing: Any) -> str:
    """The first line of the docstring, as Markdown."""
    return markdown(_sections(thing)[""].split("\n\n")[0])


def body(thing: Any) -> str:
    """What the docstring says behind the first line and before its sections, as Markdown."""
    return markdown(_sections(thing)[""].partition("\n\n")[2])


def arguments(thing: Any) -> list[Argument]:
    """Arguments of a class or function in the order of its signature, without those that it only passes on.

    What a class takes over from a base with the same default is left to the base's table.

    Raises:
        ValueError: If an argument is not described.
    """
    described, listed = _described(thing), []
    for name, parameter in inspect.signature(thing).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        base = next((base for base in _bases(thing) if name in _described(base)), None)
        if name not in described and base is None:
            raise ValueError(f"{thing.__qualname__}: the argument {name} is not described.")
        if name not in described and parameter.default == inspect.signature(base).parameters[name].default:
            continue
        default = "required" if parameter.default is parameter.empty else _yaml(parameter.default)
        meaning = described.get(name) or _described(base)[name]
        listed.append(Argument(name, _words_of(parameter.annotation, thing), default, meaning))
    return listed


def _bases(thing: Any) -> tuple[type, ...]:
    return inspect.getmro(thing)[1:] if inspect.isclass(thing) else ()


def markdown(text: str) -> str:
    """The little of reStructuredText that docstrings use: literals, roles, literal blocks, simple tables."""
    text = ROLE.sub(lambda role: f"`{role[1].rsplit('.', 1)[-1]}`", text)
    text = re.sub(r"``(.+?)``", r"`\1`", text)
    blocks = re.split(r"\n{2,}", text.strip("\n")) if text.strip() else []
    out: list[str] = []
    for block in blocks:
        lines = block.splitlines()
        if out and out[-1].endswith("::") and block.startswith("    "):
            out[-1] = out[-1][:-1]
            out.append(f"```yaml\n{textwrap.dedent(block)}\n```")
        elif RULE.match(lines[0]):
            out.append(_table(lines))
        else:
            out.append(block)
    return "\n\n".join(out)


def rows(text: str) -> list[list[str]]:
    """The rows of the simple tables inside a docstring, their headers left out."""
    blocks = (block.splitlines() for block in re.split(r"\n{2,}", inspect.cleandoc(text)))
    return [row for lines in blocks if RULE.match(lines[0]) for row in _cells(lines)[1:]]


def _table(lines: list[str]) -> str:
    head, *rest = ["| " + " | ".join(row) + " |" for row in _cells(lines)]
    return "\n".join([head, "|" + "---|" * head.count(" | ") + "---|", *rest])


def _cells(lines: list[str]) -> list[list[str]]:
    """The rows of a simple table, whose first line rules where the columns begin; the last one has no end."""
    starts = [column.start() for column in re.finditer("=+", lines[0])]
    columns = list(zip(starts, [*starts[1:], None], strict=True))
    return [[line[begin:end].strip() for begin, end in columns] for line in lines if not RULE.match(line)]


def _sections(thing: Any) -> dict[str, str]:
    """The parts of a docstring by the name of their section, what is before the first under no name."""
    first, *rest = SECTION.split(inspect.cleandoc(thing.__doc__ or ""))
    return {"": first.strip(), **dict(zip(rest[::2], rest[1::2], strict=True))}


def _described(thing: Any) -> dict[str, str]:
    """Every argument with its description on one line."""
    _, *pairs = ARGUMENT.split(_sections(thing).get("Args", ""))
    return {name: " ".join(markdown(text).split()) for name, text in zip(pairs[::2], pairs[1::2], strict=True)}


def _words_of(annotation: Any, thing: Any) -> str:
    """A type in words of YAML; names of a choice are replaced by what there is to choose."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    names = vars(sys.modules[(thing.__init__ if inspect.isclass(thing) else thing).__module__])
    for name in re.findall(r"\w+", text):
        if get_origin(names.get(name)) is Literal:
            text = text.replace(name, " | ".join(map(str, get_args(names[name]))))
    text = re.sub(r"Literal\[([^\]]*)\]", lambda choice: re.sub("[\"']", "", choice[1]).replace(", ", " | "), text)
    text = re.sub(r"Callable\[\.\.\., list\[float \| None\]\]", "function", text)
    return re.sub(r"\bNone\b", "null", text).replace(" | Path", "")


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != f.default}
        return "{" + ", ".join(f"{name}: {_yaml(value)}" for name, value in changed.items()) + "}"
    if callable(value):
        return summary(value).rstrip(".")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_yaml, value))}]"
    return str(value)
