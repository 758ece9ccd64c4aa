"""Environment: the other side of one conversation. What calls it, with time limits, is ``calls.py``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from sparse_rl_lightning.errors import check_number

Observation: TypeAlias = str | list[dict[str, Any]]
"""What an environment answers: text, or chat messages with ``role`` and ``content``.

After a prompt of chat messages, text is the content of a user's message.
"""


class Environment(ABC):
    """Answers one policy's turns in one conversation, and rewards them; each sample has an instance of its own.

    The methods may be ``async``. An error or a time out ends its conversation alone, which then has no reward.

    Example::

        class Guess(Environment):
            def reset(self, row):
                self.number = row["number"]

            def step(self, text):
                if not text.strip().isdigit():
                    return None, 0.0
                guess = int(text)
                return (None, 1.0) if guess == self.number else ("higher" if guess < self.number else "lower", None)
    """

    tools: Sequence[Callable[..., Any]] = ()
    """Functions that a chat template describes to the policy."""

    @abstractmethod
    def reset(self, row: dict[str, Any]) -> Any:
        """Begin a conversation about a row of the data set.

        Returns:
            The prompt, text or chat messages, the same for all samples of a row; None for the row's own ``prompt``.
        """

    @abstractmethod
    def step(self, text: str) -> Any:
        """Answer a turn of the policy.

        Args:
            text: The turn, without special tokens; hostile text.

        Returns:
            An ``Observation``, or None if the conversation is over, and a number or None: the turn's reward. The
            reward of a conversation is the sum over its turns.
        """

    def cut(self) -> Any:
        """The reward of a conversation that a limit ends after its last turn, a number or None; may be ``async``."""
        return None

    def close(self) -> Any:
        """Free what the environment holds: the conversation is over, whatever ended it; may be ``async``."""
        return None


EnvironmentFactory: TypeAlias = Callable[[], Environment]
"""Creates the environment of one sample, such as its class."""


@dataclass(frozen=True)
class TurnOptions:
    """Limits on conversations with an environment.

    Args:
        max_turns: Largest number of the policy's turns; what would follow is cut.
        max_turn_length: Largest number of tokens of one turn of the policy, which is then answered as it is; null for
            no limit but ``sampling.max_completion_length``, which counts all tokens behind the prompt.
        max_observation_length: Number of tokens to which an observation is cut; null for no limit:
            without room for all of it the conversation ends.
        max_prompt_length: Number of tokens of the longest prompt that ``reset`` returns, for partial rollouts only;
            null for that of the longest ``prompt`` in the data.
        timeout: Seconds that an environment may take to answer. Its methods then run in threads, beside decoding. Null:
            any time, in the trainer's thread, one after the other.

    Raises:
        ValueError: If a number is out of range.
    """

    max_turns: int = 8
    max_turn_length: int | None = None
    max_observation_length: int | None = None
    max_prompt_length: int | None = None
    timeout: float | None = 60.0

    def __post_init__(self) -> None:
        check_number("rollout.turns.max_turns", self.max_turns, least=1, whole=True)
        for name in ("max_turn_length", "max_observation_length", "max_prompt_length"):
            check_number(f"rollout.turns.{name}", getattr(self, name), least=1, or_none=True, whole=True)
        check_number("rollout.turns.timeout", self.timeout, above=0, or_none=True)
