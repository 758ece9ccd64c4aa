"""draw: the next token of every sequence, by one uniform number and the inverse of the distribution function.

The token is the first, in the order of the vocabulary, at which the cumulative probability passes the number, which is
a function of the sequence's key and the step alone. One number per draw instead of one per token of the vocabulary (as
in the Gumbel-max rule) leaves a draw with one reading of the logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.keyed_random import hash_bits
from sparse_rl_lightning.ops.library import call, register
from sparse_rl_lightning.ops.pools import accumulation_dtype

CHUNK = 512  # logits whose maximum and sum are kept, as kChunk in draw.h


class Drawn(NamedTuple):
    """Tokens just drawn, one per sequence, and their probabilities under the sampler."""

    tokens: Tensor  # (n,)
    logprobs: Tensor  # (n,) log-softmax(logits / T) over the whole vocabulary, T = 1 when greedy; NaN if broken
    behavior: Tensor | None = None  # (n,) under the truncated distribution actually drawn from, None if it is the same
    topk_ids: Tensor | None = None  # (n, K) int32 the most likely tokens of the whole vocabulary
    topk_logprobs: Tensor | None = None  # (n, K)
    support: Tensor | None = None  # (n,) int32 tokens that top-k, top-p and min-p leave: a beginning of the most likely


class RowParams(NamedTuple):
    """Parameters of each row in place of those of a call: what unlike requests are drawn with together."""

    numbers: Tensor  # (n, 6) float64: temperature, top_k, top_p, min_p, min_length, number of top log-probs
    ends: Tensor  # (n, F) int64: ids that are forbidden before min_length, padded with -1


def draw(
    logits: Tensor,
    sequence_keys: Tensor,
    steps: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    end_ids: Tensor | None = None,
    min_length: int = 0,
    drawn_from: Tensor | None = None,
    top_logprobs: int = 0,
    with_support: bool = False,
    rows: RowParams | None = None,
) -> Drawn:
    """Draw one token per sequence.

    Args:
        logits: Logits (n, V) of the policy. NaN, +inf, or nothing but -inf in a row gives token 0 and log-probability
            NaN.
        sequence_keys: Keys (n,), int64, of the random numbers.
        steps: Number of completion tokens (n,), int64, so far: the second key.
        temperature: Divisor of the logits; 0 is greedy.
        top_k: Number of most likely tokens to draw from, 0 for all. Ties with the k-th stay.
        top_p: Probability of the smallest set of tokens to draw from, among those that top-k leaves; 1 for all.
        min_p: Least probability relative to the best token, 0 for all.
        end_ids: Ids (E,), int64, that are forbidden before ``min_length``.
        min_length: Number of steps before which ``end_ids`` are forbidden.
        drawn_from: Logits (n, V) to draw from, if they are not the policy's (after a repetition penalty).
        top_logprobs: Number of most likely tokens to report.
        with_support: Whether to report how many tokens top-k, top-p and min-p leave, 0 where they leave all.
        rows: Parameters of each row, in place of the seven that have its names; ``top_logprobs`` is then the most.

    Returns:
        The tokens, with ``behavior`` if tokens are drawn from anything but softmax(logits / temperature).

    Raises:
        ValueError: If a tensor has the wrong shape, type, device or layout.
        RuntimeError: If ``top_logprobs`` exceeds the vocabulary.
    """
    n, device, dtype = len(logits), logits.device, accumulation_dtype(logits.dtype)
    if top_logprobs > logits.shape[-1]:
        raise UserError(f"top_logprobs is {top_logprobs}, the vocabulary has {logits.shape[-1]} tokens.")
    changed = top_k > 0 or top_p < 1 or min_p > 0 or min_length > 0 or drawn_from is not None or rows is not None
    drawn = Drawn(
        tokens=torch.empty(n, dtype=torch.int64, device=device),
        logprobs=torch.empty(n, dtype=dtype, device=device),
        behavior=torch.empty(n, dtype=dtype, device=device) if changed and (temperature > 0 or rows) else None,
        topk_ids=torch.empty(n, top_logprobs, dtype=torch.int32, device=device) if top_logprobs else None,
        topk_logprobs=torch.empty(n, top_logprobs, dtype=dtype, device=device) if top_logprobs else None,
        support=torch.empty(n, dtype=torch.int32, device=device) if with_support else None,
    )
    ends = torch.empty(0, dtype=torch.int64, device=device) if end_ids is None else end_ids
    parts = 2 if min_length > 0 or drawn_from is not None or rows is not None else 1
    chunks = torch.empty(n, parts, -(-logits.shape[-1] // CHUNK), 2, dtype=torch.float64, device=device)
    call(
        "draw", logits, logits, drawn_from, sequence_keys, steps, ends, min_length, temperature, top_k, top_p, min_p,
        *drawn[:5], chunks, *(rows or (None, None)), drawn.support,
    )  # fmt: skip
    return drawn


def keyed_uniform(*keys: Tensor) -> Tensor:
    """Uniform numbers in (0, 1), float64, multiples of 2**-53; see :func:`~.keyed_random.hash_bits`."""
    return ((hash_bits(*keys) >> 12).bitwise_and(2**52 - 1).to(torch.float64) + 0.5) * 2.0**-52


def truncate(logprobs: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Set the log-probabilities of tokens outside top-k, then top-p, then min-p to -inf; the best token stays.

    Args:
        logprobs: Log-probabilities (n, V), not necessarily normalized.
        top_k: Number of tokens to keep, 0 for all. Ties with the k-th are kept too.
        top_p: Probability to keep after top-k, 1 for all.
        min_p: Least probability relative to the best token, 0 for all.
    """
    if 0 < top_k < logprobs.shape[-1]:
        kth = logprobs.topk(top_k, dim=-1).values[:, -1:]
        logprobs = logprobs.masked_fill(logprobs < kth, -torch.inf)
    if top_p < 1:
        ordered, order = logprobs.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered  # probability of all better tokens
        outside = torch.zeros_like(before, dtype=torch.bool).scatter_(-1, order, before >= top_p)
        logprobs = logprobs.masked_fill(outside, -torch.inf)
    if min_p > 0:
        best = logprobs.max(dim=-1, keepdim=True).values
        logprobs = logprobs.masked_fill(logprobs < best + math.log(min_p), -torch.inf)
    return logprobs


