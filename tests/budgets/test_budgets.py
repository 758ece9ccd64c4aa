"""Budget rules: published numbers, totals that hold, a brute-force version; schedules: what they say, files, YAML."""

from __future__ import annotations

import copy
import itertools
import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import config, run_console, write
from torch import Tensor

from sparse_rl_lightning.budgets import (
    Adaptive,
    BudgetRule,
    LengthSchedule,
    PublishedSchedule,
    Pyramid,
    ScheduleFile,
    Uniform,
)
from sparse_rl_lightning.budgets.schedules import published_schedules
from sparse_rl_lightning.cli import main
from sparse_rl_lightning.compressors import H2O, RKV, Combined, KNorm, LagKV, OldestTurns, SnapKV, StreamingLLM
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.evict import pinned_entries
from sparse_rl_lightning.records import LayerState
from sparse_rl_lightning.retrievers import Quest
from sparse_rl_lightning.testing import check_compressor, random_layer
from tests.compressors.test_wrappers import Given

KVPRESS_PYRAMIDS = [  # kvpress 0.5.5, PyramidKVPress.get_layer_budget: budget, layers, beta, window, budgets
    (512, 4, 20, 12, [998, 674, 350, 26]),
    (100, 7, 3, 8, [167, 144, 122, 100, 78, 56, 33]),
    (33, 2, 2, 4, [50, 16]),
]


def test_uniform_gives_everybody_the_same() -> None:
    assert Uniform().layer_budgets(7, 3, 2) == [7, 7, 7]
    scores = torch.rand(2, 3, 9)
    budgets = Uniform().head_budgets(scores, scores > 0.5, 7, 2)
    assert torch.equal(budgets, torch.full((2, 3), 7, dtype=torch.int32))


@pytest.mark.parametrize(("budget", "num_layers", "beta", "minimum", "expected"), KVPRESS_PYRAMIDS)
def test_pyramid_gives_the_numbers_of_kvpress(
    budget: int, num_layers: int, beta: float, minimum: int, expected: list[int]
) -> None:
    assert Pyramid(beta).layer_budgets(budget, num_layers, minimum) == expected


@given(budget=st.integers(1, 5000), num_layers=st.integers(1, 80), beta=st.floats(1, 100))
def test_pyramid_moves_tokens_and_adds_none(budget: int, num_layers: int, beta: float) -> None:
    budgets = Pyramid(beta).layer_budgets(budget, num_layers, 0)
    assert budgets == sorted(budgets, reverse=True)
    assert abs(sum(budgets) - budget * num_layers) <= 1  # a line and its mirror image round alike
    assert abs(budgets[-1] - (budget / beta if num_layers > 1 else budget)) <= 0.5
    steps = [a - b for a, b in itertools.pairwise(budgets)]
    assert not steps or max(steps) - min(steps) <= 1


def test_pyramid_says_what_to_change() -> None:
    with pytest.raises(ValueError, match=r"last of 4 layers would keep 5 .* fewer than the 12 .* = 240.* to 8\.33"):
        Pyramid().layer_budgets(100, 4, 12)
    assert Pyramid().layer_budgets(240, 4, 12)[-1] == 12
    assert Pyramid(8.33).layer_budgets(100, 4, 12)[-1] == 12
    with pytest.raises(ValueError, match=r"beta must be at least 1.*beta=0\.5"):
        Pyramid(0.5)


def test_a_compressor_asks_its_rule() -> None:
    assert StreamingLLM(20).layer_budgets(3) == [20, 20, 20]
    assert StreamingLLM(30, num_sinks=1, window=4, budget_rule=Pyramid(2)).layer_budgets(3) == [45, 30, 15]
    with pytest.raises(ValueError, match="fewer than the 12 of num_sinks"):
        StreamingLLM(30, budget_rule=Pyramid(4)).layer_budgets(3)


