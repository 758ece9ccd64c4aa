"""Attention under deaths: every way gives the float64 numbers, in bounded memory, and survives being recomputed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_rl_lightning.compressors import RKV, SnapKV
from sparse_rl_lightning.learner.checkpointing import enable_checkpointing
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.records import NEVER
from sparse_rl_lightning.replay.death_attention import (
    BLOCK,
    death_attention,
    death_blocks,
    flex_death_attention,
    sdpa_death_attention,
)
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.testing import tiny_model

SCALE = 0.3


def inputs(length: int, batch: int = 2, group: int = 3, heads: int = 2, width: int = 8) -> list[Tensor]:
    """Queries, keys, values, and deaths after the key itself: about half of the tokens die."""
    shapes = [(batch, heads * n, length, width) for n in (group, 1, 1)]
    token = torch.arange(length)
    life = torch.randint(1, 2 * length, (batch, heads, length))
    death = torch.where(torch.rand(batch, heads, length) < 0.5, token + life, NEVER).to(torch.int32)
    return [*(torch.randn(shape, requires_grad=True) for shape in shapes), death]


def brute_force(query: Tensor, key: Tensor, value: Tensor, death: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Query by query over a list of the living keys, float64; a sink is one more logit without a value."""
    query, key, value = (t.double() for t in (query, key, value))
    out = torch.zeros_like(query)
    group = query.shape[1] // key.shape[1]
    for b, h, q in torch.cartesian_prod(*(torch.arange(n) for n in query.shape[:3])).tolist():
        living = [k for k in range(q + 1) if q < int(death[b, h // group, k])]
        scores = key[b, h // group, living] @ query[b, h, q] * SCALE
        if sinks is not None:
            scores = torch.cat([scores, sinks[h : h + 1].double()])
        out[b, h, q] = scores.softmax(0)[: len(living)] @ value[b, h // group, living]
    return out


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("mask_bytes", [1, 5 * 4 * 23 * 4, 10**9], ids=["one query", "chunks", "whole"])
def test_masks_and_chunks_give_the_exact_numbers_and_gradients(mask_bytes: int, has_sinks: bool) -> None:
    query, key, value, death = inputs(23)
    sinks = (2 * torch.randn(6)).requires_grad_() if has_sinks else None
    got = sdpa_death_attention(query, key, value, death, SCALE, mask_bytes, sinks)
    want = brute_force(query, key, value, death, sinks)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)
    direction, given = torch.randn_like(got), (query, key, value, *([] if sinks is None else [sinks]))
    grads = [torch.autograd.grad((out * direction).sum(), given) for out in (got, want)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0)
    if mask_bytes > 10**8:
        torch.testing.assert_close(death_attention(query, key, value, death, SCALE, sinks), got, atol=0, rtol=0)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returns."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            self.bytes = max(self.bytes, tensor.nbytes if isinstance(tensor, Tensor) else 0)
        return out


def test_no_mask_exceeds_its_limit_and_none_waits_for_the_backward_pass() -> None:
    query, key, value, death = inputs(768, batch=1, group=2, width=4)
    limit, saved = 2**17, []  # whole: 2 x 768 x 768 x 5 bytes, 5.6 MiB
    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        sdpa_death_attention(query, key, value, death, SCALE, limit).sum().backward()
    assert 2**14 < largest.bytes <= limit
    with Largest() as whole:
        sdpa_death_attention(query, key, value, death, SCALE).sum().backward()
    assert whole.bytes > 4 * limit
    assert all(tensor.dtype != torch.bool for tensor in saved)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.0, -1.0, 2.0, 1.0, 9.0, -9.0])], ids=["none", "sinks"])
@pytest.mark.parametrize("length", [40, 2 * BLOCK, 3 * BLOCK + 17])
def test_flex_attention_agrees(length: int, sinks: Tensor | None) -> None:
    """Without gradient: on the CPU FlexAttention has none."""
    query, key, value, death = (t.detach() for t in inputs(length, batch=1))
    got = flex_death_attention(query, key, value, death, SCALE, compiled=False, sinks=sinks)
    want = sdpa_death_attention(query, key, value, death, SCALE, sinks=sinks)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("length", [40, 3 * BLOCK + 17])
