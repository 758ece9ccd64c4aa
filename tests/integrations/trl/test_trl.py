"""SparseGRPOTrainer: TRL's own trainer, run on the CPU, with our rollouts, corrections and replay."""

from __future__ import annotations

import copy
import math
import os
import socket
import subprocess
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="trl is an extra")

from accelerate import dispatch_model
from datasets import Dataset
from transformers import AutoModelForCausalLM, ProcessorMixin
from trl import GRPOTrainer
from trl_runs import PROMPTS, build, evicting, listening, logged, policy, weights

from sparse_rl_lightning.callbacks import MIS, TIS, ImportanceReweighting, ScoreCentering, SparsityAwareRejection
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.integrations.transformers import CompressedCache
from sparse_rl_lightning.integrations.transformers.cache import KEYWORD
from sparse_rl_lightning.integrations.trl import SparseGRPOTrainer
from sparse_rl_lightning.integrations.trl.checks import OF_SAMPLER, check_arguments, check_trainer
from sparse_rl_lightning.integrations.trl.trainer import DRAWN, grouped, reads_texts
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.policies.modes import has_dropout
from sparse_rl_lightning.rewards import MathReward, arithmetic_reward, boxed_format_reward, boxed_math_reward
from sparse_rl_lightning.rollout import RolloutOptions, RolloutSampler, SamplingParams


class Told(GRPOTrainer):
    """Plain TRL, told the completions."""

    told: list[list[list[int]]]

    def _generate_single_turn(self, prompt_ids: Any, *_: Any) -> tuple[list[list[int]], None]:
        torch.randint(2**62, ())  # the other trainer's seed, so that both shuffle alike
        return self.told.pop(0), None


CHANGES: list[dict[str, Any]] = [
    {},
    {"loss_type": "grpo", "beta": 0.1},
    {"num_iterations": 2, "steps_per_generation": 4, "temperature": 0.8, "epsilon_high": 0.3, "max_steps": 3},
    {"mask_truncated_completions": True, "scale_rewards": "batch", "loss_type": "dr_grpo"},
    {"pad_to_multiple_of": 8, "gradient_checkpointing": True, "top_entropy_quantile": 0.5},
]


@pytest.mark.parametrize(
    ("corrected", "changes"),
    [
        pytest.param(
            corrected, changes, id=f"{corrected}-{'-'.join(changes) or 'defaults'}",
            marks=[pytest.mark.slow] * bool(changes and not corrected),
        )
        for corrected in (False, True) for changes in CHANGES
    ],
)  # fmt: skip
def test_full_cache_is_plain_trl(tmp_path: Path, changes: dict[str, Any], corrected: bool) -> None:
    corrections = [SparsityAwareRejection(), ImportanceReweighting()] if corrected else []
    ours = build(tmp_path, more={"corrections": corrections}, **changes)
    heard = listening(ours)
    ours.train()
    theirs = build(tmp_path, Told, **changes)
    theirs.told = heard
    theirs.train()
    close = {"rtol": 1e-4, "atol": 1e-6} if corrected else {"rtol": 0.0, "atol": 0.0}  # sampler's rounding, or nothing
    for name in ("loss", "entropy", "reward", *(["kl"] if "beta" in changes else [])):
        assert len(logged(ours, name)) == len(logged(theirs, name)) > 0
        torch.testing.assert_close(torch.tensor(logged(ours, name)), torch.tensor(logged(theirs, name)), **close)
    torch.testing.assert_close(weights(ours), weights(theirs), **close)
    assert not torch.equal(weights(ours), weights(build(tmp_path)))  # it did train


# ---------------------------------------------------------------- replay


