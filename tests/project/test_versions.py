"""Bounds of versions: what is run at both ends is derived from pyproject.toml, and they agree with what is pinned."""

from __future__ import annotations

import re
import runpy
import subprocess
import tomllib
from collections import defaultdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
METADATA: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
BOUNDS = runpy.run_path(str(ROOT / ".ci" / "bounds.py"))


def allowed() -> dict[str, SpecifierSet]:
    """All bounds of each package, wherever it is named."""
    project, found = METADATA["project"], defaultdict[str, SpecifierSet](SpecifierSet)
    extras = [text for texts in project["optional-dependencies"].values() for text in texts]
    for text in [*METADATA["build-system"]["requires"], *project["dependencies"], *extras]:
        found[canonicalize_name(Requirement(text).name)] &= Requirement(text).specifier
    found.pop(project["name"])
    return dict(found)


def test_every_dependency_has_a_pin_that_its_bounds_allow() -> None:
    pins, bounds = BOUNDS["oldest"](METADATA), allowed()
    assert {"torch", "transformers", "peft", "setuptools", "pytest", "ray"} <= set(pins)
    assert set(pins) == set(bounds)
    assert {name: version for name, version in pins.items() if version not in bounds[name]} == {}


def test_what_is_pinned_for_the_tests_is_allowed() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    bounds = {name: version for name, version in pinned.items() if canonicalize_name(name) in allowed()}
    assert len(bounds) > 40
    assert {name: v for name, v in bounds.items() if v not in allowed()[canonicalize_name(name)]} == {}


def test_what_is_pinned_installs_on_the_oldest_python() -> None:
    """One pin that wanted 3.11.5 left pip on 3.11.2 with a conflict of versions that named other packages."""
    oldest = METADATA["project"]["requires-python"].removeprefix(">=") + ".0"
    installed = {one.metadata["Name"]: one.metadata.get("Requires-Python", "") for one in distributions()}
    assert len(installed) > 40
    assert {name: needed for name, needed in installed.items() if oldest not in SpecifierSet(needed)} == {}


def project(*dependencies: str, **extras: list[str]) -> dict[str, Any]:
    own = {"name": "own-package", "dependencies": [*dependencies], "optional-dependencies": extras}
    return {"build-system": {"requires": ["builder>=2"]}, "project": own}


def test_bounds_are_found_wherever_they_stand() -> None:
    metadata = project("b_a>=1.5,<3", "c[d]>=2", more=["own-package[x]", "C<4"], others=["b-a>=1.5"])
    assert BOUNDS["oldest"](metadata) == {"b-a": "1.5", "builder": "2", "c": "2"}


@pytest.mark.parametrize(("other", "said"), [("b>=2", r"\{'b': \['1', '2'\]\}"), ("c<2", r"\{'c': \[\]\}")])
def test_two_lower_bounds_or_none_are_refused(other: str, said: str) -> None:
    with pytest.raises(SystemExit, match=f"one lower bound, the same wherever it has one; but {said}"):
        BOUNDS["oldest"](project("b>=1", more=[other]))


def test_the_build_says_the_same_bound_of_setuptools() -> None:
    """Nobody reads pyproject.toml without build isolation."""
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    (own,) = re.findall(r"^OLDEST_SETUPTOOLS = \((.+?)\)", setup, re.MULTILINE)
    assert own.replace(", ", ".") == BOUNDS["oldest"](METADATA)["setuptools"]


def test_the_script_names_tests_that_are_there_and_two_ends() -> None:
    script = ROOT / ".ci" / "versions"
    core = re.findall(r"\btests/[\w/.]+", script.read_text(encoding="utf-8"))
    assert len(core) > 5
    assert [path for path in core if not (ROOT / path).exists()] == []
    told = subprocess.run([script, "middle"], capture_output=True, text=True)
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr == "middle: write .ci/versions oldest, .ci/versions newest, or neither for both\n"
