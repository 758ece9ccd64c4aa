"""experiments.gradients: what agreement means, where one token leads, and that the measurement is of the real loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import ROOT
from experiments.gradients import one_token
from experiments.gradients.__main__ import FALLEN, SOURCES, missing
from experiments.gradients.agreement import cosine, estimate, length, noise, projection
from experiments.gradients.jobs import CASES
from experiments.gradients.measure import FULL, Samples, gram, measured
from experiments.gradients.page import ORDER, picture, tables
from experiments.gradients.variants import VARIANTS
from experiments.stability.outcomes import fall
from experiments.stability.records import Archive, key_of
from experiments.stability.studies import MAIN, planned
from sparse_rl_lightning.compressors import Compressor, FullKV, SnapKV
from sparse_rl_lightning.modules import SparseGRPO
from sparse_rl_lightning.modules.warmup import SupervisedWarmup
from sparse_rl_lightning.policies import TinyPolicy


def noisy(
    angle: float, scale: float, spread: float, chunks: int = 24, size: int = 400
) -> dict[str, list[torch.Tensor]]:
    """Two gradients at a known angle, each chunk with noise of its own that both share."""
    generator, size = torch.Generator().manual_seed(0), 400
    a, b = torch.zeros(size), torch.zeros(size)
    a[0], b[0], b[1] = 1.0, scale * math.cos(angle), scale * math.sin(angle)
    shared = [spread * torch.randn(size, generator=generator) for _ in range(chunks)]
    return {"a": [a + own for own in shared], "b": [b + own for own in shared]}


@pytest.mark.parametrize(("angle", "scale"), [(0.0, 1.0), (0.8, 2.0), (1.2, 0.5)])
def test_agreement_is_freed_of_shared_noise(angle: float, scale: float) -> None:
    """Raw cosines of these gradients are near 1, whatever the angle: most of them is the noise that they share."""
    found = noisy(angle, scale, spread=0.2)
    raw = torch.nn.functional.cosine_similarity(*(torch.stack(one).mean(0) for one in found.values()), dim=0)
    products = gram(found)
    for measure, truth in ((cosine, math.cos(angle)), (length, scale), (projection, scale * math.cos(angle))):
        own = estimate(measure, products, 0, 1)
        assert abs(own.value - truth) < 2 * own.width + 1e-6
        assert own.width < 0.5
    if angle > 1:
        assert raw > cosine(products[0, :, 0], products[0, :, 1], products[1, :, 1]) + 0.1


def test_agreement_without_noise_is_exact() -> None:
    products = gram(noisy(0.5, 3.0, spread=0.0))
    assert estimate(cosine, products, 0, 1).value == pytest.approx(math.cos(0.5))
    assert estimate(length, products, 0, 1).value == pytest.approx(3.0)
    assert estimate(length, products, 0, 1).width == pytest.approx(0.0, abs=1e-9)
    assert noise(products[0, :, 0], products[0, :, 1], products[1, :, 1]) == pytest.approx(1.0)


def test_one_near_impossible_token_takes_the_step_and_every_cure_stops_it() -> None:
    """The cause proposed for naive training's collapse, on a rollout made by hand (docs/measured/gradients.md)."""
    steps = {cure: one_token.followed(cure) for cure in ("none", "rejection", "weights", "Sparse-RL", "δ = 2")}
    first = steps["none"][0].norm
    assert steps["none"][0].ratio == 1.0  # nothing is wrong with the first step
    assert max(step.norm for step in steps["none"]) > 50 * first
    assert max(step.ratio for step in steps["none"]) > 1e3
    assert steps["none"][-1].taught < one_token.LIKELY  # what was taught is taken back, and more
    for cure in set(steps) - {"none"}:
        assert max(step.norm for step in steps[cure]) < 2 * first, cure
        assert steps[cure][-1].taught > 0.9, cure


def test_start_of_the_hand_made_rollout_is_what_it_says() -> None:
    logprobs = one_token.logits_of(one_token.start())[:, one_token.TOKEN]
    torch.testing.assert_close(logprobs, torch.tensor([one_token.RARE, math.log(one_token.LIKELY)]).double())


def likes_digits(prompts: Any, completions: list[str], **_: Any) -> list[float | None]:
    """Of random weights no completion is right."""
    return [sum(letter.isdigit() for letter in text) / 48 for text in completions]


