"""A real trained model, stories260K (a Llama of 260,032 parameters): equal to generate, readable when compressed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from closeness import assert_same_logprobs
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparse_rl_lightning.compressors import RKV, FullKV, RandomEviction, SnapKV, StreamingLLM
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs

PROMPTS = ["Once upon a time, there was a little girl named Lily.", "Tom and his dog", "The sun was hot and"]


@pytest.fixture(scope="module")
def story_teller(models_dir: Path) -> tuple[torch.nn.Module, object, list[list[int]]]:
    folder = models_dir / "stories260K"
    model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return model, tokenizer, [tokenizer(text)["input_ids"] for text in PROMPTS]


@pytest.mark.parametrize("compressor", [FullKV(), StreamingLLM(budget=250, buffer=50)], ids=["full", "large"])
def test_large_budget_tells_the_same_story(story_teller: tuple, compressor: object) -> None:
    model, _, prompts = story_teller
    rollout = RolloutSampler(model, compressor).generate(
        prompts, SamplingParams(max_completion_length=200, temperature=0)
    )
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=200, do_sample=False)[0]
        length = len(prompt) + int(rollout.completion_lengths[row])
        assert rollout.sequences[row, :length].tolist() == want.tolist()


def test_half_the_cache_still_tells_a_story(story_teller: tuple) -> None:
    """Dense per-token loss of the compressed story: near the model's own text, far from a broken one.

    The model's validation loss on real stories is 1.30 nats; a uniform guess costs ln 512 = 6.24.
    """
    model, tokenizer, prompts = story_teller
    compressor = StreamingLLM(budget=96, buffer=4)
    params = SamplingParams(max_completion_length=200, temperature=0.8, seed=1)
    rollout = RolloutSampler(model, compressor).generate(prompts, params)
    assert (rollout.kv.stored <= 0.5 * rollout.kv.full).all()
    for row, prompt in enumerate(prompts):
        length = len(prompt) + int(rollout.completion_lengths[row])
        ids = rollout.sequences[row : row + 1, :length]
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        assert -logprobs[len(prompt) :].mean() < 1.5
        words = tokenizer.decode(ids[0, len(prompt) :], skip_special_tokens=True).split()
        assert len(set(words)) > 0.3 * len(words), "the story goes round in circles"


@pytest.mark.parametrize("compressor", [SnapKV, RKV, StreamingLLM, RandomEviction])
def test_replay_of_a_real_model(story_teller: tuple, compressor: type) -> None:
    model, _, prompts = story_teller
    sampler = RolloutSampler(model, compressor(budget=40, buffer=10), num_slots=4)
    rollout = sampler.generate(prompts, SamplingParams(num_generations=2, max_completion_length=120, seed=5))
    replayed = replay_logprobs(model, rollout)
    assert_same_logprobs(replayed, rollout.sampler_logprobs, share=5e-5)  # five layers
