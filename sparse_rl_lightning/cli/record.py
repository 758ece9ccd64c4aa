"""``sparse-rl record``: whether an engine's record explains its log-probabilities, or says what another one says."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparse_rl_lightning.cli import options
from sparse_rl_lightning.cli.calibrate import device_of
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.policies.pretrained import load_model
from sparse_rl_lightning.text import say


def main(args: Sequence[str]) -> None:
    """Check a record, or compare two.

    Args:
        args: Arguments after ``sparse-rl record``.

    Raises:
        ValueError: If a record or a model cannot be read or do not belong together, or the answer is no.
    """
    from sparse_rl_lightning.integrations.record import check_record, read_record

    arguments = options.record().parse_args(args)
    record = read_record(arguments.file)
    if arguments.command == "compare":
        difference = record.difference(read_record(arguments.other))
        if difference:
            raise UserError(f"{arguments.file} and {arguments.other} do not say the same: {difference}.")
        say(f"{arguments.file} and {arguments.other} say the same.")
        return
    check_number("tolerance", arguments.tolerance, above=0)
    model = load_model(arguments.model, getattr(torch, arguments.dtype))
    model.to(device_of(arguments.device))  # type: ignore[arg-type]  # transformers' wrapper hides the signature
    verdict = check_record(record, model, arguments.tolerance)
    if not verdict.agrees:
        raise UserError(f"{arguments.file}: {verdict.text}")
    say(f"{arguments.file}: {verdict.text}")
