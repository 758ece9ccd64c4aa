"""Corrections, published ones by name: worked by hand, one word on the command line, and masking at the loss."""

from __future__ import annotations

import inspect
import itertools
import math
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from tiny_run import config, write
from torch import Tensor

from sparse_rl_lightning import callbacks
from sparse_rl_lightning.callbacks import (
    CIS,
    MIS,
    TIS,
    GeometricTIS,
    IcePop,
    ImportanceReweighting,
    RolloutCallback,
    SequenceMaskTIS,
    SequenceMIS,
    SequenceTIS,
    SparsityAwareRejection,
)
from sparse_rl_lightning.cli import main
from sparse_rl_lightning.corrections import mask_sequences, normalize_weights, off_policy_sequences
from sparse_rl_lightning.learner.loss import GRPOLoss
from sparse_rl_lightning.losses import Denominator, LossType
from sparse_rl_lightning.records import Rollout

# Sequence 1: ratios 4, 1/4, 2: product 2, geometric mean 2 ** (1/3) = 1.259921. Sequence 2: 8, 1: product 8, mean
# sqrt(8) = 2.828427. Sequence 3: 0.6 and 1e-5: product 6e-6, mean sqrt(6e-6) = 0.00244949. Others are not read.
RATIOS = torch.tensor([[1e-9, 4, 0.25, 2], [1e-9, 8, 1, 100], [1e-9, 0.6, 1e-5, 100]])
MASK = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 1, 0]], dtype=torch.bool)
CUBE, ROOT, TINY = 2 ** (1 / 3), math.sqrt(8), math.sqrt(6e-6)


def corrected(callbacks: list[Any], **fields: Any) -> Rollout:
    """The three sequences after these corrections."""
    sampler = torch.full(MASK.shape, -0.5)
    rollout = Rollout(
        sequences=MASK.long(), prompt_lengths=torch.ones(3, dtype=torch.int64), completion_mask=MASK,
        finished=MASK.any(dim=1), sampler_logprobs=sampler, old_logprobs=sampler + RATIOS.log(), **fields,
    )  # fmt: skip
    for callback in callbacks:
        assert callback.corrects
        callback.correct(Trainer(accelerator="cpu", logger=False), LightningModule(), rollout)
    return rollout


def coefficients(rollout: Rollout) -> list[list[float]]:
    """What every completion token's loss is multiplied with."""
    mask = rollout.completion_mask
    weights = torch.ones(mask.shape) if rollout.weights is None else rollout.weights
    if rollout.weight_reference is not None:
        weights = normalize_weights(weights, rollout.weight_reference, mask)
    kept = weights if rollout.keep is None else weights * rollout.keep
    return [row[inside].tolist() for row, inside in zip(kept, mask, strict=True)]


MEAN = (2 + 0.25 + 2 + 2 + 1 + 0.6 + 1e-5) / 7  # of min(ratio, 2) over all tokens
BOUND = (1.5 + 0.25 + 1.5 + 1.5 + 1 + 0.6 + 1e-5) / 7  # of min(ratio, 1.5)
WHOLE = (4 + 0.25 + 2 + 8 + 1 + 0.6 + 1e-5) / 7


