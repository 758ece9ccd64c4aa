"""Turns: sequences that wait in their slots for observations, tokens that the policy did not write.

A sequence that ends keeps its slot until it is given an observation, after which it samples its next turn, or is ended
by :meth:`TurnScheduler.finish`. Observations are read as chunks before decoding goes on (``extend.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparse_rl_lightning.cache.chunks import Chunk
from sparse_rl_lightning.cache.compression import ENDLESS, Compression
from sparse_rl_lightning.cache.slots import SlotCache
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.transfers import upload
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout.engine.engine import Engine
from sparse_rl_lightning.rollout.engine.extend import extend
from sparse_rl_lightning.rollout.engine.finished import StopStrings
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams
from sparse_rl_lightning.rollout.engine.scheduler import Scheduler
from sparse_rl_lightning.rollout.engine.sequences import (
    UNLIMITED,
    FinishedSequence,
    RunningSequence,
    SequenceLogs,
)

Spans = tuple[tuple[int, int], ...]
"""First and last + 1 of the tokens of every observation of a sequence."""


@dataclass
class TurnSequence(RunningSequence):
    """A sequence of several turns, in its slot."""

    observations: Spans = ()  # tokens between turns, which were not drawn
    by_token: bool = False  # whether it was an end token or a stop string that ended its turn
    turn_length: int | None = None  # most tokens of a turn

    @property
    def turn_starts(self) -> list[int]:
        """The index of the first token of every turn, the policy's and observations; before the first is the prompt."""
        return [self.prompt_length, *(border for text in self.observations for border in text)]

    @property
    def start(self) -> int:
        """The index of the first token of the turn that is being drawn."""
        return self.observations[-1][1] if self.observations else self.prompt_length

    @property
    def limit(self) -> int:
        """The index of the last token of this turn by length."""
        return self.last if self.turn_length is None else min(self.last, self.start + self.turn_length - 1)

    @property
    def num_unread(self) -> int:
        """Number of tokens, of the last observation or before it, that must be fed before the next is drawn."""
        return max(0, self.start - self.num_fed)


@dataclass(frozen=True)
class FinishedTurns(FinishedSequence):
    """A sequence of several turns that has finished."""

    observations: Spans = ()

    @classmethod
    def copy(
        cls, cache: SlotCache, logs: SequenceLogs, slot: int, running: RunningSequence, end: int, by_token: bool
    ) -> FinishedTurns:
        """Copy out a sequence, with its observations."""
        assert isinstance(running, TurnSequence)
        return replace(super().copy(cache, logs, slot, running, end, by_token), observations=running.observations)

    @classmethod
    def assemble(
        cls,
        finished: Sequence[FinishedTurns],
        geometry: CacheGeometry,
        peak_bytes: int,
        full_peak_bytes: int,
        prefill: int,
    ) -> Rollout:
        """Combine these sequences into one rollout with ``turns``: odd ones the policy's, even ones observations."""
        rollout = super().assemble(finished, geometry, peak_bytes, full_peak_bytes, prefill)
        if not any(sequence.observations for sequence in finished):
            return rollout
        turns = rollout.completion_mask.to(torch.int32)
        for row, sequence in enumerate(finished):
            for first, last in sequence.observations:
                turns[row, first:] += 1
                turns[row, last:] += 1
        turns = turns * rollout.completion_mask
        return replace(rollout, turns=turns, completion_mask=rollout.completion_mask & (turns % 2 == 1))


