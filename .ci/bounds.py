"""The oldest versions that pyproject.toml allows, a line of pip's constraints for each package that it names.

    python .ci/bounds.py > oldest.txt && pip install -c oldest.txt '.[dev]'
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


def requirements(metadata: dict[str, Any]) -> list[Requirement]:
    """All that a pyproject.toml asks for, of others: to build, to run and for every extra."""
    project = metadata["project"]
    lists = [metadata["build-system"]["requires"], project["dependencies"], *project["optional-dependencies"].values()]
    found = [Requirement(text) for texts in lists for text in texts]
    return [each for each in found if canonicalize_name(each.name) != canonicalize_name(project["name"])]


def oldest(metadata: dict[str, Any]) -> dict[str, str]:
    """Lower bound of every package by its name; one without a bound, or with two of them, is an error."""
    bounds: dict[str, str] = {}
    for requirement in requirements(metadata):
        name = canonicalize_name(requirement.name)
        lower = [each.version for each in requirement.specifier if each.operator == ">="]
        if len(lower) != 1 or bounds.get(name, lower[0]) != lower[0]:
            sys.exit(f"{requirement}: one lower bound is wanted, the same wherever {name} is named ({bounds.get(name)}).")
        bounds[name] = lower[0]
    return bounds


if __name__ == "__main__":
    pins = oldest(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    print("\n".join(f"{name}=={version}" for name, version in sorted(pins.items())))
