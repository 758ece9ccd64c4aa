"""SPARSE_RL_ATTENTION: what it chooses, and that torch's flash attention says what the reference says."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from native_cases import make_pools, pick_slots, same_bits
from torch import Tensor

from sparse_rl_lightning import ops
from sparse_rl_lightning.cli import doctor
from sparse_rl_lightning.ops import KVPools, backends

OPS = torch.ops.sparse_rl


def make_call(dtype: torch.dtype, dim: int = 64, group: int = 3) -> tuple[KVPools, Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    pools = make_pools(g, layers=1, slots=6, heads=2, dim=dim, capacity=90, dtype=dtype, kind="random").layer(0)
    pools.lengths[1] = 0
    return pools, pick_slots(g, 6), torch.randn(6, 2 * group, dim, generator=g).to(dtype)


def test_an_unknown_backend_is_refused() -> None:
    assert backends.read_choice({}) == "native"
    assert backends.read_choice({"SPARSE_RL_ATTENTION": "flash"}) == "flash"
    with pytest.raises(ValueError, match="must be one of native, flash, reference, got 'sdpa'"):
        backends.read_choice({"SPARSE_RL_ATTENTION": "sdpa"})


def test_the_reference_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    pools, slots, query = make_call(torch.float32)
    want = torch.empty_like(query)
    OPS.decode_attention.reference(
        query, pools.keys, pools.values, slots, pools.offsets, pools.lengths, 0.3, 90, want, None, None
    )
    monkeypatch.setattr(backends, "BACKEND", "reference")
    assert same_bits(ops.attend(pools, slots, query, 0.3, 90), want)
    assert doctor.attention_backend().startswith("PyTorch reference")


def test_what_flash_attention_cannot_do_goes_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pools, slots, query = make_call(torch.bfloat16)
    want = ops.attend(pools, slots, query, 0.3, 90)
    monkeypatch.setattr(backends, "BACKEND", "flash")
    if not torch.cuda.is_available():
        assert "flash is not possible here: it needs a CUDA device" in doctor.attention_backend()
    assert backends.flash_obstacle(pools.keys) == "it needs a CUDA device"
    assert same_bits(ops.attend(pools, slots, query, 0.3, 90), want)


def test_the_doctor_names_the_choice() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sparse_rl_lightning.cli.doctor"], capture_output=True, text=True, check=True,
        env={**os.environ, "SPARSE_RL_ATTENTION": "reference"},
    )  # fmt: skip
    assert "decode attention: PyTorch reference" in done.stdout


def varlen_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int,
    dropout: float, is_causal: bool, return_mask: bool, *, scale: float, seqused_k: Tensor,
) -> tuple[Any, ...]:  # fmt: skip
    """What aten::_flash_attention_forward does with sequences of different lengths, in loops."""
    assert (max_q, dropout, is_causal, return_mask) == (1, 0.0, False, False)
    out, lse = torch.empty_like(query), torch.full((query.shape[1], len(query)), torch.inf)
    for i, count in enumerate(seqused_k.tolist()):
        assert count <= max_k
        start = int(cum_seq_k[i])
        rows = query[int(cum_seq_q[i]) : int(cum_seq_q[i + 1])]
        assert len(rows) == 1
        logits = scale * rows[0].float() @ key[start : start + count, 0].float().T
        out[i] = (logits.softmax(-1) @ value[start : start + count, 0].float()).to(out.dtype)
        if count:
            lse[:, i] = logits.logsumexp(-1)
    return out, lse, None, None, None


@pytest.mark.parametrize("group", [1, 3, 8])
def test_flash_attention_is_called_with_the_right_sequences(group: int) -> None:
    pools, slots, query = make_call(torch.float16, group=group)
    got, want = torch.full_like(query, 7), torch.full_like(query, 7)
    got_lse, want_lse = torch.full(query.shape[:2], 7.0), torch.full(query.shape[:2], 7.0)
    args = (query, pools.keys, pools.values, slots, pools.offsets, pools.lengths, 0.3, 90)
    backends.flash_attention(*args, got, got_lse, None, forward=varlen_forward)
    OPS.decode_attention.reference(*args, want, want_lse, None)
    torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(got_lse, want_lse, atol=1e-5, rtol=1e-5)
    assert (pools.lengths == 0).any()


def test_the_log_sum_exp_of_flash_attention_has_the_layout_that_is_taken_for_granted() -> None:
    """What torch itself says, without data and without a GPU."""
    seen: list[tuple[int, ...]] = []

    def forward(*args: Any, **options: Any) -> Any:
        meta = [a.to("meta") if isinstance(a, Tensor) else a for a in args]
        results = torch.ops.aten._flash_attention_forward(
            *meta, scale=options["scale"], seqused_k=options["seqused_k"].to("meta")
        )
        seen.extend(tuple(result.shape) for result in results[:2])
        return varlen_forward(*args, **options)

    pools, slots, query = make_call(torch.float16, group=3)
    lse = torch.empty(query.shape[:2])
    backends.flash_attention(query, pools.keys, pools.values, slots, pools.offsets, pools.lengths, 0.3, 90,
                             torch.empty_like(query), lse, None, forward=forward)  # fmt: skip
    assert seen == [(12, 3, 64), (3, 12)]  # 6 rows of 2 KV heads, groups of 3


@pytest.mark.gpu
@pytest.mark.parametrize("overload", ["default", "flash"])
@pytest.mark.parametrize("group", [1, 3, 7, 8])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_both_backends_equal_the_reference(dtype: torch.dtype, dim: int, group: int, overload: str) -> None:
    pools, slots, query = make_call(dtype, dim, group)
    args = (query, pools.keys, pools.values, slots, pools.offsets, pools.lengths)
    want, want_lse = torch.empty_like(query), torch.empty(query.shape[:2])
    OPS.decode_attention.reference(*args, 0.3, 90, want, want_lse, None)
    got, got_lse = torch.empty_like(want, device="cuda"), torch.empty_like(want_lse, device="cuda")
    assert backends.flash_obstacle(pools.keys.cuda()) == ""
    getattr(OPS.decode_attention, overload)(*(a.cuda() for a in args), 0.3, 90, got, got_lse, None)
    torch.testing.assert_close(got.cpu(), want, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(got_lse.cpu(), want_lse, atol=1e-4, rtol=1e-4)
