"""Training on conversations with a calculator under a cache that forgets: which arm learns, and what it forgets.

    python -m experiments.turns [--seeds 0 1 2]
    python -m experiments.turns --studies smaller                    # a smaller cache

Every run is `sparse-rl fit` of `configs/tools.yaml` with one thing changed, in a process and a folder of its own below
--runs, from one warm-up. An interrupted run goes on from its last checkpoint. A finished one is a line in --kept and is
not run again, unless its environment, task or compressor has other code now. The lines of docs/measured/turns.md are
there too, by the names of arm and seed.
"""

from experiments.runner.command import Program, main
from experiments.runner.ends import Ends, ends_table
from experiments.turns.studies import SMALLER, USUAL

PROGRAM = Program(
    "turns",
    {"usual": (USUAL,), "smaller": (SMALLER,)},
    optional=("smaller",),
    line=Ends,
    plain=ends_table,
)

if __name__ == "__main__":
    main(PROGRAM, __doc__)
