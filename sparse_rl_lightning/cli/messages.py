"""Errors in a form for users: the key, what was given, and what may have been meant."""

from __future__ import annotations

import difflib
import errno
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn, get_args

import torch
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from sparse_rl_lightning.cli.classes import argument_names, known_classes
from sparse_rl_lightning.cli.launch import network_error
from sparse_rl_lightning.cli.yaml_files import MODE
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.text import visible

NOISE = re.compile(
    r"""(\s|-)*(Does\ not\ validate\ against\ any\ of\ the\ Union\ subtypes | Subtypes:\ .* | Errors:
    | -\ Expected\ a\ path\ but\ (?!\S*(/|\.ya?ml\b))\S*\ either\ not\ accessible\ or\ invalid
    | -\ Expected\ a\ <class\ 'NoneType'> | Given\ value\ type:\ .* | Given\ value:\ [\[{N].* )$""",
    re.VERBOSE,
)
"""Lines of jsonargparse's messages that repeat the type or the whole configuration, or take a name for a file."""
LOOKED_FOR = "Modules are looked for in the current folder and among the installed packages."
NO_PLACE = {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP}
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
SCHEDULES = (
    "A schedule in a file is a class: one of torch.optim.lr_scheduler, lightning.pytorch.cli.ReduceLROnPlateau with "
    "monitor, or one of yours around a function such as transformers' (docs/from_trl.md, a warm-up and a cosine)."
)


class ClearParser(LightningArgumentParser):
    """A parser whose errors are short and end with what may have been meant."""

    def __init__(self, *args: Any, parser_mode: str = MODE, **kwargs: Any) -> None:
        super().__init__(*args, parser_mode=parser_mode, **kwargs)

    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:  # the parsers' own signatures differ
        """As the parser's, which hands null for a key of a group on to the parser of the class as the text None."""
        if args is not None and len(args) == 1:
            args = [re.sub("=None$", "=null", args[0])]
        try:
            return super().parse_args(args, *rest, **kwargs)
        except UnicodeDecodeError as error:  # of a file in place of a configuration
            raise UserError(f"{' '.join(args or ())}: a file that is named here is not YAML. {error!r}") from error

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Explain the message of the outermost parser; messages of inner parsers become part of it."""
        super().error(visible(explain(message)) if self.exit_on_error else message, ex)

    def validate(self, namespace: Namespace, *args: Any, **kwargs: Any) -> None:
        """Validate like the base class, which accepts null for any type; here a number must allow null to get it.

        Raises:
            TypeError: If a value does not fit its key.
        """
        super().validate(namespace, *args, **kwargs)
        _check_schedule(namespace.get("lr_scheduler"))
        for action in self._actions:
            annotation = getattr(action, "_typehint", None)
            types = [annotation, *get_args(annotation)]
            is_number = (int in types or float in types) and type(None) not in types
            if is_number and action.default is not None and namespace.get(action.dest, action.default) is None:
                raise TypeError(
                    f"{action.dest} must be a number, got null. Leave the key out for the default, {action.default}."
                )

    def print_usage(self, file: Any = None) -> None:
        """Print nothing: fifty lines of options before an error hide it, and ``--help`` shows them."""


def _check_schedule(schedule: Any) -> None:
    """Refuse what the type of ``lr_scheduler`` allows and nothing can be made of.

    Raises:
        TypeError: If it is torch's schedule after a metric, without a metric, or a function that wants an optimizer.
    """
    path, arguments = getattr(schedule, "class_path", None), getattr(schedule, "init_args", None) or ()
    if path == "torch.optim.lr_scheduler.ReduceLROnPlateau":
        raise TypeError(f"lr_scheduler: {path} does not know what it looks at. {SCHEDULES}")
    if "optimizer" in arguments:
        raise TypeError(f"lr_scheduler: {path} is a function. {SCHEDULES}")


def explain(message: str) -> str:
    r"""A parser's message without its noise, with a suggestion for a misspelled class or option.

    >>> explain("Errors:\n  Expected a dot import path string: SnapKv").partition("A class")[0]
    "Expected a dot import path string: SnapKv\nThere is no class 'SnapKv'. Did you mean 'SnapKV'? "
    """
    for form, instead in INSTEAD.items():
        if match := re.search(form, message):
            return match.expand(instead)
    lines = dict.fromkeys(line for line in message.splitlines() if not NOISE.match(line))
    hint = next((make(match) for form, make in FORMS if (match := re.search(form, message))), "")
    return "\n".join([*lines, hint]).strip()


def user_message(error: Exception) -> str | None:
    """The message for the user about the error that ended a command; None for a bug, which keeps its traceback."""
    if isinstance(error, torch.distributed.DistNetworkError):
        return network_error(error)
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return f"{error}. Make room on the disk, or name another place."
    if isinstance(error, OSError) and error.errno in NO_PLACE and error.filename is not None:
        return f"{error}. Name a place that you may use."
    if isinstance(error, RuntimeError) and "determine home directory" in str(error):
        return f"{error} A path begins with ~, and this machine knows no home of that user. Write the path out."
    cause = error if isinstance(error, MisconfigurationException) else first_error(error)
    return str(cause) if isinstance(cause, (MisconfigurationException, UserError)) else None


def own_error(error: BaseException | None) -> UserError | None:
    """The first message to the user in a chain of causes, None if there is none."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__
    return error


def first_error(error: BaseException) -> BaseException:
    """The error that ended a run; after it Lightning tears down loops that never began, which raises another."""
    while error.__context__ is not None and is_from(error, "lightning"):
        error = error.__context__
    return error


