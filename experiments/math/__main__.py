"""The papers' question on mathematics: does training under a compressed cache reach what dense training reaches?

    python -m experiments.math --studies rates                       # dense alone, which chooses the recipe
    python -m experiments.math --studies main [--seeds 40 41] [--jobs 2]
    python -m experiments.math --studies card --device gpu           # some minutes of a large one: a curve per run

The protocol is experiments/math/PROTOCOL.md. The model is Qwen2.5-Coder-0.5B-Instruct (`make math-model`), the task are
word problems of two to four steps (examples/word_problems.py). Every run is `sparse-rl fit` in a process of its own.
What a finished one came to is a line in --kept, and it is not run again unless its code has changed.
"""

from functools import partial

from benchmarks import CODER
from experiments.math.curves import Curve, curves_table
from experiments.math.studies import CARD, MAIN, RATES
from experiments.runner.command import Program, main
from experiments.runner.tables import equivalence_table

PROGRAM = Program(
    "math",
    {"rates": RATES, "main": (MAIN,), "card": (CARD,)},
    blocks={"main": ("main", partial(equivalence_table, study=MAIN)), "card": ("card", curves_table)},
    optional=("main", "card"),
    policy=CODER,
    target="math-model",
    line=Curve,
    is_tidy=True,
)

if __name__ == "__main__":
    main(PROGRAM, __doc__)
