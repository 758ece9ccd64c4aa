"""Pieces of a page: escaped text, tables, and the document around them, which loads nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape

from sparse_rl_lightning.report.assets import SCRIPT, STYLE
from sparse_rl_lightning.text import printable


def text(value: str) -> str:
    """Escaped for HTML, line breaks kept, control characters visible."""
    return escape("\n".join(printable(line) for line in value.split("\n")))


def table(rows: Sequence[Sequence[str]], caption: str, numbers: bool = False) -> str:
    """A table that scrolls inside itself where it is too wide; the first row and column are its headers.

    Args:
        rows: Equally long rows of plain text, the header first.
        caption: What the table is, also for screen readers.
        numbers: Columns after the first are numbers, aligned to the right.
    """
    head = "".join(f'<th scope="col">{text(cell)}</th>' for cell in rows[0])
    body = "\n".join(
        f'<tr><th scope="row">{text(row[0])}</th>' + "".join(f"<td>{text(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows[1:]
    )
    kind = ' class="numbers"' if numbers else ""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{text(caption)}"><table{kind}>'
        f"<caption>{text(caption)}</caption><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>"
    )


def folded(title: str, content: str) -> str:
    """Something long that opens when asked for."""
    return f"<details><summary>{text(title)}</summary>{content}</details>"


def document(title: str, body: str) -> str:
    """The whole page. Its policy allows the one script and the one style sheet by their hashes, and nothing else.

    Args:
        title: Plain text.
        body: HTML, whose text is escaped already.
    """
    policy = f"default-src 'none'; script-src '{_hash(SCRIPT)}'; style-src '{_hash(STYLE)}'; base-uri 'none'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{text(title)}</title>
<style>{STYLE}</style>
</head>
<body><main>
{body}
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