class Watched(SparseGRPOTrainer):
    """Notes how far the log-probs of each micro-batch's loss are from the sampler's."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.differences: list[float] = []
        self.old_differences: list[float] = []
        self.in_loss: dict[str, Any] | None = None

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self.in_loss = inputs
        if "old_per_token_logps" in inputs:
            self.old_differences.append(self._off(inputs["old_per_token_logps"]))
        loss = super()._compute_loss(model, inputs)
        self.in_loss = None
        return loss

    def _get_per_token_logps_and_entropies(self, *given: Any, **options: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*given, **options)
        if self.in_loss is not None:
            assert found[0].requires_grad == self.model.training
            self.differences.append(self._off(found[0].detach()))
        return found

    def _off(self, logprobs: Tensor) -> float:
        mask, own = self.in_loss["completion_mask"], self.in_loss["sampling_per_token_logps"]
        return float(((logprobs - own) * mask).abs().max())


REPLAYS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "reference": {"beta": 0.1, "loss_type": "grpo"},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "temperature and padding": {"temperature": 0.7, "pad_to_multiple_of": 8},
}


def lora() -> Any:
    peft = pytest.importorskip("peft", reason="peft is an extra")
    return peft.LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False)  # so that the adapter counts


@pytest.mark.parametrize("adapter", [pytest.param(False, marks=pytest.mark.slow), True], ids=["whole", "lora"])
@pytest.mark.parametrize("changes", REPLAYS.values(), ids=REPLAYS)
def test_replay_sees_what_the_sampler_saw(tmp_path: Path, changes: dict[str, Any], adapter: bool) -> None:
    """A record of another sample would be as far off as the dense pass."""
    more = {"compressor": evicting(), "peft_config": lora() if adapter else None}
    trainer = build(tmp_path, Watched, {**more, "replay": True}, **changes)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert len(trainer.differences) == 4
    assert max(trainer.differences) < 2e-5
    changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert adapter == all("lora_" in name for name in changed)
    if "gradient_checkpointing" in changes:  # what is computed again attends under the record too
        usual = build(tmp_path, more={**more, "replay": True})
        usual.train()
        torch.testing.assert_close(weights(trainer), weights(usual), rtol=0.0, atol=1e-6)
    dense = build(tmp_path, Watched, {**more, "corrections": [TIS()]}, **changes | {"max_steps": 1})
    dense.train()
    assert min(dense.differences) > 1e-2


@pytest.mark.parametrize("more", [{"corrections": [TIS()]}, {"replay": True}], ids=["dense", "replay"])
def test_rotary_angles_are_exact_under_tf32(
    tmp_path: Path, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build(tmp_path, more={"compressor": evicting(), **more}, max_steps=1)
    kind, seen = type(trainer.model.model.rotary_emb), set[str]()
    forward = kind.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.add(torch.backends.cuda.matmul.fp32_precision)
        return forward(*args, **kwargs)

    monkeypatch.setattr(kind, "forward", noted)
    torch.set_float32_matmul_precision("high")
    try:
        trainer.train()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == {"ieee"}


def test_replay_of_stale_samples(tmp_path: Path) -> None:
    changes = {"num_iterations": 2, "steps_per_generation": 4, "max_steps": 4, "mask_truncated_completions": True}
    trainer = build(tmp_path, Watched, {"compressor": evicting(), "replay": True}, **changes)
    trainer.train()
    assert len(trainer.old_differences) == 8
    assert max(trainer.old_differences) < 2e-5, "before the updates"
    assert max(trainer.differences) > 1e-3, "after them"


def test_a_record_of_another_sample_is_noticed(tmp_path: Path) -> None:
    trainer = build(tmp_path, more={"compressor": evicting(), "replay": True})
    compute = trainer._compute_loss

    def mixed_up(model: Any, inputs: dict[str, Any]) -> Tensor:
        drawn = inputs[DRAWN]
        return compute(model, {**inputs, DRAWN: drawn[1:] + drawn[:1]})

    trainer._compute_loss = mixed_up
    with pytest.raises(AssertionError, match="the record of another sample"):
        trainer.train()


def test_evaluation_between_two_micro_batches(tmp_path: Path) -> None:
    """Rollouts of evaluation do not take the place of the buffered one."""
    more = {"compressor": evicting(), "replay": True, "eval_dataset": Dataset.from_dict({"prompt": PROMPTS[:3]})}
    changes = {"steps_per_generation": 4, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 4}
    trainer = build(tmp_path, Watched, more, **changes)
    trainer.train()
    assert len(logged(trainer, "eval_reward")) == 4
    assert len(logged(trainer, "eval_kv/saving_final")) == 4
    assert max(trainer.old_differences[:2]) < 2e-5


# ---------------------------------------------------------------- corrections


def float64_logprobs(folder: str, state: dict[str, Tensor], prompt: list[int], completion: list[int]) -> list[float]:
    """Of the completion's tokens, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder).double()
    model.load_state_dict(state)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0]
    table = logits.log_softmax(dim=-1)
    return [float(table[len(prompt) + i - 1, token]) for i, token in enumerate(completion)]


