"""Learned sinks: every attention beside them is that of a softmax with one more logit, in float64."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparse_rl_lightning import ops
from sparse_rl_lightning.cache.running_state import _paid
from sparse_rl_lightning.ops import attention
from sparse_rl_lightning.ops.attention import causal_attention, entries_share, torch_attention
from tests.native_cases import (
    assert_attended,
    make_pools,
    moved,
    no_kernels,
    on_each_device,
    pick_slots,
    shape_for,
    shapes,
    tolerance,
)
from tests.pretend_gpu import DeviceTensor, PretendGPU, host

SCALE = 0.3


def brute_force(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, sinks: Tensor, scale: float = SCALE
) -> tuple[Tensor, Tensor]:
    """The result and the probabilities of entries, (Hq, t, D) and (Hq, t, T), over the keys (H, T, D) that are seen."""
    group = len(query) // len(key)
    key, value = (t.double().repeat_interleave(group, 0) for t in (key, value))
    logits = (query.double() @ key.mT * scale).masked_fill(~seen, -torch.inf)
    column = sinks.double()[:, None, None].expand(*logits.shape[:2], 1)
    probs = torch.cat([logits, column], dim=-1).softmax(-1)[..., :-1]
    return probs @ value, probs


@on_each_device
@pytest.mark.parametrize("way", ["kernel", "reference"])
@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), shape=shapes, group=st.integers(1, 4), strength=st.sampled_from([0.0, 3.0, 60.0]))
def test_decode_attention(device: str, way: str, seed: int, shape: dict, group: int, strength: float) -> None:
    shape = shape_for(device, shape)
    g = torch.Generator().manual_seed(seed)
    pools = make_pools(g, **shape).layer(-1)
    (slots, heads), dim, dtype = pools.lengths.shape, shape["dim"], shape["dtype"]
    chosen, longest = pick_slots(g, slots), int(pools.lengths.max())
    query = torch.randn(slots, heads * group, dim, generator=g).to(dtype)
    sinks = strength * torch.randn(heads * group, generator=g)
    probs = torch.full((slots, heads * group, longest + 2), 7.0)
    where = [t.to(device) for t in (chosen, query, probs, sinks)]
    with no_kernels() if way == "reference" else nullcontext():
        out = ops.decode_attention(moved(pools, device), *where[:2], SCALE, longest, probs=where[2], sinks=where[3])
        again = ops.decode_attention(moved(pools, device), *where[:2], SCALE, longest, sinks=where[3])
    assert torch.equal(out, again)
    close = 2 * tolerance(dtype)  # rounded twice
    assert_attended(pools, chosen, query, SCALE, out.cpu(), probs=where[2].cpu(), close=close, sinks=sinks)


@pytest.mark.parametrize("width", [5, 8, 16])
@pytest.mark.parametrize("masked", [False, True])
def test_torch_attention_and_its_gradients(masked: bool, width: int) -> None:
    shapes = [(4, 9, width), (2, 9, width), (2, 9, width)]
    query, key, value = (torch.randn(shape, requires_grad=True) for shape in shapes)
    sinks = (2 * torch.randn(4)).requires_grad_()
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    if masked:
        seen = seen & (torch.rand(9, 9) < 0.5)
        seen[3] = False  # nothing but the sink
    mask = seen if masked else None
    got = torch_attention(query[None], key[None], value[None], mask, SCALE, sinks, enable_gqa=True)[0]
    want = brute_force(query, key, value, seen, sinks)[0]
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)
    direction, given = torch.randn_like(got), (query, key, value, sinks)
    grads = [torch.autograd.grad((out * direction).sum(), given) for out in (got, want)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [0, 1, 3, 300, 5000])
@pytest.mark.parametrize(("count", "total"), [(7, 7), (1, 9), (600, 600), (300, 700)])
def test_prompts_are_read_in_windows_and_beside_sinks(
    count: int, total: int, window: int, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last tokens of a prompt see all before them, or a window; masks of long prompts are made in parts."""
    query, key, value = (torch.randn(n, heads, 4) for n, heads in ((count, 4), (total, 2), (total, 2)))
    sinks = 2 * torch.randn(4) if has_sinks else None
    last, index = torch.arange(total - count, total)[:, None], torch.arange(total)
    seen = (index <= last) & (index > last - (window or total))
    logits, sizes = torch.full((4,), -torch.inf) if sinks is None else sinks, list[int]()
    want, probs = brute_force(*(t.transpose(0, 1) for t in (query, key, value)), seen, logits)
    proper = F.scaled_dot_product_attention

    def attend(*args: Any, attn_mask: Tensor | None, **options: Any) -> Tensor:
        sizes.append(0 if attn_mask is None else attn_mask.numel())
        return proper(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    for most in (attention.MASK_SIZE, 10_000):
        sizes.clear()
        monkeypatch.setattr(attention, "MASK_SIZE", most)
        got = causal_attention(query, key, value, SCALE, window, sinks)
        torch.testing.assert_close(got.double(), want.transpose(0, 1), atol=2e-6, rtol=1e-5)
        assert max(sizes) <= most
    assert (len(sizes) > 1) == (count > 7 and (0 < window < total or count < total))
    if sinks is not None and not window:  # what compressors read of it
        paid = _paid(query, key, SCALE, sinks)[0]
        torch.testing.assert_close(paid.double(), probs.unflatten(0, (2, 2)).sum(1), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_reads_later_chunks_of_a_prompt_without_a_mask(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(n, heads, 8, dtype=dtype) for n, heads in ((5, 4), (12, 2), (12, 2)))
    with PretendGPU() as gpu:
        got = causal_attention(*(DeviceTensor(t) for t in (query, key, value)), SCALE)
    close = 2e-2 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(host(got), causal_attention(query, key, value, SCALE), atol=close, rtol=0)
    ops = {op for _, op in gpu.launches}
    assert "scaled_dot_product_attention" in ops
    assert not ops & {"arange", "le"}
    assert ("clone" in ops) == (dtype == torch.float32), "FlashAttention groups heads without copies of keys"


def test_a_share_of_extreme_numbers() -> None:
    lse = torch.tensor([-torch.inf, -1e4, 0.0, 1e4])
    assert entries_share(lse, torch.zeros(4)).tolist() == [0.0, 0.0, 0.5, 1.0]
    assert entries_share(torch.zeros(2), torch.tensor([-200.0, 200.0], dtype=torch.bfloat16)).tolist() == [1.0, 0.0]
