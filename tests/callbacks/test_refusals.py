"""Options that no callback can act on are refused when they are given; more of them stand in tests/bad_inputs.md."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tiny_grpo import module

from sparse_rl_lightning.callbacks import (
    CIS,
    AcceptanceMonitor,
    CompletionsTable,
    MismatchSplit,
    RolloutProgress,
    SparsityAwareRejection,
    StepGuard,
    TailGuard,
)
from sparse_rl_lightning.modules import GRPOLoss

NAN, INF = float("nan"), float("inf")
COUNTS = ("every_n_rollouts", "top_k", "bin_size", "num_bins", "ceiling_every_n_rollouts")
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: SparsityAwareRejection(low=2.0, high=1.0), r"low=2\.0, high=1\.0"),
    (lambda: SparsityAwareRejection(threshold=None), "threshold, low and high are all null"),
    (lambda: SparsityAwareRejection(level="geometric"), "give low or high"),
    (lambda: CIS(threshold=-1.0), "threshold must be at least 0"),
    (lambda: CIS(floor=-1.0), "floor must be at least 0"),
    (lambda: GRPOLoss(off_policy_delta=-1.0), r"loss\.off_policy_delta must be at least 0"),
    (lambda: GRPOLoss(off_policy_reference="dense"), r"loss\.off_policy_reference must be"),  # type: ignore[arg-type]
    (lambda: module(reward_timeout=NAN), "reward_timeout must be"),
    (lambda: module(reward_timeout=INF), "reward_timeout must be"),
    (lambda: CompletionsTable(width=3), "width=3"),
    (lambda: RolloutProgress(line_seconds=-1), "line_seconds=-1"),
    *[
        (lambda name=name: AcceptanceMonitor(**{name: 0}), f"{name} must be at least 1, got {name}=0")
        for name in COUNTS
    ],
    (lambda: MismatchSplit(every_n_rollouts=0), "every_n_rollouts must be at least 1, got"),
    (lambda: MismatchSplit(tolerance=0.0), "tolerance must be above 0, got"),
    (lambda: StepGuard(max_staleness_ratio=0.5), "StepGuard: max_staleness_ratio must be at least 1"),
    (lambda: StepGuard(spike_factor=0.5), "StepGuard: spike_factor must be at least 1"),
    (lambda: TailGuard(True), "mode must be one of off, warn, raise, stop, got mode=True"),  # type: ignore[arg-type]
    (lambda: TailGuard("loud"), "mode='loud'"),  # type: ignore[arg-type]
    (lambda: TailGuard(target=1.5), "target=1.5"),
    (lambda: TailGuard(max_raises=-1), "max_raises=-1"),
    (lambda: TailGuard(max_rejection_rate=0.0), "max_rejection_rate=0.0"),
    (lambda: TailGuard(length_drop=1.2), "length_drop=1.2"),
    (lambda: TailGuard(min_tokens=0), "min_tokens=0"),
    (lambda: TailGuard(window=0), "window=0"),
    (lambda: TailGuard(patience=0), "patience=0"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_an_option_out_of_range_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