@pytest.mark.parametrize("bound", [None, 1.5], ids=["naive", "Sparse-RL"])
def test_loss_is_the_formula(tmp_path: Path, bound: float | None) -> None:
    """Sum over tokens of min(w A, clip(w) A), times xi of sequences without any xi below the threshold."""
    threshold = 0.1  # rejects some, not all
    corrections = [SparsityAwareRejection(threshold), ImportanceReweighting(clip_max=bound)] if bound else []
    more = {"compressor": evicting(), "corrections": corrections}
    # large steps, so that w leaves the clip range
    trainer = build(tmp_path, more=more, num_iterations=2, max_steps=2, learning_rate=0.3)
    folder, losses, found = str(tmp_path / "policy"), [], []
    drawing: dict[str, Tensor] = {}
    draw, compute = trainer._generate_single_turn, trainer._compute_loss

    def listen(*given: Any) -> Any:
        drawing.update(copy.deepcopy(trainer.model.state_dict()))
        return draw(*given)

    def check(model: Any, inputs: dict[str, Any]) -> Tensor:
        total, rejected, clipped = 0.0, 0, 0
        now = copy.deepcopy(trainer.model.state_dict())
        for row in range(len(inputs["advantages"])):
            prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist()
            kept = inputs["completion_mask"][row].bool()
            completion = inputs["completion_ids"][row][kept].tolist()
            sampled = inputs["sampling_per_token_logps"][row][kept].tolist()
            new = float64_logprobs(folder, now, prompt, completion)
            old = float64_logprobs(folder, drawing, prompt, completion)
            ratios = [math.exp(a - b) for a, b in zip(old, sampled, strict=True)]
            if bound and min(ratios) < threshold:
                rejected += 1
                continue
            advantage = float(inputs["advantages"][row])
            for a, b, xi in zip(new, old, ratios, strict=True):
                w = math.exp(a - b)
                best = min(w * advantage, min(max(w, 0.8), 1.2) * advantage)
                clipped += best != w * advantage
                total -= best * (min(xi, bound) if bound else 1.0)
        divisor = float(inputs["num_items_in_batch"])  # one optimizer step
        loss = compute(model, inputs)
        losses.append((float(loss), total / divisor))
        found.append((rejected, clipped))
        return loss

    trainer._generate_single_turn, trainer._compute_loss = listen, check
    trainer.train()
    assert len(losses) == 4
    for own, formula in losses:
        assert own == pytest.approx(formula, abs=2e-6)
    assert max(abs(own) for own, _ in losses) > 1e-2
    assert bool(bound) == any(rejected for rejected, _ in found)
    assert any(clipped for _, clipped in found), "the second pass"


