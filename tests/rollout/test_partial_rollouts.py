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
from tiny_grpo import Recorder, Rows, fit, module, quiet, weights

from sparse_rl_lightning.callbacks import ImportanceReweighting, SparsityAwareRejection
from sparse_rl_lightning.callbacks.base import RolloutCallback
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.data.base import PromptDataModule
from sparse_rl_lightning.modules import ReplayGRPO, SparseGRPO
from sparse_rl_lightning.records import ScoredRollout
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs
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


def samples(seen: Recorder) -> dict[str, list[list[int]]]:
    """The completions of every prompt."""
    found = {}
    for scored in seen.scored:
        ids = scored.rollout.completion_ids
        found |= {row["prompt"]: ids[4 * n : 4 * n + 4] for n, row in enumerate(scored.rows)}
    return found


def waiting(grpo: SparseGRPO) -> list[str]:
    return [row["prompt"] for row in (grpo.generator.partial.state() or {"rows": []})["rows"]]


def groups(scored: ScoredRollout) -> int:
    return len(scored.rows)


@pytest.mark.parametrize("options", [{}, {"num_slots": 16}, {"steps_per_generation": 8}], ids=str)
def test_every_prompt_is_trained_on_once_or_still_waits(options: dict[str, Any]) -> None:
    """One epoch: no prompt comes back."""
    seen, grpo = PromptsSeen(), partial(**options)
    parts = grpo.steps_per_generation
    fit(grpo, 10 * parts, [seen], data=ManyRows(prompts_per_rollout=4))
    assert sorted(seen.trained + waiting(grpo)) == sorted(seen.started) == sorted(set(seen.started))
    assert len(seen.started) == 40
    assert seen.trained != seen.started[: len(seen.trained)], "every group waited for the one before"
    unit = max(1, parts // 4)
    for scored in seen.scored:
        assert len(scored.completions) == 4 * groups(scored)
        assert groups(scored) in range(unit, 5 + unit, unit)
    assert len(waiting(grpo)) < grpo.generator.options.num_slots + unit


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
    assert waiting(limited) == []


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


def test_replay_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="does not work with ReplayGRPO: no replay reproduces"):
        partial(kind=ReplayGRPO)


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

    with pytest.raises(ValueError, match=r"longest training prompt must be known.* not over Stream"):
        quiet(1).fit(partial(), torch.utils.data.DataLoader(Stream(), batch_size=4, collate_fn=list))


# ---------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[SparseGRPO, Path]:
    """A module after three steps, and its checkpoint."""
    grpo, path = partial(), tmp_path_factory.mktemp("three") / "a.ckpt"
    fit(grpo, 3).save_checkpoint(path)
    return grpo, path


@pytest.mark.parametrize("stop", [2, 5])
def test_a_resume_draws_unfinished_groups_anew_and_loses_none(stop: int, tmp_path: Path) -> None:
    """Two resumes of one checkpoint are equal; a run that was not interrupted goes on with the tokens it has."""
    options = {"steps_per_generation": 2}
    data, first, seen, whole = ManyRows(prompts_per_rollout=4), PromptsSeen(), PromptsSeen(), partial(**options)
    fit(whole, 8, data=data)
    grpo = partial(**options)
    trainer = fit(grpo, stop, [first], data=data)
    left = waiting(grpo)
    assert left
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    ends = list[torch.Tensor]()
    for callbacks in ([], [seen]):
        resumed = partial(**options)
        fit(resumed, 8, [*callbacks], data, tmp_path / "a.ckpt")
        ends.append(weights(resumed))
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], weights(whole))
    assert sorted(first.trained + seen.trained + waiting(resumed)) == sorted(set(first.started + seen.started))
    assert set(seen.trained) & set(left)
    assert all(len(scored.rows) <= 4 + 1 for scored in seen.scored), "a rollout grew by what begins anew"
    assert all(int(scored.rollout.policy_versions.max()) == number for number, scored in enumerate(seen.scored, 1))


def test_what_is_drawn_anew_has_the_random_numbers_of_before(tmp_path: Path) -> None:
    """Under weights that stay as they are these are the samples of the run that was not interrupted."""
    data, whole, first, seen = ManyRows(prompts_per_rollout=4), Recorder(), Recorder(), Recorder()
    fit(partial(lr=0.0), 9, [whole], data)
    for stop, own, path in ((3, first, None), (5, first, tmp_path / "3.ckpt"), (9, seen, tmp_path / "5.ckpt")):
        fit(partial(lr=0.0), stop, [own], data, path).save_checkpoint(tmp_path / f"{stop}.ckpt")
    uninterrupted, resumed = samples(whole), samples(first) | samples(seen)
    both = uninterrupted.keys() & resumed.keys()
    assert len(both) > 24
    assert {prompt: resumed[prompt] for prompt in both} == {prompt: uninterrupted[prompt] for prompt in both}