class DigitSamples(Samples):
    """The quickstart's problems, judged by how many digits an answer has."""

    def module(self, policy: str, compressor: Compressor) -> SparseGRPO:
        return self._module(policy, compressor, [likes_digits], 48)


@pytest.mark.slow
def test_gradients_are_those_of_the_losses(tmp_path: Path) -> None:
    """With nothing evicted all variants but the official one's denominators are the full cache's gradient."""
    module = SupervisedWarmup(TinyPolicy())
    module.configure_model()
    module.export(tmp_path / "policy")
    samples = DigitSamples(chunks=2, prompts=2, generations=4, parts=2)
    policy = str(tmp_path / "policy")
    full = measured(policy, FullKV(), samples)
    roomy = measured(policy, SnapKV(budget=200, buffer=8, window=4, kernel_size=3), samples)
    assert set(full.by_variant) == {FULL}
    assert set(roomy.by_variant) == {variant.name for variant in VARIANTS}
    for name, chunks in roomy.by_variant.items():
        for own, other in zip(chunks, full.by_variant[FULL], strict=True):
            assert other.norm() > 0
            torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-5 * float(other.norm()), msg=name)
    assert roomy.statistics["rejected"] == 0


def test_what_has_lines_is_not_measured_again() -> None:
    lines = [{"weights": "warm", "method": method, "budget": budget} for method, budget in CASES]
    assert missing(["warm", "late"], lines) == {"late": CASES}
    assert missing(["warm"], lines[1:]) == {"warm": CASES[:1]}


def test_failing_runs_are_the_first_of_the_main_comparison_that_fall(tmp_path: Path) -> None:
    archive = Archive(ROOT / "benchmarks" / "results" / "stability.jsonl")
    assert {name for source in SOURCES for name in source.policies} == set(ORDER[1:])
    assert SOURCES[0].policies == {"middle": 80, "late": 240}
    assert key_of(SOURCES[0].training(tmp_path)) not in archive.records  # no seed of the comparison
    for source in SOURCES[1:]:
        assert key_of(source.training(tmp_path)) in archive.records
        runs = [run for run in planned([MAIN], tmp_path) if run.arm == source.arm]
        falls = {run.seed: fall(archive.records[key_of(run)].evaluations, FALLEN) for run in runs}
        assert source.seed == next(seed for seed in sorted(falls) if falls[seed] is not None)


def test_page_has_a_table_per_policy(tmp_path: Path) -> None:
    number = {"value": 0.5, "width": 0.1}
    lines = [
        {"weights": weights, "method": "SnapKV", "budget": budget, "variant": variant, "cosine": number,
         "length": number, "projection": number, "noise": number, "rejected": 0.02, "k3": 0.01, "ess": 0.9}
        for weights in ("warm", "late") for budget in (30, 34)
        for variant in (FULL, *(one.name for one in VARIANTS))
    ]  # fmt: skip
    wide = {"value": 0.5, "width": 1.2}
    lines[-1] |= {"cosine": wide, "length": {"value": 2.0, "width": math.nan}}  # replay, late, SnapKV 34
    found = tables(lines)
    along = ["cosine along training", "length along training"]
    assert list(found) == ["rollouts", "halves", *along, "projection", "warm", "late"]
    assert "| late | 0.50 ± 0.10 | 0.50 ± 0.10 |" in found["projection"]
    assert "official" not in found["warm"]  # is in those along training
    assert "| late | 2.0% · 0.01 | 2.0% · 0.01 |" in found["rollouts"]
    assert "| late | 0.50 | 0.50 | 0.50 |" in found["halves"]
    assert "|  | SnapKV 34 | SnapKV 30 |" in found["warm"]
    assert "| naive | 0.50 ± 0.10 · 0.50 ± 0.10 |" in found["late"]
    assert "|  | warm | late |" in found["cosine along training"]
    assert "| replay | 0.50 ± 0.10 | 0.50 ± 0.10 |" in found["length along training"]
    assert "| replay | – · – | 0.50 ± 0.10 · 0.50 ± 0.10 |" in found["late"]
    picture(lines, tmp_path / "gradients.png")
    assert (tmp_path / "gradients.png").read_bytes().startswith(b"\x89PNG")
