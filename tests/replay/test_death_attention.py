"""Attention under deaths: every way gives the float64 numbers, in bounded memory, and survives being recomputed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from largest import Largest
from pretend_gpu import DeviceTensor, PretendGPU
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit

from sparse_rl_lightning.compressors import RKV
from sparse_rl_lightning.learner.checkpointing import enable_checkpointing
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.records import NEVER
from sparse_rl_lightning.replay import death_attention as death_module
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


def test_flex_attention_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would once per layer and pass; torch's own parts are left out, which no pretend GPU knows."""
    monkeypatch.setattr(death_module, "death_blocks", lambda *_: None)
    monkeypatch.setattr(death_module, "flex_attention", lambda query, *_, **__: query)
    with PretendGPU() as gpu:
        query, key, value, death = (DeviceTensor(t.detach()) for t in inputs(2 * BLOCK, batch=1))
        gpu.reset()
        for first in (0, BLOCK):
            flex_death_attention(query[:, :, first:], key, value, death, SCALE, compiled=False)
        assert not gpu.waits


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A GPU, or a CPU that runs what is compiled for one op by op; of itself torch has no gradient there."""
    if request.param == "cpu":
        compile_for(lambda graph, args: graph.forward, monkeypatch)
    return str(request.param)


def compile_for(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have FlexAttention compiled by a backend that needs no GPU."""
    torch._dynamo.reset()
    compiled = death_module.compile_flex(backend)
    monkeypatch.setattr(death_module, "compile_flex", lambda: compiled)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("kind", "batch"), [("float32", 1), ("float32", 2), ("bfloat16", 1), ("bfloat16", 2), ("mixed", 2)]
)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_compiled_flex_attention_and_its_gradients(batch: int, has_sinks: bool, kind: str, device: str) -> None:
    """Under autocast values are of 16 bits, and queries and keys, which were rotated, of 32."""
    query, key, value, death = inputs(3 * BLOCK + 17, batch=batch, width=64)
    given = [query, key, value, *([torch.randn(6)] if has_sinks else [])]
    wide = {"float32": 4, "bfloat16": 0, "mixed": 2}[kind]
    types = [torch.float32] * wide + [torch.bfloat16] * (len(given) - wide)
    there = [t.detach().to(device, own).requires_grad_() for t, own in zip(given, types, strict=False)]
    given = [t.detach().float().cpu().requires_grad_() for t in there]  # rounded as these are
    want = sdpa_death_attention(*given[:3], death, SCALE, sinks=given[3] if has_sinks else None)
    with torch.autocast(device, torch.bfloat16, enabled=kind == "mixed"):
        sinks = there[3] if has_sinks else None
        got = flex_death_attention(*there[:3], death.to(device), SCALE, compiled=True, sinks=sinks)
    # rounded to 16 bits are probabilities, results and gradients
    close = 2e-3 if kind == "float32" else 5e-2
    torch.testing.assert_close(got.float().cpu(), want, atol=close, rtol=close)
    direction = torch.randn_like(want)
    found = torch.autograd.grad((got * direction.to(device)).sum(), there)
    for a, b in zip(found, torch.autograd.grad((want * direction).sum(), given), strict=True):
        torch.testing.assert_close(a.float().cpu() / b.abs().max(), b / b.abs().max(), atol=close, rtol=0)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("length", [40, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_attention_is_the_same_wherever_it_is(length: int, has_sinks: bool, device: str) -> None:
    query, key, value, death = (t.detach() for t in inputs(length, batch=1, width=64))
    sinks = torch.randn(6) if has_sinks else None
    want = brute_force(query, key, value, death, sinks)
    there = [None if t is None else t.to(device) for t in (query, key, value, death, sinks)]
    got = death_attention(*there[:4], SCALE, there[4])  # type: ignore[arg-type]  # only sinks may be None
    torch.testing.assert_close(got.double().cpu(), want, atol=2e-3, rtol=2e-3)


SHAPES = [(2, 300), (1, 300), (4, 512), (8, 1000), (6, 300), (6, 200), (1, 1024), (2, 129), (3, 384)]
KINDS = [(torch.bfloat16, True, False), (torch.float32, True, True), (torch.bfloat16, False, True),
         (torch.float32, False, False)]  # fmt: skip


@pytest.mark.parametrize(
    ("first", "most"),
    [(0, 2), pytest.param(2, 3, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
    ids=["plain", "as many blocks", "as many heads"],
)
def test_ordinary_shapes_take_few_kernels(first: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kind of pass one for a single sequence and one for more; the first may not be as many as their blocks."""
    counts = list[int]()

    def backend(graph: Any, args: Any) -> Any:
        counts[-1] += 1
        results = graph.graph.output_node().args[0]
        return lambda *_: [torch.zeros(())] * len(results)  # nothing is computed

    compile_for(backend, monkeypatch)
    for dtype, has_gradient, has_sinks in KINDS:
        counts.append(0)
        for batch, length in SHAPES[first:] + SHAPES[:first]:
            *given, death = inputs(length, batch, group=1, heads=6, width=4)
            there = [t.detach().to(dtype).requires_grad_(has_gradient) for t in given]
            sinks = torch.randn(6) if has_sinks else None
            flex_death_attention(*there, death, SCALE, compiled=True, sinks=sinks)
    assert counts[0] == most
    assert set(counts) <= {2, most}


def test_what_is_not_compiled_is_an_error_and_never_quadratic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(death_module, "MAX_COMPILES", 1)
    compile_for(lambda graph, args: graph.forward, monkeypatch)

    def run(batch: int) -> None:
        flex_death_attention(*(t.detach() for t in inputs(300, batch)), SCALE, compiled=True)

    run(2)
    run(3)  # the same kernel
    with pytest.raises(FailOnRecompileLimitHit):
        run(1)


def test_what_flex_attention_is_given_is_of_one_type_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.13 casts by itself, older ones refuse mixed types in the backward pass."""
    given = list[torch.dtype]()

    def noted(*args: Tensor, **_: Any) -> Tensor:
        given.extend(one.dtype for one in args)
        return args[0]

    monkeypatch.setattr(death_module, "flex_attention", noted)
    query, key, value, death = inputs(2 * BLOCK)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            flex_death_attention(query, key, value.bfloat16(), death, SCALE, compiled=False)
    assert given == [torch.float32, torch.float32, torch.bfloat16] + [torch.bfloat16] * 3


@pytest.mark.parametrize("asked", [BLOCK + 1, 2 * BLOCK + 17])
def test_flex_attention_leaves_out_what_is_behind_the_ends(asked: int, device: str) -> None:
    query, key, value, death = (t.detach().to(device) for t in inputs(3 * BLOCK + 17, batch=3, width=64))
    ends = torch.tensor([BLOCK + 40, 3 * BLOCK + 17, 2 * BLOCK], device=device)
    given = [t.requires_grad_() for t in (query[:, :, -asked:], key, value)]
    is_read = (torch.arange(3 * BLOCK + 17, device=device) < ends[:, None])[:, -asked:]
    found = []
    for own in (None, ends):
        out = flex_death_attention(*given, death, SCALE, compiled=True, ends=own).transpose(1, 2)
        found.append([out[is_read], *torch.autograd.grad(out[is_read].square().sum(), given), out[~is_read]])
    torch.testing.assert_close(found[0][:-1], found[1][:-1], atol=2e-3, rtol=2e-3)
    if device == "cuda":  # op by op every block is computed
        assert not torch.allclose(found[0][-1], found[1][-1], atol=1e-2)


@pytest.mark.parametrize("ends", [None, torch.tensor([BLOCK + 1])])
@pytest.mark.parametrize("length", [BLOCK, 4 * BLOCK, 3 * BLOCK + 17])
def test_blocks_are_those_of_the_mask(length: int, ends: Tensor | None) -> None:
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
    if ends is not None:  # behind an end each block sees itself
        tiles[:, :, 2:] &= torch.eye(count, dtype=torch.bool)[2:, :, None]
    blocks = death_blocks(death, 2, lambda b, h, q, k: q >= k, ends=ends)
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
