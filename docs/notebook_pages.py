"""Notebooks as pages of the site: cells in Markdown, code and what it showed."""

from __future__ import annotations

import re
from typing import Any

import nbformat


def markdown_of(text: str) -> str:
    """The Markdown of a notebook's file; the site's pages are one folder above it."""
    cells = nbformat.reads(text, as_version=4).cells
    parts = [part for cell in cells for part in ([cell.source] if cell.cell_type == "markdown" else _code(cell))]
    return "\n\n".join(parts).replace("](../docs/", "](../") + "\n"


def _code(cell: Any) -> list[str]:
    return [_fenced(cell.source, "python"), *(part for output in cell.outputs for part in _shown(output))]


def _shown(output: Any) -> list[str]:
    """A stream, a picture, HTML, or the text that stands for what a cell returned."""
    if output.output_type == "stream":
        return [_fenced(output.text.rstrip("\n"), "text")]
    data = output.get("data", {})
    if "image/png" in data:
        picture = "".join(data["image/png"].split())
        return [f"![Output of the cell above](data:image/png;base64,{picture})"]
    if "text/html" in data:
        return [_fenced(data["text/html"], "{raw} html")]
    return [_fenced(data["text/plain"], "text")] if data.get("text/plain") else []


def _fenced(text: str, language: str) -> str:
    """A block whose fence is longer than any in it."""
    longest = max((len(ticks) for ticks in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