def plan(scores: Tensor, rule: BudgetRule, layer: LayerState, layer_budget: int | None = None) -> Tensor:
    return Given(scores, budget_rule=rule).plan_eviction(layer, layer_budget)[1]


def brute_force(scores: Tensor, candidates: Tensor, layer_budget: int, minimum: int, floor: int) -> list[int]:
    """One slot: fill the floors of all heads, then take what is best anywhere."""
    num_heads, num_entries = scores.shape
    entries = [(h, n) for h in range(num_heads) for n in range(num_entries) if candidates[h, n]]
    by_score = sorted(entries, key=lambda e: -float(scores[e]))  # stable: ties stay in order of head and index
    chosen = [e for h in range(num_heads) for e in [b for b in by_score if b[0] == h][: max(floor - minimum, 0)]]
    rest = [e for e in by_score if e not in chosen]
    chosen += rest[: (layer_budget - minimum) * num_heads - len(chosen)]
    return [minimum + sum(e[0] == h for e in chosen) for h in range(num_heads)]


@pytest.mark.parametrize("floor", [0, 6, 7, 10, None])
@pytest.mark.parametrize("seed", range(4))
def test_adaptive_keeps_the_best_of_all_heads(seed: int, floor: int | None) -> None:
    """Of each slot by itself, whatever sinks and window score, and with anything in free memory."""
    layer = random_layer(seed, lengths=[[14, 14], [14, 9], [12, 14]])
    scores = torch.randn(3, 2, 14)
    scores[:, 1] += 1  # the second head has more to say
    scores[:, :, 4:7] = scores[:, :, 4:5]  # ties
    candidates = layer.valid & ~pinned_entries(layer.valid, layer.positions, 2, 3)
    scores[1], scores[layer.valid & ~candidates] = 100 * scores[1], 1000.0
    wanted = [brute_force(scores[s], candidates[s], 10, 5, 2 if floor is None else floor) for s in range(3)]
    for garbage in (1e30, torch.nan):
        budgets = plan(scores.masked_fill(~layer.valid, garbage), Adaptive(floor), layer)
        assert budgets.dtype == torch.int32
        assert budgets.tolist() == wanted
        assert budgets[0].sum() == 20


def test_adaptive_within_a_pyramid_keeps_the_layers_total() -> None:
    rule = Adaptive(layers=Pyramid(2))
    assert rule.layer_budgets(9, 2, 4) == [14, 4]
    layer = random_layer(lengths=[[14, 14]] * 3)
    for layer_budget in (5, 8, 12):
        assert (plan(torch.randn(3, 2, 14), rule, layer, layer_budget).sum(dim=1) == 2 * layer_budget).all()


def test_adaptive_says_what_to_change() -> None:
    with pytest.raises(ValueError, match="floor=30 exceeds the 20 tokens per head of layer 0"):
        Adaptive(30).layer_budgets(20, 3, 5)
    with pytest.raises(ValueError, match="exceeds the 4 tokens per head of layer 1"):
        Adaptive(6, layers=Pyramid(2)).layer_budgets(9, 2, 4)
    with pytest.raises(ValueError, match="floor=-1"):
        Adaptive(-1)


def test_select_keeps_what_the_rule_allows() -> None:
    layer = random_layer(lengths=[[14, 14]] * 3)
    scores = torch.randn(3, 2, 14)
    compressor = Given(scores, budget_rule=Adaptive(6))
    assert torch.equal(compressor.select(layer).sum(dim=-1), compressor.plan_eviction(layer)[1])


def test_entries_that_must_stay_get_their_place() -> None:
    layer = random_layer(lengths=[[14, 14]] * 3)
    scores = torch.rand(3, 2, 14)
    scores[0, 1, 2:10] = torch.inf  # beside 2 sinks and 3 most recent
    assert Given(scores, budget_rule=Adaptive(0)).plan_eviction(layer)[1][0].tolist() == [7, 13]
    assert Given(scores, budget_rule=Adaptive(10)).plan_eviction(layer)[1][0].tolist() == [7, 13]  # before any floor
    scores[0, 1, 7:10] = 0.0
    assert Given(scores).select(layer)[0, 1, 2:7].all()


