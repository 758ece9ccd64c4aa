"""What is given to others: releases of tagged commits as they are, and an image of what is there."""

from __future__ import annotations

import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHECK_DIST = ROOT / ".ci" / "check_dist.py"
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")  # linted by hadolint, and not built by the tests


def metadata(version: str = "1.2.0", url: str = "Repository, https://example.org/some/name") -> bytes:
    project_url = f"Project-URL: {url}\n" if url else ""
    return f"Metadata-Version: 2.4\nName: some\nVersion: {version}\n{project_url}\nText.".encode()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One commit, tagged."""
    (tmp_path / "file").write_text("content")
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "One"), (*who, "tag", "-am", "It", "v1.2.0")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def check(checkout: Path, content: bytes) -> None:
    own = runpy.run_path(str(CHECK_DIST))
    own["check_release"].__globals__["ROOT"] = checkout
    own["check_release"](content)


def test_a_tagged_commit_is_published(checkout: Path) -> None:
    check(checkout, metadata())


@pytest.mark.parametrize(("content", "why"), [
    (metadata("1.2.0.dev0"), "1.2.0.dev0 is no release"), (metadata("1.3.0"), "no tag v1.3.0 on this commit"),
    (metadata(url=""), "no address"), (metadata() + b" git clone ADDRESS", "no address"),
])  # fmt: skip
def test_what_is_no_release_is_not(checkout: Path, content: bytes, why: str) -> None:
    with pytest.raises(SystemExit, match=f"not to be published: .*{why}"):
        check(checkout, content)


@pytest.mark.parametrize("name", ["another", "configs/some.ckpt"])
def test_a_file_that_git_does_not_have_is_refused(name: str, checkout: Path) -> None:
    (checkout / "configs").mkdir()
    (checkout / ".git" / "info" / "exclude").write_text("*.ckpt\n*.so\n")
    (checkout / "configs" / "built.so").write_text("")
    check(checkout, metadata())
    (checkout / name).write_text("")
    with pytest.raises(SystemExit, match="files that git does not have as they are"):
        check(checkout, metadata())


def test_templates_and_citation_can_be_read() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) == 3
    for form in map(yaml.safe_load, map(Path.read_text, forms)):
        assert {"name", "description", "body"} <= form.keys()
        assert all(field["attributes"]["label"] for field in form["body"])
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()


def test_what_is_copied_is_there_and_not_left_out() -> None:
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()}
    taken = {line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")}
    assert copied == taken
    assert all((ROOT / name).exists() for name in copied)


def test_stages_install_what_the_project_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    extras = {name for found in re.findall(r"'\.\[(.+?)\]'", DOCKERFILE) for name in found.split(",")}
    assert extras <= project["project"]["optional-dependencies"].keys()
    assert re.findall(r"^FROM \S+:\S+ AS (\w+)$", DOCKERFILE, re.MULTILINE) == ["cpu", "cuda"]
    assert DOCKERFILE.count("pip install") == DOCKERFILE.count("-c constraints.txt") == 4
    assert re.findall(r"SPARSE_RL_BUILD=(\w+)", DOCKERFILE) == ["cpu", "cuda"]
    assert project["build-system"]["requires"][0].startswith("setuptools")