def test_a_checkpoint_holds_the_rows_of_unfinished_groups_and_says_so(
    three_steps: tuple[SparseGRPO, Path], tmp_path: Path, caplog: Any
) -> None:
    """Also one that is written before the first rollout after a resume."""
    grpo, path = three_steps
    saved = torch.load(path, weights_only=True)["sparse_rl"]["partial"]
    assert saved == grpo.generator.partial.state()
    again = partial(steps_per_generation=1)
    with caplog.at_level(logging.INFO):
        fit(again, 3, ckpt_path=path).save_checkpoint(tmp_path / "b.ckpt")
    assert torch.load(tmp_path / "b.ckpt", weights_only=True)["sparse_rl"]["partial"] == saved
    told = f"{len(saved['rows'])} prompts of partial rollouts had unfinished samples at the checkpoint: all of theirs "
    assert sum(told in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"temperature": 0.3}, "sampling.temperature was 1.0 and is 0.3"),
        ({"max_completion_length": 24}, "sampling.max_completion_length was 20 and is 24"),
        ({"end_tokens": ["5"]}, "rollout.end_tokens was ['5', '9'] and is ['5']"),
        ({"compressor": FullKV()}, "compressor was RKV("),
        ({"num_slots": 9}, "rollout.num_slots was 6 and is 9"),
        ({"memory_limit": 1e9}, "rollout.memory_limit was None and is 1000000000.0"),
    ],
    ids=str,
)
def test_settings_may_change_between_two_rollouts_and_that_is_told(
    changed: dict[str, Any], said: str, three_steps: tuple[SparseGRPO, Path], caplog: Any
) -> None:
    """Also those that decide only which groups are ready when."""
    _, path = three_steps
    resumed = partial(**changed)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        fit(resumed, 4, ckpt_path=path)
    (told,) = [one.getMessage() for one in caplog.records if "Resumed as configured now" in one.getMessage()]
    assert said in told


def test_another_number_of_samples_is_refused_for_groups_that_have_begun(
    three_steps: tuple[SparseGRPO, Path],
) -> None:
    _, path = three_steps
    with pytest.raises(ValueError, match="num_generations was 4 and is 2, and the checkpoint has unfinished groups"):
        fit(partial(num_generations=2), 8, ckpt_path=path)
    with pytest.warns(UserWarning, match="unfinished sequences of partial rollouts, which are dropped"):
        fit(module(max_completion_length=20), 4, ckpt_path=path)


@pytest.mark.parametrize("unit", [1, 2])
def test_groups_that_were_left_complete_are_caught_up_with(unit: int) -> None:
    """After a phase in which few groups a rollout were complete, and then many."""

    def two_tokens(rows: list[dict[str, Any]]) -> list[list[int]]:
        return [[30 + row["number"], 60 + row["number"]] for row in rows]

    policy = tiny_model(initializer_range=0.2)
    sampler = RolloutSampler(policy, FullKV(), 64, end_token_ids=[*range(20)])
    params = SamplingParams(num_generations=2, max_completion_length=12, seed=1)
    waits = PartialRollouts(1, unit=unit)
    waits.begin(8)
    taken, backlog, first = list[int](), list[int](), 0
    for number in range(12):
        waits.max_steps, count = (50, 2) if number else (1, 10)
        rows = [{"number": i} for i in range(first, first + count)]
        rollout, own, _ = waits.draw(sampler, params, rows, range(2 * first, 2 * (first + count)), two_tokens)
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
    assert waiting(grpo)
    seen = PromptsSeen()
    fit(grpo, 2, [seen])
    assert sorted(seen.trained + waiting(grpo)) == sorted(seen.started)


def test_validation_does_not_disturb_what_waits() -> None:
    with_validation, without = partial(), partial()
    fit(with_validation, 3, limit_val_batches=1.0, val_check_interval=1)
    fit(without, 3)
    assert torch.equal(weights(with_validation), weights(without))
    assert isinstance(with_validation.generator.sampler(), RolloutSampler)
