"""From what block-wise engines know, the positions kept at every event, to a record of what was evicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.integrations.record.format import ALL, SampledRecord, runs_of, shared, span


@dataclass(frozen=True)
class Kept:
    """One compression: of the tokens before ``query``, the query at this index and later ones see these alone."""

    query: int
    positions: Sequence[int]
    layer: int = ALL  # among those that the record has, -1 for all
    head: int = ALL  # KV head, -1 for all


@dataclass(frozen=True)
class Request:
    """One sequence with the events of its cache, in any order."""

    prompt: Sequence[int]  # token ids
    completion: Sequence[int]
    logprobs: Sequence[float]  # one for each token of the completion
    events: Sequence[Kept] = field(default=())
    finished: bool = True


def record_of_kept(
    requests: Sequence[Request], num_layers: int, num_heads: int, temperature: float = 1.0
) -> SampledRecord:
    """The record of requests whose events name the positions that were kept.

    Args:
        requests: Requests, with their events.
        num_layers: Layers of full attention.
        num_heads: KV heads.
        temperature: Temperature that logits were divided by.

    Raises:
        ValueError: If an event keeps a token that did not exist or had been evicted, or anything else is wrong.
    """
    rows, parts = list[list[int]](), list[Tensor]()
    for number, request in enumerate(requests):
        if len(request.logprobs) != len(request.completion):
            raise UserError(
                f"Request {number} has {len(request.completion)} tokens of a completion and {len(request.logprobs)} "
                "logprobs; give one for each."
            )
        alive = torch.ones(num_layers, num_heads, len(request.prompt) + len(request.completion), dtype=torch.bool)
        queries = sorted({event.query for event in request.events})
        for query in queries:
            gone = torch.zeros_like(alive)
            for event in (one for one in request.events if one.query == query):
                cells = (_cells(event.layer, num_layers, "layer"), _cells(event.head, num_heads, "head"))
                gone[cells[0], cells[1]] |= _gone(event, alive[cells[0], cells[1]], number)
            alive &= ~gone
            for layer, head, positions in shared(gone):
                rows.append([number, layer, head, query])
                parts.append(runs_of(positions))
    logprobs = [p for r in requests for p in (*[0.0] * len(r.prompt), *r.logprobs)]
    prompts, wholes = ([len(r.prompt) for r in requests], [len(r.prompt) + len(r.completion) for r in requests])
    return SampledRecord(
        num_layers, num_heads, temperature,
        tokens=_ints([token for r in requests for token in (*r.prompt, *r.completion)]),
        prompt_lengths=_ints(prompts), lengths=_ints(wholes), finished=_ints([int(r.finished) for r in requests]),
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
        evictions=_ints(rows).reshape(len(rows), 4), num_runs=_ints([len(part) for part in parts]),
        runs=torch.cat([torch.zeros(0, 2, dtype=torch.int32), *parts]),
    )  # fmt: skip


def _gone(event: Kept, alive: Tensor, request: int) -> Tensor:
    """The tokens (l, h, T) that an event evicts of those that are alive."""
    kept = torch.zeros(alive.shape[-1], dtype=torch.bool)
    where = f"Request {request}: the event at query {event.query}"
    if not 0 < event.query <= len(kept):
        raise UserError(f"{where} must be between 1 and the request's {len(kept)} tokens.")
    outside = [position for position in event.positions if not 0 <= position < event.query]
    if outside:
        raise UserError(f"{where} keeps position {outside[0]}; it can keep those from 0 to {event.query - 1}.")
    kept[list(event.positions)] = True
    again = (kept & ~alive).nonzero()
    if len(again):
        raise UserError(f"{where} keeps position {int(again[0, -1])}, which was evicted before.")
    before = torch.arange(len(kept)) < event.query
    return alive & before & ~kept


def _cells(number: int, count: int, name: str) -> slice:
    if not ALL <= number < count:
        raise UserError(f"An event's {name} must be from {ALL} (all) to {count - 1}, got {name}={number}.")
    return span(number)


def _ints(values: Sequence[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
