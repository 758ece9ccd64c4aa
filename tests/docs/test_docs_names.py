"""What the pages put into code style exists: classes, keys of configurations, options, files and metrics."""

from __future__ import annotations

import builtins
import importlib
import inspect
import pkgutil
import re
import typing
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
import transformers
from lightning.pytorch import callbacks, loggers, strategies
from test_readme import DOCS, README, named, read, without_blocks
from torch.optim import lr_scheduler

import sparse_rl_lightning
from sparse_rl_lightning.cli import options
from sparse_rl_lightning.cli.calibrate import calibrate, hardware
from tests.project.test_layers import OF_VERL

ROOT = README.parent
CODE = re.compile(r"`([^`\n]+)`")
CLASS = re.compile(r"[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*(\.\w+)*")
KEY = re.compile(r"(model|data|trainer)((?:\.\w+)+)(?:[:= ].*)?")
OPTION = re.compile(r"--([a-z_]+)((?:\.\w+)*)(?:[+= ].*)?")
NAMED_FILE = re.compile(r"(?:[\w.-]+/)+[\w.-]+\.(?:ipynb|md|png|py|sh|toml|yaml)")

THEIRS = {"AsyncGRPOTrainer", "GRPOTrainer", "GRPOConfig"}  # classes of other programs
NO_KEYS = {"model.generate", "trainer.fit", "trainer.pt", "--optimizer.lr"}  # methods, a file, a mistake
TORCHRUN = {"node_rank", "nnodes", "nproc_per_node", "master_addr"}
OF_SUBCOMMANDS = "config ckpt_path print_config num_threads seed_everything folder hardware help tolerance"
OWN_OPTIONS = {action.dest for parser in (options.benchmark(), options.serve()) for action in parser._actions}
OWN_OPTIONS |= {*OF_SUBCOMMANDS.split()}
OTHERS_PAGES = ("from_trl.md", "from_verl.md")
PAGES = [document for document in DOCS if document.parent.name != "api"]


def package() -> dict[str, Any]:
    """Every public class and function of the package by its name."""
    found = {}
    for module in pkgutil.walk_packages(sparse_rl_lightning.__path__, "sparse_rl_lightning."):
        if not module.name.endswith(("__main__", "._C")) and module.name not in OF_VERL:
            found |= {k: v for k, v in vars(importlib.import_module(module.name)).items() if not k.startswith("_")}
    return found


NAMES = package()
OF_LIGHTNING = (lightning, callbacks, loggers, strategies)
ELSEWHERE = (*OF_LIGHTNING, torch, torch.nn, torch.optim, lr_scheduler, transformers, builtins)


def parameters(thing: Any) -> set[str]:
    try:
        return set(inspect.signature(thing).parameters)
    except (TypeError, ValueError):  # some builtins have no signature
        return set()


OWN = [v for v in NAMES.values() if inspect.isclass(v) and v.__module__.startswith("sparse_rl_lightning")]
TOP = {
    "model": [thing for thing in OWN if issubclass(thing, lightning.LightningModule)],
    "data": [thing for thing in OWN if issubclass(thing, lightning.LightningDataModule)],
    "trainer": [lightning.Trainer],
}
CALIBRATION = parameters(calibrate) | parameters(hardware)


def code_of(text: str) -> list[str]:
    """What stands in code style outside of blocks."""
    return CODE.findall(without_blocks(text))


def is_class(name: str) -> bool:
    """Whether a name, with an attribute or none, is one of ours or of what we build on."""
    first, *rest = name.split(".")
    if first in THEIRS:
        return True
    homes = [NAMES[first]] if first in NAMES else [getattr(m, first) for m in ELSEWHERE if hasattr(m, first)]
    return any(not rest or hasattr(home, rest[0]) or rest[0] in parameters(home) for home in homes)


def is_key(top: str, path: str) -> bool:
    """Whether ``model.a.b`` and the like can stand in a configuration: ``b`` is a parameter of what ``a`` may be."""
    homes: list[Any] = TOP[top]
    for name in path.strip(".").split("."):
        if name in ("init_args", "class_path"):
            continue
        homes = [home for home in homes if name in parameters(home)]
        if not homes:
            return False
        homes = [thing for home in homes for thing in classes_of(typing.get_type_hints(home.__init__).get(name))]
    return True


def classes_of(annotation: Any) -> list[Any]:
    """Ours and Lightning's classes that a value of this type may be, with those below them."""
    if torch.optim.Optimizer in typing.get_args(annotation):  # what makes one
        return [torch.optim.AdamW]
    found = {annotation} if inspect.isclass(annotation) else set()
    for part in typing.get_args(annotation):
        found |= set(classes_of(part)) if not isinstance(part, list) else set()
    bases = [thing for thing in found if thing.__module__.startswith(("sparse_rl_lightning", "lightning"))]
    return list(dict.fromkeys([*bases, *(thing for thing in OWN if any(issubclass(thing, base) for base in bases))]))


def is_option(name: str, path: str) -> bool:
    if name in ("model", "data", "trainer"):
        return path in ("", ".help") or is_key(name, path.replace(".help", ""))
    return name in OWN_OPTIONS | CALIBRATION | TORCHRUN


def is_file(name: str) -> bool:
    homes = (ROOT, ROOT / "sparse_rl_lightning", ROOT / "docs", ROOT / "configs")
    return name.startswith(("runs/", "version_0/")) or any((home / name).is_file() for home in homes)


def unknown(text: str) -> list[str]:
    """What a text puts into code style as if it existed."""
    wrong = []
    for code in code_of(text):
        if found := CLASS.fullmatch(code):
            wrong += [] if is_class(code) else [code]
        elif code in NO_KEYS:
            continue
        elif found := KEY.fullmatch(code):
            wrong += [] if is_key(found[1], found[2]) else [code]
        elif found := OPTION.fullmatch(code):
            wrong += [] if is_option(found[1], found[2]) else [code]
        elif NAMED_FILE.fullmatch(code):
            wrong += [] if is_file(code) else [code]
    return wrong


@named([README, *PAGES])
def test_names_in_code_style_exist(document: Path) -> None:
    text = read(document)
    if document.name in OTHERS_PAGES:  # the first column of their tables is the other program's, or a mistake
        text = re.sub(r"^\| [^|]+ \|", "|", text, flags=re.MULTILINE)
    assert unknown(text) == []


@pytest.mark.parametrize(
    "code",
    ["SparseGPRO", "SnapKV.bugdet", "model.num_generation", "trainer.max_step", "--trainer.device=2", "--ckpt=last",
     "model.learner.micro_batch_token", "model.prompts_per_rollout", "data.beta",
     "model.learner.budget", "configs/no_such.yaml", "modules/no_such.py"],
)  # fmt: skip
def test_what_does_not_exist_is_found(code: str) -> None:
    assert unknown(f"Say `{code}`.") == [code]
