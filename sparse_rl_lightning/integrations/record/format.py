"""SampledRecord: what a sampler drew and what it had evicted by then, in plain arrays that any engine can write.

Nothing in it belongs to an engine: no slots, blocks or kernels, only tokens, and from which query on a head no longer
saw them. An eviction that all heads of a layer share, or all layers, is written once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.evictions import NEVER, EvictionRecord
from sparse_rl_lightning.records import Rollout

ALL = -1
"""All layers, or all heads."""
MOST = 4096
"""Layers, and KV heads, that a record can have at most."""
MOST_CELLS = 2**31
"""Tokens of one request, times layers and KV heads, at most: what a reader has in memory at a time."""


@dataclass(frozen=True)
class SampledRecord:
    """Requests with their evictions: a query at index q saw the key at index k if k <= q and nothing evicted k by q.

    Letters: B requests with N tokens in all, E evictions with R runs of positions in all. Every array is int32 but the
    log-probabilities. Layers are those of full attention, in the model's order; a layer with a sliding window or a
    recurrent state has no evictions to record. docs/from_verl.md describes every field for those who write one.

    Raises:
        ValueError: If an array has another type or shape than it must, or says what cannot have happened.
    """

    num_layers: int
    num_heads: int  # KV heads
    temperature: float  # that log-probabilities were divided by; 1 for greedy
    tokens: Tensor  # (N,) ids: prompt and completion of every request, one request after the other
    prompt_lengths: Tensor  # (B,)
    lengths: Tensor  # (B,) prompt and completion
    finished: Tensor  # (B,) 1 if an end token or a stop string ended it, 0 if its length did
    logprobs: Tensor  # (N,) float32: of the sampler, over the whole vocabulary; 0 in prompts
    evictions: Tensor  # (E, 4) request, layer or -1, KV head or -1, first query that no longer sees the positions
    num_runs: Tensor  # (E,) runs of every eviction
    runs: Tensor  # (R, 2) runs of evicted positions: the first, and the first behind it

    def __post_init__(self) -> None:
        check_number("num_layers", self.num_layers, least=1, most=MOST)
        check_number("num_heads", self.num_heads, least=1, most=MOST)
        check_number("temperature", self.temperature, above=0)
        for name, (kind, columns) in ARRAYS.items():
            _check_array(name, getattr(self, name), kind, columns)
        self._check_requests()
        self._check_evictions()

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def arrays(self) -> dict[str, Tensor]:
        """The arrays by name."""
        return {name: getattr(self, name) for name in ARRAYS}

    @property
    def nbytes(self) -> int:
        """Bytes of what says which tokens were evicted."""
        return self.evictions.nbytes + self.num_runs.nbytes + self.runs.nbytes

    @classmethod
    def of(cls, rollout: Rollout, temperature: float = 1.0) -> Self:
        """The record of a rollout of this library.

        Raises:
            ValueError: If the rollout does not know its evictions, or is of conversations.
        """
        if rollout.evictions is not None and not rollout.evictions.num_layers:
            raise UserError("All layers of this rollout's model have sliding windows: nothing is there to record.")
        if rollout.evictions is None:
            raise UserError("This rollout has no record of its evictions (rollout.evictions is None).")
        if rollout.turns is not None:
            raise UserError("Version 1 of the record has no place for tokens that were given between turns.")
        lengths = rollout.lengths
        own = torch.arange(rollout.sequences.shape[1], device=lengths.device) < lengths[:, None]
        parts = [_evictions_of(rollout.evictions[i : i + 1], i) for i in range(len(rollout))]
        evictions, num_runs, runs = (torch.cat(column) for column in zip(*parts, strict=True))
        logprobs = rollout.sampler_logprobs.masked_fill(~rollout.completion_mask, 0)
        return cls(
            rollout.evictions.num_layers, rollout.evictions.num_heads, temperature,
            tokens=rollout.sequences[own].int().cpu(), prompt_lengths=rollout.prompt_lengths.int().cpu(),
            lengths=lengths.int().cpu(), finished=rollout.finished.int().cpu(), logprobs=logprobs[own].float().cpu(),
            evictions=evictions, num_runs=num_runs, runs=runs,
        )  # fmt: skip

    @classmethod
    def cat(cls, records: Sequence[SampledRecord]) -> Self:
        """Join records of one model, request after request.

        Raises:
            ValueError: If there is none, or they are not of one model and temperature.
        """
        if len({(one.num_layers, one.num_heads, one.temperature) for one in records}) != 1:
            raise UserError(
                "Only records with the same num_layers, num_heads and temperature can be joined, at least one."
            )
        arrays = {name: torch.cat([one.arrays[name] for one in records]) for name in ARRAYS}
        requests = torch.tensor([0, *(len(one) for one in records)]).cumsum(0)[:-1]  # before each record
        own = requests.repeat_interleave(torch.tensor([len(one.evictions) for one in records]))
        arrays["evictions"][:, 0] += own.int()
        return cls(records[0].num_layers, records[0].num_heads, records[0].temperature, **arrays)

    def rollout(self) -> Rollout:
        """The rollout that was recorded: to replay, to weigh, to train on. Its cache and random keys are not known."""
        longest = int(self.lengths.max())
        index = torch.arange(longest)
        own = index < self.lengths[:, None]
        sequences, logprobs = torch.zeros(len(self), longest, dtype=torch.int64), torch.zeros(len(self), longest)
        sequences[own], logprobs[own] = self.tokens.long(), self.logprobs
        return Rollout(
            sequences=sequences,
            prompt_lengths=self.prompt_lengths.long(),
            completion_mask=own & (index >= self.prompt_lengths[:, None]),
            finished=self.finished.bool(),
            sampler_logprobs=logprobs,
            evictions=EvictionRecord.cat([EvictionRecord.from_dense(death) for death in self._deaths()]),
        )

    def difference(self, other: SampledRecord) -> str:
        """What two records say differently, in words; empty if they say the same, in whatever order and pieces."""
        for name in (*NUMBERS, "tokens", "prompt_lengths", "lengths", "finished"):
            own, given = getattr(self, name), getattr(other, name)
            if not (torch.equal(own, given) if isinstance(own, Tensor) else own == given):
                return f"{name} differ"
        if not torch.allclose(self.logprobs, other.logprobs, rtol=0, atol=1e-6):
            return "logprobs differ"
        for request, (own, given) in enumerate(zip(self._deaths(), other._deaths(), strict=True)):
            differs = (own != given).nonzero()
            if len(differs):
                layer, _, head, position = differs[0].tolist()
                where = f"request {request}, layer {layer}, head {head}, position {position}"
                queries = [int(death[layer, 0, head, position]) for death in (own, given)]
                said = ["never" if query == NEVER else f"at query {query}" for query in queries]
                return f"{where} was evicted {said[0]} in one and {said[1]} in the other"
        return ""

    def _deaths(self) -> Iterator[Tensor]:
        """The first query (L, 1, H, T) that no longer sees each token, for one request after the other."""
        pieces = torch.split(self.runs, self.num_runs.tolist())
        by_request: dict[int, list[tuple[list[int], Tensor]]] = {}
        for eviction, runs in zip(self.evictions.tolist(), pieces, strict=True):
            by_request.setdefault(eviction[0], []).append((eviction[1:], runs))
        for request, length in enumerate(self.lengths.tolist()):
            death = torch.full((self.num_layers, self.num_heads, length), NEVER, dtype=torch.int32)
            for (layer, head, query), runs in by_request.get(request, []):
                gone = _members(runs, length)
                own = death[span(layer), span(head)]
                if bool((own[..., gone] != NEVER).any()):
                    where = f"request {request}, layer {layer}, head {head}, query {query}"
                    raise UserError(f"evictions: {where} evicts a token that was evicted before.")
                own[..., gone] = query
            yield death[:, None]

    def _check_requests(self) -> None:
        count, prompt, whole = len(self.lengths), self.prompt_lengths.long(), self.lengths.long()
        if not count or len(self.prompt_lengths) != count or len(self.finished) != count:
            raise UserError(
                f"lengths, prompt_lengths and finished must have a number for every request, at least one, got "
                f"{count}, {len(self.prompt_lengths)} and {len(self.finished)}."
            )
        if bool((prompt < 1).any()) or bool((prompt > whole).any()):
            raise UserError("prompt_lengths must be at least 1 and at most lengths.")
        if int(whole.sum()) != len(self.tokens) or len(self.logprobs) != len(self.tokens):
            raise UserError(
                f"tokens and logprobs must have sum(lengths) = {int(whole.sum())} numbers, got {len(self.tokens)} and "
                f"{len(self.logprobs)}."
            )
        if self.num_layers * self.num_heads * int(whole.max()) > MOST_CELLS:
            raise UserError(
                f"{self.num_layers} layers of {self.num_heads} KV heads over {int(whole.max())} tokens are more than a "
                "record may describe."
            )
        if bool((self.tokens < 0).any()):
            raise UserError("tokens must not be negative.")
        if not bool(self.logprobs.isfinite().all()) or bool((self.logprobs > 1e-3).any()):
            raise UserError("logprobs must be finite and not above 0.")
        if bool((self.finished.clamp(0, 1) != self.finished).any()):
            raise UserError("finished must be 0 or 1.")

    def _check_evictions(self) -> None:
        if len(self.num_runs) != len(self.evictions) or bool((self.num_runs < 1).any()):
            raise UserError("num_runs must have a number for every eviction, at least 1.")
        if int(self.num_runs.long().sum()) != len(self.runs):
            raise UserError(
                f"runs must have sum(num_runs) = {int(self.num_runs.long().sum())} rows, got {len(self.runs)}."
            )
        request, layer, head, query = self.evictions.long().unbind(1)
        for name, values, least, below in (
            ("request", request, 0, len(self)), ("layer", layer, ALL, self.num_layers),
            ("head", head, ALL, self.num_heads),
        ):  # fmt: skip
            if bool(((values < least) | (values >= below)).any()):
                raise UserError(f"evictions: every {name} must be from {least} to {below - 1}.")
        if bool((query > self.lengths.long()[request]).any()):
            raise UserError("evictions: a query must not be larger than the length of its request.")
        first, past = self.runs.long().unbind(1)
        seen = query.repeat_interleave(self.num_runs.long())
        if bool((first < 0).any()) or bool((first >= past).any()) or bool((past > seen).any()):
            raise UserError(
                "runs: a run must begin at 0 or later, hold a token, and end at the first query that no longer sees it "
                "at the latest: a token has always seen itself."
            )


ARRAYS: dict[str, tuple[torch.dtype, int]] = {
    "tokens": (torch.int32, 0), "prompt_lengths": (torch.int32, 0), "lengths": (torch.int32, 0),
    "finished": (torch.int32, 0), "logprobs": (torch.float32, 0), "evictions": (torch.int32, 4),
    "num_runs": (torch.int32, 0), "runs": (torch.int32, 2),
}  # fmt: skip
"""The type of every array, and its columns if it has two dimensions."""
NUMBERS = tuple(f.name for f in fields(SampledRecord) if f.name not in ARRAYS)


def runs_of(gone: Tensor) -> Tensor:
    """The runs (R, 2) int32 of the positions where ``gone`` (T,) is true."""
    padded = torch.nn.functional.pad(gone.int(), (1, 1)).diff()
    return torch.stack([(padded == 1).nonzero()[:, 0], (padded == -1).nonzero()[:, 0]], dim=1).int()


def shared(gone: Tensor) -> list[tuple[int, int, Tensor]]:
    """What an event evicted (L, H, T), written as often as it says something new: layer, head and positions (T,)."""
    if bool((gone == gone[:1, :1]).all()):
        cells = [(ALL, ALL, gone[0, 0])]
    else:
        by_layer = (gone == gone[:, :1]).flatten(1).all(1).tolist()
        cells = [
            (layer, head, gone[layer, max(head, 0)])
            for layer, is_shared in enumerate(by_layer)
            for head in ([ALL] if is_shared else range(gone.shape[1]))
        ]
    return [cell for cell in cells if bool(cell[2].any())]


def _evictions_of(record: EvictionRecord, request: int) -> tuple[Tensor, Tensor, Tensor]:
    """Evictions, numbers of runs, and runs of a record of one sequence."""
    death = record.death[:, 0].cpu()
    rows, parts = list[list[int]](), list[Tensor]()
    for query in record.steps.tolist():
        for layer, head, gone in shared(death == query):
            rows.append([request, layer, head, query])
            parts.append(runs_of(gone))
    return (
        torch.tensor(rows, dtype=torch.int32).reshape(len(rows), 4),
        torch.tensor([len(part) for part in parts], dtype=torch.int32),
        torch.cat([torch.zeros(0, 2, dtype=torch.int32), *parts]),
    )


def _members(runs: Tensor, length: int) -> Tensor:
    """The positions (T,) bool that runs name."""
    borders = torch.zeros(length + 1, dtype=torch.int32)
    borders.index_add_(0, runs[:, 0].long(), torch.ones(len(runs), dtype=torch.int32))
    borders.index_add_(0, runs[:, 1].long(), -torch.ones(len(runs), dtype=torch.int32))
    return borders.cumsum(0)[:-1] > 0


def span(number: int) -> slice:
    """The layers, or heads, that a number means."""
    return slice(None) if number == ALL else slice(number, number + 1)


def _check_array(name: str, value: Any, kind: torch.dtype, columns: int) -> None:
    shape = f"(n, {columns})" if columns else "(n,)"
    good = isinstance(value, Tensor) and value.dtype == kind and value.dim() == (2 if columns else 1)
    if not good or (columns and value.shape[1] != columns):
        given = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise UserError(f"{name} must be {kind} of shape {shape}, got {given}.")
