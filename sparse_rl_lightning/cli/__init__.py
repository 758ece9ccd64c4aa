"""The command line; what takes seconds to import is imported when a command needs it."""

from __future__ import annotations

import os
import pkgutil
import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from sparse_rl_lightning import __version__
from sparse_rl_lightning.cli.options import COMMANDS, Command, Parser
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.text import say

if TYPE_CHECKING:
    from lightning.pytorch.cli import ArgsType, LightningCLI

HELP = {"-h", "--help"}


def main(args: ArgsType = None) -> LightningCLI:
    """Run a subcommand of the LightningCLI, or the same from Python with a list of arguments.

    Args:
        args: Arguments as on the command line, default the process's.

    Returns:
        The CLI with its ``trainer``, ``model`` and ``datamodule``.
    """
    from sparse_rl_lightning.cli.training import run

    return run(args)


def console() -> None:
    """The console script ``sparse-rl``: a user's mistake ends with one line and exit status 1 or 2.

    Everything else keeps its traceback; with the environment variable SPARSE_RL_TRACEBACK=1 a mistake does too.
    """
    sys.excepthook = _traceback
    arguments = sys.argv[1:]
    name = next((word for word in arguments if word in COMMANDS or word in {*HELP, "--version"}), "")
    command = COMMANDS.get(name)
    if command is None or (command.home and arguments[0] != name):
        _overview(name if command is None else "", arguments)
    if command.parser and HELP & {*arguments}:
        command.parser().parse_args(arguments[1:])
    try:
        _run(command, arguments[1:])
    except Exception as error:
        if isinstance(error, UserError):
            message: str | None = str(error)
        else:
            from sparse_rl_lightning.cli.messages import user_message

            message = user_message(error)
        if message is None or os.environ.get("SPARSE_RL_TRACEBACK", "0") not in ("", "0"):
            raise
        say(f"error: {message}", sys.stderr)
        sys.exit(1)


def _traceback(error_type: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    """Print a traceback; its error may quote what a model wrote."""
    say("".join(traceback.format_exception(error_type, error, where)).rstrip(), sys.stderr)


def _run(command: Command, arguments: list[str]) -> None:
    if command.home is None:
        from sparse_rl_lightning.cli.launch import follow_launcher

        follow_launcher()
        main()
    elif command.is_bare:
        pkgutil.resolve_name(f"{__name__}.{command.home}")(arguments)
    else:
        from sparse_rl_lightning.cli.quiet import prepared

        with prepared():
            pkgutil.resolve_name(f"{__name__}.{command.home}")(arguments)


def _overview(flag: str, arguments: list[str]) -> NoReturn:
    """Answer ``--help`` or ``--version``; without one of them say which commands there are."""
    parser = Parser(
        prog="sparse-rl", allow_abbrev=False, usage="%(prog)s COMMAND [...]",
        description="Reinforcement learning of language models on rollouts with an evicted KV cache.",
        epilog="`sparse-rl COMMAND --help` shows the options of a command.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"sparse-rl {__version__}")
    listed = parser.add_subparsers(title="commands", metavar="COMMAND [...]")
    for name, command in COMMANDS.items():
        listed.add_parser(name, help=command.line)
    parser.parse_args([flag] if flag else [])
    parser.error(f"expected a command first, one of {', '.join(COMMANDS)}; got {' '.join(arguments)!r}.")
