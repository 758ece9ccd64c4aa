"""This library's engine, with the full or an evicting cache."""

import torch
from serve import Generate, Settings, serve

from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.compressors import RKV, FullKV
from sparse_rl_lightning.policies.pretrained import load_pretrained


def load(settings: Settings) -> Generate:
    """R-KV evicts to budget and buffer."""
    torch.set_num_threads(settings["threads"])
    model, tokenizer = load_pretrained(settings["policy"], settings["dtype"])
    compressor = RKV(budget=settings["budget"], buffer=settings["buffer"]) if settings["evicts"] else FullKV()
    sampler = RolloutSampler(model, compressor, tokenizer=tokenizer, end_token_ids=[])

    def generate(prompts: list[list[int]], new_tokens: int) -> list[int]:
        rollout = sampler.generate(prompts, SamplingParams(max_completion_length=new_tokens, temperature=1.0))
        counts: list[int] = rollout.completion_lengths.tolist()
        return counts

    return generate


serve(load)
