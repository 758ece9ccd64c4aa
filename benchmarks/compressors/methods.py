"""The compressors that are compared, all with the same sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from sparse_rl_lightning.budgets import Adaptive, Pyramid
from sparse_rl_lightning.compressors import (
    CUR,
    H2O,
    RKV,
    TOVA,
    Combined,
    Compressor,
    ExpectedAttention,
    FullKV,
    KeyDiff,
    KNorm,
    LagKV,
    QFilters,
    QueryStatistics,
    RandomEviction,
    SnapKV,
    StreamingLLM,
    TriAttention,
    VaSE,
)

DENSE, FLOOR, REDRAWN = "FullKV", "RandomEviction", "RandomEviction, drawn anew"
PYRAMID_BETA = 2  # the paper's 20 would leave the last layer less than sinks and window


@dataclass(frozen=True)
class SlotSizes:
    """What all compressors of a comparison have in common."""

    buffer: int
    num_sinks: int
    window: int


def compressors(
    budget: int, sizes: SlotSizes, statistics: QueryStatistics, prompt_length: int = 0
) -> dict[str, Compressor]:
    """Every compressor by the name of its row, but for those that this budget is too small for.

    Args:
        budget: Tokens kept per layer and KV head.
        sizes: Buffer, sinks and window.
        statistics: Of the policy's queries, for the methods that are calibrated.
        prompt_length: Tokens of the longest prompt, if prompts are never evicted; 0 if they may be.
    """
    if budget < prompt_length + sizes.window:
        return {DENSE: FullKV()}
    common: dict[str, Any] = {"budget": budget, **asdict(sizes), "protect_prompt": prompt_length > 0}

    def make(method: Callable[..., Compressor], **options: Any) -> Compressor:
        return method(**common, **options)

    quarter = max(2, (budget + sizes.buffer - sizes.num_sinks) // 4)
    methods = {
        DENSE: FullKV(),
        FLOOR: make(RandomEviction),
        REDRAWN: make(RandomEviction, redraw=True),
        "StreamingLLM": make(StreamingLLM),
        "KNorm": make(KNorm),
        "KeyDiff": make(KeyDiff),
        "CUR": make(CUR),
        "LagKV": make(LagKV, lag_size=quarter),
        "TOVA": make(TOVA),
        "H2O": make(H2O),
        "SnapKV": make(SnapKV),
        "RKV": make(RKV),
        "VaSE": make(VaSE),
        "ExpectedAttention": make(ExpectedAttention),
        "QFilters": make(QFilters, statistics=statistics),
        "TriAttention": make(TriAttention, statistics=statistics),
        "SnapKV, Pyramid": make(SnapKV, budget_rule=Pyramid(beta=PYRAMID_BETA)),
        "SnapKV, Adaptive": make(SnapKV, budget_rule=Adaptive()),
        "Combined SnapKV, one set per layer": Combined([make(SnapKV)], across_heads="max"),
        "Combined SnapKV and KeyDiff": Combined([make(SnapKV), make(KeyDiff)]),
    }
    if budget < PYRAMID_BETA * (max(sizes.num_sinks, prompt_length) + sizes.window):
        del methods["SnapKV, Pyramid"]  # its last layer would keep less than these
    return methods
