"""From what block-wise engines know, the positions kept at every event, to a record of what was evicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.evictions import NEVER, EvictionRecord
from sparse_rl_lightning.integrations.record.format import SampledRecord
from sparse_rl_lightning.integrations.record.runs import ALL, evictions_of


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
    records = list[EvictionRecord]()
    for number, request in enumerate(requests):
        length = len(request.prompt) + len(request.completion)
        if len(request.logprobs) != len(request.completion):
            raise UserError(
                f"Request {number} has {len(request.completion)} tokens of a completion and {len(request.logprobs)} "
                "logprobs; give one for each."
            )
        death = torch.full((num_layers, num_heads, length), NEVER, dtype=torch.int32)
        for event in sorted(request.events, key=lambda event: event.query):
            cells = _cells(event.layer, num_layers, "layer"), _cells(event.head, num_heads, "head")
            _evict(death[cells], event, number)
        records.append(EvictionRecord.from_dense(death[:, None]))
    logprobs = [p for r in requests for p in (*[0.0] * len(r.prompt), *r.logprobs)]
    prompts, wholes = ([len(r.prompt) for r in requests], [len(r.prompt) + len(r.completion) for r in requests])
    return SampledRecord(
        num_layers, num_heads, temperature,
        tokens=_ints([token for r in requests for token in (*r.prompt, *r.completion)]),
        prompt_lengths=_ints(prompts), lengths=_ints(wholes), finished=_ints([int(r.finished) for r in requests]),
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
        **evictions_of(records),
    )  # fmt: skip


def _evict(death: Tensor, event: Kept, request: int) -> None:
    """Write in place when an event evicts which tokens (l, h, T), of those that no earlier query evicted."""
    where, length = f"Request {request}: the event at query {event.query}", death.shape[-1]
    if not 0 < event.query <= length:
        raise UserError(f"{where} must be between 1 and the request's {length} tokens.")
    before, kept = death[..., : event.query], torch.tensor(list(event.positions), dtype=torch.int64)
    if len(outside := kept[(kept < 0) | (kept >= event.query)]):
        raise UserError(f"{where} keeps position {int(outside[0])}; it can keep those from 0 to {event.query - 1}.")
    deaths = before[..., kept]
    if len(again := (deaths < event.query).nonzero()):
        raise UserError(f"{where} keeps position {int(kept[again[0, -1]])}, which was evicted before.")
    before.clamp_(max=event.query)
    before[..., kept] = deaths


def _cells(number: int, count: int, name: str) -> slice:
    if not ALL <= number < count:
        raise UserError(f"An event's {name} must be from {ALL} (all) to {count - 1}, got {name}={number}.")
    return slice(None) if number == ALL else slice(number, number + 1)


def _ints(values: Sequence[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
