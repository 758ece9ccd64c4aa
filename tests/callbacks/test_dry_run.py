"""The dry run at the start of a fit: it does the worst case, leaves no trace, and says what does not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chatter import Chatter, talking
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from tiny_grpo import Recorder, Rows, fit, loaded, module, quiet, weights
from torch import Tensor
from torch.utils.data import DataLoader

from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.callbacks import (
    CorrectionCallback,
    DryRun,
    ImportanceReweighting,
    RolloutCallback,
    SamplerSupport,
    SparsityAwareRejection,
)
from sparse_rl_lightning.callbacks.guards.dry_run import oldest_go
from sparse_rl_lightning.compressors import RKV, Compressor, FullKV, StreamingLLM
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.modules import GRPOLoss, Loss, ReplayGRPO, SparseGRPO, SupervisedWarmup
from sparse_rl_lightning.policies.source import PolicySource
from sparse_rl_lightning.records import NEVER, LayerState, LossOutput, Rollout
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.options import TurnOptions
from sparse_rl_lightning.testing import tiny_model

LONGEST = 17  # tokens of the longest prompt of Rows


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 5)


def noisy(completions: list[str], **_: Any) -> list[float | None]:
    return [text.count("a") + float(torch.rand(())) for text in completions]


WHOLE_PROMPTS = RKV(budget=8, buffer=3, num_sinks=0, window=2, compress_prompt=False)
SETTINGS: dict[str, dict[str, Any]] = {
    "sparse": {"beta": 0.1, "steps_per_generation": 2},
    "full, pool freed": {"compressor": FullKV(), "keep_pool": False},
    "few slots, whole prompts": {"compressor": WHOLE_PROMPTS, "num_slots": 3},
    "partial": {"num_slots": 6, "partial_rollout_steps": 4},
    "oversampling": {"oversampling": 2.0},
    "replay": {"kind": ReplayGRPO, "replay_objective": "mixed", "beta": 0.1},
}


@pytest.mark.parametrize(
    "method",
    [
        StreamingLLM(budget=8, buffer=3, num_sinks=2, window=2),
        StreamingLLM(budget=8, buffer=3, num_sinks=2, window=2, compress_prompt=False),
        StreamingLLM(budget=LengthSchedule([0, 20], [8, 12]), buffer=2, num_sinks=1, window=2),
        FullKV(),
    ],
    ids=["prompt too", "prompt whole", "schedule", "full"],
)
@pytest.mark.parametrize("prompt_length", [5, 17])
def test_the_longest_sequences_lose_what_a_rollout_would(method: Compressor, prompt_length: int) -> None:
    model, length = tiny_model(), 41
    sampler = RolloutSampler(model, method, end_token_ids=[])
    params = SamplingParams(max_completion_length=length - prompt_length)
    real = sampler.generate([list(range(1, prompt_length + 1))], params).evictions
    death = oldest_go(method, model.config.num_hidden_layers, prompt_length, length)
    assert torch.equal(real.death[:, 0, 0], death)
    assert (death < NEVER).any() == method.evicts


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_is_bitwise_the_same_with_it_and_without(name: str) -> None:
    results, states = [], []
    for enabled in (True, False):
        torch.manual_seed(0)
        settings: dict[str, Any] = {"optimizer": adam, "lr_scheduler": schedule, "disable_dropout": False}
        grpo = loaded(reward=noisy, **settings, **SETTINGS[name])
        for layer in grpo.policy.model.layers:  # draws from torch's generator in the learner; a replay refuses it
            layer.self_attn.attention_dropout = 0.0 if name == "replay" else 0.1
        callbacks = [DryRun(enabled=enabled), SparsityAwareRejection(), ImportanceReweighting()]
        trainer = fit(grpo, 4, callbacks)
        results.append(weights(grpo))
        states.append((torch.get_rng_state(), trainer.optimizers[0].state_dict()["param_groups"]))
    assert torch.equal(*results)
    assert torch.equal(states[0][0], states[1][0])
    assert states[0][1] == states[1][1]


class Never(PolicySource):
    """Weights that nobody may ask for."""

    def load(self) -> Any:
        raise AssertionError("the policy is loaded")


class Misspells(CorrectionCallback):
    def correct(self, trainer: Any, module: Any, part: Rollout) -> None:
        part.weights = part.weights * (part.old_logprobs - part.sampler_logprob)  # type: ignore[attr-defined]


class OfAnotherShape(RolloutCallback):
    def correct(self, trainer: Any, module: Any, part: Rollout) -> None:
        part.keep &= part.rewards > 0.5  # type: ignore[operator]


class Sign(GRPOLoss):
    def __call__(self, part: Rollout, logprobs: Tensor, denominators: Any) -> LossOutput:
        return super().__call__(part, logprobs.values, denominators)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mine", "kind"), [(Misspells(), SparseGRPO), (OfAnotherShape(), ReplayGRPO), (Sign(), SparseGRPO)]
)
def test_a_correction_that_cannot_work_ends_the_run_before_the_policy_is_loaded(mine: Any, kind: Any) -> None:
    grpo = module(kind=kind, beta=0.1, top_p=0.9, top_logprobs=3)
    grpo.policy_source = Never()
    if isinstance(mine, GRPOLoss):
        grpo.loss = mine
    with pytest.raises((AttributeError, RuntimeError)) as error:
        fit(grpo, 1, [mine] if isinstance(mine, Callback) else [])
    assert f"trial of {type(mine).__name__} on a made-up rollout" in error.value.__notes__[0]
    with pytest.raises(AssertionError, match="the policy is loaded"):  # which is left out where it is not wanted
        fit(grpo, 1, [DryRun(enabled=False), *([mine] if isinstance(mine, Callback) else [])])


def weights_of(value: Callable[[Rollout], Any]) -> CorrectionCallback:
    """A correction that leaves this in the place of the weights."""

    class Weighs(CorrectionCallback):
        def correct(self, trainer: Any, module: Any, part: Rollout) -> None:
            part.weights = value(part)

    return Weighs()


class Returns(CorrectionCallback):
    def correct(self, trainer: Any, module: Any, part: Rollout) -> Any:
        return part.completion_mask.float()


class KeepsNumbers(CorrectionCallback):
    def correct(self, trainer: Any, module: Any, part: Rollout) -> None:
        part.keep = part.completion_mask.float()


class Returned(Loss):
    """Returns what it is given a way to make of its log-probs."""

    def __init__(self, value: Callable[[Any], Any]) -> None:
        self.value = value

    def __call__(self, part: Rollout, logprobs: Tensor, denominators: Any) -> LossOutput:
        return self.value(logprobs)  # type: ignore[no-any-return]


SHAPE = r"\(8, 13\)"
MISTAKES = [
    (
        Returns(),
        f"Returns.correct must change weights, keep or advantages, and return nothing, got a tensor {SHAPE}",
    ),
    (KeepsNumbers(), rf"leave booleans {SHAPE} in part.keep, got a tensor {SHAPE} of torch.float32"),
    (weights_of(lambda part: part.rewards), rf"leave finite numbers {SHAPE} in part.weights, got a tensor \(8,\)"),
    (weights_of(lambda part: part.keep), rf"leave finite numbers {SHAPE} in part.weights, got .* of torch.bool"),
    (weights_of(lambda part: part.weights / 0), rf"got a tensor {SHAPE} of torch.float32 with NaN or infinity in it"),
    (weights_of(lambda part: 1.0), rf"leave finite numbers {SHAPE} in part.weights, got 1.0"),
    (Returned(lambda logprobs: logprobs.sum()), r"return a LossOutput with a scalar loss, .* got a tensor \(\)"),
    (Returned(lambda logprobs: LossOutput(logprobs.detach().sum(), {})), "The loss of Returned has no gradient"),
]


@pytest.mark.parametrize(("mine", "said"), MISTAKES)
def test_what_a_correction_or_a_loss_leaves_is_looked_at(mine: Any, said: str) -> None:
    grpo = module(**({"loss": mine} if isinstance(mine, Loss) else {}))
    grpo.policy_source = Never()
    with pytest.raises(UserError, match=said):
        fit(grpo, 1, [] if isinstance(mine, Loss) else [mine])


class LooksAtMore(CorrectionCallback):
    """Reads what only some rollouts have."""

    def __init__(self, name: str) -> None:
        self.name = name

    def correct(self, trainer: Any, module: Any, part: Rollout) -> None:
        assert part.weights is not None
        part.weights = part.weights * (getattr(part, self.name) <= getattr(part, self.name).max())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("policy_versions", {"partial_rollout_steps": 6, "num_slots": 8}),
        ("turns", {"environment": Chatter, "turns": TurnOptions(max_turns=2, max_turn_length=4)}),
        ("support", {"top_k": 9, "top_logprobs": 3}),
        ("support", {"top_k": 9}),
    ],
)
def test_a_trial_has_what_the_run_s_rollouts_have(name: str, options: dict[str, Any]) -> None:
    others = [SamplerSupport()] if "top_k" in options else []
    fit(module(max_completion_length=12, **options), 1, [*others, LooksAtMore(name)])


class MadeLater(CorrectionCallback):
    """Needs what hooks and the trainer bring later, and logs by the trainer's own logger."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.mean = 0.0

    def correct(self, trainer: Any, module: Any, part: Rollout) -> None:
        trainer.logger.log_metrics({"xi": 1.0}, step=7)
        assert self.mean == 0 < trainer.optimizers[0].param_groups[0]["lr"]


