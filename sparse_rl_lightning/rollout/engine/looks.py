"""Looks: what ended or broke the running sequences, copied to the host when it is queued and read when it is needed.

A look is of the moment at which it was queued: steps that are queued later change nothing in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sparse_rl_lightning.ops import KVPools
from sparse_rl_lightning.ops.downloads import Download
from sparse_rl_lightning.rollout.engine.sequences import RunningSequence, SequenceLogs
from sparse_rl_lightning.rollout.engine.stopping import NewestTokens


@dataclass(frozen=True)
class Sighting:
    """A sequence that has ended, or is broken, in a look."""

    slot: int
    running: RunningSequence
    end: int  # index of its last token; of a broken one it may be drawn later
    by_token: bool  # whether an end token or a stop string is there
    broken: int | None  # index of the first token drawn from NaN or infinite logits


class Look:
    """One look at the running sequences; queued by creating it.

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
        self._numbers = Download(logs.marks(pools.errors), *tokens)

    def read(self) -> Iterator[Sighting]:
        """Yield those that have ended or are broken, by slot; waits where the device has not come to the look yet.

        Raises:
            RuntimeError: If a CUDA kernel has reported an error.
        """
        (ends, broken, errors), *texts = (numbers.tolist() for numbers in self._numbers.read())
        self._pools.raise_errors(errors[0])
        for slot, (one, num_fed) in self._running.items():
            end, by_token = min(ends[slot], one.limit), ends[slot] <= one.limit
            stopped = None
            if self._texts is not None:
                stopped = self._texts.find(texts[0], slot, one, min(end, num_fed))
            if stopped is not None:
                end, by_token = stopped, True
            # token `end` is drawn by the step that feeds token `end` - 1; what a sequence drew past its end is
            # discarded, so it may be broken
            is_broken = broken[slot] <= min(end, num_fed)
            if is_broken or num_fed >= end:
                yield Sighting(slot, one, end, by_token, broken[slot] if is_broken else None)
