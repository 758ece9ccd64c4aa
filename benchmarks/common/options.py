"""Options that benchmarks have alike: a folder for the page, threads, rounds, a device and toy sizes."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch


def here() -> str:
    """The device that a benchmark takes if none is named."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def parser(
    about: str | None, page: str, *, threads: int = 0, rounds: int = 0, device: str = "", quick: bool = False
) -> argparse.ArgumentParser:
    """A parser with ``--save`` for this page, and with those of the other options that are named here."""
    options = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--save", type=Path, help=f"folder of {page}")
    if device:
        options.add_argument("--device", default=device, choices=["cpu", "cuda"])
    if threads:
        options.add_argument("--threads", type=int, default=threads)
    if rounds:
        options.add_argument("--rounds", type=int, default=rounds)
    if quick:
        options.add_argument("--quick", action="store_true", help="toy sizes: seconds, numbers without meaning")
    return options


def parsed(options: argparse.ArgumentParser, arguments: list[str] | None = None) -> argparse.Namespace:
    """What was given; torch has these threads from then on."""
    args = options.parse_args(arguments)
    if "threads" in args:
        torch.set_num_threads(args.threads)
    return args
