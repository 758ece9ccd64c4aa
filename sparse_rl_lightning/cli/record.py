"""``sparse-rl record``: whether an engine's record explains its log-probabilities, or says what another one says."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.policies.pretrained import load_pretrained
from sparse_rl_lightning.text import say


def main(args: Sequence[str]) -> None:
    """Check a record, or compare two.

    Args:
        args: Arguments after ``sparse-rl record``.

    Raises:
        ValueError: If a record or a model cannot be read or do not belong together, or the answer is no.
    """
    from sparse_rl_lightning.integrations.record import check_record, read_record

    given = parser().parse_args(args)
    record = read_record(given.file)
    if given.command == "compare":
        difference = record.difference(read_record(given.other))
        if difference:
            raise UserError(f"{given.file} and {given.other} do not say the same: {difference}.")
        say(f"{given.file} and {given.other} say the same.")
        return
    check_number("tolerance", given.tolerance, above=0)
    model, _ = load_pretrained(given.model, getattr(torch, given.dtype))
    verdict = check_record(record, model.to(given.device), given.tolerance)
    if not verdict.agrees:
        raise UserError(f"{given.file}: {verdict.text}")
    say(f"{given.file}: {verdict.text}")


def parser() -> argparse.ArgumentParser:
    """Parser of the command's options."""
    made = argparse.ArgumentParser(prog="sparse-rl record", allow_abbrev=False)
    commands = made.add_subparsers(required=True, dest="command")
    words = "replay a record, and say whether its log-probabilities are those of the replay"
    check = commands.add_parser("check", help=words, description=words, allow_abbrev=False)
    check.add_argument("file", metavar="FILE", help="record, a safetensors file (docs/record.md)")
    check.add_argument("--model", required=True, metavar="FOLDER", help="weights that drew it, a Hugging Face folder")
    check.add_argument("--tolerance", type=float, default=1e-3, help="difference in nats that is rounding")
    check.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the replay")
    check.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device of the replay")
    words = "say whether two records say the same, in whatever order and pieces"
    compare = commands.add_parser("compare", help=words, description=words, allow_abbrev=False)
    compare.add_argument("file", metavar="FILE")
    compare.add_argument("other", metavar="OTHER")
    return made
