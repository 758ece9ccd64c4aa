"""Who trains: TRL, SparseGRPO with the full and with an evicting cache, and a plain loop over finished rollouts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from benchmarks.trainer.setting import CLIP, Setting, optimizer, rows_in_order
from benchmarks.trainer.stages import PREPARE, RESCORING, ROLLOUT, Measured, Stages
from sparse_rl_lightning import RolloutSampler, SamplingParams, SparseGRPO
from sparse_rl_lightning.advantages import group_advantages
from sparse_rl_lightning.callbacks import ImportanceReweighting, SparsityAwareRejection
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.learner.forward import LearnerOptions
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.losses import policy_loss
from sparse_rl_lightning.records import Rollout, ScoredRollout

SEED = 0


class Steps(Callback):
    """Tells the clock of every optimizer step."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Look whether this micro-batch was the last of a step."""
        if trainer.global_step > self.stages.done:
            self.stages.step()


def own(setting: Setting, stages: Stages, sparse: bool) -> None:
    """``SparseGRPO``, with the corrections of Sparse-RL where the cache evicts."""
    seed_everything(SEED, verbose=False)
    module = SparseGRPO(
        setting.load(),
        setting.compressor() if sparse else FullKV(),
        setting.rewards(),
        sampling=SamplingParams(num_generations=setting.generations, max_completion_length=setting.tokens),
        learner=LearnerOptions(share_prompts=setting.shares),
        steps_per_generation=setting.micro_batches,
        optimizer=optimizer,
    )

    def see(scored: ScoredRollout) -> None:
        assert scored.rollout.rewards is not None
        stages.tokens += int(scored.rollout.completion_lengths.sum())
        stages.rewards += scored.rollout.rewards.tolist()

    stages.watch(module, "roll_out", PREPARE, see=see)
    stages.watch(module, "new_block", PREPARE)
    stages.watch(module.generator, "roll_out", ROLLOUT)
    stages.watch(module, "rescore", RESCORING)
    corrections = [SparsityAwareRejection(threshold=1e-4), ImportanceReweighting(clip_max=1.5)] if sparse else []
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            accelerator="cpu", default_root_dir=folder, max_steps=setting.steps, gradient_clip_val=CLIP,
            accumulate_grad_batches=setting.accumulate, log_every_n_steps=10, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[*corrections, Steps(stages)],
        ).fit(module, datamodule=setting.data())  # fmt: skip


def theirs(setting: Setting, stages: Stages) -> None:
    """TRL's ``GRPOTrainer`` with ``generate``, told to do what ``SparseGRPO`` does by default."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class TheirSteps(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            stages.step()

    loaded = setting.load()
    policy, tokenizer = loaded.load()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder, seed=SEED, use_cpu=True, bf16=False, gradient_checkpointing=False, max_grad_norm=CLIP,
            per_device_train_batch_size=setting.sequences // setting.micro_batches,
            gradient_accumulation_steps=setting.accumulate, steps_per_generation=setting.micro_batches,
            num_generations=setting.generations, max_completion_length=setting.tokens, max_steps=setting.steps,
            temperature=1.0, top_p=1.0, top_k=0, loss_type="grpo", beta=0.0, scale_rewards="group",
            lr_scheduler_type="constant", shuffle_dataset=False, logging_steps=10, save_strategy="no",
            report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            policy, setting.rewards(), config, Dataset.from_list(rows_in_order(setting.data())),
            processing_class=tokenizer, callbacks=[TheirSteps()], optimizers=(optimizer(policy.parameters()), None),
        )  # fmt: skip

        def see_tokens(out: Any) -> None:
            stages.tokens += sum(len(ids) for ids in out[1])

        def see_rewards(rewards: torch.Tensor) -> None:
            stages.rewards += rewards.sum(dim=1).tolist()

        stages.watch(trainer, "_prepare_inputs", PREPARE)
        stages.watch(trainer, "_generate", ROLLOUT, see=see_tokens)
        stages.watch(trainer, "_get_per_token_logps_and_entropies", RESCORING, inside=PREPARE)
        stages.watch(trainer, "_calculate_rewards", "rewards", see=see_rewards)
        trainer.train()


def plain(setting: Setting, stages: Stages) -> None:
    """Forward, backward and AdamW over finished rollouts: what an update must do, with the same head and loss."""
    torch.manual_seed(SEED)
    policy, tokenizer = setting.load().load()
    ends = [tokenizer.eos_token_id] if setting.is_quickstart else []
    sampler = RolloutSampler(policy, FullKV(), end_token_ids=ends)
    params = SamplingParams(num_generations=setting.generations, max_completion_length=setting.tokens, seed=SEED)
    texts = [row["prompt"] for row in rows_in_order(setting.data())[: setting.prompts]]
    rollout = sampler.generate([tokenizer(text)["input_ids"] for text in texts], params)
    sampler.release()
    rollout.advantages = group_advantages(torch.rand(setting.sequences), setting.generations)
    policy.train()
    learner = optimizer(policy.parameters())
    while stages.done < stages.last:
        parts = rollout.parts(setting.micro_batches)
        for start in range(0, len(parts), setting.accumulate):
            update(policy, learner, parts[start : start + setting.accumulate])
            stages.step()


def update(policy: Any, learner: torch.optim.Optimizer, parts: list[Rollout]) -> None:
    """One optimizer step."""
    for micro_batch in parts:
        assert micro_batch.advantages is not None
        logprobs, _ = sequence_logprobs(policy, micro_batch.sequences, micro_batch.completion_mask)
        loss = policy_loss(logprobs, logprobs.detach(), micro_batch.advantages, micro_batch.completion_mask).loss
        (loss / len(parts)).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), CLIP)
    learner.step()
    learner.zero_grad()


TRL, DENSE, SPARSE, PLAIN = "TRL", "SparseGRPO, FullKV", "SparseGRPO, RKV", "plain loop"
CONTENDERS: dict[str, Callable[[Setting, Stages], None]] = {
    TRL: theirs,
    DENSE: lambda setting, stages: own(setting, stages, sparse=False),
    SPARSE: lambda setting, stages: own(setting, stages, sparse=True),
    PLAIN: plain,
}


def measure(name: str, setting: Setting) -> Measured:
    """One run in this process."""
    stages = Stages(setting.warm_up * setting.steps_per_rollout, setting.steps)
    CONTENDERS[name](setting, stages)
    return stages.measured()
