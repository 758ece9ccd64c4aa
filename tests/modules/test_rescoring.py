"""The sequences of a rollout's first optimizer step are not rescored, and nothing but the time of it is another."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from closeness import assert_same_sums
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import sparse_rl_lightning.callbacks as library
from sparse_rl_lightning.advantages import group_advantages
from sparse_rl_lightning.callbacks.base import CorrectionCallback
from sparse_rl_lightning.learner.forward import Learner
from sparse_rl_lightning.modules import DistillSparse, ReplayGRPO, SparseGRPO, old_logprobs
from sparse_rl_lightning.policies import LoraPolicy
from sparse_rl_lightning.policies.modes import eval_mode
from sparse_rl_lightning.records import Rollout, ScoredRollout
from tests.tiny_grpo import Recorder, fit, module, weights

FOUND = ("old_logprobs", "keep", "weights", "weight_reference")


class Counting(Learner):
    """Counts the sequences that are rescored."""

    count = 0

    def rescored(self, policy: Any, rollout: Rollout, replayed: bool = False) -> Tensor:
        type(self).count += 0 if replayed else len(rollout)
        assert rollout.sequences.shape[1] == rollout.lengths.max()
        return super().rescored(policy, rollout, replayed)


class Whole(library.RolloutCallback):
    """Asks for all log-probs before the first loss."""

    def needs_rescoring(self, module: Any) -> bool:
        return True


class Logged(library.RolloutCallback):
    """Keeps what is logged and all gradients, step by step."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []
        self.gradients: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        found = [p.grad.flatten() for p in pl_module.policy.parameters() if p.grad is not None]
        self.gradients.append(torch.cat(found))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            self.values.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def train(
    rescored: bool, callbacks: list[Any], steps: int, accumulate: int, options: dict[str, Any]
) -> tuple[SparseGRPO, Recorder, Logged, int]:
    grpo, recorder, logged = module(**{"lr": 0.1, **options}), Recorder(), Logged()
    Counting.count = 0
    grpo.learner = Counting(**{field.name: getattr(grpo.learner, field.name) for field in fields(grpo.learner)})
    used = [recorder, logged, *callbacks, *([Whole()] if rescored else [])]
    fit(grpo, steps, used, accumulate_grad_batches=accumulate)
    return grpo, recorder, logged, Counting.count


def check_equal(
    callbacks: Any, options: dict[str, Any], accumulate: int = 1, steps: int = 2, share: float = 0.0
) -> None:
    """With and without the pass all is the same to rounding; ``share`` of the sequences is rescored without it."""
    (grpo, seen, logged, count), (other, seen_too, logged_too, all_of_them) = (
        train(rescored, callbacks(), steps, accumulate, options) for rescored in (False, True)
    )
    assert len(seen.scored) == len(seen_too.scored)
    assert all_of_them == sum(len(scored.rollout) for scored in seen.scored)
    assert count == share * all_of_them
    for one, two in zip(seen.scored, seen_too.scored, strict=True):
        assert (one.rollout.sequences == two.rollout.sequences).all()
        for name in FOUND:
            torch.testing.assert_close(getattr(one.rollout, name), getattr(two.rollout, name), atol=1e-5, rtol=1e-4)
    for one, two in zip(logged.gradients, logged_too.gradients, strict=True):
        assert_same_sums(one, two)
    for one, two in zip(logged.values, logged_too.values, strict=True):
        assert one.keys() == two.keys()
        for name in one.keys() - {name for name in one if name.startswith(("time/", "memory/"))}:
            assert one[name] == pytest.approx(two[name], abs=2e-5, rel=1e-3, nan_ok=True), name
    assert_same_sums(weights(grpo), weights(other), share=1e-5)


