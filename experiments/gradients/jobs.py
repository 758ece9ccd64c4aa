"""What one process of ``experiments.gradients`` measures: every missing case at one policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.common.pages import machine
from experiments.gradients.agreement import cosine, estimate, length, noise, projection
from experiments.gradients.measure import FULL, Samples, gram, measured
from sparse_rl_lightning.compressors import FullKV

CASES: tuple[tuple[str, int], ...] = (("SnapKV", 34), ("SnapKV", 30), ("SnapKV", 26), ("R-KV", 30), ("R-KV", 26))


@dataclass(frozen=True)
class Job:
    """Everything that is measured at one policy."""

    name: str
    policy: str
    samples: Samples
    missing: tuple[tuple[str, int], ...]

    def __call__(self) -> list[dict[str, Any]]:
        """A line per case and variant."""
        torch.set_num_threads(1)
        full = measured(self.policy, FullKV(), self.samples)
        return [line for case in self.missing for line in self._case(case, full.by_variant)]

    def _case(self, case: tuple[str, int], full: dict[str, Any]) -> Iterator[dict[str, Any]]:
        own = measured(self.policy, self.samples.compressor(*case), self.samples)
        products = gram(full | own.by_variant)
        for place, variant in enumerate((FULL, *own.by_variant)):
            numbers = {
                measure.__name__: asdict(estimate(measure, products, 0, place))
                for measure in (cosine, length, projection, noise)
            }
            yield {
                "weights": self.name, "method": case[0], "budget": case[1], "variant": variant, **numbers,
                **own.statistics, "samples": asdict(self.samples), "machine": machine("cpu"),
            }  # fmt: skip