def test_weights_of_mean_1_are_of_each_micro_batch(tmp_path: Path) -> None:
    """The presets work as they are, also those that leave their divisor to the loss."""
    trainer = build(tmp_path, more={"compressor": evicting(), "corrections": [MIS(threshold=1e-3)]}, max_steps=1)
    seen = []
    base = GRPOTrainer._compute_loss

    def look(self: Any, model: Any, inputs: dict[str, Any]) -> Tensor:
        seen.append((inputs["advantages"], inputs["completion_mask"]))
        return base(self, model, inputs)

    parts = []
    compute = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: parts.append(inputs) or compute(model, inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOTrainer, "_compute_loss", look)
        trainer.train()
    for (advantages, mask), part in zip(seen, parts, strict=True):
        xi = (part["old_per_token_logps"] - part["sampling_per_token_logps"]).double().exp()
        within = (xi >= 0.5) & (xi <= 2) & ~((xi < 1e-3) & mask.bool()).any(dim=1, keepdim=True)
        mean = xi.clamp(max=2)[mask.bool()].mean()
        expected = part["advantages"][:, None] * torch.where(within, xi.clamp(max=2), 0) / mean * mask
        torch.testing.assert_close(advantages.double(), expected, rtol=1e-5, atol=1e-6)


def test_what_is_logged(tmp_path: Path) -> None:
    trainer = build(tmp_path, more={"compressor": evicting(), "corrections": [SparsityAwareRejection(0.3)]})
    trainer.train()
    rates, distances = logged(trainer, "rejection_rate"), logged(trainer, "mismatch/kl_k3")
    assert len(rates) == len(distances) == 2
    assert 0 < sum(rates) < 2
    assert min(distances) > 1e-3
    assert min(logged(trainer, "kv/saving_integral")) > 0
    assert all(value % 0.125 == 0 for value in rates), "of 8 sequences"


def test_naive_training_is_called_that(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="naive training"):
        trainer = build(tmp_path, more={"compressor": evicting()})
    trainer.train()
    assert min(logged(trainer, "mismatch/kl_k3")) > 1e-3, "measured, not corrected"


# ---------------------------------------------------------------- runs


@pytest.mark.slow
@pytest.mark.parametrize("method", [{"replay": True}, {"corrections": [TIS()]}], ids=["replay", "TIS"])
def test_a_sparse_arm_learns(tmp_path: Path, method: dict[str, Any]) -> None:
    settings = {"max_steps": 25, "per_device_train_batch_size": 16, "optim": "adamw_torch", "learning_rate": 5e-3}
    trainer = build(tmp_path, more={"compressor": evicting(), **method}, **settings)
    trainer.train()
    rewards = logged(trainer, "reward")
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    assert min(logged(trainer, "kv/saving_integral")) > 0


@pytest.mark.parametrize("method", [{"replay": True}, {"corrections": [TIS()]}], ids=["replay", "TIS"])
def test_resume_is_the_uninterrupted_run(tmp_path: Path, method: dict[str, Any]) -> None:
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    more = {"compressor": evicting(), **method}
    whole = build(tmp_path, more=dict(more), **settings)
    whole.train()
    again = build(tmp_path, more=dict(more), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(weights(whole), weights(again))
    assert logged(whole, "loss") == logged(again, "loss")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["replay", "weights"])
