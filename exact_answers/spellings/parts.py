"""Named parts beside parts without names: ``x=1,y=2`` is the pair ``(1,2)`` or the list ``1,2``, in this order only."""

from __future__ import annotations

import re
from itertools import pairwise

from exact_answers.structure import Answer, Atom, Group, is_variable

_WORDS = re.compile(r"(?=\\text|\\mathrm).*")
_NAME = re.compile(r"(\\?[a-zA-Z]+)(?:_\{?([0-9]+)\}?)?")


def named_in_order(first: Answer, second: Answer, words: bool = False) -> tuple[Group, Group] | None:
    """Both answers as tuples if one names its parts in the order of the alphabet and the other is as many values.

    With ``words`` the names may also be words, whose order is not known.
    """
    if not (isinstance(first, Group) and isinstance(second, Group)) or len(first.items) != len(second.items):
        return None
    names, values = _named(first)
    others, same_values = _named(second)
    if bool(names) == bool(others) or not {first.kind, second.kind} <= {"list", "()"}:
        return None
    found = names or others
    is_in_order = _is_ordered(found) or (words and len(set(found)) == len(found) and all(map(_WORDS.fullmatch, found)))
    return (Group("()", values), Group("()", same_values)) if is_in_order else None


def _named(group: Group) -> tuple[list[str], tuple[Answer, ...]]:
    """The names of the parts, and the parts without them; no names unless all have one."""
    names: list[str] = []
    values: list[Answer] = []
    for item in group.items:
        name = item.items[0] if isinstance(item, Group) and item.kind == "=" else None
        if not isinstance(item, Group) or not isinstance(name, Atom) or not is_variable(name.text):
            return [], group.items
        names.append(name.text)
        values.append(item.items[1])
    return names, tuple(values)


def _is_ordered(names: list[str]) -> bool:
    """Whether letters, with or without numbers, are different and in the order of the alphabet."""
    found = [_NAME.fullmatch(name) for name in names]
    keys = [(match[1], int(match[2] or 0)) for match in found if match]
    return len(keys) == len(names) and all(one < two for one, two in pairwise(keys))
