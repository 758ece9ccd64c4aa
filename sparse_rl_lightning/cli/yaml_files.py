"""Configurations as they are read: YAML in which no key is given twice and no alias explodes."""

from __future__ import annotations

from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

MODE = "yaml without doubles"
"""The name under which jsonargparse knows this reader."""

MOST_NODES = 100_000
"""Values that a configuration may have, aliases written out."""

MOST_LEVELS = 100
"""Levels that it may have."""


class UnusableYAML(yaml.YAMLError):
    """Valid YAML that nobody can have meant."""


def read(text: str, path: object = "") -> Any:
    """The value of a YAML text, as jsonargparse reads it.

    Args:
        text: The YAML.
        path: The file that it is from, where it is known.

    Raises:
        YAMLError: If it is no YAML, a key stands twice in one mapping, or its aliases explode.
    """
    root = yaml.compose(text, Loader=_LOADER)
    if root is not None:
        try:
            _weight(root, {}, 0)
        except UnusableYAML as error:
            raise UnusableYAML(f"{path}: {error}" if path else str(error)) from None
    return get_loader("yaml")(text)


set_loader(MODE, read, (yaml.YAMLError,))

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _weight(node: yaml.Node, known: dict[int, int], level: int) -> int:
    """Number of nodes at and below one, aliases written out; those in ``known`` are counted already."""
    if level > MOST_LEVELS:
        raise UnusableYAML(f"it is nested more than {MOST_LEVELS} levels deep{_line(node)}.")
    if id(node) not in known:
        known[id(node)] = MOST_NODES  # while it is looked at: an alias of itself explodes
        parts = []
        if isinstance(node, yaml.MappingNode):
            _refuse_doubles(node)
            parts = [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        known[id(node)] = 1 + sum(_weight(part, known, level + 1) for part in parts)
    if known[id(node)] > MOST_NODES:
        raise UnusableYAML(f"its aliases stand for more than {MOST_NODES} values{_line(node)}.")
    return known[id(node)]


def _refuse_doubles(node: yaml.MappingNode) -> None:
    """Refuse equal keys, the first of which would be forgotten silently; merges (``<<``) may repeat."""
    seen: dict[tuple[str, str], yaml.Node] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        first = seen.setdefault((key.tag, key.value), key)
        if first is not key:
            lines = f"{first.start_mark.line + 1} and {key.start_mark.line + 1}"
            raise UnusableYAML(
                f"the key {key.value!r} is given twice, in lines {lines}: the second would replace all of the first. "
                "Write both as one."
            )


def _line(node: yaml.Node) -> str:
    return f" (line {node.start_mark.line + 1})"
