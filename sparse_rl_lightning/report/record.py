"""The record of a run: the numbers behind its table, picture and page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SUMMARY, PROGRESS = "summary.json", "progress.json"
"""Files that RunSummary writes: at the end, and until then."""
BESIDE = ("title", "state", "written", "settings", "config", "versions", "warnings", "validation", "samples", "worst")
"""Fields of a file besides its summary and history."""
ROUNDING = "mismatch_split/rounding/kl_k3"
REPLAYED = "replayed"
"""The key of rows whose old log-probs are replayed ones, so that ``mismatch/`` there is that of rounding."""
UNDER_REPLAY = {
    "mismatch/kl_k3": "mismatch_split/compression/kl_k3",
    "mismatch/ratio_p05": "mismatch_split/compression/ratio_p05",
    "sampling/importance_sampling_ratio/min": None,  # known of rounding alone
    ROUNDING: "mismatch/kl_k3",
}
"""The keys under which such rows have what others have under these."""


@dataclass
class RunRecord:
    """A run in plain numbers and text, independent of torch.

    ``before`` and ``after`` are mean rewards of greedy completions on held-out problems by cache, ``dense`` and
    ``sparse``; either may be missing. ``history`` has one row per rollout with the keys of
    :mod:`sparse_rl_lightning.metrics.rollout` and the values that callbacks logged with it. ``validation`` has one row
    per validation, the rollouts before it as ``rollout`` and accuracies by cache. A sample has ``prompt``,
    ``completion``, ``reward`` and ``cache``, and ``answer`` if the data has one; one of ``worst`` has ``rollout``,
    ``kinds`` (why it is shown), ``rejected`` and its most mismatched token instead of the cache. A warning has
    ``text``, and ``rollout``, or ``file`` if it is about reading one.
    """

    history: list[dict[str, float]] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    num_problems: int = 0
    measure: str = "reward"  # "accuracy" if all rewards are 0 or 1
    seconds: float = 0.0  # wall time of training
    steps: int = 0  # optimizer steps
    settings: dict[str, str] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    title: str = "Sparse-RL run"
    validation: list[dict[str, float]] = field(default_factory=list)
    worst: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, str] = field(default_factory=dict)  # every key of the configuration, written with dots
    versions: dict[str, str] = field(default_factory=dict)
    state: str = "finished"  # "running" until then; a sentence if an error ended the run
    written: str = ""  # time of writing, UTC

    def points(self, key: str, factor: float = 1.0) -> list[tuple[float, float]]:
        """Rollout and value times a factor, wherever both are numbers."""
        pairs = [(row.get("rollout", float(index)), _value(row, key)) for index, row in enumerate(self.history)]
        return [(x, factor * y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]

    def mean(self, key: str) -> float | None:
        """The mean over the rollouts that have it, None if none has."""
        values = self._values(key)
        return sum(values) / len(values) if values else None

    def median(self, key: str) -> float | None:
        """The median over the rollouts that have it, None if none has: of what one rollout can dominate."""
        values = self._values(key)
        return statistics.median(values) if values else None

    def maximum(self, key: str) -> float | None:
        """The largest value over the rollouts, None if none has one."""
        return max(self._values(key), default=None)

    def summary(self) -> dict[str, Any]:
        """The run in a few numbers: means over rollouts, medians of KL and speed, maxima of peaks; shares to 1."""
        return {
            "rollouts": len(self.history),
            "optimizer_steps": self.steps,
            "wall_time_seconds": self.seconds,
            "held_out_problems": self.num_problems,
            "measure": self.measure,
            "before": dict(self.before),
            "after": dict(self.after),
            "kv_saving_final": self.mean("kv/saving_final"),
            "kv_saving_integral": self.mean("kv/saving_integral"),
            "kv_peak_bytes": self.maximum("kv/peak_bytes"),
            "kv_full_peak_bytes": self.maximum("kv/full_peak_bytes"),
            "rejection_rate": self.mean("rejection_rate"),
            "token_mask_rate": self.mean("token_mask_rate"),
            "mismatch_kl_k3": self.median("mismatch/kl_k3"),
            "rounding_kl_k3": self.median(ROUNDING),
            "repetition_rate": self.mean("completions/repetition_rate"),
            "tokens_per_second": self.median("time/tokens_per_second"),
        }

    def as_json(self) -> dict[str, Any]:
        """All fields, with null for numbers that JSON does not support."""
        parts = {"summary": self.summary(), **{name: getattr(self, name) for name in BESIDE}, "history": self.history}
        cleaned: dict[str, Any] = _finite(parts)
        return cleaned

    def _values(self, key: str) -> list[float]:
        return [value for _, value in self.points(key)]


def _value(row: Mapping[str, float], key: str) -> float:
    """A row's value of a key, NaN without one."""
    logged = UNDER_REPLAY.get(key, key) if REPLAYED in row else key
    return math.nan if logged is None else row.get(logged, math.nan)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
