"""What docs/methods.md and docs/choosing.md say of the tables of a real model, held to the tables."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks import ROOT
from docs import docstrings, method_tables
from docs.listing import METHODS, WRAPPERS
from sparse_rl_lightning.quality.cells import Cell

PAGE = (ROOT / "docs" / "methods.md").read_text("utf-8")
BY_AGE, CHANCE = "H2O, by age", "RandomEviction"


def cells(part: str) -> dict[tuple[str, int | None], Cell]:
    return {(cell.method, cell.budget): cell for cell in method_tables.cells_of(part)}


def at(part: str, method: str, budget: int = 96) -> Cell:
    return cells(part)[method, budget]


def kl(method: str, part: str = "all", budget: int = 96) -> float:
    value = at(part, method, budget).kl
    assert value is not None
    return value


def length(method: str, part: str = "all", budget: int = 96) -> float:
    value = at(part, method, budget).length
    assert value is not None
    return value


def is_told_apart(one: str, other: str) -> bool:
    """Whether the 95 % intervals of KL have nothing in common."""
    (a, b), (c, d) = (at("all", method).intervals["kl"] for method in (one, other))
    return b < c or d < a


def test_by_age_is_the_closest_or_not_told_apart_from_it() -> None:
    for part in ("all", "open", "kept", "budgets", "sinks", "cool"):
        for budget in {key[1] for key in cells(part) if key[0] == BY_AGE}:
            others = {key[0] for key in cells(part) if key[1] == budget} - {BY_AGE}
            low = min(at(part, other, budget).intervals["kl"][1] for other in others)
            assert at(part, BY_AGE, budget).intervals["kl"][0] < low, (part, budget)
    assert kl(BY_AGE) == min(kl(key[0]) for key in cells("all") if key[1] == 96)
    assert not is_told_apart("H2O", "StreamingLLM")


@pytest.mark.parametrize("method", ["KNorm", "KeyDiff", "CUR"])
def test_methods_without_queries_are_not_told_apart_from_chance(method: str) -> None:
    assert not is_told_apart(method, CHANCE)


def test_what_is_near_and_what_is_between() -> None:
    assert kl(BY_AGE) < kl("LearnedScore") < kl("ExpectedAttention") < kl("SnapKV")
    assert is_told_apart("LearnedScore", "RKV")
    near = {"ExpectedAttention", "TOVA", "SnapKV", "TriAttention", "RKV"}
    others = {"QFilters", "StreamingLLM", "H2O", "LagKV"}
    assert max(map(kl, near)) < min(map(kl, others))
    for method in others:
        assert is_told_apart(method, CHANCE), method
        assert kl(method) < kl(CHANCE)
    for variant in ("drawn anew", "window 32"):
        assert is_told_apart(f"{CHANCE}, {variant}", CHANCE)
        assert kl(f"{CHANCE}, {variant}") < kl(CHANCE)
    rejected = {method: at("all", method).rejected or 0.0 for method in near}
    assert max(rejected, key=lambda method: rejected[method]) == "TOVA"


def test_compression_lengthens_and_chance_does_not() -> None:
    assert 1.1 < length("SnapKV") < 1.3
    assert length("RKV") < length("SnapKV")
    assert 1.2 < length("StreamingLLM") < 1.3
    assert length(CHANCE) < 1
    for budget in (64, 128, 192):
        assert length("RKV", "budgets", budget) < length("SnapKV", "budgets", budget)


def test_combinations() -> None:
    assert kl("Combined") > kl("SnapKV")
    assert kl("SnapKV, Pyramid") > kl("SnapKV")
    for variant in ("SnapKV, Adaptive", "Combined, one set per layer"):
        assert not is_told_apart(variant, "SnapKV"), variant


def test_sinks_matter_to_what_does_not_find_them() -> None:
    for method in ("SnapKV", "RKV", "TOVA"):
        without, with_them = kl(method, "sinks", 128), at("budgets", method, 128).intervals["kl"]
        assert abs(without - kl(method, "budgets", 128)) < with_them[1] - with_them[0]
    assert abs(kl(BY_AGE, "sinks", 128) - kl(BY_AGE, "others", 128)) < 0.005
    assert kl(CHANCE, "sinks", 128) > 3 * kl(CHANCE, "budgets", 128)
    assert kl("StreamingLLM", "sinks", 128) == max(cell.kl or 0.0 for cell in cells("sinks").values())
    assert (at("sinks", CHANCE, 128).rejected or 0) > 0.2


def test_a_temperature_below_one_widens_the_gap() -> None:
    assert (at("cool", "SnapKV", 128).rejected or 0) > 4 * (at("budgets", "SnapKV", 128).rejected or 1)
    assert all(kl(method, "cool", 128) > kl(method, "budgets", 128) for method in (CHANCE, "SnapKV", "RKV", "TOVA"))
    assert kl("StreamingLLM", "cool", 128) < at("cool", "RKV", 128).intervals["kl"][1]
    assert kl("StreamingLLM", "cool", 128) < kl("RKV", "cool", 128)


def test_a_protected_prompt_helps_neither_chance_nor_the_others() -> None:
    assert abs(kl(CHANCE, "kept", 192) - kl(CHANCE, "open", 192)) < 0.01
    assert kl(CHANCE, "kept", 192) > 2 * kl("SnapKV", "kept", 192)
    for method in ("SnapKV", "RKV", "TOVA", BY_AGE):
        assert kl(method, "kept", 192) > kl(method, "open", 192), method
        assert length(method, "kept", 192) < length(method, "open", 192), method


def test_replay_is_as_exact_as_the_results_say() -> None:
    every = [cell.replay_difference or 0.0 for part in method_tables.TITLES for cell in cells(part).values()]
    assert f"the largest difference is {max(every):.0e}." in " ".join(PAGE.split())
    page = (ROOT / "docs/results.md").read_text("utf-8")
    (said,) = re.findall(r"differ from the sampler's by at most (\S+), in\s+float32", page)
    assert max(every) <= float(said) < 1.5 * max(every)


def test_every_method_has_a_section_with_what_its_class_says() -> None:
    """Its first line, a formula, when to use it, and where it is from, in the order of the alphabet."""
    sections = dict(re.findall(r"^## (\w+)\n\n(.*?)(?=^## |\Z)", PAGE.partition("## Letters")[2], re.M | re.S))
    methods = sorted([*METHODS, *WRAPPERS], key=lambda method: method.__name__.lower())
    assert list(sections) == [method.__name__ for method in methods]
    for method in methods:
        section, summary = sections[method.__name__], docstrings.summary(method)
        numbers = re.findall(r"\b\d{4}\.\d{5}\b", f"{summary} {docstrings.body(method)}")
        papers = [f"[arXiv {number}](https://arxiv.org/abs/{number})" for number in dict.fromkeys(numbers)]
        settings = f"[settings](settings.md#{method.__name__.lower()})"
        source = ", ".join([*papers, f"`{method.__module__}.{method.__name__}`", settings])
        assert section.startswith(f"{summary}\n\n```math\n"), method
        assert re.search(r"\n```\n\n\*\*When to use it\.\*\* \S", section), method
        assert section.rstrip().endswith(f"**Source.** {source}."), method


def test_all_that_was_measured_is_on_the_page() -> None:
    run = json.loads(method_tables.RESULTS.read_text("utf-8"))
    assert run["parts"].keys() == method_tables.TITLES.keys()
    assert f"`sparse-rl benchmark` for {run['policy']} on questions" in PAGE
    for part, title in method_tables.TITLES.items():
        assert f"## {title}\n\n<!-- written by docs.generate: {part} -->\n" in PAGE


def test_newer_methods_are_farther_than_snapkv_but_for_vase() -> None:
    methods = ("SnapKV", "VaSE", "Smoothed, SnapKV", "RandomAttention", CHANCE, "SnapKV, defensive")
    for budget in (96, 192):
        snap, vase, smoothed, drawn, chance, defensive = (at("newer", name, budget).intervals["kl"] for name in methods)
        assert max(snap[0], vase[0]) < min(snap[1], vase[1])
        assert max(chance[0], defensive[0]) < min(chance[1], defensive[1])
        assert snap[1] < drawn[0] < drawn[1] < chance[0]
        assert snap[1] < min(smoothed[1], defensive[0])
    assert smoothed[0] > snap[1]
    assert at("newer", "VaSE, window 64").intervals["kl"][0] > at("newer", "SnapKV").intervals["kl"][1]
    assert drawn[1] < at("newer", "RandomEviction, prompt kept", 192).intervals["kl"][0]
    times = [kl("SnapKV, defensive", "newer", budget) / kl("SnapKV", "newer", budget) for budget in (96, 192)]
    assert [round(ratio) for ratio in times] == [2, 4]
    assert 2 < kl("RandomAttention", "newer", 192) / kl("SnapKV", "newer", 192) < 3
