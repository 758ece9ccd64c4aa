"""Scheduler: the queue of sequences, the slots in use, and when to compress, close and refill them.

The host knows the length of every slot without asking the device: a step adds one entry, a compression leaves the
budget for the sequence's length. So it decides alone when to compress, and checks only every few steps which sequences
have finished. On a GPU the flags of that check are read after the next steps have been queued, so the device never
waits for the host. Tokens drawn between a sequence's end and the reading are discarded.

:class:`~sparse_rl_lightning.rollout.RolloutSampler` calls its steps until nothing is left. The compression of
a full slot is in ``cache/compression.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.transfers import upload
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout.engine.engine import Engine, StepRows, bucket
from sparse_rl_lightning.rollout.engine.finished import FinishCheck, NewestTokens, StopStrings
from sparse_rl_lightning.rollout.engine.prefill import Prefill, prefill
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams, prompt_key
from sparse_rl_lightning.rollout.engine.sequences import FinishedSequence, RunningSequence, SequenceGroup
from sparse_rl_lightning.text import shown

CHECK_EVERY = {"cpu": 1}  # steps between two checks for finished sequences: a check is free on the CPU
CHECK_EVERY_ON_DEVICE = 8


def steps_per_check(device: torch.device) -> int:
    """The number of decode steps between two checks for finished sequences."""
    return CHECK_EVERY.get(device.type, CHECK_EVERY_ON_DEVICE)


def steps_past_end(device: torch.device) -> int:
    """The most decode steps that a sequence goes on after its end, until the host has read that it has ended."""
    every = steps_per_check(device)
    return 0 if every == 1 else 2 * every  # finish checks are read one interval late


@dataclass(frozen=True)
class Progress:
    """The progress of a rollout, passed to the ``progress`` function of ``RolloutSampler.generate``."""

    step: int  # decode steps done
    active: int  # sequences in slots
    finished: int
    total: int
    tokens: int  # of completions so far, observations included


@dataclass(frozen=True)
class CachedPrompt:
    """A prompt that went through the model, kept for samples that are still waiting for a slot."""

    prefill: Prefill
    logits: Tensor  # (V,) of its last token
    content: dict[str, Tensor]  # content of its slot; empty if all samples have found a slot
    nbytes: int  # of keys, values and states in the content


class Scheduler:
    """The state of a rollout: sequences are numbered prompt by prompt, and prompts may be added at any time.

    Args:
        engine: Engine with memory, weights and decode step, used by this rollout alone until it has finished.
        params: Sampling parameters.
        num_slots: Number of slots to use; the engine may have more, from an earlier rollout.
        stop: Search for stop strings, None without any.
        max_prefill_tokens: Limit on the prompt tokens in one forward pass.
        check_every: Number of decode steps between two checks for finished sequences. If it is more than one, because
            a check waits for the device, the result of a check is read when the next steps are queued.
    """

    sequence: type[RunningSequence] = RunningSequence
    finished: type[FinishedSequence] = FinishedSequence

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        num_slots: int,
        stop: StopStrings | None = None,
        max_prefill_tokens: int = 16384,
        check_every: int = 1,
    ) -> None:
        self.engine, self.cache, self.logs, self.params = engine, engine.cache, engine.logs, params
        self.num_slots, self.stop = num_slots, stop
        self.max_prefill_tokens, self.check_every = max_prefill_tokens, check_every
        self.groups: dict[int, SequenceGroup] = {}  # by prompt number, until they are taken
        self.waiting: list[int] = []  # sequence numbers, next one last
        self.running: dict[int, RunningSequence] = {}  # by slot
        self.free = list(range(num_slots))[::-1]
        self.cached_prompts: dict[int, CachedPrompt] = {}  # by prompt number
        self.num_prompts = self.num_steps = self.num_finished = self.num_tokens = self.prefill_peak_bytes = 0
        self._rows: StepRows | None = None  # of the active slots, until these change
        self._check: FinishCheck | None = None  # in flight: queued, not read yet

    # ---------------------------------------------------------------- input and output

    def add(self, prompts: Sequence[Sequence[int]], keys: Sequence[int]) -> range:
        """Queue prompts with the random keys of their sequences, and return the prompts' numbers."""
        samples = self.params.num_generations
        numbers = range(self.num_prompts, self.num_prompts + len(prompts))
        self.num_prompts = numbers.stop
        for index, (number, prompt) in enumerate(zip(numbers, prompts, strict=True)):
            sequence_keys = list(keys[index * samples : (index + 1) * samples])
            key = prompt_key(self.params.seed, prompt)
            self.groups[number] = SequenceGroup(list(prompt), key, sequence_keys, num_waiting=samples)
        # the next sequence is last, so new prompts go to the front, behind all that are waiting
        self.waiting = [*reversed(range(numbers.start * samples, numbers.stop * samples)), *self.waiting]
        return numbers

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or self.waiting)

    @property
    def in_slots(self) -> dict[int, RunningSequence]:
        """All sequences in slots."""
        return self.running

    @property
    def complete(self) -> list[int]:
        """Prompts all of whose sequences have finished."""
        return [number for number, group in self.groups.items() if len(group.finished) == len(group.keys)]

    def take(self, prompts: Sequence[int]) -> Rollout:
        """Remove prompts, all of whose sequences have finished, and return their rollout.

        Raises:
            ValueError: If there is no prompt, or one has not finished.
        """
        unfinished = sorted(set(prompts) - set(self.complete))
        if not prompts or unfinished:
            raise UserError(
                f"Only prompts all of whose sequences have ended can be taken, these have not: {unfinished}. Take "
                "what `complete` names."
                if unfinished
                else "There is no prompt to take: `complete` is empty until all sequences of a prompt have ended."
            )
        groups, size, g = [self.groups.pop(number) for number in prompts], self.cache.size, self.cache.geometry
        # the full cache of the comparison is as long as these prompts could have become
        longest = max(len(group.prompt) for group in groups) + self.params.max_completion_length
        if not self.engine.key.compressor.evicts:
            longest = max(size.capacities, default=size.max_length)  # may be left over from a longer rollout
        full = self.cache.full_bytes(longest)
        finished = [group.finished[sample] for group in groups for sample in range(len(group.keys))]
        rollout = self.finished.assemble(finished, g, self.cache.pool_bytes, full, self.prefill_peak_bytes)
        keys = [(group.key, sample) for group in groups for sample in group.keys]
        (rollout.keys,) = upload([keys], rollout.sequences.device)
        return rollout

    def forget_prompts(self) -> None:
        """Drop prompts that were read with weights which have changed; they are read again."""
        self.cached_prompts.clear()

    @property
    def progress(self) -> Progress:
        """The progress of the rollout so far."""
        # the last token drawn is not fed yet: num_fed + 1 tokens so far
        active = self.in_slots
        tokens = self.num_tokens + sum(sequence.num_fed + 1 - sequence.prompt_length for sequence in active.values())
        total = self.num_finished + len(active) + len(self.waiting)
        return Progress(self.num_steps, len(active), self.num_finished, total, tokens)

    # ---------------------------------------------------------------- steps

    def step(self) -> bool:
        """Fill free slots, decode until the next check, compress full slots, close sequences known to have finished.

        Returns:
            Whether a sequence has finished.

        Raises:
            ValueError: If logits are NaN or infinite, or the compressor refuses a sequence that has not ended.
        """
        # the first token may be the last one: where checks are not free, the next one finds it
        has_drawn = self.prepare()
        closed = has_drawn and self.check_every == 1 and self._close()
        for _ in range(self.check_every):
            # a freed slot is refilled before decoding goes on
            if closed or self._is_over:
                break
            closed = self.decode_and_compress()
        if closed:
            return True
        if self.check_every == 1 or self._is_over:
            return self._close()
        before, self._check = self._check, None
        closed = before is not None and self._close_by(before)
        self._check = self._queue_check() if self.running else None
        return closed

    def settle(self) -> None:
        """Wait for the device and close all sequences that have finished by now."""
        if self._check is not None:
            self._close()

    @property
    def _is_over(self) -> bool:
        """Whether all running sequences have reached their limit of length."""
        return all(sequence.num_fed >= sequence.last for sequence in self.running.values())

    def prepare(self) -> bool:
        """Get ready to decode; returns whether first tokens were drawn."""
        return self.admit()

    def decode_and_compress(self) -> bool:
        """Decode one step, and compress the slots that are full then; returns whether a sequence was closed."""
        return self._compress(self._decode())

    def admit(self) -> bool:
        """Give free slots to waiting sequences and draw their first tokens; returns whether there were any.

        A prompt goes through the model once, into the slot of its first sample, and is copied to the others. If slots
        run out in the middle of a group, a copy is cached outside the cache for the samples that are still waiting.
        """
        admitted: dict[int, list[int]] = {}  # slots of each prompt
        while self.waiting and self.free:
            sequence, slot = self.waiting.pop(), self.free.pop()
            number = sequence // self.params.num_generations
            self.groups[number].num_waiting -= 1
            self.running[slot] = self.start(sequence)
            admitted.setdefault(number, []).append(slot)
        if not admitted:
            return False
        self._rows = None
        # prompts that were prefilled for earlier samples come back from their cached copy, the others are prefilled now
        for number, slots in admitted.items():
            if number in self.cached_prompts:
                cached = self.cached_prompts[number]
                self.cache.restore(slots[0], cached.content, cached.prefill.num_entries)
        self._prefill({number: slots for number, slots in admitted.items() if number not in self.cached_prompts})
        # the first slot of each prompt now has it in either case; the others get copies
        logits = list[Tensor]()
        for number, slots in admitted.items():
            # a cached copy is kept as long as a sample needs it
            cached = self.cached_prompts[number] if self.groups[number].num_waiting else self.cached_prompts.pop(number)
            logits += [cached.logits] * len(slots)
            for slot in slots:
                self.running[slot].begin(cached.prefill.room, cached.prefill.evicted)
        places, keys, sources, copies = self._upload(admitted)
        if len(copies):
            self.cache.fork(sources, copies)
        self.logs.begin(places)
        # so far the slots have the prompt's key, the same for all samples; from now on each has the key of its sequence
        self.cache.sequence_keys[places] = keys
        self.cache.record_held(places)
        # the logits of the prompt's last token give every sample its first one
        self.engine.draw(torch.stack(logits), places, self.cache.seen[places])
        return True

    def start(self, sequence: int) -> RunningSequence:
        """Begin a sequence, before its prompt is read."""
        length, params = len(self.groups[sequence // self.params.num_generations].prompt), self.params
        started = self.sequence(sequence, length, length + params.max_completion_length - 1, length)
        started.searched = length + params.min_completion_length  # before it no stop string counts
        return started

    def _upload(self, admitted: dict[int, list[int]]) -> list[Tensor]:
        """Tensors on the device: slots (B,), keys of their sequences; slots to copy from and to."""
        slots = [slot for prompt_slots in admitted.values() for slot in prompt_slots]
        sequences = [self.running[slot] for slot in slots]
        groups = [self.groups[sequence.number // self.params.num_generations] for sequence in sequences]
        samples = [sequence.number % self.params.num_generations for sequence in sequences]
        keys = [group.keys[sample] for group, sample in zip(groups, samples, strict=True)]
        pairs = [(first, slot) for first, *later in admitted.values() for slot in later]
        sources, copies = ([pair[i] for pair in pairs] for i in (0, 1))
        return upload([slots, keys, sources, copies], self.cache.tokens.device)

    def _prefill(self, admitted: dict[int, list[int]]) -> None:
        """Prefill prompts, each into the first of its slots; all are cached until their samples have slots."""
        if not admitted:
            return
        engine, number_of = self.engine, {slots[0]: number for number, slots in admitted.items()}
        groups = [self.groups[number] for number in admitted]
        tokens = [group.prompt for group in groups]
        self.cache.begin(list(number_of), tokens, [group.key for group in groups])
        trigger = engine.compression.trigger
        prompts = [Prefill.of(prompt, slot, trigger) for prompt, slot in zip(tokens, number_of, strict=True)]
        cached_bytes = sum(cached.nbytes for cached in self.cached_prompts.values())
        try:
            for prompt, logits, staged in prefill(engine, prompts, self.max_prefill_tokens):
                number = number_of[prompt.slot]
                # the slot's content is copied only if samples of this prompt are left without a slot
                is_wanted = self.groups[number].num_waiting > 0
                content = self.cache.save(prompt.slot, len(prompt.tokens), prompt.num_entries) if is_wanted else {}
                self.cached_prompts[number] = CachedPrompt(prompt, logits, content, self.cache.content_bytes(content))
                cached_bytes += self.cached_prompts[number].nbytes
                self.prefill_peak_bytes = max(self.prefill_peak_bytes, staged + cached_bytes)
        except ValueError as error:
            # prompts are cached one by one: the others are those that could not be read
            missing = [
                slot for number, slots in admitted.items() if number not in self.cached_prompts for slot in slots
            ]
            sequences = [self.running[slot].number for slot in missing]
            raise UserError(
                f"Reading the prompts of sequences {shown(sequences, 60)}, at decode step {self.num_steps}: {error}"
            ) from error

    def _decode(self) -> list[int]:
        """Feed each slot its last token and draw the next; returns the slots that are full."""
        if self._rows is None:
            device = self.engine.end_ids.device
            count = bucket(len(self.running), device.type == "cuda")
            self._rows = StepRows.of(sorted(self.running), count, self.cache.size.num_slots, device)
        self.engine.decode(self._rows)
        self.num_steps += 1
        # no read from the device: lengths are tracked on the host
        return sorted(
            slot for slot, sequence in self.running.items() if sequence.feed(1, self.engine.compression.trigger)
        )

    def _compress(self, full: list[int]) -> bool:
        """Compress these slots; returns whether a sequence was closed, which is checked only after an error.

        A compressor may refuse tokens that a sequence has drawn past its end, which are discarded anyway: finished
        sequences are then closed first, and the others are compressed.
        """
        try:
            self.compress(full, self.running)
        except UserError:
            # nothing has finished, so the error is of a sequence that is still running
            if not self._close():
                raise
            # sequences that have reached their limit are closed at the next check
            running = {slot: sequence for slot, sequence in self.in_slots.items() if sequence.num_fed < sequence.last}
            self.compress([slot for slot in full if slot in running], running)
            return True
        return False

    def compress(
        self, full: list[int], running: Mapping[int, RunningSequence], text_starts: list[list[int]] | None = None
    ) -> None:
        """Compress these slots of ``running``; ``text_starts`` are where texts, drawn and given, begin in each."""
        if full:
            sequences = [running[slot] for slot in full]
            lengths, room = [sequence.num_fed for sequence in sequences], [sequence.room for sequence in sequences]
            self.engine.compression.compress(self.cache, full, lengths, room, text_starts)
            for sequence in sequences:
                sequence.cuts.append((sequence.num_fed, sum(sequence.evicted)))

    def _close(self) -> bool:
        """Wait for the device, and close all sequences that have finished by now; returns whether there were any."""
        self._check = None
        return bool(self.running) and self._close_by(self._queue_check())

    def _queue_check(self) -> FinishCheck:
        texts = None
        if self.stop is not None:
            texts = NewestTokens(dict.fromkeys(self.running, self.stop), self.running, self.cache.tokens)
        return FinishCheck(self.running, self.logs, self.cache.pools, self.num_steps, texts)

    def _close_by(self, check: FinishCheck) -> bool:
        """Copy out the sequences that have finished by a check, and free their slots; returns whether any have."""
        ended = list(check.read())
        bad = {s.running.number: s.broken - s.running.prompt_length for s in ended if s.broken is not None}
        if bad:
            raise UserError(
                f"The model's logits are NaN or infinite. Found at decode step {check.num_steps}; sequences and the "
                f"completion token from which on they are: {bad}. Look for NaN in the model's weights, or for numbers "
                f"that are too large for {self.cache.geometry.dtype}."
            )
        closed = [event.slot for event in ended]
        for event in ended:
            sequence = self.running.pop(event.slot)
            assert sequence is event.running, "a slot was reassigned while a finish check was in flight"
            self.end(event.slot, sequence, event.end, event.by_token)
        if closed:
            self._rows = None
        return bool(closed)

    def end(self, slot: int, sequence: RunningSequence, end: int, by_token: bool) -> None:
        """Store the finished sequence whose last token has index ``end``, and free its slot."""
        prompt, sample = divmod(sequence.number, self.params.num_generations)
        self.groups[prompt].finished[sample] = self.finished.copy(self.cache, self.logs, slot, sequence, end, by_token)
        self.num_tokens += end + 1 - sequence.prompt_length
        self.num_finished += 1
        self.free = sorted([*self.free, slot], reverse=True)  # the lowest slot is used first
