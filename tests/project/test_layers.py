"""Who may import whom: read off the source of every module, and off sys.modules after importing them all."""

from __future__ import annotations

import ast
import graphlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "sparse_rl_lightning"
ANSWERS = "exact_answers"  # a package by itself, below all rows
FOLDER = Path(__file__).resolve().parents[2] / PACKAGE

# A module imports from its own row or from rows below, never from above. "" is the package's __init__.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("", "__main__", "cli"),
    ("testing",),  # for users: a command holds their classes to the contract, no other part imports it
    ("serve",),  # imported by the command that needs it, and lazily
    ("integrations",),  # imported by nothing but commands that need it, and lazily
    ("modules",),
    ("callbacks",),
    ("data",),
    ("planning",),
    ("quality",),  # imported by the command that needs it, and lazily
    ("evaluation",),
    ("learner",),
    ("calibration",),
    ("rollout",),
    ("retrieval",),
    ("cache",),
    ("replay",),
    ("report",),
    ("metrics",),
    ("acceptance", "logprobs"),
    ("distributed",),
    ("checkpoints",),
    ("policies",),
    ("compressors",),
    ("retrievers",),
    ("rewards", "environments"),
    ("budgets",),
    ("ops",),
    ("advantages", "corrections", "downsampling", "losses", "output_head"),
    ("errors", "evictions", "files", "fingerprints", "records", "text"),
)
KNOW_LIGHTNING = {"cli", "modules", "callbacks", "checkpoints", "data", "distributed"}
LIGHTNING = {"lightning", "lightning_fabric", "pytorch_lightning"}
HOOKS = {
    "ALL_ATTENTION_FUNCTIONS",
    "ALL_MASK_ATTENTION_FUNCTIONS",
    "AttentionInterface",
    "AttentionMaskInterface",
    "DynamicCache",
    "StaticCache",
    "cache_utils",
    "masking_utils",
}
KNOW_HOOKS = {  # attention functions; the cache between a linear layer and the states of slots
    f"{PACKAGE}.replay.hooks": HOOKS,
    f"{PACKAGE}.rollout.engine.decoders.hf_forward": {"cache_utils"},
}
LAZY = {"datasets", "deepspeed", "flash_attn", "math_verify", "matplotlib", "pandas", "peft", "pyarrow", "trl", "wandb"}
OF_TRL = f"{PACKAGE}.integrations.trl"  # a subclass of TRL's trainer: who imports it wants TRL
OF_VERL = {f"{PACKAGE}.integrations.verl.{name}" for name in ("adapter", "register", "replica", "server")}
"""Modules that only verl imports, and that need it; no other may know it, or Ray."""

ROWS = {unit: row for row, units in enumerate(LAYERS) for unit in units}


@dataclass(frozen=True)
class Import:
    """One imported name, written out in full: ``from a.b import c`` is ``a.b.c``."""

    target: str
    line: int
    lazy: bool  # inside a function
    typing_only: bool  # under `if TYPE_CHECKING`

    @property
    def root(self) -> str:
        return self.target.partition(".")[0]


class ImportFinder(ast.NodeVisitor):
    """Collects every import of a module, ``importlib.import_module("name")`` among them."""

    def __init__(self, module: str, is_package: bool) -> None:
        self.parents = module.split(".") if is_package else module.split(".")[:-1]
        self.found: list[Import] = []
        self.functions = 0
        self.typing_blocks = 0

    def visit_FunctionDef(self, node: ast.AST) -> None:
        self.functions += 1
        self.generic_visit(node)
        self.functions -= 1

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        typing_only = ast.unparse(node.test).endswith("TYPE_CHECKING")
        self.typing_blocks += typing_only
        for statement in node.body:
            self.visit(statement)
        self.typing_blocks -= typing_only
        for statement in node.orelse:
            self.visit(statement)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        parents = self.parents[: len(self.parents) - node.level + 1] if node.level else []
        for alias in node.names:
            self.add(".".join([*parents, *filter(None, [node.module]), alias.name]), node.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        first = node.args[0] if node.args else None
        if ast.unparse(node.func).endswith("import_module") and isinstance(first, ast.Constant):
            self.add(str(first.value), node.lineno)
        self.generic_visit(node)

    def add(self, target: str, line: int) -> None:
        self.found.append(Import(target, line, self.functions > 0, self.typing_blocks > 0))


def module_name(path: Path) -> str:
    parts = path.relative_to(FOLDER.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(FOLDER.rglob("*.py"))}


def find_imports(source: str, module: str, is_package: bool = False) -> list[Import]:
    finder = ImportFinder(module, is_package)
    finder.visit(ast.parse(source))
    return finder.found


def imports_of(files: dict[str, Path]) -> dict[str, list[Import]]:
    return {m: find_imports(path.read_text("utf-8"), m, path.name == "__init__.py") for m, path in files.items()}


IMPORTS = imports_of(SOURCES)


def unit(module: str) -> str:
    """Top-level part of the package that a module belongs to."""
    return module.split(".")[1] if "." in module else ""


def resolve(target: str) -> str:
    """The module behind an imported name of this package: the longest prefix that is a file."""
    while target not in SOURCES:
        target = target.rpartition(".")[0]
    return target


def internal(module: str) -> list[tuple[Import, str]]:
    return [(name, resolve(name.target)) for name in IMPORTS[module] if name.root == PACKAGE]


def importers(is_wrong: Callable[[str, Import], bool]) -> list[str]:
    """Modules, lines and names of imports that break a rule."""
    every = ((module, name) for module, names in IMPORTS.items() for name in names)
    return [f"{module}:{name.line} imports {name.target}" for module, name in every if is_wrong(module, name)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import lightning.pytorch as pl", Import("lightning.pytorch", 1, False, False)),
        ("from transformers import cache_utils", Import("transformers.cache_utils", 1, False, False)),
        ("def f():\n  import pandas", Import("pandas", 2, True, False)),
        ("try:\n  import peft\nexcept ImportError: pass", Import("peft", 2, False, False)),
        ("class C:\n  import peft", Import("peft", 2, False, False)),
        ("if TYPE_CHECKING:\n  import pandas", Import("pandas", 2, False, True)),
        ("if TYPE_CHECKING: pass\nelse:\n  import pandas", Import("pandas", 3, False, False)),
        ("from .cache import SlotCache", Import("p.rollout.cache.SlotCache", 1, False, False)),
        ("from .. import types", Import("p.types", 1, False, False)),
        ("x = importlib.import_module('wandb')", Import("wandb", 1, False, False)),
    ],
)
def test_finder_sees_every_spelling(source: str, expected: Import) -> None:
    assert find_imports(source, "p.rollout.sampler") == [expected]


