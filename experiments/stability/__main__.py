"""The papers' claims at laptop scale: who collapses, what each correction brings, and what replay adds.

    python -m experiments.stability [--studies quiet main] [--seeds 10 11] [--jobs 2] [--save docs/measured]
    python -m experiments.stability --studies short --seeds 0        # minutes, not hours: who collapses

The protocol stands in docs/measured/stability.md. Every run is `sparse-rl fit` with a shipped configuration in a
process of its own, in a folder below --runs, from one warm-up per task. What an interrupted run has is kept: it goes
on from its last checkpoint. What a finished run came to is a line in --kept, a file of the repository, and a run that
has one is not run again, unless its rewards, task or compressor have other code now: delete the line to have it anew.
Seeds come one after the other, so that an early end leaves whole ones. --save writes what the front pages rest on,
`again`, and `centered`; the tables of the other studies stand on the page as they were measured.
"""

from experiments.runner.command import Program, main
from experiments.stability.studies import GROUPS
from experiments.stability.tables import again_table, centered_table, overview

PROGRAM = Program(
    "stability",
    GROUPS,
    blocks={"again": ("again", again_table), "overview": ("again", overview), "centered": ("centered", centered_table)},
    pages={"again": "stability.md", "overview": "../results.md", "centered": "stability.md"},
    optional=("short",),
    together=(
        ("quiet", "main", "tight", "steps", "control", "spiral"), ("countdown",), ("again", "remedies"), ("centered",),
        ("short",),
    ),
)  # fmt: skip

if __name__ == "__main__":
    main(PROGRAM, __doc__)
