"""One rollout: the queue of sequences, the slots in use, when to compress, when to stop, when to refill.

The host knows the length of every slot without asking the device: a step adds one entry, a compression leaves the
budget of the sequence's length. So it decides alone when to compress, and looks at the device only every few steps,
to see which sequences have ended. What a sequence does between its end and that look is thrown away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout.cache.compression import Compression
from sparse_rl_lightning.rollout.engine.graphs import GraphedStep, bucket
from sparse_rl_lightning.rollout.engine.prefill import Reading, read_prompts
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams, prompt_key
from sparse_rl_lightning.rollout.engine.sequences import Ended, assemble
from sparse_rl_lightning.rollout.engine.step import Rows
from sparse_rl_lightning.rollout.engine.stopping import StopStrings


@dataclass(frozen=True)
class Progress:
    """How far a rollout is, handed to the ``progress`` function of :meth:`RolloutSampler.generate`."""

    step: int  # decode steps done
    active: int  # sequences in slots
    finished: int
    total: int
    tokens: int  # completion tokens so far


@dataclass(frozen=True)
class Plan:
    """What every sequence of a run has in common."""

    params: SamplingParams
    compression: Compression
    end_ids: Tensor  # (E,) int64
    stop: StopStrings | None
    num_slots: int
    max_prefill_tokens: int
    check_every: int  # steps between two looks at the device


@dataclass
class Held:
    """What the host knows of a slot in use."""

    sequence: int
    seen: int  # tokens fed
    room: int  # tokens that may still be fed before it must be compressed
    evicted: tuple[int, ...] = ()  # (L) tokens lost so far, a mean over heads
    looked: int = 0  # tokens that were searched for stop strings


@dataclass(frozen=True)
class _Prompt:
    """A prompt that was read: what its slot held, and the logits of its last token."""

    content: dict[str, Tensor]  # empty where all samples have found a slot
    logits: Tensor  # (V,)
    room: int
    evicted: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of the keys and values that are kept."""
        return sum(self.content[name].nbytes for name in ("keys", "values") if self.content)