def reference(
    logits: Tensor, drawn_from: Tensor | None, sequence_keys: Tensor, steps: Tensor, end_ids: Tensor, min_length: int,
    temperature: float, top_k: int, top_p: float, min_p: float, tokens: Tensor, logprobs: Tensor,
    behavior: Tensor | None, topk_ids: Tensor | None, topk_logprobs: Tensor | None, chunks: Tensor,
    row_params: Tensor | None = None, row_ends: Tensor | None = None, support: Tensor | None = None,
    masses: Tensor | None = None,
) -> None:  # fmt: skip
    """The op ``draw`` in PyTorch, for any device and type; it does not wait, so steps that run it can be captured."""
    if not logits.numel():
        return
    if row_params is not None:
        read = logits, drawn_from, sequence_keys, steps
        written = tokens, logprobs, behavior, topk_ids, topk_logprobs, chunks
        return _by_rows(row_params, end_ids if row_ends is None else row_ends, read, written, support)
    policy = (logits.double() / (temperature or 1.0)).log_softmax(dim=-1)
    allowed = policy if drawn_from is None else drawn_from.double() / (temperature or 1.0)
    forbidden = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    forbidden.index_fill_(0, end_ids, True)
    allowed = allowed.masked_fill((steps < min_length)[:, None] & forbidden, -torch.inf).log_softmax(dim=-1)
    if temperature == 0:
        chosen = allowed.argmax(dim=-1)
    else:
        allowed = truncate(allowed, top_k, top_p, min_p).log_softmax(dim=-1)
        passed = allowed.exp().cumsum(dim=-1)
        # rounding may leave the total below the number: the last token that has a probability is never passed
        target = torch.minimum(keyed_uniform(sequence_keys, steps), passed[:, -1].nextafter(passed.new_zeros(())))
        chosen = (passed > target[:, None]).to(torch.int8).argmax(dim=-1)
    broken = ~(policy.amax(dim=-1) > -torch.inf) | allowed.isnan().any(dim=-1)
    tokens.copy_(chosen.masked_fill(broken, 0))
    logprobs.copy_(policy.gather(-1, tokens[:, None]).squeeze(-1).masked_fill(broken, torch.nan))
    if behavior is not None:
        behavior.copy_(allowed.gather(-1, tokens[:, None]).squeeze(-1).masked_fill(broken, torch.nan))
    if support is not None:
        truncates = 0 < top_k < logits.shape[-1] or top_p < 1 or min_p > 0
        left = (allowed > -torch.inf).sum(dim=-1) if truncates else torch.zeros_like(tokens)
        support.copy_(left.masked_fill(broken, 0) if temperature else (~broken).to(left.dtype))
    if topk_ids is not None and topk_logprobs is not None:
        ordered, order = policy.sort(dim=-1, descending=True, stable=True)
        count = topk_ids.shape[-1]
        topk_ids.copy_(order[:, :count].masked_fill(broken[:, None], 0))
        topk_logprobs.copy_(ordered[:, :count].masked_fill(broken[:, None], torch.nan))


def _by_rows(
    params: Tensor, ends: Tensor, inputs: Sequence[Any], outputs: Sequence[Any], support: Tensor | None
) -> None:
    """The reference row by row, each with its parameters; it waits for the device."""
    draw_row: Any = reference
    for row, (temperature, top_k, top_p, min_p, min_length, num_top) in enumerate(params.tolist()):
        at = slice(row, row + 1)
        read, written = ([None if each is None else each[at] for each in tensors] for tensors in (inputs, outputs))
        forbidden = ends if ends.ndim == 1 else ends[row][ends[row] >= 0]
        numbers = int(min_length), temperature, int(top_k), top_p, min_p
        draw_row(*read, forbidden, *numbers, *written, support=None if support is None else support[at])
        for most_likely, empty in zip(written[3:5], (0, -torch.inf), strict=True):
            if most_likely is not None:
                most_likely[:, int(num_top) :] = empty


register("draw", reference)
