"""The overheads of :data:`H200` against every decode step that was measured on a GPU and is kept.

They are fitted to the steps on an H200. Those on an H100, of other models too, are held beside what follows for that
card.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import pytest

from benchmarks.rollout.cells import BUFFER, NEW_TOKENS, compressors
from docs.quoted import RESULTS as FOLDER
from docs.quoted import Row, measured
from sparse_rl_lightning.calibration import H200, CostModel, Hardware, ModelShape, Work
from sparse_rl_lightning.compressors import RKV, Compressor, FullKV
from sparse_rl_lightning.planning import card_of

METHODS = compressors((512, 1024))
RESULTS = "../benchmarks/results"
CELLS = [
    row
    for row in measured(f"{RESULTS}/gpu-cells-1.5b.md", "Steps at given lengths")
    if row["tokens/s"] != "–" and row["cache"] in METHODS
]
MEMORY = "Equal memory: 40 GB, Qwen2.5-1.5B, length 16,384"
SETTLED = 1024 + 2 * BUFFER
"""A length after which a compressed cache is as full as it will be on average."""
H100 = card_of("h100-80gb").hardware
SMALL = ModelShape.of("qwen2.5-1.5b")


def number(cell: str) -> float:
    return float(cell.replace(",", "").rstrip("% "))


@dataclass(frozen=True)
class Kept:
    """A step that was measured."""

    shape: ModelShape
    hardware: Hardware
    method: Compressor
    work: Work
    seconds: float

    def parts(self, hardware: Hardware) -> tuple[float, float, CostModel]:
        """Seconds of products and of attention."""
        model = CostModel(self.shape, replace(hardware, layer_overhead=0.0, sequence_overhead=0.0))
        products = model.linear_seconds(self.work.batch)
        return products, model.step_seconds(self.method, self.work) - products, model

    @property
    def predicted(self) -> float:
        return CostModel(self.shape, self.hardware).step_seconds(self.method, self.work)


def of_cell(row: Row, batch: str, length: int) -> Kept:
    work = Work(int(batch), length, NEW_TOKENS)
    return Kept(SMALL, H200, METHODS[row["cache"]], work, 1e-3 * number(row["ms per step"]))


def of_larger(model: str, row: Row) -> Kept:
    """The steps alone behind a share: all of the 256 slots decode."""
    seconds = 256 / number(row["tokens/s"]) * number(row["share of steps alone"]) / 100
    work = Work(256, SETTLED, NEW_TOKENS)
    return Kept(ModelShape.of(model.lower()), H100, METHODS[row["cache"]], work, seconds)


ON_H200 = [of_cell(row, row["batch"], int(number(row["length"]))) for row in CELLS]
ON_H200 += [of_cell(row, row["slots"], 16384) for row in measured(f"{RESULTS}/gpu-memory.md", MEMORY)]
ON_H100 = [
    of_larger(model, row)
    for model in ("Qwen3-1.7B", "Qwen3-4B")
    for row in measured(f"{RESULTS}/gpu-whole-{model.lower()}.md", f"Whole rollouts, {model}")
    if row["cache"] in METHODS and row["tokens/s"] != "–"
]
PROFILE = (FOLDER / "gpu-profile.md").read_text()
PROFILED = [float(ms) for ms in re.findall(r"([\d.]+) ms per step", PROFILE)]
REDUNDANCY = [float(ms) for ms in re.findall(r"redundancy_kernel.*?\| ([\d.]+) \|", PROFILE)]
"""Of R-KV alone, at its worst: no key has a similar one. The model leaves it out."""
ON_H100 += [  # 256 slots: 272 entries without a compression, and full slots, of which two are compressed in every step
    Kept(SMALL, H100, FullKV(), Work(256, 264, 16), 1e-3 * PROFILED[0]),
    Kept(SMALL, H100, RKV(512, buffer=128), Work(256, SETTLED, 16), 1e-3 * (PROFILED[1] - sum(REDUNDANCY))),
]


def fitted(rows: list[Kept]) -> Hardware:
    """The overheads with the least relative errors of these steps, by least squares."""
    plain = Hardware(H200.bandwidth, H200.flops)
    parts = [row.parts(plain) for row in rows]
    layers = np.array([float(row.shape.num_layers) for row in rows])
    batches, seconds = np.array([row.work.batch for row in rows]), np.array([row.seconds for row in rows])
    columns = np.stack([layers, layers * batches, [attention for _, attention, _ in parts]], axis=1)
    rest = seconds - [products for products, _, _ in parts]
    layer, sequence, attention = np.linalg.lstsq(columns / seconds[:, None], rest / seconds, rcond=None)[0]
    return replace(plain, layer_overhead=layer, sequence_overhead=sequence, kv_share=1 / attention)


def distinct(rows: list[Kept]) -> list[Kept]:
    """Without those that measure again what another length has measured: full slots."""
    return list({(row.method, row.work.batch, row.method.evicts or row.work.prompt): row for row in rows}.values())


def test_the_overheads_are_those_that_fit_what_was_measured() -> None:
    assert len(distinct(ON_H200)) == 12
    found = fitted(distinct(ON_H200))
    assert H200.layer_overhead == pytest.approx(found.layer_overhead, rel=0.01)
    assert H200.sequence_overhead == pytest.approx(found.sequence_overhead, rel=0.01)
    assert H200.kv_share == pytest.approx(found.kv_share, rel=0.01)


@pytest.mark.parametrize(("rows", "most"), [(ON_H200, 0.08), (ON_H100, 0.15)], ids=["H200", "H100"])
def test_every_step_is_predicted(rows: list[Kept], most: float) -> None:
    assert len(rows) >= 6
    errors = [row.predicted / row.seconds - 1 for row in rows]
    assert max(map(abs, errors)) < most, [f"{100 * error:+.0f} %" for error in errors]


def test_a_step_is_predicted_by_the_others() -> None:
    rows = distinct(ON_H200)
    for row in rows:
        others = fitted([other for other in rows if other is not row])
        assert replace(row, hardware=others).predicted == pytest.approx(row.seconds, rel=0.11), row


def test_shares_of_the_floor_follow_from_the_same_speeds() -> None:
    for cell, row in zip(CELLS, ON_H200, strict=False):
        products, attention, _ = row.parts(Hardware(H200.bandwidth, H200.flops))
        floor = products + attention
        assert number(cell["floor ms"]) == pytest.approx(1e3 * floor, rel=0.006), cell
        assert number(cell["share of the floor"]) == pytest.approx(100 * floor / row.seconds, abs=0.6), cell
