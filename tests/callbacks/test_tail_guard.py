"""TailGuard: what counts as a sign, and each action in real runs: warn, raise the budget, stop with a checkpoint."""

from __future__ import annotations

import csv
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from test_acceptance_monitor import sharp
from tiny_grpo import Recorder, fit, module, weights
from tiny_run import config, write

from sparse_rl_lightning.acceptance import tail_target
from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.callbacks import AcceptanceMonitor, RolloutCallback, TailGuard
from sparse_rl_lightning.callbacks.guards.tail_guard import Limits, TailWatch
from sparse_rl_lightning.callbacks.monitors.acceptance import TailReport
from sparse_rl_lightning.cli import main
from sparse_rl_lightning.compressors import Combined, FullKV, KNorm, RandomEviction
from sparse_rl_lightning.retrievers import Centroid

BUDGET, BUFFER = 6, 2  # of sharp()
BYTES = 2 * 2 * (2 * 8 * 4)  # layers x KV heads x (key and value of 8 float32)
EAGER: dict[str, Any] = {"target": 1.0, "min_tokens": 1, "patience": 1}  # no real tail reaches 1


class Shorten(RolloutCallback):
    """Responses collapse: from one rollout on they are cut after so many tokens, until another."""

    def __init__(self, start: int, end: int = 10**6, length: int = 3) -> None:
        self.start, self.end, self.length = start, end, length

    def on_rollout_start(self, trainer: Any, module: Any, rows: Any) -> None:
        length = self.length if self.start <= module.num_rollouts < self.end else 12
        module.generator.sampling = replace(module.generator.sampling, max_completion_length=length)


class Reject(RolloutCallback):
    """Every second sequence goes."""

    def correct(self, trainer: Any, module: Any, part: Any) -> None:
        part.keep = part.keep & (torch.arange(len(part)) % 2 == 0)[:, None]


def guarded(mode: Any, others: list[Any] | None = None, monitor: dict[str, Any] | None = None, **options: Any) -> Any:
    """Callbacks; the guard stands first, so that it cannot rely on the monitor having measured already."""
    guard = TailGuard(mode, **options)
    return [guard, *(others or []), AcceptanceMonitor(**{"every_n_rollouts": 1, **(monitor or {})})]


def told(record: Any) -> list[str]:
    return [str(warning.message) for warning in record if "TailGuard:" in str(warning.message)]


# ---------------------------------------------------------------- signs


def test_length_is_compared_with_the_longest_window() -> None:
    watch = TailWatch(Limits(window=2, patience=2, length_drop=0.4))
    ratios = []
    for length in (1, 10, 20, 10, 8, 8, 8):  # windows: 5.5, 15, 15, 9, 8, 8
        watch.see(length, 0.0)
        ratios.append((watch.length_ratio, watch.alarms))
    assert ratios[0] == (None, [])
    assert [ratio for ratio, _ in ratios[1:]] == pytest.approx([1, 1, 1, 9 / 15, 8 / 15, 8 / 15])
    assert [alarms for _, alarms in ratios] == [[]] * 6 + [["length"]]
    watch.start_over()
    for length in (8, 8, 8):  # the longest is remembered
        watch.see(length, 0.0)
    assert watch.alarms == ["length"]


def test_rejection_is_a_mean_over_a_whole_window() -> None:
    watch = TailWatch(Limits(window=3, patience=1, max_rejection_rate=0.25))
    seen = []
    for rate in (0.75, 0.0, 0.0, 0.0, 0.1, 0.7):  # a quarter, the limit; in the end more
        watch.see(5.0, rate)
        seen.append(watch.alarms)
    assert seen == [[], [], [], [], [], ["rejection"]]


