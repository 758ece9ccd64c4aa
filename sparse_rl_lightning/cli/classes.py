"""Classes of a configuration: lookup by name, and the arguments that they take."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from jsonargparse import ArgumentParser
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from torch.optim import Optimizer

# imported so that a configuration can name their classes without the whole path
import sparse_rl_lightning.callbacks
import sparse_rl_lightning.compressors
import sparse_rl_lightning.data
import sparse_rl_lightning.modules
import sparse_rl_lightning.retrievers
import sparse_rl_lightning.rewards  # noqa: F401
from sparse_rl_lightning.budgets import BudgetRule, LengthSchedule
from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.data.base import PromptDataModule
from sparse_rl_lightning.downsampling import DownSampling
from sparse_rl_lightning.modules.base import PolicyModule
from sparse_rl_lightning.policies.source import PolicySource
from sparse_rl_lightning.retrievers import Retriever

BASES = (
    PolicyModule, PromptDataModule, Compressor, Retriever, BudgetRule, LengthSchedule, DownSampling, PolicySource,
    Callback, Logger, Optimizer,
)  # fmt: skip
"""Base classes whose subclasses a configuration may name."""


def known_classes() -> dict[str, type]:
    """Classes that a configuration may name without their module, by name."""
    classes: dict[str, type] = {}
    waiting: list[type] = list(BASES)
    while waiting:
        cls = waiting.pop()
        waiting.extend(cls.__subclasses__())
        if cls.__name__.startswith("_") or (cls in BASES and inspect.isabstract(cls)):
            continue
        if cls.__name__ not in classes or cls.__module__.startswith("sparse_rl_lightning."):  # not a namesake of it
            classes[cls.__name__] = cls
    return classes


def imported(path: str) -> Any:
    """The class of a ``class_path``."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def named_classes(value: Any) -> list[Any]:
    """The classes that a configuration names in one place: none, one or a list."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if hasattr(item, "class_path")]


def argument_names(path: str) -> set[str]:
    """Arguments of a ``class_path``, those of a group as ``group.name``; none if there is no such class."""
    try:
        cls = known_classes().get(path) or imported(path)
        parser = ArgumentParser(exit_on_error=False)
        added = [*parser.add_class_arguments(cls, fail_untyped=False), *parser.get_defaults().keys()]
    except (ImportError, AttributeError, TypeError, ValueError):  # the parser reports what is wrong with the name
        return set()
    return {*added, *(name.partition(".")[0] for name in added)}
