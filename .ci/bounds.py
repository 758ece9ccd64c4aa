"""The oldest versions that pyproject.toml allows, as pip's constraints: a line for each package that it names.

python .ci/bounds.py > oldest.txt && pip install -c oldest.txt '.[dev]'

Each is a release itself, and they fit together, or pip says which does not.
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
    """All packages of others that a pyproject.toml asks for: to build, to run and for every extra."""
    project = metadata["project"]
    lists = [metadata["build-system"]["requires"], project["dependencies"], *project["optional-dependencies"].values()]
    found = [Requirement(text) for texts in lists for text in texts]
    return [each for each in found if canonicalize_name(each.name) != canonicalize_name(project["name"])]


def oldest(metadata: dict[str, Any]) -> dict[str, str]:
    """The lower bound of every package by its name; one that has none, or two of them, ends the program."""
    bounds: dict[str, set[str]] = {}
    for requirement in requirements(metadata):
        own = bounds.setdefault(canonicalize_name(requirement.name), set())
        own |= {each.version for each in requirement.specifier if each.operator == ">="}
    wrong = {name: sorted(found) for name, found in sorted(bounds.items()) if len(found) != 1}
    if wrong:
        sys.exit(f"pyproject.toml: a package has one lower bound, the same wherever it has one; but {wrong}.")
    return {name: found.pop() for name, found in sorted(bounds.items())}


if __name__ == "__main__":
    for name, version in oldest(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))).items():
        print(f"{name}=={version}")
