"""Promises about the files themselves: small, readable, free of one machine's paths, with a version that fits."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

from sparse_rl_lightning.ops.schemas import SCHEMAS

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("sparse_rl_lightning", "exact_answers")
SOURCES = sorted(
    path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "tests" not in path.parts[-2:]
)

MAX_BYTES = 1_000_000
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 50  # of code: long signatures and docstrings are what the CLI shows its users
LONG_FILES: dict[str, int] = {}  # path in the repository -> its own limit; say why beside each
LONG_FUNCTIONS: dict[str, int] = {}  # path::name -> its own limit

MAX_UNLIKE_FILES = 13
ONE_KIND = {  # by package: what a file of the kind that it collects defines a class of, by the name of a base
    "compressors": {"Compressor", "AttentionCompressor", "SnapKV"},
    "retrievers": {"Retriever"},
}

SYNTAX = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

PLACES = {"/root", "/work", "/tmp/bash_jobs.0", "/home/me", "/Users/me"}
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:root|work|tmp/bash_jobs\S*|home/\w+|Users/\w+)/")


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    """Files under version control that are in the work tree."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def function_lengths(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Name and number of lines of every function's body, its docstring not counted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            yield node.name, (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_test_files_have_names_of_their_own() -> None:
    """Without packages two test files of one name cannot be collected in one process."""
    names = sorted(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert sorted(set(names)) == names


def test_tracked_files_are_small(tracked: list[Path]) -> None:
    assert {name_of(path): size for path in tracked if (size := path.stat().st_size) > MAX_BYTES} == {}


@pytest.mark.parametrize(("text", "found"), [("= {}/data", True), ("see docs{}/data", False), ("a.org{}/", False)])
def test_machine_paths_are_recognized(text: str, found: bool) -> None:
    for place in PLACES:
        assert bool(MACHINE_PATH.search(text.format(place))) == found


def test_tracked_files_name_no_machine_paths(tracked: list[Path]) -> None:
    hits = [
        f"{name_of(path)}:{number}"
        for path in tracked
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="ignore").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert hits == []


def test_files_are_short() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {name: n for name, n in lengths.items() if n > LONG_FILES.get(name, MAX_FILE_LINES)} == {}


def bases(tree: ast.Module) -> set[str]:
    """Names of the classes that a file's classes are made of."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {ast.unparse(base).split(".")[-1] for node in classes for base in node.bases}


def test_a_package_is_of_one_kind_or_small() -> None:
    unlike = Counter[str]()
    for name, tree in SYNTAX.items():
        folder, _, file = name.removeprefix("sparse_rl_lightning/").rpartition("/")
        stem = file.removesuffix(".py")
        is_like = bases(tree) & ONE_KIND.get(folder, set()) or (folder == "ops" and stem in SCHEMAS)
        if stem not in ("__init__", "__main__") and not is_like:
            unlike[folder] += 1
    assert {folder: count for folder, count in unlike.items() if count > MAX_UNLIKE_FILES} == {}


def test_no_module_is_named_as_one_of_the_standard_library() -> None:
    own = [path for path in SOURCES if path.stem in sys.stdlib_module_names and path.stem != "__main__"]
    assert [name_of(path) for path in own] == []


def test_functions_fit_a_screen() -> None:
    source = 'class C:\n  def f(\n    self,\n  ):\n    """Say\n    it."""\n    def g(): return 1\n\n    return g'
    assert dict(function_lengths(ast.parse(source))) == {"f": 3, "g": 1}
    lengths = {f"{path}::{name}": n for path, tree in SYNTAX.items() for name, n in function_lengths(tree)}
    assert {name: n for name, n in lengths.items() if n > LONG_FUNCTIONS.get(name, MAX_FUNCTION_LINES)} == {}


def test_public_names_have_docstrings() -> None:
    public = [(path, node) for path, tree in SYNTAX.items() for node in tree.body if isinstance(node, Definition)]
    bare = [f"{path}::{node.name}" for path, node in public if node.name[0] != "_" and not ast.get_docstring(node)]
    assert bare == []


def package_version() -> Version:
    source = (ROOT / "sparse_rl_lightning" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    assert found, "__version__ must be a plain string: setuptools reads it without importing"
    return Version(found[1])


def test_version_fits_the_changelog() -> None:
    """The version is the newest release; with changes under Unreleased it is a .dev version above it."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## \[(.+?)\][^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    unreleased = [text for title, text in sections[:1] if title == "Unreleased"]
    releases = [Version(title) for title, _ in sections[len(unreleased) :]]
    assert releases
    assert releases == sorted(releases, reverse=True)
    version = package_version()
    if any(re.search(r"^- ", text, re.MULTILINE) for text in unreleased):
        assert version.is_devrelease
        assert version > releases[0]
    else:
        assert version == releases[0]


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == package_version().base_version
    assert package_version().is_devrelease or "date-released" in citation


def test_the_public_hosts_workflow_runs_what_there_is() -> None:
    """Its steps call the scripts in ``.ci`` and targets of the Makefile, nothing of their own."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    calls = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert calls == [".ci/run", "make test-slow", ".ci/versions ${{ matrix.end }}", "make dist"]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    wanted = re.findall(r"\bmake ([a-z-]+)", "\n".join([*calls, script]))
    assert {"dist", "test"} <= set(wanted)
    assert set(wanted) <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_messages_to_users_are_of_their_own_class() -> None:
    """The command line shows a UserError as one line, and a ValueError as the bug that it is."""
    calls = [
        f"{path}:{node.lineno}"
        for path, tree in SYNTAX.items()
        for node in ast.walk(tree)
        if path.startswith("sparse_rl_lightning/")
        and isinstance(node, ast.Call)
        and ast.unparse(node.func) == "ValueError"
    ]
    assert calls == [], "raise UserError(message) there"


def test_what_needs_a_gpu_is_run_without_one_too() -> None:
    """As another case of the same test, on a CPU or the pretend GPU; or its first run would be on a GPU."""
    alone = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.match(r"(@|pytestmark = )pytest\.mark\.(gpu|skipif\(not torch\.cuda)", line)
    ]
    assert alone == [
        "tests/ops/test_native_device.py: @pytest.mark.gpu"
    ]  # a library of all kernels, as where one is built