def test_the_worst_bin_with_enough_tokens_counts() -> None:
    watch = TailWatch(Limits(min_tokens=50, patience=2))
    tail = {"0-2000": 0.9, "2000-4000": 0.8, "4000-6000": 0.1}
    tokens = {"0-2000": 500, "2000-4000": 50, "4000-6000": 49}
    assert watch.see_tail(tail, tokens, 0.85) == ("2000-4000", pytest.approx(-0.05))
    assert watch.alarms == []
    assert watch.see_tail({"4000-6000": 0.1}, tokens, 0.85) is None  # judges nothing, forgives nothing
    watch.see_tail(tail, tokens, 0.85)
    assert watch.alarms == ["tail"]
    watch.see_tail(tail, tokens, 0.8)
    assert watch.alarms == []


def test_the_state_goes_on_where_it_was() -> None:
    limits = Limits(window=3, patience=2)
    one = TailWatch(limits)
    for length in (9, 9, 9, 2, 2):
        one.see(length, 0.5)
    other = TailWatch(limits, **one.state())
    for watch in (one, other):
        watch.see(2, 0.5)
    assert vars(one) == vars(other)
    assert one.alarms == ["rejection", "length"]


def test_a_rise_of_rejection_is_seen_below_the_limit() -> None:
    """A spiral goes from 1 to 9 %: a rise, though still below the limit; 1 to 4 % and an even 9 % are none."""
    limits = Limits(window=2, patience=2)
    rates = {"spiral": [0.01, 0.01, 0.05, 0.09, 0.09, 0.09], "small": [0.01] * 3 + [0.04] * 3, "even": [0.09] * 6}
    found = {}
    for name, each in rates.items():
        watch = TailWatch(limits)
        for rate in each:
            watch.see(9, rate)
        found[name] = watch.alarms
    assert found == {"spiral": ["rise"], "small": [], "even": []}
    old = TailWatch(limits, **{**TailWatch(limits).state(), "strikes": {"tail": 0, "rejection": 0, "length": 0}})
    for rate in rates["spiral"]:  # a checkpoint of before goes on
        old.see(9, rate)
    assert old.alarms == ["rise"]


# ---------------------------------------------------------------- warn


def test_a_collapse_of_the_length_is_warned_about_once_until_it_is_gone() -> None:
    shorten = Shorten(4, 8)
    callbacks = guarded("warn", [shorten], target=0.0, window=2, patience=1)
    with pytest.warns(UserWarning, match="TailGuard") as record:
        trainer = fit(sharp(min_completion_length=3, lr=0.0), 12, callbacks)
    (message,) = told(record)
    assert message.startswith("TailGuard: Responses have shrunk to")
    assert "% of their mean length of 1" in message
    assert trainer.global_step == 12
    shorten.start, shorten.end = 12, 99  # a second collapse is told again
    with pytest.warns(UserWarning, match="TailGuard") as record:
        fit(trainer.lightning_module, 8, callbacks)
    assert len(told(record)) == 1


def test_the_tail_is_judged_under_the_runs_own_ceiling() -> None:
    with pytest.warns(UserWarning, match="TailGuard") as record:
        trainer = fit(sharp(), 4, guarded("warn", min_tokens=1, patience=2))
    (message,) = told(record)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    target = tail_target(logged["acceptance/ceiling_p05"])
    assert f"the target is {target:.3f}" in message
    assert "at 0-2000 tokens" in message
    assert logged["guard/tail_margin"] == pytest.approx(logged["acceptance/p05/0-2000"] - target, abs=1e-5)
    assert (logged["guard/budget"], logged["guard/raises"]) == (BUDGET, 0)


@pytest.mark.filterwarnings("error:TailGuard")
def test_a_healthy_run_is_left_alone() -> None:
    dense = module(compressor=FullKV())
    trainer = fit(dense, 3, guarded("warn", min_tokens=1, patience=1, window=2, length_drop=0.9))
    assert float(trainer.callback_metrics["guard/tail_margin"]) == pytest.approx(1 - tail_target(1.0), abs=1e-3)
    fit(sharp(), 4, guarded("warn", **{**EAGER, "min_tokens": 10**6}))  # too few tokens to judge
    fit(sharp(), 4, guarded("warn", **{**EAGER, "patience": 5}))
    unguarded = module(compressor=FullKV())
    fit(unguarded, 3)
    assert torch.equal(weights(dense), weights(unguarded))