def test_two_processes_train_one_policy(tmp_path: Path, method: str) -> None:
    """Each draws its own share, and the gradients are those of both: the weights stay the same on both."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here.parents[2]), str(here), os.environ.get("PYTHONPATH", "")])
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "PYTHONPATH": paths}
    command = [sys.executable, str(here / "two_ranks.py"), str(tmp_path), method]
    ranks = [subprocess.Popen(command, env=shared | {"RANK": str(i), "LOCAL_RANK": str(i)}) for i in range(2)]
    assert [rank.wait(timeout=250) for rank in ranks] == [0, 0]
    one, two = (torch.load(tmp_path / f"{i}.pt") for i in range(2))
    assert torch.equal(one["weights"], two["weights"])
    assert one["heard"] != two["heard"]
    assert one["kv"] == two["kv"] != [], "means over both"
    assert not torch.equal(one["weights"], weights(build(tmp_path)))


def test_chats_and_a_tokenizer_of_the_folder(tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    length = lambda completions, **_: [float(len(c[0]["content"])) for c in completions]  # noqa: E731
    more = {"compressor": evicting(), "replay": True, "processing_class": None, "reward_funcs": length}
    trainer = build(tmp_path, Watched, more)
    trainer.train_dataset = Dataset.from_dict({"prompt": chats})
    trainer.train()
    assert max(trainer.differences) < 2e-5


def test_rewards_of_this_library_read_chats(tmp_path: Path) -> None:
    rewards = [boxed_math_reward, MathReward(), boxed_format_reward, arithmetic_reward]
    assert reads_texts(own := partial(boxed_math_reward)) is not own  # a user's class of ours, and a partial, too
    assert reads_texts(own := type("Mine", (MathReward,), {"__module__": "mine"})()) is not own
    trainer = build(tmp_path, more={"reward_funcs": rewards}, max_steps=1)
    columns = {"prompts": [], "completion_ids": [], "answer": ["7", "7"]}
    said = ["\\boxed{7}", "It is #7"]
    chats = [[{"role": "assistant", "content": text}] for text in said]
    for function, own in zip(trainer.reward_funcs, rewards, strict=True):
        want = own(completions=said, **columns)
        assert sorted(want) == [0.0, 1.0]
        assert function(completions=chats, **columns) == function(completions=said, **columns) == want
    prompts = [[{"role": "user", "content": text}] for text in PROMPTS]
    trainer.train_dataset = Dataset.from_dict({"prompt": prompts, "answer": ["7"] * len(prompts)})
    trainer.train()
    assert logged(trainer, "rewards/boxed_format_reward/mean") == [0.0]


def test_the_trained_policy_is_taken_without_what_trl_put_on_it(tmp_path: Path) -> None:
    trainer = build(tmp_path, max_steps=1)
    trainer.train()
    with pytest.raises(UserError, match=r"has been replaced .* SparseGRPOTrainer's own_forward\(\)"):
        RolloutSampler(trainer.model)
    put_on = trainer.model.forward
    with trainer.own_forward() as policy:
        rollout = RolloutSampler(policy).generate([[3, 4, 5]], SamplingParams(max_completion_length=6, temperature=0))
        options = {"max_new_tokens": 6, "do_sample": False, KEYWORD: CompressedCache(FullKV(), policy)}
        ids = policy.generate(torch.tensor([[3, 4, 5]]), **options)
        assert ids[0].tolist() == [3, 4, 5, *rollout.completion_ids[0]]
        scored, _ = sequence_logprobs(policy, rollout.sequences, rollout.completion_mask)
        assert (scored - rollout.sampler_logprobs)[rollout.completion_mask].abs().max() < 2e-5
    assert trainer.model.forward is put_on


def test_completions_end_where_trl_says(tmp_path: Path) -> None:
    """Its end tokens are those of the tokenizer too, and ours are added to its own."""
    trainer = build(tmp_path, more={"rollout": RolloutOptions(end_tokens=("7",))}, generation_kwargs={"max_tokens": 9})
    assert trainer.eos_token_ids == trainer.sampler.end_token_ids == [1, 10]
    heard = listening(trainer)
    trainer.train()
    completions = [ids for rollout in heard for ids in rollout]
    assert max(len(ids) for ids in completions) == 9
    assert any(ids[-1] == 10 for ids in completions)
    assert all(10 not in ids[:-1] and (len(ids) == 9 or ids[-1] in (1, 10)) for ids in completions)


def test_bfloat16_is_the_learners(tmp_path: Path) -> None:
    """Sampler and learner round alike under autocast: what is left is far below an eviction."""
    trainer = build(tmp_path, Watched, {"corrections": [TIS()]}, bf16=True)
    trainer.train()
    assert max(logged(trainer, "mismatch/kl_k3")) < 1e-3


# ---------------------------------------------------------------- parts and refusals


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([[1], [1], [2], [2]], ([[1], [2]], 2)),
        ([[1], [1], [1], [1], [2], [2]], ([[1], [1], [2]], 2)),
        ([[1], [2], [2]], ([[1], [2], [2]], 1)),
        ([[1, 2]], ([[1, 2]], 1)),
    ],
)
def test_repeats_are_samples(prompts: list[list[int]], expected: tuple[list[list[int]], int]) -> None:
    assert grouped(prompts) == expected
    again, samples = expected
    assert [prompt for prompt in again for _ in range(samples)] == prompts


def tool(number: int) -> int:
    """Add one.

    Args:
        number: A number.
    """
    return number + 1


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "vllm": ({}, {"use_vllm": True}, "does not work with use_vllm=True.*Remove use_vllm"),
    "paged": ({}, {"use_transformers_continuous_batching": True}, "num_slots"),
    "cache": ({}, {"cache_implementation": "static"}, "the compressor decides"),
    "head": ({}, {"cast_lm_head_to_fp32": True, "bf16": True}, "load the model in float32 and set bf16=False"),
    "tools": ({"tools": [tool]}, {}, "does not work with tools.*SparseGRPO has conversations with .* `environment`"),
    "environment": ({"environment_factory": object}, {}, "environment_factory.*SparseGRPO has .* `environment`"),
    "rollouts": ({"rollout_func": print}, {}, "does not work with rollout_func"),
    "module's option": ({"rollout": RolloutOptions(oversampling=2.0)}, {}, "rollout.oversampling has no effect"),
    "compressor": ({"compressor": "SnapKV"}, {}, "compressor must be"),
    "correction": ({"corrections": ["TIS"]}, {}, "corrections must be"),
    "two of a kind": ({"corrections": [TIS(), MIS()]}, {}, "two corrections of one kind"),
    "in the loss": ({"corrections": [ScoreCentering()]}, {}, "ScoreCentering corrects in the loss, which is TRL's"),
    "baseline": ({"corrections": [SparsityAwareRejection(baseline="kept")]}, {}, "baseline to 'all'"),
    "both": ({"corrections": [TIS()], "replay": True}, {}, "nothing is left for corrections"),
    "vespo": ({"corrections": [TIS()]}, {"loss_type": "vespo"}, "vespo"),
    "temperature": ({}, {"generation_kwargs": {"temperature": 0.5}}, "remove temperature from generation_kwargs"),
    "seed": ({}, {"generation_kwargs": {"seed": 3}}, "remove seed from generation_kwargs"),
    "greedy": ({}, {"generation_kwargs": {"do_sample": False}}, "remove do_sample from generation_kwargs"),
    "end": ({}, {"generation_kwargs": {"eos_token_id": 5}}, r"set end_tokens of rollout \(RolloutOptions\) instead"),
    "key": ({}, {"generation_kwargs": {"num_beams": 3}}, "num_beams is not honored"),
    "stop": ({}, {"generation_kwargs": {"stop": "a"}, "mask_truncated_completions": True}, "is truncated"),
    "prompts": ({"processing_class": "processor"}, {}, "reads text alone"),
    "endless": ({}, {"max_completion_length": None}, "max_completion_length=None has no end.* give a number"),
    "noise": ({"corrections": [TIS()]}, {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 adds noise"),
}


@pytest.mark.parametrize(("more", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(tmp_path: Path, more: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    if more.get("processing_class"):
        more = {"processing_class": ProcessorMixin.__new__(ProcessorMixin)}
    with pytest.raises(UserError, match=message):
        build(tmp_path, more=more, **changes)


OPTIONS: dict[str, Any] = {  # another value of each option of the sampler
    "num_slots": 3, "end_tokens": ("7",), "memory_limit": 0.5, "kv_dtype": "bfloat16", "keep_pool": False,
    "cuda_graphs": False, "head_in_float32": True, "decoder": "transformers",
}  # fmt: skip
SAMPLERS = {"end_tokens": ("end_token_ids", [1, 10]), "kv_dtype": ("kv_dtype", torch.bfloat16),
            "decoder": ("decoder_kind", "transformers")}  # fmt: skip
"""Where the sampler keeps some options."""


@pytest.mark.parametrize("name", [field.name for field in fields(RolloutOptions)])
def test_every_option_of_rollouts_is_used_or_refused(tmp_path: Path, name: str) -> None:
    if name not in OF_SAMPLER:
        options = RolloutOptions()
        object.__setattr__(options, name, "another")
        with pytest.raises(UserError, match=f"rollout.{name} has no effect under TRL"):
            check_arguments({}, options)
        return
    options = RolloutOptions(**{name: OPTIONS[name]})
    attribute, value = SAMPLERS.get(name, (name, OPTIONS[name]))
    assert getattr(build(tmp_path, more={"rollout": options}).sampler, attribute) == value


def test_a_model_on_several_devices_is_refused(tmp_path: Path) -> None:
    model = dispatch_model(AutoModelForCausalLM.from_pretrained(policy(tmp_path)), {"": "cpu"}, force_hooks=True)
    with pytest.raises(UserError, match=r"the whole model on one device.* CUDA_VISIBLE_DEVICES=0, .*accelerate launch"):
        build(tmp_path, more={"model": model})


SOFT = ("PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig")


@pytest.mark.parametrize(("kind", "replay"), [*zip(SOFT, (False, True, False), strict=True)])
def test_soft_prompts_are_refused(tmp_path: Path, kind: str, replay: bool) -> None:
    """They stand above the model that the sampler reads."""
    peft = pytest.importorskip("peft", reason="peft is an extra")
    prompt = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UserError, match=r"The adapter 'default' .* is a soft prompt .* Use LoRA"):
        build(tmp_path, more={"peft_config": prompt, "replay": replay})


def test_four_bits_on_a_cpu_are_refused(tmp_path: Path) -> None:
    class Linear4bit(torch.nn.Linear):
        """By its name, which is all that can be had of bitsandbytes here."""

    trainer = build(tmp_path)
    check_trainer(trainer, replay=False)
    trainer.model.model.layers[0].mlp.up_proj.__class__ = Linear4bit
    with pytest.raises(UserError, match=r"4 bits of bitsandbytes .* Use a GPU, 8 bits, or LoraPolicy"):
        check_trainer(trainer, replay=False)


def test_a_head_in_float32_changes_nothing_in_float32(tmp_path: Path) -> None:
    found = []
    for cast in (False, True):
        trainer = build(tmp_path, cast_lm_head_to_fp32=cast)
        trainer.train()
        found.append(weights(trainer))
    assert torch.equal(*found)
    assert not torch.equal(found[0], weights(build(tmp_path)))


def test_a_head_in_float32_on_16_bits_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy(tmp_path), dtype=torch.bfloat16)
    with pytest.raises(UserError, match="the sampler would not see that head"):
        build(tmp_path, more={"model": model}, cast_lm_head_to_fp32=True)


class OfSequences(GRPOTrainer):
    """A loss of its own with one advantage of each sequence, as TRL's experimental GMPOTrainer."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        assert inputs["advantages"].ndim == 1
        return super()._compute_loss(model, inputs)