def test_every_module_has_a_layer() -> None:
    assert {unit(module) for module in SOURCES} - set(ROWS) == set(), "put the new part into a row of LAYERS"


def test_imports_go_down() -> None:
    def goes_up(module: str, name: Import) -> bool:
        is_ours = name.root == PACKAGE and name.target != f"{PACKAGE}.__version__"  # a plain string
        return is_ours and ROWS[unit(resolve(name.target))] < ROWS[unit(module)]

    assert importers(goes_up) == []


def test_no_import_cycles() -> None:
    """Not even for the sake of types: what needs each other's names is one idea in two files."""
    graph = {
        module: {t for found, t in internal(module) if t != module and not (found.typing_only and module == PACKAGE)}
        for module in SOURCES
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


def test_the_answer_checker_stands_by_itself() -> None:
    """It imports nothing but Python's library and what it computes with, no circle, and the rewards alone import it."""
    paths = [path for path in sorted((FOLDER.parent / ANSWERS).rglob("*.py")) if path.parent.name != "tests"]
    files = {module_name(path): path for path in paths}
    imports = imports_of(files)
    every = [name for names in imports.values() for name in names if name.root not in sys.stdlib_module_names]
    assert {name.root for name in every} == {ANSWERS, "math_verify", "mpmath", "sympy"}
    assert {name.root for name in every if not name.lazy} == {ANSWERS}
    graph = {
        module: {
            max((file for file in files if f"{name.target}.".startswith(f"{file}.")), key=len)
            for name in names if name.root == ANSWERS
        }
        for module, names in imports.items() if module != ANSWERS
    }  # fmt: skip
    graphlib.TopologicalSorter(graph).prepare()
    users = {unit(module) for module, names in IMPORTS.items() if any(name.root == ANSWERS for name in names)}
    assert users == {"rewards"}
    loaded = "import exact_answers, sys; print({'torch', 'numpy', 'sympy', 'sparse_rl_lightning'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, cwd=FOLDER.parent)
    assert done.stdout == "set()\n", done.stderr


def test_only_the_upper_parts_know_lightning() -> None:
    assert importers(lambda module, name: name.root in LIGHTNING and unit(module) not in KNOW_LIGHTNING) == []


def test_heavy_packages_are_imported_inside_functions() -> None:
    def is_eager(module: str, name: Import) -> bool:
        return name.root in LAZY and not (name.lazy or name.typing_only or module.startswith(OF_TRL))

    assert importers(is_eager) == []


def identifiers(source: str) -> set[str]:
    """Every name that a module reads, imports or accesses as an attribute."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                names.add(name)
            case ast.ImportFrom(module=str(name)):
                names.update(name.split("."))
            case ast.alias(name=name):
                names.update(name.split("."))
    return names


def test_one_file_knows_the_attention_hooks_and_one_the_cache() -> None:
    strangers = {
        module: sorted(identifiers(path.read_text(encoding="utf-8")) & HOOKS - KNOW_HOOKS.get(module, set()))
        for module, path in SOURCES.items()
    }
    assert {module: names for module, names in strangers.items() if names} == {}


def test_verl_is_known_to_its_modules_alone() -> None:
    found = {module for module, imports in IMPORTS.items() if any(one.root in ("ray", "verl") for one in imports)}
    assert found == OF_VERL
    users = {m for m in SOURCES for one, target in internal(m) if target in OF_VERL and not one.lazy}
    assert users <= OF_VERL


PROBE = """
import importlib, json, sys, time
import lightning.pytorch, torch, torchmetrics, transformers
before, start = set(sys.modules), time.process_time()
import {package}
seconds = time.process_time() - start
for name in {modules}:
    importlib.import_module(name)
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


def test_importing_everything_loads_nothing_heavy() -> None:
    """Beyond what Lightning, torchmetrics and transformers load themselves; CPU seconds, for busy machines."""
    skipped = {name for name in SOURCES if name.startswith(OF_TRL)} | OF_VERL | {f"{PACKAGE}.__main__"}
    modules = [name for name in SOURCES if name not in skipped]
    probe = PROBE.format(package=PACKAGE, modules=modules)
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=FOLDER.parent)
    assert result.returncode == 0, result.stderr
    seconds, loaded = json.loads(result.stdout.splitlines()[-1])
    assert {name.partition(".")[0] for name in loaded} & LAZY == set()
    assert seconds < 5
