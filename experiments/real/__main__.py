"""The papers' question on a real instruct model: does training collapse under a compressed cache, and what saves it?

    python -m experiments.real --studies rates                       # dense alone: rates and steps per rollout
    python -m experiments.real --studies main [--seeds 20 21] [--jobs 2] [--save docs/measured]
    python -m experiments.real --studies learned                     # does a learned eviction pass the best rule?
    python -m experiments.real --studies cell                        # four runs of main again, on one machine
    python -m experiments.real --studies centered equivalence        # PROTOCOL.md's last two comparisons

The protocol is experiments/real/PROTOCOL.md. The model is SmolLM2-135M-Instruct (`make real-model`), the task a story
with six given words. Every run is `sparse-rl fit` in a process of its own, six to nine minutes on a core. What a
finished one came to is a line in --kept, and it is not run again unless its code has changed: task and reward, which
are files of the study, caches, corrections and losses. Lines of `cell` have a file of their own,
real_again.jsonl, and replace none. --save writes all but `rates` and `learned`, whose tables stand on the page as they
were measured.
"""

from functools import partial

from benchmarks import REAL
from experiments.real.studies import CELL, CENTERED, EQUIVALENCE, LEARNING_TO_EVICT, MAIN, RATES
from experiments.real.tables import against_dense, arms_table, cell_table, centered_table, overview
from experiments.runner.command import Program, main
from experiments.runner.tables import equivalence_table

PROGRAM = Program(
    "real",
    {
        "rates": RATES,
        "main": MAIN,
        "learned": LEARNING_TO_EVICT,
        "cell": (CELL,),
        "centered": (CENTERED,),
        "equivalence": (EQUIVALENCE,),
    },
    blocks={
        "main": ("main", arms_table),
        "overview": ("main", overview),
        "readme": ("main", against_dense),
        "cell": ("cell", cell_table),
        "centered": ("centered", centered_table),
        "equivalence": ("equivalence", partial(equivalence_table, study=EQUIVALENCE)),
    },
    pages={
        "main": "real.md",
        "overview": "../results.md",
        "readme": "../../README.md",
        **dict.fromkeys(("cell", "centered", "equivalence"), "real.md"),
    },
    together=(("rates",), ("main", "learned"), ("cell",), ("centered",), ("equivalence",)),
    policy=REAL,
    is_tidy=True,
)

if __name__ == "__main__":
    main(PROGRAM, __doc__)
