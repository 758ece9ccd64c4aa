"""Results of an evaluation on disk: what was measured under which settings, so that a later run can take them up."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparse_rl_lightning.files import file_name, own_folder, write_parquet, write_whole
from sparse_rl_lightning.metrics import Accuracy
from sparse_rl_lightning.rewards.math import Convention
from sparse_rl_lightning.text import say


@dataclass(frozen=True)
class BenchmarkResult:
    """One benchmark under one cache."""

    benchmark: str
    arm: str  # the cache: dense, or a compressor with its budget
    fingerprint: str  # of everything that decides the result
    accuracy: Accuracy  # of answers that count strictly
    lenient: Accuracy  # of answers that graders of papers pay
    mean_length: float  # tokens
    clipped: float  # share of completions cut off by the length limit
    kv_saving_final: float  # share of KV tokens not stored at the end of the sequences
    kv_saving_integral: float  # the same over all decode steps
    kv_peak_bytes: int
    seconds: float
    counters: dict[str, int] = field(default_factory=dict)  # of the answer checker
    too_long: int = 0  # problems for which the context has no room: not sampled, wrong in accuracy, in nothing else

    def by(self, answers: Convention) -> Accuracy:
        """The accuracy by a convention of what counts as the answer."""
        return self.accuracy if answers == "strict" else self.lenient

    @property
    def measure(self) -> str:
        """``Pass@1``, or ``Avg@32``."""
        samples = self.accuracy.num_samples
        return "Pass@1" if samples == 1 else f"Avg@{samples}"


class ResultFolder:
    """A JSON and a parquet file for every benchmark and cache; the JSON is written last and says that both are whole.

    Args:
        path: The folder, created when something is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, benchmark: str, arm: str, fingerprint: str) -> BenchmarkResult | None:
        """A finished result of the same settings, None if there is none or it was judged by one convention only."""
        file = self._file(benchmark, arm, "json")
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(stored, dict) or stored.get("benchmark") != benchmark:
            return None
        if "lenient" not in stored:
            say(f"{file} was written when answers were judged by one convention only: {benchmark} is evaluated again.")
            return None
        if stored.get("fingerprint") != fingerprint:
            return None
        for name in ("accuracy", "lenient"):
            counts = stored[name]
            counts["pass_at"] = {int(k): value for k, value in counts["pass_at"].items()}
            stored[name] = Accuracy(**counts)
        return BenchmarkResult(**stored)

    def save(self, result: BenchmarkResult, completions: Mapping[str, list[Any]]) -> None:
        """Write both files.

        Args:
            result: What was measured.
            completions: Columns with a value per completion.
        """
        path = self._file(result.benchmark, result.arm, "json")
        own_folder(self.path)
        own_folder(path.parent)
        write_parquet(path.with_suffix(".parquet"), completions)
        write_whole(path, json.dumps(dataclasses.asdict(result), indent=2) + "\n")

    def write(self, name: str, content: str | bytes) -> Path:
        """Write another file and return where."""
        own_folder(self.path)
        write_whole(self.path / name, content)
        return self.path / name

    def _file(self, benchmark: str, arm: str, suffix: str) -> Path:
        return self.path / file_name(arm) / f"{file_name(benchmark)}.{suffix}"
