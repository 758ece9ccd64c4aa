"""The tasks: arithmetic that small policies solve, and stories that a small Llama tells."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks import ROOT
from benchmarks.compressors.methods import SlotSizes
from benchmarks.compressors.quality import Problems, Task
from sparse_rl_lightning import RolloutSampler, SamplingParams, testing
from sparse_rl_lightning.calibration import gather_statistics
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.data import ArithmeticTasks
from sparse_rl_lightning.policies.pretrained import load_pretrained
from sparse_rl_lightning.policies.tiny import ARITHMETIC_ALPHABET
from sparse_rl_lightning.rollout.prompts import encode_prompts

TRAINED = ("runs/quickstart/policy", "runs/warmup/policy")  # the first that is there
OPENINGS = ("Once upon a time", "One day", "Lily and Ben", "There was a little", "Tom and his dog", "The sun was")
PROBLEMS: dict[str, dict[str, Any]] = {
    "sums": {"tasks": "sum"}, "reductions": {"tasks": "reduction"}, "countdown": {"tasks": "countdown", "num_terms": 3}
}  # fmt: skip
CALIBRATION_SEED = 1  # texts for calibration are drawn under another seed than those that are measured


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    num_problems: int
    solution_length: int  # at most
    num_stories: int
    story_length: int


USUAL = Sizes(num_problems=256, solution_length=48, num_stories=64, story_length=256)
QUICK = Sizes(num_problems=8, solution_length=64, num_stories=4, story_length=48)


def default_policy() -> Path:
    """Where the quickstart leaves its policy, before or after training."""
    folders = [ROOT / folder for folder in TRAINED]
    return next((folder for folder in folders if (folder / "config.json").is_file()), folders[-1])


def default_stories() -> Path:
    """SPARSE_RL_MODELS/stories260K, or ../shared/models/stories260K beside the repository, as in the tests."""
    return Path(os.environ.get("SPARSE_RL_MODELS", ROOT.parent / "shared" / "models")) / "stories260K"


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A Hugging Face folder."""
    model, tokenizer = load_pretrained(str(folder), torch.float32)
    return model.eval(), tokenizer


def toy() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Random weights: every part runs, the numbers mean nothing."""
    tokenizer = testing.character_tokenizer(ARITHMETIC_ALPHABET)
    return testing.tiny_model(vocab_size=len(tokenizer), initializer_range=0.3, eos_token_id=None), tokenizer


def arithmetic(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sizes: Sizes) -> Task:
    """Held-out problems of a kind that the policy was trained on, and its sampled solutions of them."""
    count = sizes.num_problems
    data = ArithmeticTasks(**PROBLEMS[name], num_train=count, num_val=count)
    shown, other = (
        encode_prompts(tokenizer, [r["prompt"] for r in rows]) for rows in (data.val_rows(), data.train_rows())
    )
    params = SamplingParams(max_completion_length=sizes.solution_length)
    end = [tokenizer.eos_token_id]
    sampler = RolloutSampler(model, FullKV(), end_token_ids=end)
    rollout, calibration = sampler.generate(shown, params), sampler.generate(other, params)
    return Task(
        name, model, rollout.sequences, rollout.lengths, list(map(len, shown)),
        SlotSizes(buffer=4, num_sinks=1, window=4),
        gather_statistics(model, calibration.sequences, calibration.lengths),
        Problems(data.val_rows(), tokenizer, params.max_completion_length),
    )  # fmt: skip


def stories(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sizes: Sizes) -> Task:
    """Stories that the model told, all cut to one length; shorter ones are left out."""
    openings = encode_prompts(tokenizer, OPENINGS)
    longest = max(map(len, openings))
    texts, calibration = (_told(model, openings, sizes, seed) for seed in (0, CALIBRATION_SEED))
    lengths = torch.full((sizes.num_stories,), sizes.story_length)
    slot = SlotSizes(buffer=sizes.story_length // 16, num_sinks=4, window=sizes.story_length // 32)
    statistics = gather_statistics(model, calibration, lengths[: len(calibration)])
    return Task("stories", model, texts, lengths[: len(texts)], [longest] * len(texts), slot, statistics)


def _told(model: PreTrainedModel, openings: Sequence[list[int]], sizes: Sizes, seed: int) -> torch.Tensor:
    """(num_stories, story_length) of those long enough, openings taking turns."""
    rounds = -(-sizes.num_stories * 4 // 3) // len(openings) + 1
    params = SamplingParams(num_generations=rounds, max_completion_length=sizes.story_length, seed=seed)
    rollout = RolloutSampler(model, FullKV()).generate(openings, params)
    order = torch.arange(len(rollout)).view(len(openings), rounds).T.flatten()
    long = order[(rollout.lengths >= sizes.story_length)[order]][: sizes.num_stories]
    if not len(long):
        raise ValueError(f"no story of the model has {sizes.story_length} tokens: use a model trained on longer texts.")
    return rollout.sequences[long, : sizes.story_length]