def test_flex_attention_and_its_gradients_on_a_gpu(length: int, has_sinks: bool) -> None:
    query, key, value, death = inputs(length, batch=1, width=64)
    given = [query, key, value, *([torch.randn(6, requires_grad=True)] if has_sinks else [])]
    there = [t.detach().cuda().requires_grad_() for t in given]
    want = sdpa_death_attention(*given[:3], death, SCALE, sinks=given[3] if has_sinks else None)
    got = death_attention(*there[:3], death.cuda(), SCALE, there[3] if has_sinks else None)
    torch.testing.assert_close(got.cpu(), want, atol=2e-3, rtol=2e-3)
    direction = torch.randn_like(want)
    found = torch.autograd.grad((got * direction.cuda()).sum(), there)
    for a, b in zip(found, torch.autograd.grad((want * direction).sum(), given), strict=True):
        torch.testing.assert_close(a.cpu(), b, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("length", [BLOCK, 4 * BLOCK, 3 * BLOCK + 17])
def test_blocks_are_those_of_the_mask(length: int) -> None:
    """A block is computed if any pair in it lives, and taken whole only if all do."""
    heads, token = 2, torch.arange(length)
    # eviction in bursts: some blocks die wholly, some partly, some not at all
    death = torch.where(torch.rand(1, heads, length) < 0.9, (token // BLOCK + 1) * BLOCK + 40, NEVER)
    death[0, 1, : 2 * BLOCK] = 2 * BLOCK
    mask = (token <= token[:, None]) & (token[:, None] < death[:, :, None])
    count = -(-length // BLOCK)
    whole = torch.zeros(1, heads, count * BLOCK, count * BLOCK, dtype=torch.bool)
    whole[:, :, :length, :length] = mask
    tiles = whole.view(1, heads, count, BLOCK, count, BLOCK).transpose(3, 4).flatten(4)
    blocks = death_blocks(death, 2, lambda b, h, q, k: q >= k)
    partial = listed(blocks.kv_num_blocks, blocks.kv_indices)
    full = listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    assert torch.equal(partial | full, tiles.any(-1).repeat_interleave(2, dim=1))
    assert torch.equal(full, tiles.all(-1).repeat_interleave(2, dim=1))


def listed(numbers: Tensor, indices: Tensor) -> Tensor:
    """(B, H, Q, K) bool: the key blocks that a query block lists."""
    chosen = torch.arange(indices.shape[-1]) < numbers[..., None]
    return torch.zeros_like(chosen).scatter(-1, indices.long(), chosen)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient_and_no_sample(use_reentrant: bool) -> None:
    model = tiny_model(initializer_range=0.2, eos_token_id=None)
    sampler = RolloutSampler(model, RKV(budget=12, buffer=5, num_sinks=1, window=3))
    prompts, params = [list(range(3, 20)), [4, 5]], SamplingParams(num_generations=2, max_completion_length=30)
    rollout = sampler.generate(prompts, params)
    model.train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            enable_checkpointing(model, use_reentrant=use_reentrant)
            model.enable_input_require_grads()  # the reentrant kind needs it
        replayed = replay_logprobs(model, rollout)  # two forwards in one graph, as a mixed objective has
        dense = sequence_logprobs(model, rollout.sequences, rollout.completion_mask)[0]
        assert float((replayed - dense).detach().abs().max()) > 1e-2, "nothing that matters died"
        assert model.config._attn_implementation == "sdpa"
        again = sampler.generate(prompts, params)  # between the forward and the backward pass
        assert torch.equal(again.sequences, rollout.sequences)
        model.zero_grad()
        (replayed.sum() + 0.5 * dense.square().sum()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert model.config._attn_implementation == "sdpa"
    scale = gradients[0].abs().max()
    torch.testing.assert_close(gradients[1] / scale, gradients[0] / scale, atol=1e-6, rtol=0)


def test_replay_of_one_sequence_does_not_depend_on_the_others() -> None:
    model = tiny_model(initializer_range=0.2, eos_token_id=None)
    sampler = RolloutSampler(model, SnapKV(budget=12, buffer=5, num_sinks=1, window=3))
    rollout = sampler.generate([list(range(3, 3 + n)) for n in (30, 2, 17)], SamplingParams(max_completion_length=20))
    together = replay_logprobs(model, rollout)
    for row in range(3):
        torch.testing.assert_close(replay_logprobs(model, rollout[row : row + 1])[0], together[row], atol=2e-5, rtol=0)
