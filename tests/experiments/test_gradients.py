"""experiments.gradients: what agreement means, and that the measurement is of the real loss."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import ROOT
from benchmarks.common import kept
from benchmarks.common.pages import mark, replaced
from experiments.gradients.__main__ import CASES, PAGE, SOURCES, missing
from experiments.gradients.agreement import Estimate, cosine, estimate, lead, length, noise, projection
from experiments.gradients.centering import Centered
from experiments.gradients.measure import FULL, Samples, gram, leads, measured, table
from experiments.gradients.variants import BOTH, CENTERING, VARIANTS
from experiments.runner.studies import Where, planned
from experiments.stability.studies import MAIN
from sparse_rl_lightning.compressors import FullKV, SnapKV
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


def likes_digits(prompts: Any, completions: list[str], **_: Any) -> list[float | None]:
    """Of random weights no completion is right."""
    return [sum(letter.isdigit() for letter in text) / 48 for text in completions]


class DigitSamples(Samples):
    """The quickstart's problems, judged by how many digits an answer has."""

    rewards = (likes_digits,)
    variants = (*VARIANTS, CENTERING, BOTH)
    top = 25  # all of the vocabulary


@pytest.mark.slow
def test_gradients_are_those_of_the_losses(tmp_path: Path) -> None:
    """With nothing evicted all variants but the official one's denominators are the full cache's gradient."""
    module = SupervisedWarmup(TinyPolicy())
    module.configure_model()
    module.export(tmp_path / "policy")
    samples = DigitSamples(chunks=2, prompts=2, generations=4, parts=2)
    policy = str(tmp_path / "policy")
    full, _ = measured(policy, FullKV(), samples)
    roomy, statistics = measured(policy, SnapKV(budget=200, buffer=8, window=4, kernel_size=3), samples)
    assert set(full) == {FULL}
    assert set(roomy) == {variant.name for variant in DigitSamples.variants}
    for name, chunks in roomy.items():
        for own, other in zip(chunks, full[FULL], strict=True):
            assert other.norm() > 0
            torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-5 * float(other.norm()), msg=name)
    assert statistics["rejected"] == 0


def test_what_has_lines_is_not_measured_again() -> None:
    lines = [{"weights": "warm", "method": method, "budget": budget} for method, budget in CASES]
    assert missing(["warm", "late"], lines, CASES) == {"late": CASES}
    assert missing(["warm"], lines[1:], CASES) == {"warm": CASES[:1]}


def test_failing_runs_are_the_first_of_the_main_comparison_that_fall() -> None:
    """Each is taken at its last evaluation before its accuracy is less than 0.6 of its best."""
    lines = {line["key"]: line["evaluations"] for line in kept.read(ROOT / "benchmarks/results/stability.jsonl")}
    for arm, seed, rollouts in list(SOURCES.values())[2:]:
        falls = {}
        for run in planned([replace(MAIN, arms=(arm,))], Where(ROOT)):
            best = 0.0
            for before, after in pairwise(lines[run.key]):
                best = max(best, before["dense"])
                if after["dense"] < 0.6 * best:
                    falls.setdefault(run.seed, before["rollouts"])
        assert (seed, rollouts) == min(falls.items())


@pytest.mark.parametrize("name", ["gradients", "real_gradients"])
def test_every_line_that_is_kept_has_a_row(name: str) -> None:
    lines = kept.read(ROOT / "benchmarks" / "results" / f"{name}.jsonl")
    assert len(table(lines).rows) == len(lines) > 0


def test_a_lead_is_the_difference_of_two_cosines_and_nothing_over_oneself() -> None:
    products = gram(noisy(0.5, 1.0, 0.02) | {"third": noisy(1.2, 1.0, 0.02)["b"]})
    first, second = (estimate(cosine, products, 0, number) for number in (1, 2))
    ahead = lead(cosine, products, 0, 1, 2)
    assert ahead.value == pytest.approx(first.value - second.value)
    assert 0 < ahead.width < first.width + second.width
    assert lead(cosine, products, 0, 2, 2) == Estimate(0.0, 0.0)
    assert leads(products, ["b", "third"], "third", 1)["lead"]["value"] == pytest.approx(ahead.value)
    assert leads(products, ["b", "third"], "nobody", 1) == {}


def test_the_page_says_what_was_measured_of_centering() -> None:
    lines = kept.read(ROOT / "benchmarks" / "results" / "centering_gradients.jsonl")
    measured_at = {line["variant"]: line for line in lines if (line["weights"], line["budget"]) == ("warm", 26)}
    cosines = [Estimate(**measured_at[variant.name]["cosine"]) for variant in Centered.variants]
    said = " ".join((ROOT / "docs" / "corrections.md").read_text("utf-8").split())
    naive, weights, alone, _ = map(str, cosines)
    assert f"cosine with the full cache's is {alone}, with weights {weights}, without both {naive}." in said
    lead_over_weights = Estimate(**measured_at["centering and weights"]["lead"])
    assert lead_over_weights.value < lead_over_weights.width
    assert "Both together are not established as better than weights." in said
    begin, shown = mark("experiments.gradients", "centering_gradients"), PAGE.read_text("utf-8")
    assert shown == replaced(shown, begin, table(lines).untitled)
    assert begin in shown
