"""Partial rollouts of SparseGRPO: nothing is lost or trained on twice, old tokens are known, mistakes are named."""

from __future__ import annotations

import datetime
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from tiny_grpo import Recorder, Rows, fit, module, weights

from sparse_rl_lightning.callbacks import ImportanceReweighting, SparsityAwareRejection
from sparse_rl_lightning.callbacks.base import RolloutCallback
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.data.base import PromptDataModule
from sparse_rl_lightning.modules import ReplayGRPO, SparseGRPO
from sparse_rl_lightning.records import ScoredRollout
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.rollout.conversations import Opening
from sparse_rl_lightning.rollout.partial import PartialRollouts
from sparse_rl_lightning.testing import tiny_model


class ManyRows(PromptDataModule):
    """Forty different prompts of one to eight characters."""

    def train_rows(self) -> list[dict[str, Any]]:
        draw = random.Random(5)
        prompts = ["".join(draw.choices("0123456789", k=1 + i % 8)) + f"{i:02d}" for i in range(40)]
        return [{"prompt": prompt, "answer": {"number": i, "tags": [0.5, None]}} for i, prompt in enumerate(prompts)]


class PromptsSeen(Recorder):
    """Also notes the prompts of every block as they came from the loader."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[str] = []

    def on_rollout_start(self, trainer: Trainer, module: Any, rows: list[dict[str, Any]]) -> None:
        self.started += [row["prompt"] for row in rows]

    @property
    def trained(self) -> list[str]:
        return [row["prompt"] for scored in self.scored for row in scored.rows]


def partial(**options: Any) -> SparseGRPO:
    """Completions end anywhere between one and twenty tokens."""
    own = {"num_slots": 6, "partial_rollout_steps": 3, "max_completion_length": 20, "end_tokens": ["5", "9"]}
    return module(**{**own, **options})


def groups(scored: ScoredRollout) -> int:
    return len(scored.rows)


@pytest.mark.parametrize("options", [{}, {"num_slots": 16}, {"steps_per_generation": 8}], ids=str)
def test_every_prompt_is_trained_on_once_or_still_waits(options: dict[str, Any]) -> None:
    """One epoch: no prompt comes back."""
    seen, grpo = PromptsSeen(), partial(**options)
    parts = grpo.steps_per_generation
    fit(grpo, 10 * parts, [seen], data=ManyRows(prompts_per_rollout=4))
    waiting = [row["prompt"] for row in grpo.generator.partial.rows.values()]
    assert sorted(seen.trained + waiting) == sorted(seen.started) == sorted(set(seen.started))
    assert len(seen.started) == 40
    assert seen.trained != seen.started[: len(seen.trained)], "every group waited for the one before"
    unit = max(1, parts // 4)
    for scored in seen.scored:
        assert len(scored.completions) == 4 * groups(scored)
        assert groups(scored) in range(unit, 5 + unit, unit)
    assert len(waiting) < grpo.generator.options.num_slots + unit


def test_completions_belong_to_their_prompts() -> None:
    """Every sequence of a rollout begins with the prompt of its row, whenever it was begun."""
    seen, grpo = PromptsSeen(), partial()
    fit(grpo, 10, [seen], data=ManyRows(prompts_per_rollout=4))
    for scored in seen.scored:
        for number, row in enumerate(scored.rows):
            prompt = grpo.generator.encode([row])[0]
            own = scored.rollout.sequences[4 * number : 4 * number + 4, : len(prompt)]
            assert (own == torch.tensor(prompt)).all()


def test_with_a_limit_that_none_reaches_the_weights_are_those_of_the_ordinary_run() -> None:
    callbacks = [SparsityAwareRejection(), ImportanceReweighting()]
    ordinary = partial(num_slots=16, partial_rollout_steps=None)
    limited, cut = partial(num_slots=16, partial_rollout_steps=21), partial(num_slots=16)
    for grpo in (ordinary, limited, cut):
        fit(grpo, 6, [*callbacks])
    assert torch.equal(weights(limited), weights(ordinary))
    assert not torch.equal(weights(cut), weights(ordinary))
    assert limited.generator.partial.rows == {}


def test_versions_are_logged_and_old_tokens_counted() -> None:
    seen, logged = Recorder(), []

    class Metrics(RolloutCallback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    grpo = partial()
    fit(grpo, 8, [seen, Metrics()])
    for number, (metrics, scored) in enumerate(zip(logged, seen.scored, strict=True), start=1):
        drawn = scored.rollout.policy_versions[scored.rollout.completion_mask]
        assert metrics["rollout/version"] == number >= int(drawn.max())
        assert metrics["rollout/oldest_version"] == int(drawn.min())
        assert metrics["rollout/off_policy_tokens"] == pytest.approx(float((drawn < number).float().mean()))
        assert (scored.rollout.policy_versions.diff(dim=1)[scored.rollout.completion_mask[:, 1:]] >= 0).all()
    assert logged[0]["rollout/off_policy_tokens"] == 0
    assert any(0 < metrics["rollout/off_policy_tokens"] < 1 for metrics in logged)
    assert any(metrics["rollout/unfinished"] > 0 for metrics in logged)
    assert all(metrics["rollout/unfinished"] <= 6 for metrics in logged)


def test_xi_speaks_of_the_policy_that_drew() -> None:
    """With a full cache xi is 1 but in sequences that an older version began: corrections cover staleness, too."""
    differences: dict[bool, list[float]] = {False: [], True: []}

    class Compare(RolloutCallback):
        def on_rollout_scored(self, trainer: Trainer, module: Any, scored: ScoredRollout) -> None:
            rollout, mask = scored.rollout, scored.rollout.completion_mask
            old = ((rollout.policy_versions < module.generator.partial.session.version) & mask).any(dim=1)
            for row, difference in enumerate((rollout.old_logprobs - rollout.sampler_logprobs).abs().amax(dim=1)):
                differences[bool(old[row])].append(float(difference))

    fit(partial(compressor=FullKV(), num_slots=12), 8, [Compare()])
    assert max(differences[False]) < 2e-5
    assert sum(difference > 1e-3 for difference in differences[True]) > 5


def test_replay_refuses_sequences_of_several_versions_by_name() -> None:
    class Replay(RolloutCallback):
        def on_rollout_scored(self, trainer: Trainer, module: Any, scored: ScoredRollout) -> None:
            replay_logprobs(module.policy, scored.rollout)

    with pytest.raises(ValueError, match=r"drawn by several versions of the policy \(partial rollouts\)"):
        fit(partial(), 8, [Replay()])


def test_progress_counts_from_the_start_of_each_rollout() -> None:
    seen = []

    class Look(RolloutCallback):
        def on_rollout_start(self, *_: Any) -> None:
            seen.append([])

        def on_rollout_progress(self, trainer: Trainer, module: Any, progress: Any) -> None:
            seen[-1].append(progress)

    fit(partial(), 4, [Look()])
    for rollout in seen:
        assert rollout[0].step <= 1
        assert 0 <= rollout[0].finished
        assert rollout[-1].finished <= rollout[-1].total <= 16 + 6
        assert 0 < rollout[-1].tokens <= 6 * rollout[-1].step + 16


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_slots": None}, "does not work with num_slots=null: .* Set model.rollout.num_slots"),
        ({"oversampling": 2.0}, "does not work with oversampling=2.0"),
        ({"keep_pool": False}, "does not work with keep_pool=False"),
        ({"kind": ReplayGRPO}, "does not work with ReplayGRPO: no replay reproduces"),
        ({"partial_rollout_steps": 0}, "partial_rollout_steps must be at least 1"),
        ({"partial_checkpoint": "drop"}, "partial_checkpoint must be one of store, restart, got"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        partial(**options)


class Broken(Rows):
    """A row that is unlike the others, far from the first block."""

    def __init__(self, **row: Any) -> None:
        super().__init__(prompts_per_rollout=4)
        self.row = row

    def train_rows(self) -> list[dict[str, Any]]:
        return [*super().train_rows(), {"prompt": "a", "answer": "b", **self.row}]


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"day": [datetime.date(2020, 1, 1)]}, "column 'day' of the training data holds a date"),
        ({"prompt": "a" * 600}, "has 600 tokens.* exceeds the model's context of 512"),
    ],
)
def test_rows_that_would_fail_later_fail_before_the_first_rollout(row: dict[str, Any], match: str) -> None:
    recorder = Recorder()
    with pytest.raises(ValueError, match=match):
        fit(partial(), 1, [recorder], data=Broken(**row))
    assert recorder.scored == []


def test_loaders_that_hide_their_rows_are_refused() -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(Rows().train_rows())

    trainer = Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"longest training prompt must be known.* not over Stream"):
        trainer.fit(partial(), torch.utils.data.DataLoader(Stream(), batch_size=4, collate_fn=list))


# ---------------------------------------------------------------- checkpoints


def save_after(folder: Path, steps: int, **options: Any) -> tuple[SparseGRPO, Path]:
    grpo = partial(**options)
    trainer = fit(grpo, steps)
    trainer.save_checkpoint(folder / "a.ckpt")
    return grpo, folder / "a.ckpt"


@pytest.mark.parametrize("stop", [1, 2, 5])
def test_stored_sequences_go_on_as_if_nothing_had_happened(stop: int, tmp_path: Path) -> None:
    whole, resumed = partial(steps_per_generation=2), partial(steps_per_generation=2)
    fit(whole, 8)
    _, path = save_after(tmp_path, stop, steps_per_generation=2)
    fit(resumed, 8, ckpt_path=path)
    assert torch.equal(weights(resumed), weights(whole))
    assert resumed.generator.partial.rows == whole.generator.partial.rows


def test_restarted_sequences_are_drawn_again_by_the_new_policy(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO):
        stored, path = save_after(tmp_path, 3)
        large = torch.load(path, weights_only=True)["sparse_rl"]["partial"]
        _, path = save_after(tmp_path, 3, partial_checkpoint="restart")
    small = torch.load(path, weights_only=True)["sparse_rl"]["partial"]
    told = [record.getMessage() for record in caplog.records if "unfinished sequences" in record.getMessage()]
    assert any(message.endswith("MiB (store).") for message in told)
    assert any(message.endswith("MiB (restart).") for message in told)
    left = stored.generator.partial.num_unfinished
    assert f"{left} unfinished sequences of partial rollouts were not trained." in told
    assert large["session"]["slots"]
    assert small["session"]["slots"] == {}
    assert small["rows"] == large["rows"] == stored.generator.partial.rows
    ended = [one for group in stored.generator.partial.session.scheduler.groups.values() for one in group.finished]
    seen, resumed = Recorder(), partial(partial_checkpoint="restart")
    fit(resumed, 4, [seen], ckpt_path=path)
    (scored,) = seen.scored
    versions, mask = scored.rollout.policy_versions, scored.rollout.completion_mask
    is_old = ((versions < resumed.generator.partial.session.version) & mask).any(dim=1)
    is_new = ((versions == resumed.generator.partial.session.version) & mask).any(dim=1)
    assert not (is_old & is_new).any(), "a sequence that was restarted holds no old token"
    assert 0 < int(is_old.sum()) <= len(ended)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    _, path = save_after(tmp_path, 3)
    with pytest.raises(ValueError, match="max_completion_length was 20 and is 24"):
        fit(partial(max_completion_length=24), 8, ckpt_path=path)
    with pytest.raises(ValueError, match=r"\d unfinished sequences in slots, and this session has 2 slots"):
        fit(partial(num_slots=2), 8, ckpt_path=path)
    with pytest.warns(UserWarning, match="unfinished sequences of partial rollouts, which are dropped"):
        fit(module(max_completion_length=20), 8, ckpt_path=path)


@pytest.mark.parametrize("changed", [{"temperature": 0.3}, {"top_k": 5}], ids=str)
def test_a_restart_with_other_settings_draws_finished_samples_again_too(changed: Any, tmp_path: Path) -> None:
    _, path = save_after(tmp_path, 3, partial_checkpoint="restart")
    saved = torch.load(path, weights_only=True)["sparse_rl"]["partial"]
    assert any(group["finished"] for group in saved["session"]["groups"].values())
    seen, resumed = Recorder(), partial(**changed)
    fit(resumed, 4, [seen], ckpt_path=path)
    drawn = seen.scored[0].rollout.policy_versions[seen.scored[0].rollout.completion_mask]
    assert drawn.unique().tolist() == [saved["session"]["version"] + 1]


@pytest.mark.parametrize("unit", [1, 2])
def test_groups_that_were_left_complete_are_caught_up_with(unit: int) -> None:
    """After a phase in which few groups a rollout were complete, and then many."""
    policy = tiny_model(initializer_range=0.2)
    sampler = RolloutSampler(policy, FullKV(), 64, end_token_ids=[*range(20)])
    params = SamplingParams(num_generations=2, max_completion_length=12, seed=1)
    waits = PartialRollouts(1, unit=unit)
    waits.begin(8)
    taken, backlog, first = list[int](), list[int](), 0
    for number in range(12):
        waits.max_steps, count = (50, 2) if number else (1, 10)
        rows = [{"number": i} for i in range(first, first + count)]
        opening = Opening(rows, [[30 + i, 60 + i] for i in range(first, first + count)], [])
        rollout, own, _ = waits.draw(sampler, params, opening, range(2 * first, 2 * (first + count)))
        assert len(own) in range(unit, 1 + count + unit, unit)
        taken, first = taken + [row["number"] for row in own], first + count
        backlog.append(int(waits.metrics(rollout)["rollout/backlog"]))
    assert backlog[1] > 2 * unit
    assert backlog[1:] == [max(0, backlog[1] - unit * i) for i in range(11)]
    assert taken[-2:] == [30, 31]
    assert sorted(taken) == list(range(32))


def test_checkpoints_of_ordinary_runs_can_be_gone_on_with(tmp_path: Path) -> None:
    trainer = fit(module(max_completion_length=20), 2)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    grpo = partial()
    fit(grpo, 4, ckpt_path=tmp_path / "a.ckpt")
    assert grpo.num_rollouts == 4


def test_a_new_fit_forgets_what_an_interrupted_one_left() -> None:
    class Stop(RolloutCallback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            raise ZeroDivisionError

    grpo = partial()
    with pytest.raises(ZeroDivisionError):
        fit(grpo, 3, [Stop()])
    assert grpo.generator.partial.rows
    seen = PromptsSeen()
    fit(grpo, 2, [seen])
    assert sorted(seen.trained + [row["prompt"] for row in grpo.generator.partial.rows.values()]) == sorted(
        seen.started
    )


def test_validation_does_not_disturb_what_waits() -> None:
    with_validation, without = partial(), partial()
    fit(with_validation, 6, limit_val_batches=1.0, val_check_interval=1)
    fit(without, 6)
    assert torch.equal(weights(with_validation), weights(without))
    assert isinstance(with_validation.generator.sampler(), RolloutSampler)
