"""The image is made of what is there; it is linted by hadolint and not built by the tests."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text("utf-8")


def test_what_is_copied_is_there_and_not_left_out() -> None:
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", TEXT, re.MULTILINE) for name in line.split()}
    taken = {line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")}
    assert copied == taken
    assert all((ROOT / name).exists() for name in copied)


def test_stages_install_what_the_project_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    extras = {name for found in re.findall(r"'\.\[(.+?)\]'", TEXT) for name in found.split(",")}
    assert extras <= project["project"]["optional-dependencies"].keys()
    assert re.findall(r"^FROM \S+:\S+ AS (\w+)$", TEXT, re.MULTILINE) == ["cpu", "cuda"]
    assert TEXT.count("pip install") == TEXT.count("-c constraints.txt") == 4
    assert re.findall(r"SPARSE_RL_BUILD=(\w+)", TEXT) == ["cpu", "cuda"]
    assert project["build-system"]["requires"][0].startswith("setuptools")
