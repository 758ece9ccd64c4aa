"""score_entries: the cheap scores of all cached entries, each read from the cache once."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl_lightning.errors import check_choice
from sparse_rl_lightning.ops.checks import check_runs
from sparse_rl_lightning.ops.entries import CachedEntries, heads_of, shared_scores
from sparse_rl_lightning.ops.keyed_random import hash_uniform
from sparse_rl_lightning.ops.library import call, register

Method = Literal["position", "random", "key_norm", "key_difference", "mass", "shared"]


def score_entries(
    entries: CachedEntries, method: Method, *, by_age: bool = False, by_value: bool = False, given: Tensor | None = None
) -> Tensor:
    """Score the entries of all layers by simple properties of each.

    - "position": the true position.
    - "random": a number in (0, 1) from (key, layer, head, position), with the key of the prompt for its tokens and that
      of the sequence for later ones.
    - "key_norm": the negative L2 norm of the key.
    - "key_difference": the negative cosine of the key to the mean of the row's normalized keys.
    - "mass": the first running number, ``by_age`` divided by the number of queries that could see the entry,
      ``by_value`` times the norm of the value.
    - "shared": the mean of the ``given`` scores of a token over the heads that have it.

    Args:
        entries: Entries of the cache.
        method: One of the above.
        by_age: Only for "mass".
        by_value: Only for "mass".
        given: Scores (L, B, H, N), only for "shared".

    Returns:
        The scores (L, B, H, N), 0 in free memory and in rows to skip; float64 if the keys are, else float32.
    """
    check_choice("method", method, Method)
    assert (method == "shared") == (given is not None)
    e, scores = entries, entries.scores()
    p = e.pools
    call(
        "score_entries", p.keys, p.keys, p.values, p.positions, e.state_pool, e.slots, e.seen, p.offsets, p.lengths,
        e.prompt_lengths, e.prompt_keys, e.sequence_keys, method, by_age, by_value, given, scores, p.errors,
    )  # fmt: skip
    return scores


def reference(
    key_pool: Tensor, value_pool: Tensor, position_pool: Tensor, state_pool: Tensor | None, slots: Tensor, seen: Tensor,
    offsets: Tensor, lengths: Tensor, prompt_lengths: Tensor, prompt_keys: Tensor, slot_keys: Tensor, method: Method,
    by_age: bool, by_value: bool, given: Tensor | None, entry_scores: Tensor, errors: Tensor | None = None,
) -> None:  # fmt: skip
    """The op ``score_entries`` in PyTorch."""
    dtype, width = entry_scores.dtype, entry_scores.shape[-1]
    check_runs(slots, offsets, lengths, width, len(key_pool))
    entry_scores.zero_()
    used, positions, live, rows = heads_of(position_pool, slots, offsets, lengths, width)
    if not live.numel():
        return
    chosen = slots[used]
    if method == "random":
        in_prompt = positions < prompt_lengths[chosen][:, None, None]
        keys = torch.where(in_prompt, prompt_keys[chosen][:, None, None], slot_keys[chosen][:, None, None])
        layers, _, heads = (torch.arange(size, device=slots.device) for size in offsets.shape)
        scores = hash_uniform(keys, layers[:, None, None, None], heads[:, None], positions.long())
    elif method == "shared":
        assert given is not None
        # layers are so many slots more
        shared, at, valid = (t.flatten(0, 1) for t in (given[:, used], positions, live))
        scores = shared_scores(shared, at, valid, "mean").view_as(live)
    elif method == "mass":
        assert state_pool is not None
        scores = state_pool[rows][..., 0].to(dtype)
        scores = scores / (seen[chosen][:, None, None] - positions) if by_age else scores
        scores = scores * torch.linalg.vector_norm(value_pool[rows].to(dtype), dim=-1) if by_value else scores
    elif method == "position":
        scores = positions
    else:
        keys = key_pool[rows].to(dtype).masked_fill(~live.unsqueeze(-1), 0.0)
        scores = -torch.linalg.vector_norm(keys, dim=-1)
        if method == "key_difference":
            unit = F.normalize(keys, dim=-1)
            scores = -(unit * F.normalize(unit.sum(dim=-2, keepdim=True), dim=-1)).sum(dim=-1)
    entry_scores[:, used] = scores.to(dtype).masked_fill(~live, 0.0)


register("score_entries", reference)