REJECTION = {"threshold": 0.2}  # some sequences of the tiny policy
CORRECTIONS: dict[str, Any] = {
    "none": list,
    "rejection": lambda: [library.SparsityAwareRejection(**REJECTION)],
    "paper": lambda: [library.SparsityAwareRejection(**REJECTION), library.ImportanceReweighting()],
    "official": lambda: [
        library.SparsityAwareRejection(**REJECTION, low=0.7, high=1.3),
        library.ImportanceReweighting("token_mask", 0.5, 1.5, "micro_batch", 1.5),
    ],
    "TIS": lambda: [library.TIS()],
    "IcePop": lambda: [library.IcePop()],
    "MIS": lambda: [library.MIS(threshold=0.2)],
    "SequenceMIS": lambda: [library.SequenceMIS(1.2)],
    "SequenceMaskTIS": lambda: [library.SequenceMaskTIS(0.9, 1.1)],
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize(("micro_batches", "accumulate"), [(1, 1), (4, 4)])
def test_one_step_needs_no_pass(name: str, micro_batches: int, accumulate: int) -> None:
    check_equal(CORRECTIONS[name], {"steps_per_generation": micro_batches}, accumulate)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["paper", "none", "official"])
def test_of_several_steps_the_first_needs_none(name: str) -> None:
    check_equal(CORRECTIONS[name], {"steps_per_generation": 4}, 2, steps=4, share=0.5)
    check_equal(CORRECTIONS[name], {"steps_per_generation": 2, "num_iterations": 2}, 1, steps=8, share=0.5)
    check_equal(CORRECTIONS[name], {"num_iterations": 3}, 1, steps=6)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dapo"},
        {"loss_type": "dr_grpo", "denominator": "kept_tokens"},
        {"denominator": "kept_tokens", "beta": 0.1, "kl_on": "kept"},
        {"loss_type": "bnpo", "denominator": "kept"},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"importance_sampling_level": "sequence"},
        {"off_policy_delta": 1e-3},
        {"off_policy_delta": 0.01, "off_policy_reference": "sampler"},
        {"mask_truncated_completions": True},
        {"micro_batch_tokens": 40},
        {"gradient_checkpointing": True},
        {"num_slots": 5, "partial_rollout_steps": 6},
    ],
    ids=str,
)
def test_losses_and_learners(options: dict[str, Any]) -> None:
    check_equal(CORRECTIONS["paper"], {"steps_per_generation": 4, **options}, 4)


@pytest.mark.parametrize("objective", ["sparse", "dense", "mixed", "rejected"])
def test_replay(objective: str) -> None:
    options = {"kind": ReplayGRPO, "replay_objective": objective, "steps_per_generation": 2}
    check_equal(CORRECTIONS["paper"], options, 2)


def test_distillation() -> None:
    pytest.importorskip("peft", reason="peft is an extra (lora)")
    check_equal(CORRECTIONS["paper"], {"kind": DistillSparse, "steps_per_generation": 2}, 2, steps=4)


class Adapted(SparseGRPO):
    """SparseGRPO on the policy with an adapter that is not zero."""

    def __init__(self, policy: Any, *args: Any, dropout: float = 0.0, **kwargs: Any) -> None:
        pytest.importorskip("peft", reason="peft is an extra (lora)")
        super().__init__(LoraPolicy(policy, r=4, lora_dropout=dropout), *args, **kwargs)

    def on_policy_loaded(self) -> None:
        super().on_policy_loaded()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in self.policy.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def test_lora() -> None:
    check_equal(CORRECTIONS["paper"], {"kind": Adapted, "steps_per_generation": 2}, 2)


# ---------------------------------------------------------------- settings that keep the pass


class Ranked(library.RolloutCallback):
    """A user's correction, which compares sequences with each other unless it says otherwise."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def correct(self, trainer: Any, module: Any, part: Rollout) -> None:
        assert part.old_logprobs is not None
        assert part.advantages is not None
        self.sizes.append(len(part))


class Single(Ranked):
    """One that looks at every sequence by itself."""

    def needs_rescoring(self, module: Any) -> bool:
        return False


class OfItsBase(CorrectionCallback):
    """One that says nothing of it."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    correct = Ranked.correct


