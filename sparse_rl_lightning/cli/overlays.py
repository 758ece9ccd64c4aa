"""Overlays: a configuration that names another one as its base and contains only what differs."""

from __future__ import annotations

from typing import Any

from sparse_rl_lightning.cli.classes import argument_names


def merged(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """A mapping with an overlay on top of it.

    Mappings are merged key by key, lists and all other values are replaced; a key that ends with ``+`` appends to the
    list of the base. A class that replaces another keeps those arguments that it also takes, as on the command
    line.

    Args:
        base: Values below.
        overlay: Values on top.

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