def test_too_many_rejections_are_warned_about() -> None:
    with pytest.warns(UserWarning, match="TailGuard") as record:
        trainer = fit(sharp(), 4, guarded("warn", [Reject()], target=0.0, window=3, patience=1))
    assert told(record) == [
        "TailGuard: 50.0% of the sequences of 3 rollouts were rejected, more than 25.0%. Raise the budget; "
        "reweight with a bound (ImportanceReweighting with clip_max: 1.5) in place of rejecting, by which nothing is "
        "learned from these sequences; or train under the sampler's evictions (ReplayGRPO)."
    ]
    assert float(trainer.callback_metrics["guard/rejection_rate"]) == 0.5


# ---------------------------------------------------------------- raise


def test_the_budget_is_raised_and_the_memory_planned_anew() -> None:
    recorder = Recorder()
    grpo = sharp()
    with pytest.warns(UserWarning, match="TailGuard") as record:
        fit(grpo, 5, guarded("raise", [recorder], max_raises=3, **EAGER))
    budgets = [6, 8, 10, 13, 13]  # times 5/4, rounded up; from the next rollout on
    sizes = [scored.rollout.kv.peak_bytes for scored in recorder.scored]
    assert sizes == [16 * (budget + BUFFER) * BYTES for budget in budgets]
    assert grpo.generator.sampler().cache.pool_bytes == sizes[-1]
    assert set(grpo.generator.sampler().cache.size.capacities) == {13 + BUFFER}
    kept = [int(scored.rollout.kv.stored.max()) for scored in recorder.scored]
    assert all(most <= budget + BUFFER for most, budget in zip(kept, budgets, strict=True))
    assert kept[3] > budgets[0] + BUFFER
    assert [message.split("The budget ")[-1] for message in told(record)] == [
        "grows from 6 to 8 tokens per layer and head, step 1 of 3.",
        "grows from 8 to 10 tokens per layer and head, step 2 of 3.",
        "grows from 10 to 13 tokens per layer and head, step 3 of 3.",
        "was raised 3 times already. Raise the budget, or train under the sampler's evictions (ReplayGRPO) if you do "
        "not.",
    ]


@pytest.mark.filterwarnings("ignore:TailGuard")
def test_under_retrieval_more_is_read() -> None:
    recorder, grpo = Recorder(), sharp()
    grpo.generator.compressor = FullKV()
    grpo.generator.retriever = Centroid(budget=4, page_size=2, num_first_pages=0, num_last_pages=1, num_dense_layers=1)
    fit(grpo, 3, guarded("raise", [recorder], max_raises=1, **EAGER))
    assert grpo.generator.retriever.budget == 6  # a quarter more, in whole pages
    shares = [scored.rollout.kv.read_share for scored in recorder.scored]
    assert shares[1] > shares[0]


@pytest.mark.filterwarnings("ignore:TailGuard")
def test_every_budget_of_a_schedule_is_raised_to_the_next() -> None:
    recorder, grpo = Recorder(), sharp()
    schedule = LengthSchedule(starts=[0, 12], budgets=[6, 8])
    grpo.generator.compressor = RandomEviction(budget=schedule, buffer=BUFFER, num_sinks=1, window=2)
    fit(grpo, 3, guarded("raise", [recorder], max_raises=1, **EAGER))
    assert grpo.generator.compressor.schedule == schedule.raised(1) == LengthSchedule(starts=[0, 12], budgets=[8, 10])
    sizes = [scored.rollout.kv.peak_bytes for scored in recorder.scored]
    assert sizes == [16 * (budget + BUFFER) * BYTES for budget in (8, 10, 10)]