@pytest.mark.parametrize(
    ("callback", "expected"),
    [
        (TIS(), [[2, 0.25, 2], [2, 1], [0.6, 1e-5]]),
        (IcePop(), [[4, 0, 2], [0, 1], [0.6, 0]]),
        (SequenceTIS(), [[2, 2, 2], [2, 2], [6e-6, 6e-6]]),
        (GeometricTIS(), [[CUBE] * 3, [2, 2], [TINY, TINY]]),
        (SequenceMIS(), [[2, 2, 2], [0, 0], [6e-6, 6e-6]]),
        (SequenceMaskTIS(), [[4, 0.25, 2], [8, 1], [0, 0]]),
        (SparsityAwareRejection(), [[1, 1, 1], [1, 1], [0, 0]]),
        (SparsityAwareRejection(0.9e-5), [[1, 1, 1], [1, 1], [1, 1]]),
        (SparsityAwareRejection(1.1e-5), [[1, 1, 1], [1, 1], [0, 0]]),
        (SparsityAwareRejection(1e-4, 0.5, 2.5), [[0, 0, 1], [0, 1], [0, 0]]),
        (SparsityAwareRejection(None, 0.5, 2.5), [[0, 0, 1], [0, 1], [1, 0]]),
        (SparsityAwareRejection(None, 0.7, None), [[1, 0, 1], [1, 1], [0, 0]]),
        (SparsityAwareRejection(None, None, 2.5), [[0, 1, 1], [0, 1], [1, 1]]),
        (ImportanceReweighting(), [[4, 0.25, 2], [8, 1], [0.6, 1e-5]]),
        (ImportanceReweighting(normalize="batch"),
         [[4 / WHOLE, 0.25 / WHOLE, 2 / WHOLE], [8 / WHOLE, 1 / WHOLE], [0.6 / WHOLE, 1e-5 / WHOLE]]),
        (ImportanceReweighting("token_mask", 0.5, 2.5, "batch", normalize_clip_max=1.5),
         [[0, 0, 2 / BOUND], [0, 1 / BOUND], [0.6 / BOUND, 0]]),
        (MIS(normalize="none"), [[0, 0, 2], [0, 1], [0, 0]]),
        (MIS(), [[0, 0, 2 / MEAN], [0, 1 / MEAN], [0, 0]]),
        (MIS(normalize="batch"), [[0, 0, 2 / MEAN], [0, 1 / MEAN], [0, 0]]),
        (SparsityAwareRejection(None, 0.5, 2.5, "sequence"), [[1, 1, 1], [0, 0], [0, 0]]),
        (SparsityAwareRejection(None, 0.999, None, "geometric"), [[1, 1, 1], [1, 1], [0, 0]]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, RolloutCallback) else "",
)  # fmt: skip
def test_weights_by_hand(callback: RolloutCallback, expected: list[list[float]]) -> None:
    """Whether the rollout says what is kept, or not yet."""
    for keep in (MASK.clone(), None):
        for found, wanted in zip(coefficients(corrected([callback], keep=keep)), expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-5)


def test_corrections_multiply_what_is_there() -> None:
    first = MASK & torch.tensor([[True], [False], [False]])
    assert corrected([SparsityAwareRejection(None, None, 2.5)], keep=first).keep.int().tolist() == [
        [0, 0, 1, 1], [0] * 4, [0] * 4
    ]  # fmt: skip
    truncates, tens = ImportanceReweighting("sequence_truncate", clip_max=3.0), torch.full(MASK.shape, 10.0)
    rollout = corrected([truncates], weights=tens)
    expected = torch.tensor([[0, 20, 20, 20], [0, 30, 30, 0], [0, 6e-5, 6e-5, 0]])
    torch.testing.assert_close(rollout.weights, expected)
    assert rollout.weight_reference is None


def documented_presets() -> list[list[Any]]:
    """The YAML blocks of ImportanceReweighting's docstring, as objects."""
    presets = []
    for block in (inspect.getdoc(ImportanceReweighting) or "").split("::\n\n")[1:]:
        lines = itertools.takewhile(lambda line: not line or line.startswith(" "), block.splitlines())
        entries = yaml.safe_load("\n".join(lines))
        presets.append([getattr(callbacks, e["class_path"])(**e.get("init_args", {})) for e in entries])
    return presets


def test_documented_presets_are_those_of_the_paper_and_of_its_code() -> None:
    paper, code = documented_presets()
    for found, wanted in zip(coefficients(corrected(paper)), [[4, 0.25, 2], [8, 1], [0, 0]], strict=True):
        assert found == pytest.approx(wanted)
    rollout = corrected(code)
    assert coefficients(rollout)[1] == pytest.approx([0, 1 / BOUND])
    assert coefficients(rollout[1:2])[0] == pytest.approx([0, 1 / 1.25])  # a micro-batch has its own mean
    with pytest.raises(ValueError, match="Only one ImportanceReweighting"):
        ImportanceReweighting(normalize="micro_batch").correct(Trainer(logger=False), LightningModule(), rollout)


@pytest.mark.parametrize("kind", [SparsityAwareRejection, ImportanceReweighting])
def test_truncated_sampling_is_warned_of_once(kind: Any) -> None:
    callback, behavior = kind(), torch.zeros(MASK.shape)
    with pytest.warns(UserWarning, match="ignores the truncation"):
        corrected([callback], behavior_logprobs=behavior)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        corrected([callback], behavior_logprobs=behavior)
        corrected([kind()])


@pytest.mark.parametrize("floor", [0.0, 5e-3])
def test_calibrated_weights_truncate_the_displacement_of_the_log_odds(floor: float) -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 4, 50, generator=generator, dtype=torch.float64)
    p[0, :5], mask = torch.tensor([1 - 1e-3, 1 - 1e-5, 1.0, 0.5, 1e-4]), torch.ones(4, 50, dtype=torch.bool)
    mask[:, 40:] = False
    rollout = Rollout(
        sequences=mask.long(), prompt_lengths=mask[:, 0].long(), completion_mask=mask, finished=mask[:, 0],
        sampler_logprobs=q.log(), old_logprobs=p.log(), keep=mask.clone(),
    )  # fmt: skip
    CIS(threshold=1.5, floor=floor).correct(Trainer(accelerator="cpu", logger=False), LightningModule(), rollout)
    odds = (p / (1 - p)) / (q / (1 - q))  # exp(eps)
    want = p + (1 - p) * odds.clamp(max=1 + 1.5)
    want = torch.where(1 - p > floor, want, (p / q).clamp(max=1 + 1.5 * floor))
    want[0, 2] = min(1 / float(q[0, 2]), 1 + 1.5 * floor)
    assert bool((want < p / q - 1e-9)[mask].any())
    assert bool((want == 1 + 1.5 * floor).any())
    torch.testing.assert_close(rollout.weights[mask], want[mask])
    assert not bool(rollout.weights[~mask].any())


