"""``sparse-rl report``: the page of a run, finished or not, or one page that compares several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparse_rl_lightning.cli import options
from sparse_rl_lightning.cli.options import ONE, SEVERAL
from sparse_rl_lightning.files import output_file, whole_file, write_whole
from sparse_rl_lightning.report import MARK, comparison, page, read_run
from sparse_rl_lightning.text import say


def main(args: Sequence[str]) -> Path:
    """Read the runs, write the page.

    Args:
        args: Arguments after ``sparse-rl report``.

    Returns:
        The path of the page.

    Raises:
        ValueError: If a folder contains no readable run, two have one name, or the page cannot be written.
    """
    arguments = options.report().parse_args(args)
    folders = [Path(folder).expanduser() for folder in arguments.folders]
    records = [(str(folder), read_run(folder)) for folder in folders]
    usual = folders[0] / ONE if len(folders) == 1 else Path(SEVERAL)
    output = Path(arguments.output).expanduser() if arguments.output else usual
    target = output_file(
        output,
        "--output",
        bool(arguments.output),
        lambda path: arguments.overwrite or MARK in whole_file(path)[: 2**12],
    )
    write_whole(target, page(records[0][1]) if len(records) == 1 else comparison(records))
    for name, record in records:
        for warning in record.warnings:
            if "file" in warning:  # from the reader, not from a file
                say(f"{name}: {warning['text']}")
    say(f"Written: {output}")
    return output
