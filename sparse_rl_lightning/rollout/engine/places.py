"""Places: whether a slot can keep a text that a conversation is given, where such texts are never evicted.

A protected text that a budget cannot hold would be an error in the middle of a rollout, at the next compression: so
it is refused before it is read.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparse_rl_lightning.cache.compression import ENDLESS, Compression
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.rollout.engine.turns import TurnSequence


@dataclass(frozen=True)
class Places:
    """The places of a budget that a paused sequence's next text may take, and those that it may not."""

    budget: int  # the smallest of a layer, at the lengths from now on
    first: int = 0  # sinks, or the prompt where that is protected and longer
    window: int = 0
    older: int = 0  # tokens of the texts that stay protected beside the next
    count: int = 0  # texts that are protected

    @classmethod
    def of(cls, one: TurnSequence, compression: Compression) -> Places:
        """Determine the places for the next text of a sequence; endless if nothing is protected or evicted any more."""
        c, trigger = compression.compressor, compression.trigger
        if not c.protect_observations or one.room > one.last - one.num_fed:
            return cls(ENDLESS)
        stay = one.given[max(0, len(one.given) + 1 - c.protect_observations) :]
        return cls(
            trigger.smallest_budget(one.num_fed + 1, one.last),
            max(c.num_sinks, one.prompt_length if c.protect_prompt else 0), c.window,
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
