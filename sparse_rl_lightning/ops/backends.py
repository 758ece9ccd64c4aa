"""Which code computes decode attention: the compiled kernel, torch's own flash attention, or the PyTorch reference.

``SPARSE_RL_ATTENTION`` in the environment chooses once, at start: ``native`` (the default), ``flash`` or ``reference``.
What the chosen one cannot do goes to the compiled kernel, and without a kernel to the reference.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError

VARIABLE = "SPARSE_RL_ATTENTION"
BACKENDS = ("native", "flash", "reference")
FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_HEAD_DIM = 256
FLASH_LIMITS = f"float16 and bfloat16, head sizes that are multiples of 8 up to {FLASH_HEAD_DIM}"


def read_choice(environment: Mapping[str, str] = os.environ) -> str:
    """The backend asked for.

    Raises:
        ValueError: If there is no such backend.
    """
    choice = environment.get(VARIABLE, "native")
    if choice not in BACKENDS:
        raise UserError(f"{VARIABLE} must be one of {', '.join(BACKENDS)}, got {choice!r}.")
    return choice


BACKEND = read_choice()
"""The backend of this process."""


def overload_for(key_pool: Tensor, probs: Tensor | None) -> str:
    """The overload of ``decode_attention`` that serves a call: "default", "flash" or "reference"."""
    if BACKEND == "flash" and not flash_obstacle(key_pool, probs):
        return "flash"
    return "reference" if BACKEND == "reference" else "default"


def flash_obstacle(key_pool: Tensor, probs: Tensor | None = None) -> str:
    """Why torch's flash attention cannot serve a call; an empty text if it can."""
    rows, dim = key_pool.shape
    if key_pool.device.type != "cuda":
        return "it needs a CUDA device"
    if torch.cuda.get_device_capability(key_pool.device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or newer"
    if key_pool.dtype not in FLASH_DTYPES or dim % 8 or dim > FLASH_HEAD_DIM:
        return f"it takes {FLASH_LIMITS}"
    if rows >= 2**31:
        return "it counts the rows of a pool in int32"
    return "it gives no probabilities" if probs is not None else ""


def flash_attention(
    query: Tensor, key_pool: Tensor, value_pool: Tensor, slots: Tensor, offsets: Tensor, lengths: Tensor, scale: float,
    max_length: int, out: Tensor, lse: Tensor | None, probs: Tensor | None, errors: Tensor | None = None, *,
    forward: Callable[..., Any] = torch.ops.aten._flash_attention_forward,
) -> None:  # fmt: skip
    """The op ``decode_attention`` on torch's flash attention for sequences of different lengths.

    Every (row, KV head) is a sequence of its own, with one query token of G heads and one KV head. Its keys begin
    ``cum_seq_k[i]`` rows into the pool and there are ``seqused_k[i]`` of them, so the starts need not be cumulative.

    torch may split a sequence over several blocks, and how often depends on the number of sequences: here, unlike in
    the own kernel, a row's last bits hang on the batch.

    The arguments are those of the schema, and in ``forward`` a function like ``aten::_flash_attention_forward``.
    """
    assert probs is None, "flash attention gives no probabilities"
    at = slots.clamp(min=0)
    held = (lengths[at] * (slots >= 0)[:, None]).flatten().to(torch.int32)  # (B * H)
    if not held.numel() or not max_length:
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        return
    starts = offsets[at].flatten().to(torch.int32)
    ends = torch.arange(len(held) + 1, dtype=torch.int32, device=query.device)  # one query token per sequence
    result, total, *_ = forward(
        query.view(len(held), -1, query.shape[2]), key_pool.unsqueeze(1), value_pool.unsqueeze(1), ends,
        torch.cat([starts, starts[-1:]]), 1, max_length, 0.0, False, False, scale=scale, seqused_k=held,
    )  # fmt: skip
    empty = held == 0
    out.copy_(result.masked_fill(empty[:, None, None], 0.0).view_as(out))
    # (G, B * H), as ATen's flash_api.cpp (mha_varlen_fwd) returns it on either of its ways: with one query token and
    # G > 1 it takes the heads of a group for G tokens of one head, and its kernel (get_lse_tile) writes (head, token,
    # sequence); with G = 1 it writes (head, all tokens). An empty sequence gets +inf.
    if lse is not None:
        lse.copy_(total.masked_fill(empty, -torch.inf).T.reshape(lse.shape))