class Below(SparseGRPOTrainer, OfSequences):
    """Our class above that loss."""


def test_corrections_of_another_loss_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"OfSequences has another loss, .* Give no corrections, or replay=True"):
        build(tmp_path, Below, {"corrections": [TIS()], "compressor": evicting()})
    for method in ({}, {"replay": True}):
        build(tmp_path, Below, method, max_steps=1).train()  # sees what it wants
    build(tmp_path, Watched, {"corrections": [TIS()]}, max_steps=1).train()  # a loss around ours is handed TRL's shape


DROPOUTS = ("lora_dropout", "attention_dropout")


def dropping(folder: Path, kind: str) -> dict[str, Any]:
    """Arguments of a trainer whose policy has dropout, and adapters that act."""
    dropout = 0.3 if kind == "attention_dropout" else 0.0
    model = AutoModelForCausalLM.from_pretrained(policy(folder), attention_dropout=dropout)
    if kind == "attention_dropout":
        return {"model": model}
    peft = pytest.importorskip("peft", reason="peft is an extra")
    own = {"init_lora_weights": False, "lora_dropout": 0.3, "target_modules": "all-linear"}
    return {"model": model, "peft_config": peft.LoraConfig(task_type="CAUSAL_LM", r=4, **own)}


@pytest.mark.parametrize("kind", DROPOUTS)
def test_dropout_is_no_mismatch(tmp_path: Path, kind: str) -> None:
    """On policy with the full cache every ratio is 1: what corrections see is rounding alone."""
    more = dropping(tmp_path, kind) | {"corrections": [ImportanceReweighting(clip_max=1.5)]}
    with pytest.warns(UserWarning, match="has dropout .* it is switched off"):
        trainer = build(tmp_path, more=more)
    trainer.train()
    assert logged(trainer, "clip_ratio/region_mean") == [0.0] * 2
    assert max(logged(trainer, "mismatch/kl_k3")) < 1e-6