class Run:
    """A rollout in progress: sequences are numbered prompt by prompt, and prompts may be added at any time."""

    def __init__(self, plan: Plan, step: GraphedStep) -> None:
        self.plan, self.graphed = plan, step
        self.step, self.cache, self.tracks = step.step, step.step.cache, step.step.tracks
        self.prompts: dict[int, list[int]] = {}
        self.keys: dict[int, int] = {}  # random key of each sequence
        self.ended: dict[int, Ended] = {}  # sequences not yet taken
        self.waiting: list[int] = []  # sequence numbers, next one last
        self.waiting_of = Counter[int]()  # how many of them are each prompt's
        self.slots: dict[int, Held] = {}  # in use, by slot
        self.free = list(range(plan.num_slots))[::-1]
        self.read: dict[int, _Prompt] = {}  # prompts that were read, with samples that have not found a slot yet
        self.num_prompts = self.num_steps = self.num_finished = self.num_tokens = self.prefill_peak_bytes = 0
        self._rows: Rows | None = None

    def go_on_with(self, step: GraphedStep) -> None:
        """The weights have changed: what was read under others and not begun is read again."""
        self.graphed, self.step = step, step.step
        self.read = {}
        self.tracks.version += 1

    def forget_rows(self) -> None:
        """Slots came into use or fell out of it."""
        self._rows = None

    def add(self, prompts: Sequence[Sequence[int]], keys: Sequence[int]) -> range:
        """Queue prompts and the random keys of their sequences; returns the prompts' numbers."""
        generations = self.plan.params.num_generations
        numbers = range(self.num_prompts, self.num_prompts + len(prompts))
        self.num_prompts = numbers.stop
        self.prompts |= {number: list(prompt) for number, prompt in zip(numbers, prompts, strict=True)}
        sequences = range(numbers.start * generations, numbers.stop * generations)
        self.keys |= dict(zip(sequences, keys, strict=True))
        self.waiting = [*reversed(sequences), *self.waiting]
        self.waiting_of.update(dict.fromkeys(numbers, generations))
        return numbers

    def wait_for(self, sequences: Iterable[int]) -> None:
        """Queue these and no others, next one last; their prompts are known."""
        self.waiting = list(sequences)
        self.waiting_of = Counter(sequence // self.plan.params.num_generations for sequence in self.waiting)

    def __iter__(self) -> Iterator[list[int]]:
        """Work until every sequence has ended; after each look at the device the sequences that were found ended."""
        while self.is_busy:
            yield self.advance()

    @property
    def is_busy(self) -> bool:
        """Whether a sequence waits or is in a slot."""
        return bool(self.waiting or self.slots)

    def advance(self) -> list[int]:
        """Fill free slots, decode up to the next look at the device, and return the sequences that were found ended.

        Raises:
            ValueError: If logits are NaN or infinite, or the compressor refuses a sequence that has not ended.
        """
        ended, steps = self._close_ended() if self._admit() else [], 0
        while not ended and self.slots and steps < self.plan.check_every:
            full = self._decode()
            steps += 1
            if full:
                ended = self._compress(full)
        return ended or self._close_ended()

    def take(self, prompts: Sequence[int]) -> Rollout:
        """The rollout of these prompts, all of whose sequences have ended; the run forgets them.

        Raises:
            ValueError: If there is no prompt, or one has not ended.
        """
        unfinished = sorted(set(prompts) - set(self.complete))
        if not prompts or unfinished:
            raise ValueError(
                f"Only prompts all of whose sequences have ended can be taken, these have not: {unfinished}. Take "
                "what `complete` names."
                if unfinished
                else "There is no prompt to take: `complete` is empty until all sequences of a prompt have ended."
            )
        generations, cache, g = self.plan.params.num_generations, self.cache, self.cache.geometry
        sequences = [p * generations + sample for p in prompts for sample in range(generations)]
        ended = [self.ended.pop(sequence) for sequence in sequences]
        longest = max(len(self.prompts[p]) for p in prompts) + self.plan.params.max_completion_length
        if not self.plan.compression.compressor.evicts:
            longest = cache.size.capacities[0]  # a full cache may be left over from a longer rollout
        for sequence in sequences:
            del self.keys[sequence]
        for prompt in prompts:
            del self.prompts[prompt], self.waiting_of[prompt]
        full = g.num_layers * cache.size.num_slots * g.num_kv_heads * longest * g.bytes_per_entry
        return assemble(ended, cache.pool_bytes, full, self.prefill_peak_bytes)

    @property
    def complete(self) -> list[int]:
        """Prompts all of whose sequences have ended."""
        generations = self.plan.params.num_generations
        return [p for p in self.prompts if all(p * generations + i in self.ended for i in range(generations))]

    @property
    def progress(self) -> Progress:
        """How far it is."""
        tokens = self.num_tokens + sum(held.seen + 1 - self._prompt_length(held) for held in self.slots.values())
        total = self.num_finished + len(self.slots) + len(self.waiting)
        return Progress(self.num_steps, len(self.slots), self.num_finished, total, tokens)

    # ---------------------------------------------------------------- admission

    def _admit(self) -> bool:
        """Give free slots to waiting sequences, reading each prompt once, and draw their first tokens.

        Returns:
            Whether there were any.
        """
        admitted: dict[int, list[int]] = {}  # slots of each prompt
        while self.waiting and self.free:
            sequence, slot = self.waiting.pop(), self.free.pop()
            prompt = sequence // self.plan.params.num_generations
            self.waiting_of[prompt] -= 1
            self.slots[slot] = Held(sequence, len(self.prompts[prompt]), 0)
            admitted.setdefault(prompt, []).append(slot)
        if not admitted:
            return False
        self._rows = None
        fresh = {prompt: slots[0] for prompt, slots in admitted.items() if prompt not in self.read}
        for prompt, slots in admitted.items():
            if prompt not in fresh:
                self.cache.write(slots[0], self.read[prompt].content)
        try:
            self._read(fresh)
        except ValueError as error:
            unread = [self.slots[slot].sequence for p in fresh if p not in self.read for slot in admitted[p]]
            raise ValueError(
                f"Reading the prompts of sequences {unread}, at decode step {self.num_steps}: {error}"
            ) from error
        for prompt, slots in admitted.items():
            self.cache.fork(slots[0], slots[1:])
            for slot in slots:
                self.slots[slot].room, self.slots[slot].evicted = self.read[prompt].room, self.read[prompt].evicted
                self.tracks.begin(slot, len(self.prompts[prompt]) + self.plan.params.max_completion_length - 1)
        order = [slot for slots in admitted.values() for slot in slots]
        places = self._tensor(order)
        self.cache.sequence_keys[places] = self._tensor([self.keys[self.slots[slot].sequence] for slot in order])
        self.tracks.held[places, self.cache.seen[places] - 1] = self.cache.held(places)
        self.step.draw(torch.stack([self.read[p].logits for p, slots in admitted.items() for _ in slots]), places)
        self.read = {prompt: read for prompt, read in self.read.items() if self.waiting_of[prompt]}
        return True

    def _read(self, slots: dict[int, int]) -> None:
        """Read prompts, each into the slot of its first sample, and keep a copy for samples that have no slot yet."""
        compression, most, readings = self.plan.compression, self.plan.max_prefill_tokens, list[Reading]()
        trigger = compression.trigger
        for prompt, slot in slots.items():
            tokens = self.prompts[prompt]
            self.cache.begin(slot, tokens, prompt_key(self.plan.params.seed, tokens))
            length = len(tokens)
            room = trigger.room(length, trigger.evicted_from_prompt(length), prompt_length=length)
            readings.append(Reading(tokens, slot, trigger.limits(length), room))
        prompt_of = {slot: prompt for prompt, slot in slots.items()}
        parked = sum(prompt.nbytes for prompt in self.read.values())
        read = read_prompts(self.cache, self.step.decoder, compression, readings, most)
        for reading, logits, staged in read:
            prompt = prompt_of[reading.slot]
            content = self.cache.read(reading.slot) if self.waiting_of[prompt] else {}
            evicted = trigger.evicted_from_prompt(len(reading.tokens))
            self.read[prompt] = _Prompt(content, logits, reading.room, evicted)
            parked += self.read[prompt].nbytes
            self.prefill_peak_bytes = max(self.prefill_peak_bytes, staged + parked)

    # ---------------------------------------------------------------- decoding

    def _decode(self) -> list[int]:
        """Feed each slot its last token, draw the next; returns the slots that are full."""
        if self._rows is None:
            device = self.plan.end_ids.device
            count = bucket(len(self.slots), device.type == "cuda")
            self._rows = Rows.of(sorted(self.slots), count, self.cache.size.num_slots, device)
        self.graphed(self._rows)
        self.num_steps += 1
        trigger, full = self.plan.compression.trigger, []
        for slot, held in self.slots.items():
            held.seen += 1
            held.room -= 1
            if held.room == 0:
                full.append(slot)
                held.evicted = trigger.evicted(held.seen, held.evicted)
                held.room = trigger.room(held.seen, held.evicted)
        return sorted(full)

    def _compress(self, full: list[int]) -> list[int]:
        """Compress these slots; returns sequences that were found ended, where that was looked for.

        A compressor may refuse what a sequence has drawn past its end, which nobody will ever see: on an error the
        device is looked at, and what has not ended is compressed again.
        """
        try:
            self._cut(full)
        except Exception:
            ended = self._close_ended()
            if not ended:
                raise
            self._cut([slot for slot in full if slot in self.slots])
            return ended
        return []

    def _cut(self, full: list[int]) -> None:
        if not full:
            return
        lengths, room = [self.slots[slot].seen for slot in full], [self.slots[slot].room for slot in full]
        self.plan.compression.compress(self.cache, full, lengths, room)
        places = self._tensor(full)
        self.tracks.held[places, self.cache.seen[places] - 1] = self.cache.held(places)

    def _close_ended(self) -> list[int]:
        """Look at the device; copy out the sequences that have ended and free their slots."""
        if not self.slots:
            return []
        self.cache.pools.raise_errors()
        ends, finished, broken = self.tracks.look()
        closed = []
        bad: dict[int, int] = {}  # sequences drawn from what is no number, and their first such token
        for slot, held in sorted(self.slots.items()):
            end, by_token = ends[slot], finished[slot]
            if self.plan.stop is not None:
                prompt, last = self._prompt_length(held), min(end, held.seen)
                fresh = max(prompt + self.plan.params.min_completion_length, held.looked)
                stopped = self.plan.stop.find(self.cache.tokens[slot], prompt, fresh, last)
                held.looked = last + 1
                end, by_token = (end, by_token) if stopped is None else (stopped, True)
            if broken[slot] <= min(end, held.seen):
                bad[held.sequence] = broken[slot] - self._prompt_length(held)
            if held.seen < end or bad:
                continue
            self.ended[held.sequence] = Ended.copy(
                self.cache, self.tracks, slot, self._prompt_length(held), end, by_token
            )
            closed.append(held.sequence)
            self.num_tokens += end + 1 - self._prompt_length(held)
            self.free.append(slot)
            del self.slots[slot]
        if bad:
            raise ValueError(
                f"The model's logits are NaN or infinite. Found at decode step {self.num_steps}; sequences and the "
                f"completion token from which on they are: {bad}. Look for NaN in the model's weights, or for numbers "
                f"that are too large for {self.cache.geometry.dtype}."
            )
        self.num_finished += len(closed)
        if closed:
            self._rows = None
            self.free.sort(reverse=True)
        return closed

    def _prompt_length(self, held: Held) -> int:
        return len(self.prompts[held.sequence // self.plan.params.num_generations])

    def _tensor(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.plan.end_ids.device)
