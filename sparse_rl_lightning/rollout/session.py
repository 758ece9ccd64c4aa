"""RolloutSession: a rollout that continues across updates, for partial rollouts.

A few long sequences delay a whole rollout. In a session they stay in their slots while the learner updates, and
continue with the new weights afterwards; the version of the policy that drew each token is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.draw import Drawn
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.policies.modes import sampling_mode
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout.engine.engine import Engine
from sparse_rl_lightning.rollout.engine.memory import MemoryPlan
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams, sequence_keys
from sparse_rl_lightning.rollout.engine.scheduler import Progress, Scheduler
from sparse_rl_lightning.rollout.engine.sequences import SequenceLogs
from sparse_rl_lightning.rollout.engine.turns import ObservationBudget, TurnScheduler, TurnSequence
from sparse_rl_lightning.rollout.prompts import check_prompts
from sparse_rl_lightning.rollout.sampler import RolloutSampler


class VersionedLogs(SequenceLogs):
    """Logs with the version of the policy that drew each token, if weights change during a rollout."""

    def __init__(self, num_slots: int, length: int, params: SamplingParams, device: torch.device) -> None:
        super().__init__(num_slots, length, params, device)
        self.versions = torch.zeros(num_slots + 1, length, dtype=torch.int32, device=device)
        self.version = torch.zeros((), dtype=torch.int32, device=device)  # version of the policy that draws now
        self.drawn["versions"] = self.versions

    def record(self, slots: Tensor, at: Tensor, drawn: Drawn, end_ids: Tensor) -> None:
        """Log as the base class does, with the current version."""
        super().record(slots, at, drawn, end_ids)
        self.versions[slots, at] = self.version


def checked_prompts(
    prompts: Sequence[Sequence[int]], params: SamplingParams, model: PreTrainedModel, most: int
) -> list[list[int]]:
    """The prompts of a session as lists of token ids.

    Raises:
        ValueError: If one is empty, has tokens that the model does not know, or has more than ``most``.
    """
    checked = check_prompts(prompts, params, model)
    longest = max(len(prompt) for prompt in checked)
    if longest > most:
        raise UserError(
            f"A prompt has {longest} tokens, the session was made for max_prompt_length={most}: raise it; in training "
            "rollout.turns.max_prompt_length, if an environment's reset() gives the prompt."
        )
    return checked


class RolloutSession:
    """Sequences that are decoded a limited number of steps at a time, each time with the model's current weights.

    The session has its own memory; the sampler may be used independently.

    Args:
        sampler: Sampler with model, compressor and settings; ``num_slots`` must be set.
        params: Sampling parameters.
        max_prompt_length: Length of the longest prompt in tokens.
        turns: Whether a sequence that ends waits in its slot, named by :attr:`paused`, until it is given tokens by
            :meth:`append`, after which it goes on, or is ended by :meth:`finish`. The host then checks after
            every step which have ended.
        max_turn_length: Number of tokens after which a turn ends at the latest, None for no limit of its own.
        num_sequences: Number of sequences, if it is known: no more slots are used, and they are those of the sampler,
            which must not be used by anything else until the session is over. None gives the session its own.

    Raises:
        ValueError: If the sampler has no ``num_slots`` and there is no ``num_sequences``, or a retriever and ``turns``.

    Example::

        session = RolloutSession(sampler, SamplingParams(num_generations=8), max_prompt_length=200)
        session.add(prompts, sequence_ids=range(64))
        session.advance(max_steps=512)
        rollout = session.take(session.complete)  # the others continue after the update
    """

    logs_type: type[VersionedLogs] = VersionedLogs
    engine_type: type[Engine] | None = None  # None for the sampler's
    scheduler_type: Callable[..., Scheduler] | None = None  # None for the plain one
    keeps_weights = False  # whether advance() goes on with the same ones unless it is told otherwise

    def __init__(
        self,
        sampler: RolloutSampler,
        params: SamplingParams,
        max_prompt_length: int,
        turns: bool = False,
        max_turn_length: int | None = None,
        num_sequences: int | None = None,
    ) -> None:
        slots = num_sequences or sampler.num_slots
        if slots is None:
            raise UserError("A RolloutSession needs a fixed number of slots: set num_slots of the RolloutSampler.")
        if turns and sampler.retriever is not None:
            raise UserError("turns=True needs a sampler without a retriever: pages are chosen for single tokens.")
        self.sampler, self.params, self.max_prompt_length, self.turns = sampler, params, max_prompt_length, turns
        self._broken = False
        self.keeps_weights = self.keeps_weights or turns
        with sampling_mode(sampler.model):
            shared = num_sequences is not None
            before = sampler.memory_plan if shared and sampler.cache is not None else None
            key = sampler.engine_key(params, slots, max_prompt_length, logs=self.logs_type, before=before)
            new = self.engine_type or sampler.engine_type
            self.engine = sampler.engine_for(key) if shared else new(sampler.model, key)
            create = partial(TurnScheduler, turn_length=max_turn_length) if turns else self.scheduler_type
            self.scheduler: Scheduler = sampler.scheduler(self.engine, params, key.size.num_slots, create)
        if shared:
            sampler.memory_plan = key.memory_plan
            self._logs.version.zero_()  # of an earlier session

    def add(self, prompts: Sequence[Sequence[int]], sequence_ids: Sequence[int]) -> range:
        """Queue prompts of token ids behind the waiting ones; from now on the numbers returned identify them.

        Sequence ids are as in :meth:`RolloutSampler.generate`.
        """
        prompts = checked_prompts(prompts, self.params, self.sampler.model, self.max_prompt_length)
        total = len(prompts) * self.params.num_generations
        if len(sequence_ids) != total:
            raise UserError(f"sequence_ids must name {total} sequences, got {len(sequence_ids)}.")
        return self.scheduler.add(prompts, sequence_keys(self.params.seed, sequence_ids).tolist())

    def advance(
        self,
        max_steps: int | None = None,
        *,
        until: Callable[[], bool] | None = None,
        progress: Callable[[Progress], None] | None = None,
        new_weights: bool | None = None,
    ) -> None:
        """Decode with the model's current weights, until nothing is left but paused sequences.

        Args:
            max_steps: Number of decode steps after which to stop; None continues until every sequence has finished.
            until: Condition checked after ``max_steps``: decoding continues while it is False and sequences are
                unfinished.
            progress: Function as in :meth:`RolloutSampler.generate`; it counts from the beginning of the session.
            new_weights: Whether the weights may have changed since the last call, default True, but False with
                ``turns`` and of requests. False continues with the same version: tokens of several versions cannot be
                replayed.
        """
        sampler, scheduler = self.sampler, self.scheduler
        stop = None if max_steps is None else scheduler.num_steps + max_steps
        if self._broken:
            raise UserError(
                "An earlier advance() of this RolloutSession was interrupted in the middle of a step: make a new "
                "session."
            )
        self._broken = True
        with sampling_mode(sampler.model):
            if not self.version or (not self.keeps_weights if new_weights is None else new_weights):
                longest = self.max_prompt_length + self.params.max_completion_length
                self.engine.take_weights(sampler.model, CacheGeometry.of(sampler.model, sampler.kv_dtype, longest))
                scheduler.forget_prompts()
                self._logs.version += 1
            while scheduler.has_unfinished and (
                stop is None or scheduler.num_steps < stop or not (until is None or until())
            ):
                scheduler.step()
                self._broken = False  # between two steps the state is consistent
                if progress is not None:
                    progress(scheduler.progress)
                self._broken = True
            scheduler.settle()  # what is complete can be taken now, and not only in the next call
        self._broken = False

    @property
    def version(self) -> int:
        """The version of the policy that draws: the number of calls of :meth:`advance` with new weights so far."""
        return int(self._logs.version)

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """The number of slots that the memory limit allowed, and why."""
        return self.engine.key.memory_plan

    @property
    def complete(self) -> list[int]:
        """Prompts all of whose sequences have finished, oldest first."""
        return self.scheduler.complete

    @property
    def num_unfinished(self) -> int:
        """Number of sequences that are waiting or in slots, paused ones included."""
        return len(self.scheduler.waiting) + len(self.scheduler.in_slots)

    def take(self, prompts: Sequence[int]) -> Rollout:
        """Remove complete prompts and return their rollout; ``policy_versions`` is the version that drew each token."""
        return self.scheduler.take(prompts)

    # ---------------------------------------------------------------- turns

    @property
    def paused(self) -> dict[int, list[int]]:
        """The tokens of the turn that has just ended, by sequence: prompt's number x ``num_generations`` + sample."""
        return {sequence: self.turn(sequence) for sequence in self.waiting_turns}

    @property
    def waiting_turns(self) -> list[int]:
        """The sequences that are paused, slot by slot."""
        return [turn.number for _, turn in sorted(self._paused.items())]

    def turn(self, sequence: int) -> list[int]:
        """The tokens of the turn that a paused sequence has just drawn.

        Raises:
            ValueError: If the sequence is not paused.
        """
        slot, turn = self._paused_turn(sequence)
        tokens: list[int] = self.engine.cache.tokens[slot, turn.start : turn.num_fed + 1].tolist()
        return tokens

    def room(self, sequence: int) -> int:
        """The most tokens that a paused sequence can be given, so that one can still be drawn.

        With ``protect_observations`` also no more than the smallest budget of its lengths from now on can keep, beside
        sinks, window, a protected prompt and the texts that stay protected.
        """
        _, turn = self._paused_turn(sequence)
        budget = ObservationBudget.of(turn, self.engine.compression)
        return max(0, min(turn.last - turn.num_fed - 1, budget.left))

    def was_cut(self, sequence: int) -> bool:
        """Whether it was a limit that ended the turn of a paused sequence, and no token or stop string."""
        return not self._paused_turn(sequence)[1].by_token

    def append(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Give a paused sequence tokens that the policy did not write; it reads them in the next :meth:`advance`.

        They count for positions, the length of the completion and the cache, and are compressed like all others, but
        they are in no ``completion_mask``: ``turns`` of the rollout numbers them.

        Args:
            sequence: Number of the sequence.
            token_ids: Tokens, at least one.

        Raises:
            ValueError: If the sequence is not paused, there is no token, or too many for ``max_completion_length`` or
                for ``protect_observations``.
        """
        of_one = replace(self.params, max_completion_length=1, min_completion_length=0)
        (tokens,) = check_prompts([token_ids], of_one, self.sampler.model)
        (slot, turn), room = self._paused_turn(sequence), self.room(sequence)
        ObservationBudget.of(turn, self.engine.compression).check(sequence, len(tokens))
        if len(tokens) > room:
            raise UserError(
                f"sequence {sequence} has room for {room} more tokens that are not its own, got {len(tokens)}: shorten "
                "them, finish() it, or raise max_completion_length."
            )
        self._turn_scheduler.give(slot, tokens)

    def finish(self, sequence: int, cut: bool = False) -> None:
        """End a paused sequence with the turn that it has just drawn.

        Args:
            sequence: Number of the sequence.
            cut: Whether something would have followed: it then does not count as ``finished``.

        Raises:
            ValueError: If the sequence is not paused.
        """
        slot, _ = self._paused_turn(sequence)
        self._turn_scheduler.finish(slot, cut)

    @property
    def _turn_scheduler(self) -> TurnScheduler:
        assert isinstance(self.scheduler, TurnScheduler)
        return self.scheduler

    @property
    def _paused(self) -> dict[int, TurnSequence]:
        return self._turn_scheduler.paused if self.turns else {}

    def _paused_turn(self, sequence: int) -> tuple[int, TurnSequence]:
        """The slot and the state of a paused sequence."""
        for slot, turn in self._paused.items():
            if turn.number == sequence:
                return slot, turn
        raise UserError(
            f"sequence {sequence} is not paused. Paused are {sorted(self.paused)}"
            + ("." if self.turns else ", since the session was made without turns=True.")
        )

    @property
    def _logs(self) -> VersionedLogs:
        assert isinstance(self.engine.logs, VersionedLogs)
        return self.engine.logs