@pytest.mark.parametrize(
    ("callbacks", "options", "sequences"),
    [
        ([], {"denominator": "kept"}, 32),
        ([], {"denominator": "kept_tokens", "loss_type": "dapo"}, 32),
        ([library.ImportanceReweighting(normalize="batch")], {}, 32),
        ([library.MIS(normalize="batch")], {}, 32),
        ([], {"oversampling": 2.0}, 32),
        ([], {"kind": Adapted, "dropout": 0.5, "disable_dropout": False}, 32),
        ([Ranked()], {}, 32),
        ([library.AcceptanceMonitor(2)], {}, 16),  # the rollout that it measures
        ([library.MismatchSplit(2)], {}, 16),
        ([Single()], {}, 0),
    ],
    ids=lambda value: str([type(one).__name__ for one in value] if isinstance(value, list) else value),
)
def test_what_keeps_the_pass(callbacks: list[Any], options: dict[str, Any], sequences: int) -> None:
    *_, count = train(False, callbacks, 2, 2, {"steps_per_generation": 2, **options})
    assert count == sequences


def test_a_correction_sees_every_sequence_once() -> None:
    for own, sizes in ((Ranked(), [16, 16]), (Single(), [8] * 4), (OfItsBase(), [8] * 4)):
        train(False, [own], 4, 1, {"steps_per_generation": 2})
        assert own.sizes == sizes


class Halves(Single):
    def correct(self, trainer: Any, module: Any, part: Rollout) -> None:
        assert part.advantages is not None
        part.advantages = part.advantages / 2


