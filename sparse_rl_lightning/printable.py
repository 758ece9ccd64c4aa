"""Text from a model, made safe to print: it may hold anything a language model can spell."""

from __future__ import annotations


def printable(text: str, width: int | None = None) -> str:
    r"""One line without control characters, which could take over a terminal; long text loses its middle.

    Line breaks become ``\n``; escape sequences, invisible and text-direction characters and lone surrogates become
    their escapes.

    Args:
        text: Any text.
        width: Most characters to return, None for all.
    """
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if width is None or len(line) <= width:
        return line
    head = (width - 1) // 2
    return f"{line[:head]}…{line[len(line) - (width - 1 - head) :]}"