class TurnScheduler(Scheduler):
    """Scheduler whose sequences wait in their slots when a turn is over, for :meth:`give` or :meth:`finish`.

    It checks after every step which have ended: what a sequence draws past its turn could not be undone. Other
    arguments are those of ``Scheduler``.

    Args:
        turn_length: Most tokens of a turn, None for no limit but the completion's.
    """

    sequence, finished = TurnSequence, FinishedTurns

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        num_slots: int,
        stop: StopStrings | None = None,
        max_prefill_tokens: int = 16384,
        *,
        turn_length: int | None = None,
    ) -> None:
        super().__init__(engine, params, num_slots, stop, max_prefill_tokens, check_every=1)
        self.turn_length = turn_length
        self.running: dict[int, TurnSequence]  # type: ignore[assignment]  # of turns alone
        self.paused: dict[int, TurnSequence] = {}  # by slot, their turn over
        self.reading: dict[int, TurnSequence] = {}  # by slot, with observations to read

    # ---------------------------------------------------------------- in place of the plain scheduler's

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do anything: not where all slots have sequences that are paused."""
        return bool(self.running or self.reading or (self.waiting and self.free))

    @property
    def in_slots(self) -> dict[int, TurnSequence]:  # type: ignore[override]  # of turns alone
        """All sequences in slots: running, reading and paused."""
        return {**self.running, **self.reading, **self.paused}

    def start(self, sequence: int) -> TurnSequence:
        """Begin a sequence with the limit on its turns."""
        started = super().start(sequence)
        assert isinstance(started, TurnSequence)
        started.turn_length = self.turn_length
        return started

    def prepare(self) -> bool:
        """Fill free slots, and let the others read their observations."""
        return self.admit() | self._read()  # both

    def end(self, slot: int, sequence: TurnSequence, end: int, by_token: bool) -> None:  # type: ignore[override]  # of turns alone
        """Let a sequence wait whose turn is over."""
        assert end == sequence.num_fed
        sequence.by_token, self.paused[slot] = by_token, sequence

    def compress(self, full: list[int], running: dict[int, TurnSequence]) -> None:  # type: ignore[override]  # of turns alone
        """Compress these slots, with the turns of their sequences if the compressor asks for them."""
        c = self.engine.compression.compressor
        protects = c.needs_turns or c.protect_observations > 0
        super().compress(full, running, [running[slot].turn_starts for slot in full] if protects else None)

    # ---------------------------------------------------------------- between turns

    def give(self, slot: int, tokens: Sequence[int]) -> None:
        """Let a paused sequence read tokens and go on; they are read at the next step, those of all slots together."""
        sequence = self.paused.pop(slot)
        first, last = sequence.num_fed + 1, sequence.num_fed + 1 + len(tokens)
        assert tokens
        assert last <= sequence.last, "no room to draw a token"
        (self.cache.tokens[slot, first:last],) = upload([list(tokens)], self.cache.tokens.device)
        self.logs.end[slot] = UNLIMITED
        for log in self.logs.drawn.values():
            log[slot, first:last] = 0
        sequence.observations, self.reading[slot] = (*sequence.observations, (first, last)), sequence

    def finish(self, slot: int, cut: bool = False) -> None:
        """End a paused sequence after its last turn, finished unless it was ``cut``."""
        sequence = self.paused.pop(slot)
        super().end(slot, sequence, sequence.num_fed, sequence.by_token and not cut)

    def _read(self) -> bool:
        """Read all observations, and draw the first token of each turn that follows; returns whether there were any."""
        if not self.reading:
            return False
        while self.reading:
            chunks, left = list[Chunk](), self.max_prefill_tokens
            for slot, sequence in sorted(self.reading.items()):
                count = min(sequence.num_unread, sequence.room, left)
                if count:
                    chunks.append(Chunk(slot, sequence.num_fed, count, sequence.evicted))
                left -= count
            logits = extend(self.engine, chunks)
            trigger = self.engine.compression.trigger
            full = [chunk.slot for chunk in chunks if self.reading[chunk.slot].feed(chunk.count, trigger)]
            self.compress(full, self.reading)
            self._go_on([chunk.slot for chunk in chunks], logits)
        self._rows = None
        return True

    def _go_on(self, slots: list[int], logits: Tensor) -> None:
        """Draw the first token of a turn in those slots that have read everything."""
        done = [row for row, slot in enumerate(slots) if not self.reading[slot].num_unread]
        if done:
            places, rows = upload([[slots[row] for row in done], done], logits.device)
            self.engine.draw(logits[rows], places, self.cache.seen[places])
            self.running |= {slots[row]: self.reading.pop(slots[row]) for row in done}


class TeacherForcedTurns(TurnScheduler):
    """Scheduler of texts whose turns are known beforehand: no sequence waits.

    Args:
        engine: Engine that continues with given tokens.
        params: Sampling parameters.
        num_slots: Number of slots to use.
        observations: Observations of each sequence.
    """

    def __init__(self, engine: Engine, params: SamplingParams, num_slots: int, observations: Sequence[Spans]) -> None:
        super().__init__(engine, params, num_slots)
        self.observations = observations

    def start(self, sequence: int) -> TurnSequence:
        """Begin a sequence whose observations are known."""
        return replace(super().start(sequence), observations=self.observations[sequence])

    def end(self, slot: int, sequence: TurnSequence, end: int, by_token: bool) -> None:  # type: ignore[override]  # of turns alone
        """End a sequence."""
        Scheduler.end(self, slot, sequence, end, by_token)


@dataclass(frozen=True)
class ObservationBudget:
    """The places of a budget that a paused sequence's next text may take, and those that it may not."""

    budget: int  # the smallest of a layer, at the lengths from now on
    first: int = 0  # sinks, or the prompt where that is protected and longer
    window: int = 0
    older: int = 0  # tokens of the texts that stay protected beside the next
    count: int = 0  # texts that are protected

    @classmethod
    def of(cls, sequence: TurnSequence, compression: Compression) -> ObservationBudget:
        """Determine the places for the next text of a sequence; endless if nothing is protected or evicted any more."""
        c, trigger = compression.compressor, compression.trigger
        if not c.protect_observations or sequence.room > sequence.last - sequence.num_fed:
            return cls(ENDLESS)
        stay = sequence.observations[max(0, len(sequence.observations) + 1 - c.protect_observations) :]
        return cls(
            trigger.smallest_budget(sequence.num_fed + 1, sequence.last),
            max(c.num_sinks, sequence.prompt_length if c.protect_prompt else 0), c.window,
            sum(last - first for first, last in stay), c.protect_observations,
        )  # fmt: skip

    @property
    def left(self) -> int:
        """The number of tokens that the next text may have; negative if the texts before it take too much."""
        return self.budget - self.first - self.window - self.older

    def check(self, sequence: int, length: int) -> None:
        """Refuse a text that is too long.

        Raises:
            ValueError: If not all that is protected fits the budget.
        """
        if length > self.left:
            raise UserError(
                f"sequence {sequence} was given {length} tokens, which protect_observations={self.count} keeps from "
                f"eviction: with {self.first} first tokens (num_sinks, or a protected prompt), window={self.window} "
                f"and {self.older} tokens of texts before them that is {length + self.budget - self.left}, more than "
                f"the {self.budget} that a layer keeps. Give at most {max(0, self.left)}, finish() it, raise budget or "
                "lower protect_observations."
            )
