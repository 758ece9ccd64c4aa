"""Training on completions of a thousand tokens under a quarter of their KV cache: sums of eighty numbers.

    python -m experiments.long [--seeds 0 1 2] [--jobs 2]

The policy has 3 M parameters and learns longer and longer sums before (experiments/long/studies.py). Every run is
`sparse-rl fit` in a process of its own; a finished one is a line in --kept, and is not run again unless its code has
changed.
"""

from experiments.long.studies import QUARTER
from experiments.runner.command import Program, main

PROGRAM = Program("long", {"quarter": (QUARTER,)})

if __name__ == "__main__":
    main(PROGRAM, __doc__)
