"""Finish checks: what has ended running sequences, by an end token, a stop string or length, or broken them.

The flags are copied to the host asynchronously when a check is queued, and read when they are needed. A check is of the
moment at which it was queued: steps that are queued later change nothing in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops import KVPools
from sparse_rl_lightning.ops.transfers import Download, upload
from sparse_rl_lightning.rollout.engine.sequences import RunningSequence, SequenceLogs


@dataclass(frozen=True)
class FinishedEvent:
    """A sequence that a check found ended, or broken."""

    slot: int
    running: RunningSequence
    end: int  # index of its last token; of a broken one it may be drawn later
    by_token: bool  # whether an end token or a stop string is there
    broken: int | None  # index of the first token drawn from NaN or infinite logits


class FinishCheck:
    """One check of the running sequences; queued by creating it.

    Args:
        running: Running sequences by slot, at least one.
        logs: Logs of the sequences.
        pools: Pools of the cache, where kernels report errors.
        num_steps: Number of decode steps so far.
        texts: Newest tokens of the sequences if stop strings may end them.
    """

    def __init__(
        self,
        running: Mapping[int, RunningSequence],
        logs: SequenceLogs,
        pools: KVPools,
        num_steps: int,
        texts: NewestTokens | None = None,
    ) -> None:
        self.num_steps = num_steps
        self._running = {slot: (running[slot], running[slot].num_fed) for slot in sorted(running)}
        self._pools, self._texts = pools, texts
        tokens = [] if texts is None else [texts.tokens]
        self._numbers = Download(logs.finish_flags(pools.errors), *tokens)

    def read(self) -> Iterator[FinishedEvent]:
        """Yield those that have ended or are broken, by slot; waits until the copy has arrived.

        Raises:
            RuntimeError: If a CUDA kernel has reported an error.
        """
        (ends, broken, errors), *texts = (numbers.tolist() for numbers in self._numbers.read())
        self._pools.raise_errors(errors[0])
        for slot, (running, num_fed) in self._running.items():
            end, by_token = min(ends[slot], running.limit), ends[slot] <= running.limit
            stopped = None
            if self._texts is not None:
                stopped = self._texts.find(texts[0], slot, running, min(end, num_fed))
            if stopped is not None:
                end, by_token = stopped, True
            # token `end` is drawn by the step that feeds token `end` - 1; what a sequence drew past its end is
            # discarded, so it may be broken
            is_broken = broken[slot] <= min(end, num_fed)
            if is_broken or num_fed >= end:
                yield FinishedEvent(slot, running, end, by_token, broken[slot] if is_broken else None)


CONTEXT = 8  # tokens around a stop string that are decoded with it


class StopStrings:
    """Search for the token that completes a stop string.

    A string may begin and end anywhere inside tokens, so the text of the last tokens is searched as a whole.

    Args:
        strings: Texts that end a completion.
        tokenizer: Tokenizer of the policy.

    Raises:
        ValueError: If there is no tokenizer to decode with.
    """

    def __init__(self, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> None:
        if tokenizer is None:
            raise UserError(
                f"stop_strings={list(strings)} need text, but the sampler has no tokenizer: give "
                "RolloutSampler(tokenizer=...), or end tokens as end_token_ids."
            )
        self.strings = tuple(strings)
        self.tokenizer = tokenizer
        # a token is at least one byte of the text
        self._reach = max(len(text.encode()) for text in strings) + CONTEXT

    def first(self, start: int, fresh: int) -> int:
        """The index of the first token that :meth:`find` needs."""
        # a decoder may treat the first token of a text differently, so some tokens before the string are decoded too
        return max(0, start - CONTEXT, fresh - self._reach)

    def find(self, tokens: list[int], first: int, start: int, fresh: int) -> int | None:
        """Find the token that first completes a stop string; a string that begins in the prompt does not count.

        Args:
            tokens: Tokens of a sequence from index ``first`` to its last one so far.
            first: Index that :meth:`first` gives.
            start: Index of its first completion token.
            fresh: Index of the first token that may complete a string.

        Returns:
            The index of the token, None if no token completes a stop string.
        """
        if first + len(tokens) <= fresh:
            return None
        text = self._decode(tokens)
        if not any(string in text for string in self.strings):
            return None
        begin = len(self._settled(tokens[: max(0, start - first)]))
        settled = len(self._settled(tokens[: fresh - first]))
        if not self._completes(tokens, begin, settled):  # it stands in the prompt, or among tokens searched before
            return None
        ends = range(fresh - first + 1, len(tokens) + 1)
        return next(first + end - 1 for end in ends if self._completes(tokens[:end], begin, settled))

    def _completes(self, tokens: list[int], begin: int, settled: int) -> bool:
        """Whether the text has a stop string that begins at ``begin`` or later and ends behind ``settled``."""
        text = self._decode(tokens)
        return any(string in text[max(begin, settled - len(string) + 1) :] for string in self.strings)

    def _settled(self, tokens: list[int]) -> str:
        """The text that further tokens do not change: without a character whose last bytes are still missing."""
        return self._decode(tokens).rstrip("\ufffd") if tokens else ""

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))


class NewestTokens:
    """The tokens that running sequences drew since they were searched last, of all slots at once.

    ``tokens`` (n, T') has them, on the device, in the order of ``running``.

    Args:
        stops: Search for stop strings of each slot.
        running: Running sequences by slot.
        tokens: Tokens (S + 1, T) of all slots, on the device.
    """

    def __init__(
        self, stops: Mapping[int, StopStrings], running: Mapping[int, RunningSequence], tokens: Tensor
    ) -> None:
        self.stops, self.row = stops, {slot: row for row, slot in enumerate(running)}
        self.firsts = {slot: self.first(slot, sequence) for slot, sequence in running.items()}
        # before the minimum length nothing is searched
        width = max(0, *(sequence.num_fed + 1 - self.firsts[slot] for slot, sequence in running.items()))
        rows, begins = upload([list(running), list(self.firsts.values())], tokens.device)
        index = begins[:, None] + torch.arange(width, device=tokens.device)
        self.tokens = tokens[rows[:, None], index.clamp(max=tokens.shape[1] - 1)]

    def first(self, slot: int, running: RunningSequence) -> int:
        """The index of the first token of a sequence that is looked at."""
        return self.stops[slot].first(running.start, max(running.start, running.searched))

    def find(self, tokens: Sequence[list[int]], slot: int, running: RunningSequence, last: int) -> int | None:
        """The index of the token that completes a stop string, at ``last`` or before, in ``tokens`` as read."""
        first, fresh = self.firsts[slot], max(running.start, running.searched)
        drawn = tokens[self.row[slot]][: max(0, last + 1 - first)]
        running.searched = max(running.searched, last + 1)
        return self.stops[slot].find(drawn, first, running.start, fresh)
