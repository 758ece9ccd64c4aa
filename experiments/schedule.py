"""A calibrated schedule against a fixed budget of the same mean cost, on the quickstart.

    python -m experiments.schedule [--seeds 0 1 2] [--jobs 2]

The schedule is one that ``sparse-rl calibrate --config configs/calibrate.yaml`` allows: of those, one for each target,
that with the highest target was taken which reads no more of the cache than the fixed budget does, averaged over the
tokens of dense completions (docs/measured/sparrow.md). Both train the quickstart's policy with all else equal.
"""

import json

from experiments.quickstart import USUAL, Quickstart
from experiments.runner.command import Program, main
from experiments.runner.runs import Arm

SCHEDULE = {"starts": [0, 24, 28, 40, 48], "budgets": [20, 24, 28, 32, 44]}
SPELLED = json.dumps({"class_path": "LengthSchedule", "init_args": SCHEDULE})
ARMS = (
    Arm("fixed", "quickstart"),
    Arm("schedule", "quickstart", options={"compressor.init_args.budget": SPELLED}),
)
PROGRAM = Program("schedule", {"schedule": (Quickstart("RKV", 30, ARMS, USUAL, (0, 1, 2)),)})

if __name__ == "__main__":
    main(PROGRAM, __doc__)