STEPS = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 90)), min_size=1, max_size=6)
PUBLISHED = {  # budget in the middle of some bins, read off the tables of the paper's code
    "qwen3-1.7b-0.86": {1000: 512, 3000: 1024, 7000: 1536, 15000: 3584, 37000: 4096},
    "qwen3-4b-0.86": {1000: 512, 9000: 1536, 19000: 4096, 27000: 5120, 31000: 6144, 39000: 8192, 60000: 8192},
    "qwen3-8b-0.86": {5000: 1024, 21000: 4096, 23000: 5120, 35000: 6208, 39000: 7168},
    "qwen3-14b-0.86": {3000: 768, 9000: 4096, 29000: 6144, 31000: 8192, 35000: 10240, 38000: 14336},
    "qwen3-1.7b-0.92": {1000: 1024, 15000: 6144, 19000: 8192},
    "qwen3-1.7b-0.80": {11000: 1536, 17000: 2048, 19000: 2560},
    "qwen3-1.7b-0.75": {3000: 512, 17000: 1536},
}


def schedule(steps: list[tuple[int, int]]) -> LengthSchedule:
    """Steps of a width and a budget."""
    starts = [sum(width for width, _ in steps[:i]) for i in range(len(steps))]
    return LengthSchedule(starts, [budget for _, budget in steps])


@given(STEPS)
def test_the_budget_is_that_of_the_last_start_behind_it(steps: list[tuple[int, int]]) -> None:
    found = schedule(steps)
    want = [budget for width, budget in steps for _ in range(width)] + [steps[-1][1]] * 20
    assert [found.at(length) for length in range(len(want))] == want
    assert found.lookup(torch.arange(len(want))).tolist() == want
    assert (found.maximum, found.minimum) == (max(want), min(want))
    assert found.is_constant == (len(set(want)) == 1)
    assert found.shrinks == any(b < a for a, b in itertools.pairwise(want))


