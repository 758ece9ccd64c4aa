"""The learner under retrieval: it chooses the pages that the sampler chose, and has its log-probs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chosen_pages import ChosenPages

from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.compressors import SnapKV
from sparse_rl_lightning.learner.checkpointing import enable_checkpointing
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.retrieval.logprobs import LearnerPages
from sparse_rl_lightning.retrievers import Centroid, Quest, Retriever
from sparse_rl_lightning.rollout import (
    RolloutSampler,
    SamplingParams,
    replay_logprobs,
    retrieval_logprobs,
)
from sparse_rl_lightning.testing import ARCHITECTURES, tiny_model

PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 9, 33, 1)]
SMALL: dict[str, Any] = {"budget": 16, "page_size": 4, "num_dense_layers": 1}
RETRIEVERS: dict[str, Retriever] = {
    "centroid": Centroid(**SMALL),
    "quest": Quest(**SMALL),
    "centroid-max": Centroid(**SMALL, group_reduction="max"),
    "schedule": Quest(LengthSchedule([0, 20, 30], [12, 16, 24]), page_size=4, num_dense_layers=0, num_last_pages=1),
}
each_retriever = pytest.mark.parametrize("retriever", RETRIEVERS.values(), ids=RETRIEVERS)
PARAMS = SamplingParams(num_generations=2, max_completion_length=40, temperature=0.9, seed=3)


def roll_out(retriever: Retriever, architecture: str = "qwen2", **options: Any) -> tuple[Any, Rollout]:
    policy = tiny_model(architecture, initializer_range=0.2, num_layers=3, eos_token_id=None, **options)
    sampler = RolloutSampler(policy, retriever=retriever, num_slots=3)
    return policy, sampler.generate(PROMPTS, PARAMS)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@each_retriever
def test_the_samplers_pages_reproduce_its_logprobs(
    architecture: str, retriever: Retriever, chosen: ChosenPages
) -> None:
    policy, rollout = roll_out(retriever, architecture)
    replayed = chosen.replay_logprobs(policy, rollout, PARAMS.seed, retriever, 0.9)
    torch.testing.assert_close(replayed, rollout.sampler_logprobs, atol=2e-5, rtol=0)
    with torch.no_grad():
        dense, _ = sequence_logprobs(policy, rollout.sequences, rollout.completion_mask, 0.9)
    assert (dense - rollout.sampler_logprobs).abs().max() > 1e-2, "nothing that matters was left out"
    replayed.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.parameters())


@each_retriever
def test_the_learner_chooses_the_same_pages(retriever: Retriever, chosen: ChosenPages) -> None:
    policy, rollout = roll_out(retriever)
    again = retrieval_logprobs(policy, rollout, retriever, 0.9)
    assert chosen.share_differing(rollout, PARAMS.seed, retriever) == 0  # the seed meets no near-tie
    torch.testing.assert_close(again.logprobs, rollout.sampler_logprobs, atol=2e-5, rtol=0)
    assert (again.entropy[rollout.completion_mask] > 0).all()


def test_another_policy_wants_other_pages(chosen: ChosenPages) -> None:
    retriever = RETRIEVERS["centroid"]
    _, rollout = roll_out(retriever)
    other = tiny_model("qwen2", initializer_range=0.2, num_layers=3, eos_token_id=None, seed=9)
    retrieval_logprobs(other, rollout, retriever, 0.9)
    assert 0.1 < chosen.share_differing(rollout, PARAMS.seed, retriever) <= 1


@each_retriever
def test_one_query_at_a_time_gives_the_same_numbers_and_gradients(retriever: Retriever) -> None:
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 37, 8, generator=g) for heads in (6, 2, 2))
    inputs = [t.requires_grad_() for t in (query, key, value)]
    lengths = torch.tensor([5, 1])
    results = []
    for mask_bytes in (1, 2000, 10**9):
        out = LearnerPages(lengths, retriever, mask_bytes=mask_bytes).attend(1, *inputs, 0.3)
        results.append([out, *torch.autograd.grad((out * out.detach().cos()).sum(), inputs)])
    for other in results[:-1]:
        for a, b in zip(other, results[-1], strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@each_retriever
def test_attention_is_that_of_a_loop_over_queries(retriever: Retriever) -> None:
    g = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, heads, 37, 8, generator=g, dtype=torch.float64) for heads in (6, 2, 2))
    prompt, r = 5, retriever
    got = LearnerPages(torch.tensor([prompt]), r).attend(1, query, key, value, 0.3)
    for at in range(37):
        there, limit = at // r.page_size + 1, r.schedule.at(at + 1) // r.page_size
        for h in range(2):
            read = set(range(there))
            if there > limit and at >= prompt:
                whole = key[0, h, : at // r.page_size * r.page_size].unflatten(0, (-1, r.page_size))
                scores = r.score(query[0, 3 * h : 3 * h + 3, None, at], r.summarize(whole).transpose(0, 1))[0]
                middle = range(r.num_first_pages, there - r.num_last_pages)
                best = sorted(middle, key=lambda p, scores=scores: -float(scores[p]))
                free = limit - r.num_first_pages - r.num_last_pages
                read = (read - set(middle)) | set(best[:free])
            tokens = [t for t in range(at + 1) if t // r.page_size in read]
            for q in range(3 * h, 3 * h + 3):
                shares = (0.3 * key[0, h, tokens] @ query[0, q, at]).softmax(0)
                torch.testing.assert_close(got[0, q, at], shares @ value[0, h, tokens], atol=1e-12, rtol=0)


def test_gradient_checkpointing_chooses_the_same_pages_again() -> None:
    retriever = RETRIEVERS["quest"]
    policy, rollout = roll_out(retriever)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            enable_checkpointing(policy, use_reentrant=False)
        policy.train()
        policy.zero_grad()
        retrieval_logprobs(policy, rollout, retriever, 0.9).logprobs.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_bfloat16_chooses_nearly_the_same_pages(chosen: ChosenPages) -> None:
    """Bound as of replay in bfloat16; few of the pages differ, and those that do explain no large part of the rest."""
    retriever = RETRIEVERS["centroid"]
    policy = tiny_model(initializer_range=0.2, num_layers=3, eos_token_id=None).bfloat16()
    rollout = RolloutSampler(policy, retriever=retriever).generate(PROMPTS, PARAMS)
    mask = rollout.completion_mask
    with torch.no_grad():
        replayed = chosen.replay_logprobs(policy, rollout, PARAMS.seed, retriever, 0.9)
        retrieval_logprobs(policy, rollout, retriever, 0.9)
        dense, _ = sequence_logprobs(policy, rollout.sequences, mask, 0.9)
    noise, sparse = ((own - rollout.sampler_logprobs)[mask].abs().mean() for own in (replayed, dense))
    assert noise < 0.03
    assert sparse > 10 * noise
    assert chosen.share_differing(rollout, PARAMS.seed, retriever) < 0.1


def test_what_cannot_be_followed_is_refused() -> None:
    retriever = RETRIEVERS["centroid"]
    policy, rollout = roll_out(retriever)
    with pytest.raises(ValueError, match="no record of its evictions"):
        replay_logprobs(policy, rollout)
    compressor = SnapKV(budget=24, buffer=5, num_sinks=2, window=4)
    both = RolloutSampler(policy, compressor, retriever=retriever).generate(PROMPTS, PARAMS)
    with pytest.raises(ValueError, match="compressed besides"):
        retrieval_logprobs(policy, both, retriever)
