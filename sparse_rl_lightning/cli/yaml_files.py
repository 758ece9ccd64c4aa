"""The reader of configurations: YAML on top of its ``base``, without duplicate keys or exploding aliases.

A configuration that names another one as its base contains only what differs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from sparse_rl_lightning.cli.classes import argument_names
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import is_silent_pipe, whole_file

MODE = "yaml without doubles"
"""The name of this reader in jsonargparse."""

MOST_NODES = 100_000
"""Largest number of values in a configuration, aliases expanded."""

MOST_LEVELS = 100
"""Largest depth of nesting."""

MOST_DIGITS = 300
"""Largest number of digits of a whole number: a float holds 308."""

MOST_BASES = 100
"""Largest number of files below a configuration, each counted as often as one names it."""

LARGEST_FILE = 2**24
"""Bytes of a configuration."""

SILENT = "names a pipe, and nobody may be writing to it. Give a file."
"""What is said of a value whose reader would wait."""


class UnusableYAML(yaml.YAMLError):
    """Valid YAML that nobody can have meant."""


def read(text: str, path: str | Path = "") -> Any:
    """The value of a YAML text, as jsonargparse reads it.

    The text of a file, whose path is known, may name a ``base``, another file beside it or a list of several, whose
    values it overrides.

    Raises:
        YAMLError: If it is not YAML, a key is twice in one mapping, its aliases explode, or its base cannot be used.
    """
    return _read(text, Path(path) if path else None, (), [])


def read_file(path: str | Path) -> Any:
    """The value of a YAML file, including its ``base``; errors as of :func:`read`."""
    return _read(yaml_text(path), Path(path), (), [])


def yaml_text(path: str | Path) -> str:
    """The text of a configuration.

    Raises:
        OSError: If it cannot be read, is no regular file, or is larger than a configuration can be.
        ValueError: If it is not UTF-8.
    """
    try:
        return whole_file(path, LARGEST_FILE).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{str(path)!r} is not a text in UTF-8: {error.reason}.") from error


def check_named(value: str, folder: str | Path = "") -> None:
    """Refuse a value that names a file of YAML in ``folder`` which cannot be one; errors as of :func:`yaml_text`."""
    path = os.path.join(folder, os.path.expanduser(value))
    if value.endswith((".yaml", ".yml")) and os.path.isfile(path):
        yaml_text(path)


set_loader(MODE, read, (yaml.YAMLError,))


def _read(text: str, path: Path | None, overlays: tuple[Path, ...], opened: list[Path]) -> Any:
    """The value of a text; ``overlays`` are the files that build on it, the outermost first; ``opened`` all bases."""
    try:
        root = yaml.compose(text, Loader=_LOADER)
        if root is not None:
            _weight(root, {}, 0, path.parent if path else Path())
        value = get_loader("yaml")(text)
        if path is None or not isinstance(value, dict) or "base" not in value:
            return value
        return _on_bases(value, path, (*overlays, path.resolve()), opened)
    except UnusableYAML as error:
        raise UnusableYAML(f"{path}: {error}" if path else str(error)) from None


def _on_bases(values: dict[str, Any], path: Path, overlays: tuple[Path, ...], opened: list[Path]) -> dict[str, Any]:
    """The values on top of the files that their key ``base`` names, where later files override earlier ones."""
    given = values.pop("base")
    names = given if isinstance(given, list) else [given]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UnusableYAML(f"base must name a file or a list of files, such as base: quickstart.yaml, got {given!r}.")
    result: dict[str, Any] = {}
    for name in names:
        result = merged(result, _base(path.parent / Path(name).expanduser(), name, overlays, opened))
    return merged(result, values)


def _base(path: Path, name: str, overlays: tuple[Path, ...], opened: list[Path]) -> dict[str, Any]:
    """The values of a file that another one names as its base."""
    if path.resolve() in overlays:
        circle = " -> ".join(file.name for file in (*overlays[overlays.index(path.resolve()) :], path))
        raise UnusableYAML(f"base: {circle} is a circle. Remove one of these lines.")
    opened.append(path)
    if len(opened) > MOST_BASES:
        raise UnusableYAML(f"base: {name!r} is more than the {MOST_BASES}th file below it. Name each base once.")
    try:
        text = yaml_text(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text"
        raise UnusableYAML(
            f"base: {name!r} cannot be read: {reason}. Its place is given from the folder of the file that names it."
        ) from None
    try:
        value = _read(text, path, overlays, opened)
    except UnusableYAML:
        raise
    except yaml.YAMLError as error:
        raise UnusableYAML(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise UnusableYAML(f"base: {name!r} must hold keys such as model: and trainer:, got a {type(value).__name__}.")
    return value


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _weight(node: yaml.Node, known: dict[int, int], level: int, folder: Path) -> int:
    """Number of nodes at and below one, aliases written out; those in ``known`` are counted already.

    ``folder`` is where files that values name are looked for.
    """
    if level > MOST_LEVELS:
        raise UnusableYAML(f"it is nested more than {MOST_LEVELS} levels deep{_line(node)}.")
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(node, folder)
    if id(node) not in known:
        known[id(node)] = MOST_NODES  # during the visit: an alias of itself explodes
        parts = []
        if isinstance(node, yaml.MappingNode):
            _refuse_doubles(node)
            parts = [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        known[id(node)] = 1 + sum(_weight(part, known, level + 1, folder) for part in parts)
    if known[id(node)] > MOST_NODES:
        raise UnusableYAML(f"its aliases stand for more than {MOST_NODES} values{_line(node)}.")
    return known[id(node)]


def _check_scalar(node: yaml.ScalarNode, folder: Path) -> None:
    """Refuse a number that no float holds, and a pipe in place of a file."""
    if node.tag.endswith(":int") and len(node.value) > MOST_DIGITS:
        raise UnusableYAML(f"a number has {len(node.value)} digits, more than {MOST_DIGITS}{_line(node)}.")
    if node.tag.endswith(":str") and is_silent_pipe(node.value, folder):
        raise UnusableYAML(f"{node.value!r}{_line(node)} {SILENT}")
    try:
        check_named(node.value, folder)
    except (OSError, UserError) as error:
        raise UnusableYAML(f"{node.value!r}{_line(node)} cannot be read: {error}") from error


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


def merged(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """A mapping with an overlay on top of it.

    Mappings are merged key by key, lists and all other values are replaced; a key that ends with ``+`` appends to the
    list of the base. A class that replaces another keeps those arguments that it also takes, as on the command
    line.

    >>> merged({"a": {"b": 1, "c": [2]}}, {"a": {"b": 3, "c+": [4]}})
    {'a': {'b': 3, 'c': [2, 4]}}
    """
    result = dict(base)
    named, before = overlay.get("class_path"), base.get("class_path")
    if named and before and named != before and isinstance(base.get("init_args"), dict):
        taken = argument_names(str(named))
        result["init_args"] = {key: value for key, value in base["init_args"].items() if key in taken}
        if not result["init_args"]:
            del result["init_args"]
    for key, value in overlay.items():
        name = key.removesuffix("+") if isinstance(key, str) else key
        if name != key:
            place = name if name in result else key
            result[place] = [*_items(result.get(place)), *_items(value)]
            continue
        result.pop(f"{name}+", None)
        below = result.get(name)
        if isinstance(value, dict):
            value = merged(below if isinstance(below, dict) else {}, value)
        result[name] = value
    return result


def _items(value: Any) -> list[Any]:
    """A list unchanged, a single value as a list, and an empty list for null."""
    return value if isinstance(value, list) else [] if value is None else [value]