@given(STEPS, st.integers(0, 3))
def test_a_raised_schedule_moves_up_its_own_levels(steps: list[tuple[int, int]], times: int) -> None:
    before = schedule(steps)
    after = before.raised(times)
    assert after.starts == before.starts
    for _ in range(times):
        levels = sorted(set(before.budgets))
        top = -(-levels[-1] * 5 // 4) if len(levels) == 1 else 2 * levels[-1] - levels[-2]
        higher = [min([b for b in levels if b > old] or [top]) for old in before.budgets]
        before = LengthSchedule(list(before.starts), higher)
    assert after == before


def test_what_is_no_schedule_is_refused() -> None:
    for wrong, message in [
        ({}, "one budget for every start, at least one"),
        ({"starts": [0, 5], "budgets": [3]}, r"one budget for every start.*starts=\[0, 5\], budgets=\[3\]"),
        ({"starts": [1], "budgets": [3]}, "must begin with 0"),
        ({"starts": [0, 5, 5], "budgets": [1, 2, 3]}, "and ascend"),
        ({"starts": [0, 5], "budgets": [4.5, 6]}, "whole numbers"),
        ({"starts": [0, 5], "budgets": [1, 0]}, "positive number of tokens everywhere"),
    ]:
        with pytest.raises(ValueError, match=message):
            LengthSchedule(**wrong)


def test_files(tmp_path: Path) -> None:
    want = LengthSchedule([0, 30], [12, 20])
    path = tmp_path / "schedule.yaml"
    want.save(path, "measured\nby hand")
    assert path.read_text().startswith("# measured\n# by hand\n")
    assert LengthSchedule.from_file(path) == ScheduleFile(str(path)) == want
    for text in ("starts: [0, 30]\nbudgets: [12, 20]", json.dumps({"starts": [0, 30], "budgets": [12, 20]})):
        path.write_text(text)
        assert LengthSchedule.from_file(path) == want
    with pytest.raises(ValueError, match=r"there is no schedule at .*gone.*sparse-rl calibrate"):
        LengthSchedule.from_file(tmp_path / "gone")
    for text in ("12", "budget: 3", "[[0, 12], [30, 20]]", "starts: 0\nbudgets: 512", "starts: [0]\nbudgets: null"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"schedule\.yaml holds no schedule"):
            LengthSchedule.from_file(path)
    for text in ("{", "x: !!bool x", "[" * 5000):
        path.write_text(text)
        with pytest.raises(ValueError, match="neither YAML nor JSON"):
            LengthSchedule.from_file(path)


def test_a_schedule_in_ones_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    LengthSchedule([0], [8]).save(tmp_path / "s.yaml")
    assert ScheduleFile("~/s.yaml").budgets == (8,)


@pytest.mark.parametrize("rule", [Pyramid, "pyramid"])
def test_what_is_no_rule_is_refused(rule: Any) -> None:
    for build in (partial(SnapKV, 32), partial(Quest, 48), partial(OldestTurns, 48), partial(Adaptive, 2)):
        with pytest.raises(UserError, match=r"must be a rule such as Pyramid\(\), got"):
            build(**{"layers" if build.func is Adaptive else "budget_rule": rule})


def test_published_schedules() -> None:
    assert set(PUBLISHED) == set(published_schedules())
    for name, numbers in PUBLISHED.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = PublishedSchedule(name)
        assert {length: found.at(length) for length in numbers} == numbers
        assert bool(caught) == (not name.endswith("0.86"))
    with pytest.warns(UserWarning, match=r"qwen3-1.7b-0.75 is known up to 18000 tokens only; its last.* 1536, is used"):
        PublishedSchedule("qwen3-1.7b-0.75")
    with pytest.raises(ValueError, match=r"one of qwen3-1.7b-0.75, .*got name='qwen3'"):
        PublishedSchedule("qwen3")


def test_a_compressor_is_sized_by_the_maximum() -> None:
    rising = LengthSchedule([0, 40], [12, 20])
    compressor = RKV(rising, buffer=4, num_sinks=1)
    assert compressor.budget == 20
    assert compressor.schedule is rising
    shown = "RKV(budget=LengthSchedule(starts=[0, 40], budgets=[12, 20]), buffer=4, num_sinks=1, window=8,"
    assert repr(compressor).startswith(shown)
    assert compressor.layer_budgets(2) == [20, 20]
    assert compressor.layer_budgets(2, 12) == [12, 12]
    constant = RKV(LengthSchedule.constant(20), buffer=4, num_sinks=1)
    assert repr(constant) == repr(RKV(20, buffer=4, num_sinks=1))
    with pytest.raises(ValueError, match=r"RKV: budget=7 is smaller than num_sinks \+ window = 4 \+ 8"):
        RKV(LengthSchedule([0, 40], [7, 20]))
    with pytest.raises(ValueError, match=r"lag_size must be from 2 to 7, .*budget \+ buffer = 16 tokens"):
        LagKV(rising, lag_size=8, buffer=4, num_sinks=1)


def test_a_schedule_that_shrinks_is_allowed_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="KNorm: budget=12 to 20 by length shrinks"):
        KNorm(LengthSchedule([0, 40], [20, 12]), num_sinks=1)


def test_wrappers_take_the_schedule_of_their_parts() -> None:
    rising, sizes = LengthSchedule([0, 40], [12, 20]), {"buffer": 4, "num_sinks": 1}
    wrapped = Combined([KNorm(rising, **sizes), SnapKV(LengthSchedule([0, 40], [12, 20]), **sizes)])
    assert wrapped.schedule == rising
    assert Combined([RKV(rising, **sizes)], across_heads="max").budget == 20
    with pytest.raises(ValueError, match=r"same budget, but KNorm has budget=LengthSchedule\(.* and RKV has budget=20"):
        Combined([KNorm(rising, **sizes), RKV(20, **sizes)])


