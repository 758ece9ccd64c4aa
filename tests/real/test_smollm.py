"""What is shown on a real instruct model, SmolLM2-135M-Instruct of ``make real-model``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from examples.stories import Stories, story_reward
from sparse_rl_lightning.compressors import H2O, RKV, TOVA, Compressor, FullKV, SnapKV, StreamingLLM
from sparse_rl_lightning.policies.pretrained import load_pretrained
from sparse_rl_lightning.replay import replay_logprobs
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams

FOLDER = Path(__file__).resolve().parents[2] / "runs" / "models" / "smollm2-135m-instruct"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not (FOLDER / "config.json").is_file(), reason="needs the model of make real-model"),
]
SIZES: dict[str, Any] = {"budget": 48, "buffer": 16, "num_sinks": 4}
Model = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def model() -> Model:
    return load_pretrained(str(FOLDER), "float32")


@pytest.fixture(scope="module")
def prompts(model: Model) -> list[list[int]]:
    """Chat prompts of the story task."""
    rows = Stories(num_train=8, seed=1).train_rows()
    render = model[1].apply_chat_template
    return [render(row["prompt"], add_generation_prompt=True, return_dict=False) for row in rows]  # type: ignore[misc]


def test_the_folder_is_of_the_file(model: Model) -> None:
    policy, tokenizer = model
    assert sum(one.numel() for one in policy.parameters()) == 134_515_008
    config = json.loads((FOLDER / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_theta"], config["torch_dtype"]) == (1e-5, 100_000.0, "bfloat16")
    assert (tokenizer.eos_token, policy.generation_config.eos_token_id) == ("<|im_end|>", 2)  # type: ignore[union-attr]


def test_greedy_tokens_are_those_of_generate(model: Model, prompts: list[list[int]]) -> None:
    policy, tokenizer = model
    rollout = RolloutSampler(policy, FullKV(), tokenizer=tokenizer).generate(
        prompts, SamplingParams(max_completion_length=48, temperature=0.0)
    )
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        want = policy.generate(ids, max_new_tokens=48, do_sample=False, attention_mask=torch.ones_like(ids))  # type: ignore[operator]
        own = rollout.sequences[row][rollout.completion_mask[row]]
        assert own.tolist() == want[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "compressor", [SnapKV(**SIZES), RKV(**SIZES), TOVA(**SIZES), H2O(**SIZES), StreamingLLM(**SIZES)]
)
def test_replay_is_exact(compressor: Compressor, model: Model, prompts: list[list[int]]) -> None:
    policy, tokenizer = model
    rollout = RolloutSampler(policy, compressor, tokenizer=tokenizer).generate(
        prompts[:4], SamplingParams(max_completion_length=64, seed=3)
    )
    assert rollout.kv.saving_final > 0.2
    with torch.no_grad():
        replayed = replay_logprobs(policy, rollout)
    torch.testing.assert_close(replayed, rollout.sampler_logprobs, atol=2e-4, rtol=0)


def test_the_task_can_be_learned_and_is_not_yet(model: Model, prompts: list[list[int]]) -> None:
    """Some reward before training, and differences within prompts."""
    policy, tokenizer = model
    rollout = RolloutSampler(policy, SnapKV(64, buffer=16, num_sinks=4), tokenizer=tokenizer).generate(
        prompts, SamplingParams(num_generations=4, max_completion_length=96, seed=2)
    )
    own = zip(rollout.sequences, rollout.completion_mask, strict=True)
    texts = tokenizer.batch_decode([ids[mask] for ids, mask in own], skip_special_tokens=True)
    words = [row["words"] for row in Stories(num_train=8, seed=1).train_rows() for _ in range(4)]
    rewards = torch.tensor(story_reward(texts, words)).view(8, 4)
    assert 0.08 < rewards.mean() < 0.5
    assert (rewards.amax(dim=1) > rewards.amin(dim=1)).float().mean() > 0.5