def test_a_raised_budget_means_fewer_slots_under_a_memory_limit() -> None:
    slots: list[int] = []
    budgets = [6, 8, 10, 13]

    class Plans(RolloutCallback):
        def on_rollout_scored(self, trainer: Any, module: Any, scored: Any) -> None:
            plan = module.generator.sampler().memory_plan
            assert scored.rollout.kv.peak_bytes == plan.pool_bytes
            assert plan.pool_bytes == plan.num_slots * (budgets[len(slots)] + BUFFER) * BYTES
            assert plan.total_bytes <= plan.limit
            slots.append(plan.num_slots)

    with pytest.warns(UserWarning, match="TailGuard"):
        fit(sharp(memory_limit=72_000), 4, guarded("raise", [Plans()], monitor={"ceiling_prompts": 0}, **EAGER))
    assert slots == sorted(slots, reverse=True)
    assert slots[-1] < slots[0] < 16


@pytest.mark.filterwarnings("ignore:TailGuard")
def test_a_resumed_run_keeps_the_raised_budget_and_is_bitwise_the_same(tmp_path: Path) -> None:
    options = {**EAGER, "patience": 2, "max_raises": 2}
    whole, first, second = sharp(), sharp(), sharp()
    recorder = Recorder()
    fit(whole, 7, guarded("raise", [recorder], **options))
    fit(first, 3, guarded("raise", **options)).save_checkpoint(tmp_path / "last.ckpt")
    assert (first.generator.compressor.budget, whole.generator.compressor.budget) == (8, 10)
    resumed = Recorder()
    fit(second, 7, guarded("raise", [resumed], **options), ckpt_path=tmp_path / "last.ckpt")
    sizes = [scored.rollout.kv.peak_bytes for scored in recorder.scored]
    assert len(set(sizes)) == 3
    assert [scored.rollout.kv.peak_bytes for scored in resumed.scored] == sizes[3:]
    assert torch.equal(weights(second), weights(whole))
    again = Recorder()  # with the same module, whose budget stands raised by more than the checkpoint says
    fit(second, 5, guarded("raise", [again], **options), ckpt_path=tmp_path / "last.ckpt")
    assert [scored.rollout.kv.peak_bytes for scored in again.scored] == sizes[3:5]


def test_raising_reaches_the_parts_of_a_wrapper() -> None:
    mixture = Combined([KNorm(budget=20, buffer=4), RandomEviction(budget=20, buffer=4)])
    union = Combined([mixture], across_heads="max")
    union.raise_budget(2)
    assert [c.budget for c in (union, mixture, *mixture._parts)] == [32] * 4  # 20, 25, 32
    union.raise_budget(2)  # counted from the budget given
    assert "budget=32" in repr(union)
    with pytest.raises(ValueError, match="FullKV keeps everything"):
        FullKV().raise_budget(1)


# ---------------------------------------------------------------- stop


@pytest.mark.filterwarnings("ignore:TailGuard")
def test_the_run_stops_at_an_optimizer_step_with_a_checkpoint(tmp_path: Path) -> None:
    options = {"steps_per_generation": 4, "min_completion_length": 3}
    cut: dict[str, Any] = {"accumulate_grad_batches": 2, "default_root_dir": tmp_path}
    guard, *others = guarded("stop", [Shorten(4)], target=0.0, window=2, patience=2)
    stopped = sharp(**options)
    trainer = fit(stopped, 40, [guard, *others], **cut)
    # rollout 4 is the first short one, its window still half long; 5 and 6 are strikes; one of two steps is taken
    assert (stopped.num_rollouts, trainer.global_step) == (7, 2 * 6 + 1)
    path = tmp_path / "checkpoints" / "tail_guard_00006.ckpt"
    saved = torch.load(path, weights_only=True)
    assert saved["global_step"] == 13
    own = stopped.state_dict()
    assert own.keys() == saved["state_dict"].keys()
    assert all(torch.equal(own[name], value) for name, value in saved["state_dict"].items())
    whole, resumed = sharp(**options), sharp(**options)
    fit(whole, 16, [Shorten(4)], **cut)
    fit(resumed, 16, [TailGuard("off"), Shorten(4)], ckpt_path=path, **cut)
    assert torch.equal(weights(resumed), weights(whole))


