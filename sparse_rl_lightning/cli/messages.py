"""Errors of the command line: the key, what was given, what may have been meant."""

from __future__ import annotations

import difflib
import dis
import importlib
import inspect
import re
from collections.abc import Iterable
from typing import Any, NoReturn, get_args

from jsonargparse import Namespace
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from torch.optim import Optimizer

from sparse_rl_lightning.budgets import BudgetRule, LengthSchedule
from sparse_rl_lightning.cli.yaml_files import MODE
from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.data.base import PromptDataModule
from sparse_rl_lightning.modules.base import PolicyModule
from sparse_rl_lightning.policies.source import PolicySource
from sparse_rl_lightning.retrievers import Retriever

BASES = (
    PolicyModule, PromptDataModule, Compressor, Retriever, BudgetRule, LengthSchedule, PolicySource, Callback, Logger,
    Optimizer,
)  # fmt: skip
"""Classes whose subclasses a configuration names."""

NOISE = re.compile(
    r"""\s*(Does\ not\ validate\ against\ any\ of\ the\ Union\ subtypes | Subtypes:\ .* | Errors:
    | -\ Expected\ a\ <class\ 'NoneType'> | Given\ value\ type:\ .* | Given\ value:\ [\[{N].* )$""",
    re.VERBOSE,
)
"""Lines of jsonargparse's messages that repeat the type or the whole configuration."""


class ClearParser(LightningArgumentParser):
    """A parser whose errors are short and end with what may have been meant."""

    def __init__(self, *args: Any, parser_mode: str = MODE, **kwargs: Any) -> None:
        super().__init__(*args, parser_mode=parser_mode, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Explain the message of the outermost parser; those inside become part of it."""
        super().error(explain(message) if self.exit_on_error else message, ex)

    def validate(self, namespace: Namespace, *args: Any, **kwargs: Any) -> None:
        """As the parser's, which takes null for any type; here a number is one unless its type allows null.

        Raises:
            TypeError: If a value is not what its key takes.
        """
        super().validate(namespace, *args, **kwargs)
        for action in self._actions:
            annotation = getattr(action, "_typehint", None)
            kinds = [annotation, *get_args(annotation)]
            is_number = (int in kinds or float in kinds) and type(None) not in kinds
            if is_number and action.default is not None and namespace.get(action.dest, action.default) is None:
                raise TypeError(
                    f"{action.dest} must be a number, got null. Leave the key out for the default, {action.default}."
                )

    def print_usage(self, file: Any = None) -> None:
        """Print nothing: fifty lines of options before an error hide it, and ``--help`` shows them."""


def explain(message: str) -> str:
    r"""A parser's message without its noise, with a suggestion for a misspelt class or option.

    >>> explain("Errors:\n  Expected a dot import path string: SnapKv")
    "  Expected a dot import path string: SnapKv\nThere is no class 'SnapKv'. Did you mean 'SnapKV'?"
    """
    lines = [line for line in message.splitlines() if not NOISE.match(line)]
    return "\n".join([*lines, *_suggestion(message)]).strip()


def own_error(error: BaseException | None) -> BaseException | None:
    """The first error in a chain of causes that this package raised, None if there is none."""
    while error is not None and not is_own(error):
        error = error.__cause__
    return error


def first_error(error: BaseException) -> BaseException:
    """What ended a run: Lightning tears down after an error, and of loops that were not begun that raises another."""
    while error.__context__ is not None and _raised_by(error, "lightning"):
        error = error.__context__
    return error


def is_own(error: BaseException) -> bool:
    """Whether a ``raise`` in this package raised it.

    An error that Python itself raises while it runs our code, as ``int("x")`` does, is no message to a user.
    """
    return _raised_by(error, __package__.partition(".")[0])


def _raised_by(error: BaseException, package: str) -> bool:
    """Whether a ``raise`` in a package raised it."""
    traceback = error.__traceback__
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    found = traceback.tb_frame.f_globals.get("__name__", "").partition(".")[0]
    instruction = traceback.tb_frame.f_code.co_code[traceback.tb_lasti]
    return found == package and bool(instruction == dis.opmap["RAISE_VARARGS"])


def _suggestion(message: str) -> list[str]:
    if found := re.search(r"Expected a dot import path string: (\w+)", message):
        if found[1] == "None":
            return []
        hint = _did_you_mean(found[1], _class_names())
        own = f"A class of your own is named with its module, such as mine.{found[1]}."
        return [f"There is no class {found[1]!r}. {hint or own}"]
    if found := re.search(r"class_path '([\w.]+)':\s+Option '(\w+)' is not accepted", message):
        hint = _did_you_mean(found[2], _argument_names(imported(found[1])))
    elif found := re.search(r"class_path '[\w.]+':\s+Option '(\w+)\.[\w.]+' is not accepted", message):
        hint = f"What belongs to a class stands below its init_args, {found[1]!r} too."
    elif found := re.search(r"does not accept option '([\w.]+)'", message):
        options = ["model", "data", "trainer", "seed_everything", "num_threads", "ckpt_path"]
        hint = _did_you_mean(
            found[1], [*options, *(f"trainer.{name}" for name in inspect.signature(Trainer).parameters)]
        )
    else:
        hint = ""
    if "Expected an instantiatable class" in message:
        hint = "Give a class_path, and its options below init_args."
    return [hint] * bool(hint)


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the closest known names, whatever their case, or nothing."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=3)]
    return f"Did you mean {' or '.join(map(repr, close))}?" if close else ""


def _class_names() -> set[str]:
    names = {base.__name__ for base in BASES if not inspect.isabstract(base)}
    waiting: list[type] = list(BASES)
    while waiting:
        subclasses: list[type] = waiting.pop().__subclasses__()
        names.update(c.__name__ for c in subclasses if not c.__name__.startswith("_"))
        waiting.extend(subclasses)
    return names


def _argument_names(cls: type) -> set[str]:
    """Arguments of a class, those that it passes on to its parents among them."""
    return {name for c in cls.__mro__ for name in inspect.signature(c.__init__).parameters}  # type: ignore[misc]


def imported(path: str) -> Any:
    """The class of a ``class_path``."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
