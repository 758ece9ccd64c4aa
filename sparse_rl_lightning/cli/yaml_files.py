"""The reader of configurations: YAML on top of its ``base``, without duplicate keys.

A configuration that names another one as its base contains only what differs.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from sparse_rl_lightning.cli.classes import argument_names

MODE = "yaml without doubles"
"""The name of this reader in jsonargparse."""


class UnusableYAML(yaml.YAMLError):
    """Valid YAML that nobody can have meant."""


def read(text: str, path: str | Path = "", above: Collection[Path] = ()) -> Any:
    """The value of a YAML text, as jsonargparse reads it.

    The text of a file, whose path is known, may name a ``base``, another file beside it or a list of several, whose
    values it overrides. The files ``above`` it are those that have named it.

    Raises:
        YAMLError: If it is not YAML, a key is twice in one mapping, or its base cannot be used; names the file.
    """
    try:
        root = yaml.compose(text, Loader=_LOADER)
        if root is not None:
            _refuse_doubles(root, set())
        value = get_loader("yaml")(text)
        if path and isinstance(value, dict) and "base" in value:
            return _on_bases(value, Path(path), above)
        return value
    except yaml.YAMLError as error:
        raise UnusableYAML(f"{path}: {error}" if path else str(error)) from None
    except (
        ValueError,
        ArithmeticError,
        LookupError,
        AttributeError,
        RecursionError,
    ) as error:  # yaml's own, of values such as !!bool x
        raise UnusableYAML(f"{path}: it holds a value that cannot be read ({error}).".removeprefix(": ")) from None


def read_file(path: str | Path, above: Collection[Path] = ()) -> Any:
    """The value of a YAML file, including its ``base``; arguments and errors as of :func:`read`."""
    return read(Path(path).read_text("utf-8"), path, above)


set_loader(MODE, read, (yaml.YAMLError,))


def _on_bases(values: dict[str, Any], path: Path, above: Collection[Path]) -> dict[str, Any]:
    """The values on top of the files that their key ``base`` names, where later files override earlier ones."""
    base = values.pop("base")
    names = base if isinstance(base, list) else [base]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UnusableYAML(f"base must name a file or a list of files, such as base: quickstart.yaml, got {base!r}.")
    result: dict[str, Any] = {}
    for name in names:
        result = merged(result, _base(path.parent, name, {*above, path.resolve()}))
    return merged(result, values)


def _base(folder: Path, name: str, above: Collection[Path]) -> dict[str, Any]:
    """The values of a file that another one, in this folder, names as its base."""
    try:
        file = folder / Path(name).expanduser()
        if file.resolve() in above:
            raise UnusableYAML(f"base: {name!r} leads back to a file that is on top of it. Name a file that does not.")
        value = read_file(file, above)
    except (OSError, ValueError, RuntimeError) as error:  # of links that lead back, of ~ without a home
        reason = (
            error.strerror if isinstance(error, OSError) else "not a text" if isinstance(error, ValueError) else error
        )
        raise UnusableYAML(
            f"base: {name!r} cannot be read: {reason}. Its place is given from the folder of the file that names it."
        ) from None
    if not isinstance(value, dict):
        raise UnusableYAML(f"base: {name!r} must hold keys such as model: and trainer:, got a {type(value).__name__}.")
    return value


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _refuse_doubles(node: yaml.Node, visited: set[int]) -> None:
    """Refuse equal keys, the first of which would be forgotten silently; merges (``<<``) may repeat."""
    if id(node) in visited or isinstance(node, yaml.ScalarNode):
        return
    visited.add(id(node))  # an alias is the same node again
    if isinstance(node, yaml.MappingNode):
        _refuse_equal_keys(node)
    for item in node.value:
        _refuse_doubles(item[1] if isinstance(item, tuple) else item, visited)


def _refuse_equal_keys(node: yaml.MappingNode) -> None:
    keys: dict[tuple[str, str], yaml.Node] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        name = key.value.removesuffix("+") if isinstance(value, yaml.SequenceNode) else key.value
        first = keys.setdefault((key.tag, name), key)
        if first is not key:
            lines = f"{first.start_mark.line + 1} and {key.start_mark.line + 1}"
            raise UnusableYAML(
                f"the key {key.value!r} is given twice, in lines {lines}: the second would replace all of the first. "
                "Write both as one."
            )


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
            target = name if name in result else key
            result[target] = [*_items(result.get(target)), *_items(value)]
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