# ---------------------------------------------------------------- settings


def test_what_cannot_be_watched_or_acted_on_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"add it to trainer\.callbacks"):
        fit(sharp(), 1, [TailGuard()])
    with pytest.raises(ValueError, match=r"ceiling_prompts=0.*Give TailGuard.target"):
        fit(sharp(), 1, guarded("warn", monitor={"ceiling_prompts": 0}))
    with pytest.raises(ValueError, match=r"mode='raise' needs a compressor that evicts or a retriever, FullKV"):
        fit(module(compressor=FullKV()), 1, guarded("raise"))
    with pytest.raises(ValueError, match="does not work with partial rollouts"):
        fit(sharp(num_slots=4, partial_rollout_steps=4), 1, guarded("raise"))


def test_an_old_report_is_judged_once() -> None:
    guard, monitor = TailGuard("warn", **EAGER), AcceptanceMonitor()
    guard._monitor, monitor.report = monitor, TailReport(0, {"0-2000": 0.5}, {"0-2000": 10}, None)
    grpo = sharp()
    grpo.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    grpo.log_dict = lambda *_, **__: None
    with warnings.catch_warnings(record=True):
        for index in range(3):
            guard._judge(grpo, index, 10.0, 0.0)
    assert guard.watch.strikes["tail"] == 1


@pytest.mark.parametrize("word", ["off", "raise", "stop"])
@pytest.mark.filterwarnings("ignore:TailGuard")
def test_one_word_of_a_configuration(word: str, folder: Path) -> None:
    values = config()
    values["trainer"]["callbacks"] += [
        {"class_path": "AcceptanceMonitor", "init_args": {"every_n_rollouts": 1, "ceiling_prompts": 2}},
        {"class_path": "TailGuard", "init_args": {"mode": "WORD", "target": 1.0, "min_tokens": 1, "patience": 1}},
    ]
    path = Path(write(values))
    path.write_text(path.read_text().replace("WORD", word))  # as a person writes it, without quotes
    cli = main(["fit", "--config", str(path)])
    # 12, 15, 19: the second raise waits for the next rollout
    assert cli.model.generator.compressor.budget == (12 if word != "raise" else 15)
    assert cli.trainer.callback_metrics.get("guard/budget", 12) == (12 if word != "raise" else 19)
    assert cli.trainer.global_step == (1 if word == "stop" else 4)
    assert (folder / "runs/own/checkpoints/tail_guard_00000.ckpt").exists() == (word == "stop")
    with open(folder / "runs/own/version_0/metrics.csv", encoding="utf-8") as file:
        assert ("guard/tail_margin" in next(csv.reader(file))) == (word != "off")


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_judge_the_same_tail(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that alone ended the run, or raised its budget, would leave the others waiting, or drawing otherwise."""
    reports = [
        TailReport(0, {"0-2000": 0.9, "2000-4000": 0.5}, {"0-2000": 300, "2000-4000": 10}, None),
        TailReport(0, {"0-2000": 0.6}, {"0-2000": 100}, 0.9),
    ]
    monkeypatch.setattr("sparse_rl_lightning.callbacks.guards.tail_guard.of_all_ranks", lambda own: reports)
    grpo, guard = module(), TailGuard(target=0.85, mode="warn", min_tokens=50, patience=1)
    monkeypatch.setattr(grpo, "log_dict", lambda metrics, **_: logged.update(metrics))
    monkeypatch.setattr("sparse_rl_lightning.callbacks.guards.tail_guard.warn_of_run", lambda *_: None)
    logged: dict[str, float] = {}
    guard._monitor = AcceptanceMonitor()
    guard._monitor.report = reports[rank]
    grpo._trainer = Trainer(accelerator="cpu", logger=False)
    guard._judge(grpo, 0, 10.0, 0.0)
    assert logged["guard/tail_margin"] == pytest.approx((0.9 * 300 + 0.6 * 100) / 400 - 0.85)
    assert TailReport.mean(reports).ceiling == 0.9