class Advantages(library.RolloutCallback):
    """Keeps those of the rollout that is trained on, after every micro-batch."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self.seen.append(pl_module.block.rollout.advantages.clone())


@pytest.mark.parametrize("options", [{}, {"micro_batch_tokens": 60}])
def test_a_step_of_several_passes_corrects_every_sequence_once(options: dict[str, Any]) -> None:
    uncorrected, halved = Advantages(), Advantages()
    for callbacks in ([uncorrected], [Halves(), halved]):
        fit(module(num_iterations=2, **options), 1, callbacks, accumulate_grad_batches=2)
    (expected, _), seen = uncorrected.seen, halved.seen
    assert expected.abs().sum() > 0
    assert [torch.equal(value, expected / 2) for value in seen] == [True, True]


# ---------------------------------------------------------------- callbacks


class DensePolicy(library.RolloutCallback):
    """Compares what callbacks see with the policy before the update."""

    def __init__(self) -> None:
        self.expected: list[Tensor] = []
        self.seen: list[Tensor] = []
        self.steps: list[int] = []

    @torch.no_grad()
    def on_rollout_drawn(self, trainer: Any, module: Any, scored: ScoredRollout) -> None:
        with eval_mode(module.policy):
            self.expected.append(module.learner.dense(module.policy, scored.rollout)[0])

    def on_rollout_scored(self, trainer: Any, module: Any, scored: ScoredRollout) -> None:
        assert scored.rollout.old_logprobs is not None
        self.seen.append(scored.rollout.old_logprobs.clone())
        self.steps.append(trainer.global_step)


@pytest.mark.parametrize(("micro_batches", "accumulate", "iterations"), [(1, 1, 1), (4, 4, 1), (4, 2, 1), (2, 2, 2)])
def test_callbacks_see_the_dense_policy_before_the_update(micro_batches: int, accumulate: int, iterations: int) -> None:
    callback = DensePolicy()
    options = {"steps_per_generation": micro_batches, "num_iterations": iterations, "lr": 2.0}
    per_rollout = micro_batches * iterations // accumulate
    train(False, [library.TIS(), callback], 2 * per_rollout, accumulate, options)
    assert callback.steps == [0, per_rollout]
    for expected, seen in zip(callback.expected, callback.seen, strict=True):
        torch.testing.assert_close(seen, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("others", [[], [Whole()]])
def test_an_edit_where_it_may_come_too_late_is_refused(others: list[Any]) -> None:
    class Late(library.RolloutCallback):
        def on_rollout_scored(self, trainer: Any, module: Any, scored: ScoredRollout) -> None:
            assert scored.rollout.keep is not None
            scored.rollout.keep[0] = False

    with pytest.raises(ValueError, match=r"Late\.on_rollout_scored changed keep.*correct\(trainer, module, part\)"):
        fit(module(), 1, [*others, Late()])


# ---------------------------------------------------------------- checkpoints


def test_a_run_resumed_within_a_rollout_is_the_run_that_went_on(tmp_path: Path) -> None:
    """Two steps on every rollout: the first brings its own log-probs, the second reads those that were stored."""

    def run(steps: int, *callbacks: Any, **more: Any) -> Tensor:
        grpo = module(steps_per_generation=4, lr=0.1)
        fit(grpo, steps, [*CORRECTIONS["official"](), *callbacks], accumulate_grad_batches=2, **more)
        return weights(grpo)

    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = run(5, save, enable_checkpointing=True)
    for stop in (1, 2, 3):
        assert torch.equal(run(5, ckpt_path=tmp_path / f"step={stop}.ckpt"), whole)


def test_a_run_resumed_within_the_first_step_has_all_log_probs(tmp_path: Path) -> None:
    class Save(library.RolloutCallback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if not (tmp_path / "a.ckpt").exists():
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    with pytest.warns(UserWarning, match="between two optimizer steps"):
        fit(module(steps_per_generation=4), 1, [library.TIS(), Save()], accumulate_grad_batches=4)
    grpo = module(steps_per_generation=4)
    fit(grpo, 1, [library.TIS()], accumulate_grad_batches=4, ckpt_path=tmp_path / "a.ckpt")
    rollout = grpo.block.rollout  # type: ignore[union-attr]
    assert rollout.old_logprobs is not None
    assert rollout.weights is not None
    assert (rollout.old_logprobs < 0)[rollout.completion_mask].all()
    assert (rollout.weights > 0)[rollout.completion_mask].all()


def test_baseline_of_what_is_kept_leaves_rejected_rewards_out() -> None:
    """The mean and deviation of a prompt are those of its samples that are kept, in whatever micro-batches they are."""
    parts = {}
    for baseline in ("all", "kept"):
        recorder, grpo = Recorder(), module(steps_per_generation=4)
        fit(grpo, 4, [library.SparsityAwareRejection(0.7, baseline=baseline), recorder])
        parts[baseline] = recorder.scored[0].rollout
    everything, kept = parts["all"], parts["kept"]
    alive = kept.keep.any(dim=1)
    assert torch.equal(everything.keep, kept.keep)
    assert 0 < int((~alive).sum()) < len(kept)
    torch.testing.assert_close(everything.advantages, group_advantages(everything.rewards, 4))
    groups = zip(kept.rewards.view(-1, 4), alive.view(-1, 4), kept.advantages.view(-1, 4), strict=True)
    for rewards, left, advantages in groups:
        assert not advantages[~left].any()
        own = rewards[left]
        if len(own) > 1 and own.max() > own.min():
            torch.testing.assert_close(advantages[left], (own - own.mean()) / (own.std() + 1e-6))
        else:
            assert not advantages.any()
    assert not torch.equal(everything.advantages[alive], kept.advantages[alive])


def test_a_rollout_of_an_interrupted_fit_is_not_reported_later(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = list[Any]()
    monkeypatch.setattr("sparse_rl_lightning.modules.old_logprobs.report", lambda _, scored: reported.append(scored))
    grpo = module(steps_per_generation=2)
    old, scored = grpo.old_logprobs, SimpleNamespace()
    for forgets in (True, False):
        fit(grpo, 1)
        part, _ = grpo.block.next()  # type: ignore[union-attr]
        reported.clear()
        old.is_complete = False
        old.report(scored)  # type: ignore[arg-type]
        if forgets:
            old.forget()
        old.store(grpo.block, part)  # type: ignore[arg-type]
        assert reported == ([] if forgets else [scored])


class Sometimes(CorrectionCallback):
    """Halves what counts of the first part that it sees, and leaves the others as they are."""

    seen = 0

    def correct(self, trainer: Any, module: Any, part: Rollout) -> None:
        self.seen += 1
        if self.seen == 1:
            part.weights = torch.full(part.sequences.shape, 0.5)
            part.advantages = 2 * part.advantages


def test_a_correction_that_leaves_sequences_as_they_are_does_not_silence_them() -> None:
    """Parts without weights count once, and what is edited of a part holds in every pass over the rollout."""
    grpo, seen = module(steps_per_generation=2, num_iterations=2), Unedited()
    fit(grpo, 3, [Sometimes(), seen])  # the rest of a second pass is to come
    own = grpo.block.rollout  # type: ignore[union-attr]
    halved = (own.weights == 0.5).any(dim=1)
    assert halved.sum() == len(own) // 2
    assert own.weights[~halved].equal(own.completion_mask[~halved].float())
    assert seen.advantages.any()
    assert own.advantages.equal(torch.where(halved, 2 * seen.advantages, seen.advantages))


class Doubles(CorrectionCallback):
    def correct(self, trainer: Any, module: Any, part: Rollout) -> None:
        part.weights = part.weights * 2  # type: ignore[operator]


class TriplesInPlace(CorrectionCallback):
    def correct(self, trainer: Any, module: Any, part: Rollout) -> None:
        part.weights *= 3  # type: ignore[operator]


@pytest.mark.parametrize("steps", [1, 2])
def test_weights_are_there_to_be_multiplied_and_only_kept_if_they_are(steps: int) -> None:
    """Rejection alone leaves none, which the loss need not read."""
    for callbacks, want in (
        ([library.SparsityAwareRejection(threshold=0.8)], None),
        ([Doubles(), library.SparsityAwareRejection(), TriplesInPlace()], 6.0),
        ([TriplesInPlace()], 3.0),
    ):
        grpo = module(steps_per_generation=steps)
        fit(grpo, steps, callbacks)
        rollout = grpo.block.rollout  # type: ignore[union-attr]
        assert rollout.weights is None if want is None else rollout.weights.equal(want * rollout.completion_mask)


class Unedited(library.RolloutCallback):
    """Keeps the advantages of a rollout's rewards."""

    advantages: Any = None

    def on_rollout_scored(self, trainer: Any, module: Any, scored: ScoredRollout) -> None:
        self.advantages = module.advantages(scored.rollout.rewards)