class OfOptimizers(MadeLater):
    mean = 0.0


@pytest.mark.parametrize("mine", [MadeLater(), OfOptimizers()], ids=lambda mine: type(mine).__name__)
def test_what_a_run_brings_later_is_not_tried(mine: Any, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(module(), 1, [mine], logger=logger)
    assert (Path(logger.log_dir) / "metrics.csv").read_text().count("\n") == 2, "a head and the real rollout"


class NeedsAll(CorrectionCallback):
    """Uses whatever a real rollout has, and keeps what it saw."""

    def __init__(self, copies: bool) -> None:
        self.seen: list[int] = []
        self.stream = None if copies else (one for one in ())  # which cannot be copied

    def correct(self, trainer: Any, module: Any, part: Rollout) -> None:
        self.seen.append(len(part))
        assert isinstance(module, SparseGRPO)
        noise = torch.rand(part.weights.shape, device=module.device)
        part.weights = part.weights * (1 + 0.1 * noise) * self.log_ratio(part).exp()
        part.advantages = module.advantages(part.rewards)
        module.log("mine", part.weights.sum())
        assert part.evictions.death.shape[1:] == (len(part), part.evictions.num_heads, part.sequences.shape[1])
        part.keep[:] &= part.completion_mask & (module.policy.config.vocab_size > 0)  # type: ignore[index]

    def needs_rescoring(self, module: Any) -> bool:
        return True


@pytest.mark.parametrize("copies", [True, False])
def test_the_trial_of_a_correction_leaves_no_trace(copies: bool) -> None:
    results = []
    for enabled in (None, False):
        torch.manual_seed(0)
        grpo, mine = module(top_p=0.9), NeedsAll(copies)
        fit(grpo, 2, [DryRun(enabled=enabled), mine])
        assert mine.seen == [16, 16]
        results.append(weights(grpo))
    assert torch.equal(*results)


class Watched(StreamingLLM):
    """Notes for every compression how many slots it was and how many tokens they held."""

    seen: list[tuple[int, int]] = []  # noqa: RUF012  # of all instances, cleared by the test

    def score(self, layer: LayerState) -> Tensor:
        Watched.seen.append((layer.keys.shape[0], int(layer.lengths.min())))
        return super().score(layer)


class Trace(Callback):
    """The shapes the learner sees before the first batch, and what the dry run leaves behind."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.left: dict[str, Any] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        def look(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                self.shapes.append(tuple(kwargs["input_ids"].shape))

        self.handle = pl_module.policy.model.register_forward_pre_hook(look, with_kwargs=True)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.handle.remove()
        self.left = {
            "gradients": [name for name, p in pl_module.named_parameters() if p.grad is not None],
            "optimizer": dict(trainer.optimizers[0].state),
            "cache": pl_module.generator.sampler().cache,
            "rollouts": pl_module.num_rollouts,
        }


@pytest.mark.parametrize(
    ("accelerator", "callbacks"), [("cpu", [DryRun(enabled=True)]), pytest.param("cuda", [], marks=pytest.mark.gpu)]
)
def test_it_is_on_by_default_on_a_gpu(
    accelerator: str, callbacks: list[DryRun], caplog: pytest.LogCaptureFixture
) -> None:
    grpo = module(optimizer=adam, beta=0.1)
    with caplog.at_level(logging.INFO):
        fit(grpo, 1, callbacks, accelerator=accelerator, devices=1)
    assert "Dry run of the worst case: optimizer step of " in caplog.text


@pytest.mark.parametrize("num_slots", [None, 6])
def test_it_does_the_worst_case_and_says_what_it_took(num_slots: int | None, caplog: pytest.LogCaptureFixture) -> None:
    Watched.seen.clear()
    trace, recorder = Trace(), Recorder()
    grpo = module(
        compressor=Watched(budget=20, buffer=4, num_sinks=1, window=2), num_slots=num_slots, steps_per_generation=4,
        optimizer=adam, max_completion_length=30,
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        fit(grpo, 1, [DryRun(enabled=True), trace, recorder])
    slots = num_slots or 16
    assert Watched.seen[0] == (2 * slots, 24)  # two layers and all slots at once, full
    assert trace.shapes == [(4, LONGEST + 30)]
    assert trace.left == {"gradients": [], "optimizer": {}, "cache": None, "rollouts": 0}
    (told,) = [record.getMessage() for record in caplog.records if "Dry run" in record.getMessage()]
    assert "optimizer step of " in told
    rollout = f"rollout in {slots} slots (budget 20 and buffer 4, decoder native) with a prompt of {LONGEST} tokens: "
    assert rollout in told
    assert f"update on 4 sequences of {LONGEST + 30} tokens: " in told
    assert told.count(" s, peak ") == 3


def test_the_cpu_is_spared_unless_asked_and_a_callback_of_ones_own_counts(caplog: pytest.LogCaptureFixture) -> None:
    for callbacks in ([], [DryRun(enabled=False)]):
        trainer = fit(module(), 1, [*callbacks])
        assert [type(c) for c in trainer.callbacks].count(DryRun) == 1
        assert callbacks == [] or callbacks[0] in trainer.callbacks
    assert "Dry run" not in caplog.text


def test_a_rollout_that_does_not_fit_ends_before_it_begins() -> None:
    """Petabytes, which no allocator promises; a slot is never larger than the longest sequence, so that is long too."""
    recorder = Recorder()
    compressor = RKV(budget=2_000_000_000, buffer=3)
    grpo = loaded(compressor=compressor, num_generations=2048, max_completion_length=10**10)
    grpo.policy.config.max_position_embeddings = 2 * 10**10
    told = "DryRun: out of memory on cpu in the worst case, rollout in 8192 slots"
    with pytest.raises(ValueError, match=told) as found:
        fit(grpo, 1, [DryRun(enabled=True), recorder])
    for part in ("budget 2000000000", "prompt of 17 tokens", "GiB", "Lower model.rollout.num_slots (now null: 8192)"):
        assert part in str(found.value)
    assert recorder.scored == []
    assert grpo.generator.sampler().cache is None


class Hungry(SparseGRPO):
    """Its update needs more memory than there is."""

    def micro_batch_loss(self, *_: Any) -> Any:
        return torch.empty(2**60)


class Greedy(torch.optim.SGD):
    """An optimizer whose state is too large."""

    def step(self, closure: Any = None) -> None:
        torch.empty(2**60)


def test_an_update_or_an_optimizer_that_does_not_fit_is_named_and_other_errors_are_not_touched() -> None:
    match = r"update on 16 sequences of 29 tokens.*Raise model.steps_per_generation \(now 1\)"
    with pytest.raises(ValueError, match=match):
        fit(module(kind=Hungry), 1, [DryRun(enabled=True)])
    with pytest.raises(ValueError, match=r"optimizer step of [\d,]+ parameters.*optimizer with less state"):
        fit(module(optimizer=lambda parameters: Greedy(parameters, lr=0.1)), 1, [DryRun(enabled=True)])

    class Bug(RKV):
        def score(self, layer: LayerState) -> Tensor:
            raise RuntimeError("a bug of the user's")

    with pytest.raises(RuntimeError, match=r"^a bug of the user's$"):
        fit(module(compressor=Bug(budget=20, buffer=4)), 1, [DryRun(enabled=True)])


def test_a_resumed_optimizer_keeps_its_state(tmp_path: Any) -> None:
    trainer = fit(module(optimizer=adam), 2)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    results = []
    for enabled in (True, False):
        grpo = module(optimizer=adam)
        fit(grpo, 4, [DryRun(enabled=enabled)], ckpt_path=tmp_path / "a.ckpt")
        results.append(weights(grpo))
    assert torch.equal(*results)


def test_where_it_cannot_work_it_says_so() -> None:
    with pytest.raises(ValueError, match="DryRun: SupervisedWarmup does not roll out"):
        fit(SupervisedWarmup(module().policy_source), 1, [DryRun()])
    loader = DataLoader(Rows().train_rows(), batch_sampler=[[0, 1], [2, 3]], collate_fn=list)  # no batch size
    with pytest.warns(UserWarning, match="DryRun: skipped"):
        quiet(1, callbacks=[DryRun(True)]).fit(module(), loader)


class Asking(Chatter):
    """Gives the prompt itself."""

    def reset(self, row: dict[str, Any]) -> str | None:
        super().reset(row)
        return "0123"


class NoPrompts(Rows):
    def train_rows(self) -> list[dict[str, Any]]:
        return [{"answer": str(n % 8)} for n in range(16)]


def test_prompts_of_an_environment_leave_it_out() -> None:
    grpo = talking(Asking)
    with pytest.warns(UserWarning, match="skipped, because the environment gives prompts"):
        fit(grpo, 1, [DryRun(True)], NoPrompts(prompts_per_rollout=4))
    assert grpo.trainer.global_step == 1
