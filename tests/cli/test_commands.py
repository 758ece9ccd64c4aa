"""The table of commands: help and dispatch come from it, and what needs nothing heavy answers without it."""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import run_console

from sparse_rl_lightning import __version__, cli
from sparse_rl_lightning.cli import options
from sparse_rl_lightning.cli.options import COMMANDS
from sparse_rl_lightning.cli.training import SparseRLCLI
from sparse_rl_lightning.planning.job import PROMPT

HEAVY = {"torch", "transformers", "lightning", "numpy", "jsonargparse", "datasets"}
PROBE = """
import json, sys
from sparse_rl_lightning.cli import console
sys.argv = ["sparse-rl", *{words!r}]
try:
    console()
except SystemExit as end:
    print(json.dumps([end.code or 0, sorted({{name.partition(".")[0] for name in sys.modules}})]))
"""


def probe(*words: str) -> tuple[int, set[str], str]:
    """Exit status of a command line in a process of its own, the packages it has imported, and what it said."""
    code = PROBE.format(words=list(words))
    wide = {**os.environ, "COLUMNS": "200"}  # no line is broken, at a hyphen neither
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=wide)
    *said, last = done.stdout.splitlines()
    status, packages = json.loads(last)
    return status, set(packages), "\n".join(said) + done.stderr


def listed(text: str) -> dict[str, str]:
    """The commands of a help text and their lines."""
    return dict(re.findall(r"^ {4}([\w-]+)\s+(\S.*)$", text, re.MULTILINE))


# ---------------------------------------------------------------- the table


def test_help_is_the_table() -> None:
    status, packages, said = probe("--help")
    assert listed(said) == {name: command.line for name, command in COMMANDS.items()}
    assert (status, HEAVY & packages) == (0, set())


def test_every_command_is_in_the_table_and_can_be_run() -> None:
    own = {name for name, command in COMMANDS.items() if command.home is None}
    bare = SparseRLCLI.__new__(SparseRLCLI)
    bare._first_word = ""
    assert own == set(bare.subcommands())
    for command in COMMANDS.values():
        assert command.home is None or callable(pkgutil.resolve_name(f"sparse_rl_lightning.cli.{command.home}"))
    functions = inspect.getmembers(options, inspect.isfunction)
    here = [name for name, function in functions if function.__module__ == options.__name__]
    parsers = {name for name in here if not name.startswith("_")}
    assert parsers == {name.replace("-", "_") for name, command in COMMANDS.items() if command.parser}


def test_subcommands_are_described_by_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lightning's first lines of ``test`` and ``predict`` end in mid-sentence."""
    for name in ("test", "predict"):
        assert run_console(monkeypatch, name, "--help") == 0
        assert COMMANDS[name].line in " ".join(capsys.readouterr().out.split())


# ---------------------------------------------------------------- what is light


@pytest.mark.parametrize(
    "words",
    [
        ["-h"], ["--version"], ["--help", "fit"], ["doctor", "--help"], ["plan", "-h"], ["benchmark", "--help"],
        ["record", "check", "--help"], ["record", "--help"], ["report", "--help"], ["plan", "--config", "x", "--help"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_help_and_version_import_nothing_heavy(words: list[str]) -> None:
    status, packages, said = probe(*words)
    assert (status, HEAVY & packages) == (0, set()), said
    assert said.strip() == f"sparse-rl {__version__}" if words == ["--version"] else said.startswith("usage: sparse-rl")


@pytest.mark.parametrize("words", [[], ["train"], ["fti", "--config", "x"], ["-c", "x", "plan"], ["--confg", "x"]])
def test_what_is_no_command_names_them_all(words: list[str]) -> None:
    status, packages, said = probe(*words)
    assert (status, HEAVY & packages) == (2, set())
    assert f"one of {', '.join(COMMANDS)}; got {' '.join(words)!r}." in said


def test_a_mistake_of_a_light_command_is_told_without_anything_heavy(tmp_path: Path) -> None:
    status, packages, said = probe("report", str(tmp_path / "missing"))
    assert (status, HEAVY & packages) == (1, set())
    assert said.strip().startswith("error: ")


def test_doctor_refuses_what_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_console(monkeypatch, "doctor", "--verbose") == 2
    assert "unrecognized arguments: --verbose" in capsys.readouterr().err


def test_options_may_stand_before_a_subcommand(monkeypatch: pytest.MonkeyPatch) -> None:
    """``sparse-rl -c FILE fit``, as jsonargparse has it."""
    seen: list[list[str]] = []
    monkeypatch.setattr(cli, "main", lambda: seen.append(sys.argv[1:]))
    run_console(monkeypatch, "-c", "x.yaml", "fit")
    assert seen == [["-c", "x.yaml", "fit"]]


def test_the_longest_prompt_of_a_plan_is_that_of_a_proposal() -> None:
    assert options.plan(proposes=False).get_default("prompt") == PROMPT
    assert f"(default {PROMPT})" in " ".join(options.plan().format_help().split())