@pytest.mark.parametrize("kind", DROPOUTS)
def test_dropout_is_off_in_replay_and_stays_in_plain_trl(tmp_path: Path, kind: str) -> None:
    with pytest.warns(UserWarning, match="has dropout"):
        trainer = build(tmp_path, Watched, dropping(tmp_path, kind) | {"compressor": evicting(), "replay": True})
    trainer.train()
    assert max(trainer.differences) < 2e-5
    plain = build(tmp_path, more=dropping(tmp_path, kind))
    assert has_dropout(plain.model)


def test_what_the_generation_config_binds_is_named(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy(tmp_path))
    model.generation_config.suppress_tokens = [5]
    model.generation_config.min_new_tokens = 4
    with pytest.warns(UserWarning, match="suppress_tokens, min_new_tokens of the model's generation_config"):
        build(tmp_path, more={"model": model})


def test_log_probs_of_other_sequences_are_refused_in_replay(tmp_path: Path) -> None:
    trainer = build(tmp_path, more={"compressor": evicting(), "replay": True})
    ids = torch.tensor([[3, 4, 5, 6]])
    with pytest.raises(UserError, match=r"With replay=True .* use sparse_rl_lightning.logprobs.sequence_logprobs"):
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), 2)


@pytest.mark.parametrize("plugin", ["fsdp", "zero_3"])
def test_sharded_weights_are_refused(tmp_path: Path, plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build(tmp_path)
    check_trainer(trainer, replay=True)
    if plugin == "fsdp":
        trainer.is_fsdp_enabled = True
    else:
        state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3))
        monkeypatch.setattr(trainer.accelerator, "state", state)
    with pytest.raises(UserError, match="DDP or ZeRO-2"):
        check_trainer(trainer, replay=False)


def test_flash_attention_is_not_replayed(tmp_path: Path) -> None:
    trainer = build(tmp_path)
    trainer.model.config._attn_implementation = "flash_attention_2"
    check_trainer(trainer, replay=False)
    with pytest.raises(UserError, match="load the model with 'sdpa'"):
        check_trainer(trainer, replay=True)


@pytest.mark.slow
def test_a_trl_without_what_is_overridden_is_refused() -> None:
    code = "from trl import GRPOTrainer; del GRPOTrainer._compute_loss; import sparse_rl_lightning.integrations.trl"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "no GRPOTrainer._compute_loss" in result.stderr.splitlines()[-1]


def test_settings_of_drawing_are_trls(tmp_path: Path) -> None:
    changes = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}
    expected = SamplingParams(max_completion_length=7, min_completion_length=2, **changes)
    more = {"generation_kwargs": {"min_new_tokens": 2}, "max_completion_length": 7}
    assert build(tmp_path, **changes, **more)._sampling == expected


def test_without_trl_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['trl'] = None; import sparse_rl_lightning.integrations.trl"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'sparse-rl-lightning[trl]'" in result.stderr.splitlines()[-1]
