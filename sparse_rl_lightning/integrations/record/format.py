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
from sparse_rl_lightning.integrations.record.runs import ALL, evictions_of, pieces, ranges, record_of_runs
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.replay.logprobs import drawn_by_several

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
        for name, (dtype, columns) in ARRAYS.items():
            _check_array(name, getattr(self, name), dtype, columns)
        self._check_requests()
        self._check_evictions()

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def arrays(self) -> dict[str, Tensor]:
        """The arrays by name."""
        return {name: getattr(self, name) for name in ARRAYS}

    @property
    def completion_tokens(self) -> Tensor:
        """The ids of all tokens that were drawn, request after request."""
        lengths = self.lengths.long()
        index = ranges(torch.zeros_like(lengths), lengths)  # of each token in its request
        return self.tokens[index >= self.prompt_lengths.repeat_interleave(lengths)]

    @classmethod
    def of(cls, rollout: Rollout, temperature: float = 1.0) -> Self:
        """The record of a rollout of this library.

        Raises:
            ValueError: If the rollout does not know its evictions, is of conversations, was drawn by several versions
                of the weights, or has the experts that read its tokens.
        """
        record, lengths = _recordable(rollout).to("cpu"), rollout.lengths
        is_token = torch.arange(rollout.sequences.shape[1], device=lengths.device) < lengths[:, None]
        logprobs = rollout.sampler_logprobs.masked_fill(~rollout.completion_mask, 0)
        return cls(
            record.num_layers, record.num_heads, temperature,
            tokens=rollout.sequences[is_token].int().cpu(), prompt_lengths=rollout.prompt_lengths.int().cpu(),
            lengths=lengths.int().cpu(), finished=rollout.finished.int().cpu(),
            logprobs=logprobs[is_token].float().cpu(),
            **evictions_of(record[i : i + 1] for i in range(len(record))),
        )  # fmt: skip

    @classmethod
    def cat(cls, records: Sequence[SampledRecord]) -> Self:
        """Join records of one model, request after request.

        Raises:
            ValueError: If there is none, or they are not of one model and temperature.
        """
        if len({(record.num_layers, record.num_heads, record.temperature) for record in records}) != 1:
            raise UserError(
                "Only records with the same num_layers, num_heads and temperature can be joined, at least one."
            )
        arrays = {name: torch.cat([record.arrays[name] for record in records]) for name in ARRAYS}
        requests = torch.tensor([0, *(len(record) for record in records)]).cumsum(0)[:-1]  # before each record
        offsets = requests.repeat_interleave(torch.tensor([len(record.evictions) for record in records]))
        arrays["evictions"][:, 0] += offsets.int()
        return cls(records[0].num_layers, records[0].num_heads, records[0].temperature, **arrays)

    def rollout(self) -> Rollout:
        """The rollout that was recorded: to replay, to weigh, to train on. Its cache and random keys are not known."""
        longest = int(self.lengths.max())
        index = torch.arange(longest)
        is_token = index < self.lengths[:, None]
        sequences, logprobs = torch.zeros(len(self), longest, dtype=torch.int64), torch.zeros(len(self), longest)
        sequences[is_token], logprobs[is_token] = self.tokens.long(), self.logprobs
        return Rollout(
            sequences=sequences,
            prompt_lengths=self.prompt_lengths.long(),
            completion_mask=is_token & (index >= self.prompt_lengths[:, None]),
            finished=self.finished.bool(),
            sampler_logprobs=logprobs,
            evictions=EvictionRecord.cat(list(self._records())),
        )

    def difference(self, record: SampledRecord) -> str:
        """What two records say differently, in words; empty if they say the same, in whatever order and pieces."""
        for name in (*NUMBERS, "tokens", "prompt_lengths", "lengths", "finished"):
            mine, theirs = getattr(self, name), getattr(record, name)
            if not (torch.equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs):
                return f"{name} differ"
        if not torch.allclose(self.logprobs, record.logprobs, rtol=0, atol=1e-6):
            return "logprobs differ"
        for request, (mine, theirs) in enumerate(zip(self._records(), record._records(), strict=True)):
            deaths = mine.death, theirs.death
            differs = (deaths[0] != deaths[1]).nonzero()
            if len(differs):
                layer, _, head, position = differs[0].tolist()
                where = f"request {request}, layer {layer}, head {head}, position {position}"
                queries = [int(death[layer, 0, head, position]) for death in deaths]
                moments = ["never" if query == NEVER else f"at query {query}" for query in queries]
                return f"{where} was evicted {moments[0]} in one and {moments[1]} in the other"
        return ""

    def _records(self) -> Iterator[EvictionRecord]:
        """The evictions of one request after the other."""
        num_runs, request = self.num_runs.long(), self.evictions[:, 0]
        rows = torch.split(request.argsort(stable=True), request.bincount(minlength=len(self)).tolist())
        for chosen, length in zip(rows, self.lengths.tolist(), strict=True):
            shape = self.num_layers, self.num_heads, length
            yield record_of_runs(self.evictions[chosen], num_runs[chosen], self.runs[pieces(num_runs, chosen)], shape)

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


def _recordable(rollout: Rollout) -> EvictionRecord:
    """The evictions of a rollout, if they are all that its replay needs besides the weights.

    Raises:
        ValueError: If they are not.
    """
    if rollout.evictions is None:
        raise UserError("This rollout has no record of its evictions (rollout.evictions is None).")
    if not rollout.evictions.num_layers:
        raise UserError("All layers of this rollout's model have sliding windows: nothing is there to record.")
    if rollout.turns is not None:
        raise UserError("Version 1 of the record has no place for tokens that were given between turns.")
    if rows := drawn_by_several(rollout).nonzero().flatten().tolist():
        raise UserError(
            f"Sequences {rows} were drawn by several versions of the policy (partial rollouts), and version 1 of the "
            "record is of one. Record the others, rollout[indices], or switch partial rollouts off."
        )
    if rollout.routing is not None:
        raise UserError(
            "Version 1 of the record has no place for the experts that read each token (rollout.routing). Draw with "
            "record_routing=False."
        )
    return rollout.evictions


def _check_array(name: str, value: Any, dtype: torch.dtype, columns: int) -> None:
    shape = f"(n, {columns})" if columns else "(n,)"
    good = isinstance(value, Tensor) and value.dtype == dtype and value.dim() == (2 if columns else 1)
    if not good or (columns and value.shape[1] != columns):
        actual = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise UserError(f"{name} must be {dtype} of shape {shape}, got {actual}.")
