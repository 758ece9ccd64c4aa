"""Dense, naive, Sparse-RL, replay and every correction on the quickstart's task, from the same warm-up.

    python -m experiments.arms [--studies budgets corrections] [--jobs 2]

The four arms run under two budgets, the corrections under the harder one. All runs of a seed see the same prompts in
the same order, and all are evaluated greedily on the same held-out problems with the full cache and under the
compressor. The page of the runs of before is docs/measured/arms.md.
"""

from experiments.quickstart import USUAL, Quickstart
from experiments.runner.command import Program, main
from experiments.runner.runs import DENSE, NAIVE, OFFICIAL, PAPER, REPLAY, SPARSE_RL, Arm

ARMS = (DENSE, NAIVE, PAPER, REPLAY)
CORRECTIONS = (
    NAIVE,
    PAPER,
    SPARSE_RL,
    OFFICIAL,
    Arm("SparsityAwareRejection", "naive", ("SparsityAwareRejection",)),
    *(
        Arm(name, "naive", (name,))
        for name in ("TIS", "IcePop", "SequenceTIS", "GeometricTIS", "SequenceMIS", "SequenceMaskTIS", "CIS")
    ),
    Arm("MIS", "naive", ("MIS",), {"loss.denominator": "kept_tokens"}),
    Arm("off-policy masking", "naive", (), {"loss.off_policy_delta": 1e-4}),
    REPLAY,
    Arm(
        "replay, mixed with Sparse-RL (paper)",
        "replay",
        ("SparsityAwareRejection", "ImportanceReweighting"),
        {"replay_objective": "mixed"},
    ),
    DENSE,
)
JUDGED = (30, 26)
PROGRAM = Program(
    "arms",
    {
        "budgets": [Quickstart("RKV", budget, ARMS, USUAL, (0,), JUDGED) for budget in JUDGED],
        "corrections": (Quickstart("RKV", 26, CORRECTIONS, USUAL, (0,), JUDGED),),
    },
)

if __name__ == "__main__":
    main(PROGRAM, __doc__)