@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [
        (TIS(), MIS(), True), (TIS(), CIS(), True), (SequenceMaskTIS(), MIS(), True),
        (ImportanceReweighting(), ImportanceReweighting(), True),
        (SparsityAwareRejection(), SparsityAwareRejection(), True), (MIS(), SparsityAwareRejection(), False),
    ],
)  # fmt: skip
def test_two_corrections_of_one_kind_are_refused(
    first: RolloutCallback, second: RolloutCallback, refused: bool
) -> None:
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[first, second])
    for callback, other in ((first, second), (second, first)):
        names = f"{type(other).__name__} and {type(callback).__name__}"
        words = f"{names} are two corrections of one kind.* Keep one of them"
        with pytest.raises(ValueError, match=words) if refused else nullcontext():
            callback.setup(trainer, LightningModule(), "fit")


def test_one_word_on_the_command_line(folder: Path) -> None:
    path = write(config(callbacks=[], max_steps=1, logger=False, enable_checkpointing=False))
    cli = main(["fit", "--config", path, "--trainer.callbacks+=MIS"])
    assert "MIS" in [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert cli.trainer.global_step == 1


def test_sequence_bounds_are_checked() -> None:
    log_ratio = RATIOS.log()
    assert mask_sequences(log_ratio, MASK, 0.0, 2.0001, "sequence").tolist() == [True, False, True]
    assert mask_sequences(log_ratio, MASK, 1.2, math.inf).tolist() == [True, True, False]
    with pytest.raises(ValueError, match="level must be one of"):
        mask_sequences(log_ratio, MASK, 0.5, 2.0, "token")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 <= low < high"):
        mask_sequences(log_ratio, MASK, 2.0, 2.0)


# ---------------------------------------------------------------- off-policy sequence masking

OLD = torch.tensor([[-9.0, -1, -2], [-9, -1, -2], [-9, -1, -2]])
NOW = torch.tensor([[9.0, -1.5, -2.1], [9, -1.5, -2.1], [9, -0.5, -2.1]])  # means of the differences: 0.3, 0.3, -0.2
INSIDE = torch.tensor([[0, 1, 1]] * 3, dtype=torch.bool)
ADVANTAGES = torch.tensor([-1.0, 1.0, -1.0])


@pytest.mark.parametrize(("delta", "kept"), [(1e-4, [False, True, True]), (0.31, [True] * 3)])
def test_opsm_drops_bad_sequences_the_learner_has_left(delta: float, kept: list[bool]) -> None:
    assert off_policy_sequences(NOW, OLD, ADVANTAGES, INSIDE, delta).tolist() == kept
    assert off_policy_sequences(NOW, OLD, torch.zeros(3), INSIDE, delta).all()  # nothing is learned from them anyway


def loss_and_gradient(own: GRPOLoss, **fields: Tensor) -> tuple[Tensor, Tensor]:
    part = Rollout(
        INSIDE.long(), torch.ones(3, dtype=torch.int64), INSIDE, torch.ones(3, dtype=torch.bool),
        **{"sampler_logprobs": OLD, "old_logprobs": OLD, "advantages": ADVANTAGES, **fields},
    )  # fmt: skip
    logprobs = NOW.clone().requires_grad_()
    loss = own(part, logprobs, own.denominators(part)).loss
    loss.backward()
    return loss.detach(), logprobs.grad


def test_opsm_at_the_loss_counts_the_sequence_as_zeros() -> None:
    loss, gradient = loss_and_gradient(GRPOLoss(off_policy_delta=1e-4))
    only = INSIDE & torch.tensor([[False], [True], [True]])
    expected = loss_and_gradient(GRPOLoss(), keep=only)
    torch.testing.assert_close((loss, gradient), expected)
    assert gradient[0].count_nonzero() == 0
    assert gradient[1].count_nonzero() == 2


@pytest.mark.parametrize("denominator", ["all", "kept_tokens", "kept"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo"])
def test_opsm_changes_no_divisor(loss_type: LossType, denominator: Denominator) -> None:
    """What is left has the gradient that it has without masking."""
    keep = INSIDE & torch.tensor([[True], [True], [False]])
    settings = {"loss_type": loss_type, "denominator": denominator}
    _, without = loss_and_gradient(GRPOLoss(**settings), keep=keep)
    _, masked = loss_and_gradient(GRPOLoss(off_policy_delta=1e-4, **settings), keep=keep)
    assert masked[0].count_nonzero() == 0
    torch.testing.assert_close(masked[1:], without[1:], rtol=0, atol=0)


def test_opsm_can_compare_with_the_sampler() -> None:
    away = loss_and_gradient(GRPOLoss(off_policy_delta=1e-4, off_policy_reference="sampler"), sampler_logprobs=NOW)
    torch.testing.assert_close(away, loss_and_gradient(GRPOLoss()))  # the sampler is where the learner is
