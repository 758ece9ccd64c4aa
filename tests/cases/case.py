"""A case: what a user does, what the command line says last, and its exit status; and how it is run."""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tiny_run import config

TRAINS = "`Trainer.fit` stopped: `max_steps=1` reached."
"""The last line of a run that has come to its end."""

HANG = 300
"""Seconds after which a case counts as one that hangs; the slowest takes a few."""


@dataclass(frozen=True)
class Case:
    """One line of the tables. Without anything but the first three fields the name is what stands behind the command.

    Args:
        name: What the user does, as the page says it.
        says: Part of the last line.
        status: Of the process: 0 done, 1 an error, 2 a configuration that cannot be read.
        args: What stands behind the command.
        command: Which one.
        edit: Changes the configuration.
        text: Changes the file it is written to.
        rows: Content of the data file.
        file: Name of the data file.
        data: Arguments of JsonlPrompts.
        reward: Source of a module with the reward function ``lr``.
        policy: Changes the model folder ``pol``, which is the policy then.
        prepare: Changes the working directory.
        slow: Not in the fast tests.
    """

    name: str
    says: str = TRAINS
    status: int = 0
    args: str | None = None
    command: str = "fit"
    edit: Callable[[dict[str, Any]], object] | None = None
    text: Callable[[str], str] | None = None
    rows: str | bytes | None = None
    file: str = "p.jsonl"
    data: dict[str, Any] | None = None
    reward: str | None = None
    policy: Callable[[Path], object] | None = None
    prepare: Callable[[Path], object] | None = None
    slow: bool = False

    @property
    def is_command(self) -> bool:
        """Whether the name is what the user types."""
        given = (self.args, self.edit, self.text, self.rows, self.data, self.reward, self.policy, self.prepare)
        return all(one is None for one in given)


@dataclass(frozen=True)
class Answer:
    """What a case was answered with."""

    status: int | None  # None if it did not end
    shown: str

    @property
    def error_lines(self) -> int:
        """Lines of what the command line calls an error."""
        return len(f"\n{self.shown}".rpartition("\nerror: ")[2].strip().splitlines())

    @property
    def last(self) -> str:
        """The message: what the command line calls an error, or the last line."""
        if "\nerror: " in f"\n{self.shown}":
            return " ".join(f"\n{self.shown}".rpartition("\nerror: ")[2].split())
        lines = [line for line in self.shown.splitlines() if line.strip()]
        done = [line for line in lines if line.startswith("`Trainer.fit` stopped")]  # a bar may be drawn once more
        return done[-1] if done and self.status == 0 else lines[-1].strip() if lines else ""


def answer(case: Case, folder: Path, whole: Path) -> Answer:
    """Run a case in a process of its own, in an empty folder.

    Args:
        case: The case.
        folder: The empty folder.
        whole: A model folder, of which cases with a ``policy`` get a copy.
    """
    argv = ["sparse-rl", case.command, "--config", "config.yaml", *_arguments(case)]
    _write(case, folder, whole)
    shown = folder / "shown.txt"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sparse_rl_lightning.cli.training", "sparse_rl_lightning.cli.plan", "datasets"])
    process = context.Process(target=_run, args=(folder, argv, shown))
    process.start()
    process.join(HANG)
    status = process.exitcode
    if status is None:
        process.kill()
        process.join()
    text, here = shown.read_text("utf-8", "replace"), str(folder.resolve())
    return Answer(status, text.replace(f"{here}/", "").replace(here, ".").replace(str(Path.home()), "~"))


def row(case: Case, given: Answer) -> str:
    """The case as a row of the page."""
    name = f"`--{case.name}`" if case.is_command else case.name
    said = "trains" if given.last == TRAINS else shortened(given.last)
    return f"| {name.replace('|', chr(92) + '|')} | {said} | {given.status} |"


def shortened(text: str, most: int = 400) -> str:
    """A message in a cell, cut behind a word where it is long, and without what would be markup there."""
    text = text if len(text) <= most else f"{text[:most].rsplit(' ', 1)[0]} ..."
    for character, code in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|")):
        text = text.replace(character, code)
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


# ---------------------------------------------------------------- inside


def _arguments(case: Case) -> Sequence[str]:
    if case.is_command:
        return [f"--{case.name}"]
    return shlex.split(case.args or "")


def _write(case: Case, folder: Path, whole: Path) -> None:
    values = config(max_steps=1)
    if case.rows is not None or case.data is not None:
        arguments = {"path": case.file, "prompts_per_rollout": 2} | (case.data or {})
        values["data"] = {"class_path": "JsonlPrompts", "init_args": arguments}
        values["model"]["init_args"]["reward_funcs"] = "sparse_rl_lightning.rewards.arithmetic_reward"
    if isinstance(case.rows, str):
        (folder / case.file).write_text(case.rows, encoding="utf-8")
    elif case.rows is not None:
        (folder / case.file).write_bytes(case.rows)
    if case.reward is not None:
        (folder / "mine.py").write_text(case.reward, encoding="utf-8")
        values["model"]["init_args"]["reward_funcs"] = "mine.lr"
    if case.policy is not None:
        _copy(whole, folder / "pol")
        case.policy(folder / "pol")
        values["model"]["init_args"]["policy"] = "./pol"
    if case.edit is not None:
        case.edit(values)
    text = yaml.safe_dump(values, sort_keys=False)
    (folder / "config.yaml").write_text(text if case.text is None else case.text(text), encoding="utf-8")
    if case.prepare is not None:
        case.prepare(folder)


def _copy(source: Path, target: Path) -> None:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())


def _run(folder: Path, argv: list[str], shown: Path) -> None:
    """In the child: the console script, with all output in a file."""
    output = os.open(shown, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(0)
    os.chdir(folder)
    sys.argv = argv
    sys.path = [path for path in sys.path if path not in ("", os.fspath(folder))]
    os.environ.pop("SPARSE_RL_TRACEBACK", None)
    from sparse_rl_lightning.cli import console

    status = 0
    try:
        console()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.exit(status)


def json_lines(*rows: Any) -> str:
    """The content of a JSONL file."""
    return "".join(json.dumps(row) + "\n" for row in rows)
