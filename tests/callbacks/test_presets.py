"""Published corrections by name: numbers worked by hand, one word on the command line, and masking at the loss."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from tiny_run import config, write
from torch import Tensor

from sparse_rl_lightning.callbacks import (
    CIS,
    MIS,
    TIS,
    GeometricTIS,
    IcePop,
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
# sqrt(8) = 2.828427. Sequence 3: 0.6 and 1e-5: product 6e-6, mean sqrt(6e-6) = 0.00244949. Elsewhere 100, unread.
RATIOS = torch.tensor([[100, 4, 0.25, 2], [100, 8, 1, 100], [100, 0.6, 1e-5, 100]])
MASK = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 1, 0]], dtype=torch.bool)
CUBE, ROOT, TINY = 2 ** (1 / 3), math.sqrt(8), math.sqrt(6e-6)


def coefficients(callback: RolloutCallback) -> list[list[float]]:
    """What the callback multiplies every completion token's loss with."""
    assert callback.corrects
    sampler = torch.full(MASK.shape, -0.5)
    rollout = Rollout(
        sequences=MASK.long(), prompt_lengths=torch.ones(3, dtype=torch.int64), completion_mask=MASK,
        finished=MASK.any(dim=1), sampler_logprobs=sampler, old_logprobs=sampler + RATIOS.log(), keep=MASK.clone(),
    )  # fmt: skip
    callback.correct(Trainer(accelerator="cpu", logger=False), LightningModule(), rollout)
    weights = torch.ones(MASK.shape) if rollout.weights is None else rollout.weights
    if rollout.weight_reference is not None:
        weights = normalize_weights(weights, rollout.weight_reference, MASK)
    assert rollout.keep is not None
    return [row[mask].tolist() for row, mask in zip(weights * rollout.keep, MASK, strict=True)]


MEAN = (2 + 0.25 + 2 + 2 + 1 + 0.6 + 1e-5) / 7  # of min(ratio, 2) over all tokens


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
        (MIS(normalize="none"), [[0, 0, 2], [0, 1], [0, 0]]),
        (MIS(), [[0, 0, 2 / MEAN], [0, 1 / MEAN], [0, 0]]),
        (MIS(normalize="batch"), [[0, 0, 2 / MEAN], [0, 1 / MEAN], [0, 0]]),
        (SparsityAwareRejection(None, 0.5, 2.5, "sequence"), [[1, 1, 1], [0, 0], [0, 0]]),
        (SparsityAwareRejection(None, 0.999, None, "geometric"), [[1, 1, 1], [1, 1], [0, 0]]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, RolloutCallback) else "",
)
def test_weights_by_hand(callback: RolloutCallback, expected: list[list[float]]) -> None:
    for found, wanted in zip(coefficients(callback), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)


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
    for wrong in ({"threshold": -1.0}, {"floor": -1.0}):
        with pytest.raises(ValueError, match="must be at least 0"):
            CIS(**wrong)


@pytest.mark.parametrize(
    ("callbacks", "refused"),
    [([MIS(), TIS()], True), ([TIS(), CIS()], True), ([SequenceMaskTIS(), MIS()], True),
     ([MIS(), SparsityAwareRejection()], False)],
)  # fmt: skip
def test_only_one_callback_may_weigh(callbacks: list[RolloutCallback], refused: bool) -> None:
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[*callbacks])
    for callback in callbacks:
        if refused:
            with pytest.raises(ValueError, match="are two corrections of one kind"):
                callback.setup(trainer, LightningModule(), "fit")
        else:
            callback.setup(trainer, LightningModule(), "fit")


@pytest.mark.parametrize("name", ["TIS", "IcePop", "CIS", "SequenceTIS", "GeometricTIS", "SequenceMIS", "MIS"])
def test_one_word_on_the_command_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(config(callbacks=[], max_steps=1, logger=False, enable_checkpointing=False))
    cli = main(["fit", "--config", path, f"--trainer.callbacks+={name}"])
    assert name in [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert cli.trainer.global_step == 1


def test_sequence_bounds_are_checked() -> None:
    log_ratio = RATIOS.log()
    assert mask_sequences(log_ratio, MASK, 0.0, 2.0001, "sequence").tolist() == [True, False, True]
    assert mask_sequences(log_ratio, MASK, 1.2, math.inf).tolist() == [True, True, False]
    with pytest.raises(ValueError, match="level must be one of"):
        mask_sequences(log_ratio, MASK, 0.5, 2.0, "token")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 <= low < high"):
        mask_sequences(log_ratio, MASK, 2.0, 2.0)
    with pytest.raises(ValueError, match="give low or high"):
        SparsityAwareRejection(level="geometric")


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
    assert logprobs.grad is not None
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


def test_opsm_options_are_checked() -> None:
    with pytest.raises(ValueError, match=r"loss\.off_policy_delta must be at least 0"):
        GRPOLoss(off_policy_delta=-1.0)
    with pytest.raises(ValueError, match=r"loss\.off_policy_reference must be"):
        GRPOLoss(off_policy_reference="dense")  # type: ignore[arg-type]