def is_from(error: BaseException, package: str) -> bool:
    """Whether an error was raised in the code of a package."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").partition(".")[0] == package


def _of_class(match: re.Match[str]) -> str:
    """What may have been meant by the name of a class that no key of its kind has."""
    name, classes = match[1], known_classes()
    if name in classes:  # of another kind than the key's, or the key takes any class
        return f"Here {name} is named with its module: {classes[name].__module__}.{name}."
    hint = f"A class of your own is named with its module, such as mine.{name}."
    return " ".join(filter(None, [f"There is no class {name!r}.", _did_you_mean(name, classes), hint]))


def _of_option(match: re.Match[str]) -> str:
    """What may have been meant by a key of a class, or of a group in it; the class comes first."""
    name, names = ".".join(match.groups()[1:]), argument_names(match[1])
    return (_elsewhere(name) if "optimizer" in names else "") or _did_you_mean(name, names)


def _of_key(match: re.Match[str]) -> str:
    """What may have been meant by a key of the whole configuration."""
    return _elsewhere(match[1]) or _did_you_mean(match[1], _keys())


def _elsewhere(name: str) -> str:
    """What may have been meant by a name that is right in another program, or at another level."""
    last = name.rpartition(".")[2]
    levels = [key for key in _keys() if key.endswith(f".{last}") and key != name]
    key = ELSEWHERE.get(last) or min(levels, key=len, default="")
    return key and f"Did you mean {key!r}?"


def _keys() -> list[str]:
    """The keys of a configuration, but those of classes that it names."""
    groups = {"trainer": inspect.signature(Trainer).parameters, "model": sorted(argument_names("SparseGRPO"))}
    inner = (f"{group}.{name}" for group, names in groups.items() for name in names)
    return ["base", "model", "data", "trainer", "seed_everything", "num_threads", "ckpt_path", *inner]


ELSEWHERE = {
    "lr": "model.optimizer.lr", "learning_rate": "model.optimizer.lr", "weight_decay": "model.optimizer.weight_decay",
    "lr_scheduler_type": "model.lr_scheduler", "budget": "model.compressor.budget",
    "buffer": "model.compressor.buffer", "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "max_grad_norm": "trainer.gradient_clip_val", "output_dir": "trainer.default_root_dir", "bf16": "trainer.precision",
    "per_device_train_batch_size": "data.prompts_per_rollout", "num_train_epochs": "trainer.max_epochs",
    "logging_steps": "trainer.log_every_n_steps", "resume_from_checkpoint": "ckpt_path",
}  # fmt: skip
"""Keys by their names in TRL and at the level at which Lightning's own examples have them."""
INSTEAD = {
    r"arguments are required: (\w+)\.data, \w+\.model": (
        r"Name a configuration: sparse-rl \1 --config FILE, such as configs/quickstart.yaml in a checkout of the "
        "repository."
    ),
}
"""Forms of jsonargparse's messages that say what its code has met, and what to say instead."""
FORMS: list[tuple[str, Callable[[re.Match[str]], str]]] = [
    (
        r"does not accept option 'partial_checkpoint'",
        lambda _: "Remove it: since 0.3 a resumed run draws unfinished sequences anew, as restart did.",
    ),
    (r"Expected a dot import path string: (?!None\b)(\w+)", _of_class),
    (r'(?s)(?=.*key "lr_scheduler").*expects a function or a callable class', lambda _: SCHEDULES),
    (r"Expected an instantiatable class", lambda _: "Give a class_path, and its options below init_args."),
    (r"class_path '([\w.]+)':\s+Option '(\w+)\+?' is not accepted", _of_option),
    (r"class_path '([\w.]+)':\s+Group '(\w+)' does not accept option '([\w.]+)\+?'", _of_option),
    (r"class_path '([\w.]+)':\s+unrecognized arguments: --([\w.]+)", _of_option),
    (
        r"class_path '[\w.]+':\s+Option '(\w+)\.[\w.]+' is not accepted",
        lambda match: f"What belongs to a class stands below its init_args, {match[1]!r} too.",
    ),
    (r"does not accept option '([\w.]+)\+?'", _of_key),
    (r"unrecognized arguments: --([\w.]+)", _of_key),
    (r"unrecognized arguments: (\S+\.ya?ml)", lambda match: f"Did you mean --config {match[1]}?"),
    (
        r"File does not exist: '((.+)/(.+))'",
        lambda match: _did_you_mean(match[3], (path.name for path in Path(match[2]).glob("*.y*ml"))),
    ),
    (
        r"module '([\w.]+)' has no attribute '(\w+)'",
        lambda match: _did_you_mean(match[2], dir(sys.modules.get(match[1]))),
    ),
    (
        r"argument --(model|data): expected one argument",
        lambda match: f"--{match[1]}.help=NAME, such as SparseGRPO, lists the keys of a class and of its groups.",
    ),
    (r"No module named '[\w.]+'", lambda _: LOOKED_FOR),
    (r"int too large to convert to float", lambda match: "A number has more digits than a float holds, 308."),
]
"""Forms of jsonargparse's messages, the first of which counts, and what to add."""


def _did_you_mean(name: str, names: Iterable[str]) -> str:
    """A sentence with the closest known names, whatever their case, or nothing."""
    is_dotted = "." in name
    by_lower = {(c if is_dotted else c.rpartition(".")[2]).lower(): c for c in names}  # alone, a name may be a group's
    cutoff = 0.85 if is_dotted else 0.6  # names of a group have its name in common
    close = [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, 3, cutoff)]
    return f"Did you mean {' or '.join(map(repr, close))}?" if close else ""
