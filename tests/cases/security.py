"""Cases of hostile names, rows and files; no test of these may find a file ``PWNED`` afterwards."""

from __future__ import annotations

import os

from cases.case import Case
from cases.data import columns

NAMES = [
    Case("a column with a path in its name", rows=columns(**{"../../x": 1}), slow=True),
    Case("markup and escape sequences in a column", rows=columns(x="<script>\x1b[2J=cmd|'/c calc'!A1"), slow=True),
]

PIPES = [
    Case("a pipe as checkpoint", "it is a pipe, a socket or a device, not a file", 1,
         "--ckpt_path=pipe", prepare=lambda folder: os.mkfifo(folder / "pipe")),
    Case("a device that never ends as checkpoint", "it is a pipe, a socket or a device, not a file", 1,
         "--ckpt_path=endless", prepare=lambda folder: (folder / "endless").symlink_to("/dev/zero")),
    Case("a pipe in a model folder", "it is a pipe, a socket or a device, not a file", 1,
         policy=lambda folder: os.mkfifo(folder / "merges.txt")),
    Case("escape sequences in a key", r"\x1b[2J", 2, text=lambda text: f'"\\e[2J": 1\n{text}'),
    Case("escape sequences in a file's name", r"\x1b[2J", 1, "--ckpt_path='\x1b[2J'"),
    Case("escape sequences in a class", r"\x1b[2J", 2,
         edit=lambda values: values["model"].update(class_path="\x1b[2J")),
]  # fmt: skip

CASES = [*NAMES, *PIPES]