@pytest.mark.parametrize("method", [RKV, H2O, LagKV])
def test_the_contract_holds_with_a_schedule(method: Any) -> None:
    own = {"lag_size": 2} if method is LagKV else {}
    check_compressor(method(LengthSchedule([0, 16, 25], [8, 10, 13]), buffer=4, num_sinks=2, window=3, **own))


def test_copies_are_equal() -> None:
    rising = LengthSchedule([0, 40], [12, 20])
    assert copy.deepcopy(rising) == rising
    assert rising != LengthSchedule([0, 41], [12, 20])
    assert len({rising, LengthSchedule([0, 40], [12, 20])}) == 1


@pytest.mark.parametrize("rule", [Uniform(), Adaptive(), Adaptive(floor=7), Adaptive(layers=Pyramid(2))])
def test_every_slot_keeps_its_own_budget(rule: Any) -> None:
    layer = random_layer(lengths=[[14, 14], [14, 9], [12, 14]])
    scores = torch.randn(3, 2, 14)
    scores[:, 1] += 1
    together = Given(scores, budget=12, buffer=2, budget_rule=rule).plan_eviction(layer, torch.tensor([7, 12, 9]))[1]
    assert together.dtype == torch.int32
    for slot, budget in enumerate((7, 12, 9)):
        alone = Given(scores, budget=12, buffer=2, budget_rule=rule).plan_eviction(layer, budget)[1]
        assert torch.equal(together[slot], alone[slot])
    kept = Given(scores, budget=12, buffer=2, budget_rule=rule).select(layer, torch.tensor([7, 12, 9])).sum(dim=(1, 2))
    assert (kept <= torch.tensor([14, 24, 18])).all()


def with_budget(budget: Any) -> dict[str, Any]:
    values = config(max_steps=1)
    values["model"]["init_args"]["compressor"]["init_args"]["budget"] = budget
    return values


def test_a_schedule_in_yaml(folder: Path) -> None:
    LengthSchedule([0, 16], [10, 12]).save("schedule.yaml", "calibrated")
    pasted = yaml.safe_load(Path("schedule.yaml").read_text())
    in_a_file = {"class_path": "ScheduleFile", "init_args": {"path": "schedule.yaml"}}
    for way in (pasted, pasted | {"class_path": "sparse_rl_lightning.budgets.LengthSchedule"}, in_a_file):
        cli = main(["fit", "--config", write(with_budget(way)), "--trainer.default_root_dir=runs/own"])
        assert cli.model.generator.compressor.schedule == LengthSchedule([0, 16], [10, 12])
        saved = yaml.safe_load((Path(cli.trainer.log_dir) / "run_config.yaml").read_text())
        again = saved["model"]["init_args"]["compressor"]["init_args"]["budget"]
        assert again["class_path"].endswith(way["class_path"].rpartition(".")[2])


def test_a_plain_number_stays_a_number(folder: Path) -> None:
    cli = main(["fit", "--config", write(config(max_steps=1)), "--model.compressor.budget=14"])
    assert cli.model.generator.compressor.budget == 14
    saved = yaml.safe_load(Path("runs/own/version_0/run_config.yaml").read_text())
    assert saved["model"]["init_args"]["compressor"]["init_args"]["budget"] == 14


def test_mistakes_in_yaml_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for budget, message in [
        ({"class_path": "LenghtSchedule"}, "Did you mean 'LengthSchedule'"),
        ({"class_path": "PublishedSchedule", "init_args": {"name": "qwen"}}, "must be one of qwen3"),
    ]:
        assert run_console(monkeypatch, "fit", "--config", write(with_budget(budget))) in (1, 2)
        assert message in capsys.readouterr().err
