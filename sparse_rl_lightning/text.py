"""Text for people: safe printing of model output, numbers and tables in reports, printing beside a progress bar."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from sparse_rl_lightning.errors import UserError

DASH = "–"
"""Shown where nothing was measured."""
BYTE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def printable(text: str, width: int | None = None) -> str:
    r"""One line without control characters, which could take over a terminal; long text loses its middle.

    Line breaks become ``\n``; escape sequences, invisible and text-direction characters and lone surrogates become
    their escapes.

    Args:
        text: Any text.
        width: Largest number of characters to return, None for all.
    """
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if width is None or len(line) <= width:
        return line
    head = (width - 1) // 2
    return f"{line[:head]}…{line[len(line) - (width - 1 - head) :]}"


def visible(text: str) -> str:
    """Text as :func:`printable` shows it, with its line breaks."""
    return "\n".join(map(printable, text.split("\n")))


def say(text: str, file: TextIO | None = None) -> None:
    """Print :func:`visible` text above any progress bar, at once; what the terminal cannot encode becomes escapes.

    Without a ``file`` it is what the process has as its standard output by then.
    """
    file = file or sys.stdout
    encoding = getattr(file, "encoding", None) or "utf-8"
    tqdm.write(visible(text).encode(encoding, "backslashreplace").decode(encoding), file=file)
    if file is not None:  # of a process without standard output
        file.flush()  # a log that is followed would wait for kilobytes


def shortened(text: str, width: int) -> str:
    """Long text without its middle, which is replaced by its length: a model may write megabytes."""
    if len(text) <= width:
        return text
    head = width // 2
    tail = width - head
    return f"{text[:head]} … [{len(text) - width:,} characters left out] … {text[-tail:]}"


def shown(value: Any, width: int = 200) -> str:
    """What users' code returned or raised, for messages: its first ``width`` characters, unable to steer a terminal."""
    try:
        text = ascii(value)
    except Exception:  # its own __repr__ raises
        return type(value).__name__
    return text if len(text) <= width else f"{text[:width]}..."


def nearby(path: Path) -> str:
    """A path for messages: from the working directory if it is below it."""
    with suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def prompt_text(prompt: Any) -> str:
    """A prompt as text: itself, or its chat messages one per line."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)


def table(rows: Sequence[Sequence[str]], right: str = "") -> str:
    """Aligned columns, two spaces apart, with a rule under the first row.

    Args:
        rows: Rows of one-line cells, equally long, the header first.
        right: Alignment of each column, ``r`` for right; missing ones are left-aligned.
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    sides = right.ljust(len(widths), "l")
    lines = []
    for row in rows:
        cells = [c.rjust(w) if side == "r" else c.ljust(w) for c, w, side in zip(row, widths, sides, strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def number(value: float | None, digits: int = 3) -> str:
    """A number for people: ``0.312``, or a dash without one."""
    return DASH if value is None or value != value else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share for people: ``31.2 %``, or a dash."""
    return DASH if value is None or value != value else f"{100 * value:.1f} %"


def interval(mean: float, low: float, high: float) -> str:
    """A share with its bounds in percent: ``31.2 [25.0, 37.9]``."""
    return f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def size(num_bytes: float | None) -> str:
    """Bytes for people, in powers of 1024."""
    if num_bytes is None:
        return DASH
    unit, factor = byte_unit(num_bytes)
    return f"{num_bytes / factor:.{0 if factor == 1 else 1}f} {unit}"


def byte_unit(num_bytes: float) -> tuple[str, int]:
    """The largest unit that a number of bytes fills, and its size."""
    return next((unit, factor) for unit, factor in BYTE_UNITS if num_bytes >= factor or factor == 1)


def duration(seconds: float) -> str:
    """Seconds for people: ``4 min 07 s``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def compiled(pattern: str, name: str) -> re.Pattern[str]:
    """A user's regular expression, given as the argument ``name``.

    Raises:
        ValueError: If it is none.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"{name}={pattern!r} is not a regular expression: {error}.") from error
