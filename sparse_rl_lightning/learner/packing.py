"""Packing of sequences by their number of tokens: bins of about equal work, and parts that fit into memory.

None of it changes a loss that divides by sums over the optimizer step: which sequences share a forward pass only
affects time and memory. ``loss_type: bnpo`` and weights with ``normalize: micro_batch`` divide by their own pass's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparse_rl_lightning.records import Rollout

Compute = Callable[[Rollout], tuple[Tensor, ...]]


def pack(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Exactly ``num_bins`` bins with about the same number of tokens: longest sequence first, into the emptiest bin.

    The fullest bin has at most 4/3 of the tokens of the best packing (Graham 1969), and no bin is empty if there are
    as many sequences.

    Args:
        lengths: Number of tokens of every sequence, at least 1.
        num_bins: Number of bins, at least 1.

    Returns:
        Indices of the sequences of every bin, each in ascending order. The same lengths give the same bins.
    """
    assert num_bins >= 1
    assert min(lengths, default=1) >= 1
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, number) for number in range(num_bins)]  # a heap: the emptiest first, then the lowest number
    for index in _longest_first(lengths):
        tokens, number = loads[0]
        bins[number].append(index)
        heapq.heapreplace(loads, (tokens + lengths[index], number))
    return [sorted(members) for members in bins]


def split(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Parts of at most ``max_tokens`` tokens, padding to the longest of a part included.

    Args:
        lengths: Number of tokens of every sequence.
        max_tokens: Limit on rows x longest row of a part. A sequence that is longer by itself is a part of its own.

    Returns:
        Indices of the sequences of every part, the longest sequences first.
    """
    return _filled(_longest_first(lengths), lambda members, _: (len(members) + 1) * lengths[members[0]] <= max_tokens)


def token_counts(rollout: Rollout) -> list[int]:
    """The number of tokens of every sequence, prompt and completion."""
    counts: list[int] = rollout.lengths.tolist()
    return counts


def pack_prompts(
    prompts: Sequence[int], lengths: Sequence[int], prompt_lengths: Sequence[int], num_bins: int
) -> list[list[int]]:
    """As :func:`pack`, with samples of a prompt in one bin as far as that fills all bins: there the prompt counts once.

    Args:
        prompts: The prompt of every sequence, ascending.
        lengths: Number of tokens of every sequence, prompt included.
        prompt_lengths: Number of tokens of every sequence's prompt.
        num_bins: Number of bins, at most that of the sequences.
    """
    most, indices = len(prompts) // num_bins, range(len(prompts))
    units = _filled(indices, lambda unit, index: prompts[unit[0]] == prompts[index] and len(unit) < most)
    tokens = [prompt_lengths[unit[0]] + sum(lengths[i] - prompt_lengths[i] for i in unit) for unit in units]
    return [[index for unit in members for index in units[unit]] for members in pack(tokens, num_bins)]


def split_prompts(rollout: Rollout, max_tokens: int) -> list[list[int]]:
    """As :func:`split`, where neighbors with the same prompt count it once.

    Counted is what attention unfolds a part to: its prompts and its completions, both padded. The samples of a prompt
    come longest first, so that those of a part are about equally long.
    """
    at = torch.arange(rollout.sequences.shape[1], device=rollout.sequences.device)
    ids = rollout.sequences.masked_fill(at >= rollout.prompt_lengths[:, None], -1)
    groups = [0, *(ids[1:] != ids[:-1]).any(dim=1).cumsum(0).tolist()]
    lengths = token_counts(rollout)
    prompts: list[int] = rollout.prompt_lengths.tolist()

    def size(members: list[int]) -> int:
        shortest, longest = min(prompts[i] for i in members), max(prompts[i] for i in members)
        completion = max(lengths[i] for i in members) - shortest
        return len({groups[i] for i in members}) * longest + len(members) * completion

    order = sorted(range(len(lengths)), key=lambda index: (groups[index], -lengths[index]))
    return _filled(order, lambda members, index: size([*members, index]) <= max_tokens)


def in_parts(compute: Compute, rollout: Rollout, parts: list[list[int]]) -> tuple[Tensor, ...]:
    """The result of ``compute`` for the whole rollout, from a forward pass over each of its parts.

    No part has padding that all of its sequences have. With several parts each is checkpointed, so backward too stores
    the activations of one part at a time, at the cost of one more forward pass.

    Args:
        compute: Function from a rollout to (B, T) tensors.
        rollout: Sequences to process.
        parts: Indices of the sequences of every part.

    Returns:
        These (B, T) tensors.
    """
    if len(parts) < 2:
        return tuple(map(rollout.widened, compute(rollout.trimmed())))
    outputs = []
    for rows in parts:
        piece = rollout[torch.tensor(rows, device=rollout.sequences.device)].trimmed()
        outputs.append([rollout.widened(tensor) for tensor in checkpoint(compute, piece, use_reentrant=False)])
    order = torch.tensor([row for rows in parts for row in rows], device=rollout.sequences.device).argsort()
    return tuple(torch.cat(column)[order] for column in zip(*outputs, strict=True))


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


def _filled(order: Sequence[int], fits: Callable[[list[int], int], bool]) -> list[list[int]]:
    """Parts of these indices in their order: each goes into the last part if it fits, else it begins one."""
    parts: list[list[int]] = []
    for index in order:
        if parts and fits(parts[-1], index):
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts
