"""Cases of hostile names, rows and files; no test of these may find a file ``PWNED`` afterwards."""

from __future__ import annotations

from cases.case import Case
from cases.data import columns

NAMES = [
    Case("a column with a path in its name", rows=columns(**{"../../x": 1}), slow=True),
    Case("markup and escape sequences in a column", rows=columns(x="<script>\x1b[2J=cmd|'/c calc'!A1"), slow=True),
]

TOPICS = {"Names": NAMES}