@pytest.mark.parametrize(("kind", "keeps"), [(SparseGRPO, False), (ReplayGRPO, True)])
def test_the_record_of_evictions_stays_where_the_loss_reads_it(kind: Any, keeps: bool) -> None:
    grpo = module(kind=kind)
    fit(grpo, 1)
    assert (grpo.block.rollout.evictions is not None) == keeps


def test_sequences_without_weights_count_with_a_weight_of_one() -> None:
    mask = torch.tensor([[False, True, True], [False, True, False]])
    empty = torch.zeros(2, 3)
    given = {"prompt_lengths": torch.ones(2), "finished": torch.ones(2, dtype=torch.bool), "sampler_logprobs": empty}
    rollout = Rollout(sequences=mask.long(), completion_mask=mask, **given)
    source = rollout[torch.tensor([0])]
    source.weights, source.old_logprobs = torch.tensor([[0.0, 0.5, 1.5]]), torch.tensor([[0.0, -1.0, -2.0]])
    old_logprobs._store(rollout, torch.tensor([0]), source)
    assert rollout.weights.tolist() == [[0.0, 0.5, 1.5], [0.0, 1.0, 0.0]]
    assert rollout.old_logprobs.tolist() == [[0.0, -1.0, -2.0], [0.0, 0.0, 0.0]]
