"""Stop strings: texts that end a completion, found in what the tokens decode to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase

ROOM = 8  # tokens


class StopStrings:
    """Finds the token that completes a stop string.

    A string may begin and end anywhere inside tokens, so the text of the last tokens is looked at as a whole.

    Args:
        strings: Texts that end a completion.
        tokenizer: The policy's tokenizer.

    Raises:
        ValueError: If there is no tokenizer to decode with.
    """

    def __init__(self, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> None:
        if tokenizer is None:
            raise ValueError(
                f"stop_strings={list(strings)} need text, but the sampler has no tokenizer: give "
                "RolloutSampler(tokenizer=...), or end tokens as end_token_ids."
            )
        self.strings = tuple(strings)
        self.tokenizer = tokenizer
        # a token is at least one byte of the text; some room before the string keeps what a decoder does to the first
        # token of a text out of it
        self._reach = max(len(text.encode()) for text in strings) + ROOM

    def find(self, tokens: Tensor, start: int, fresh: int, last: int) -> int | None:
        """The index of the token that completes a stop string first.

        Args:
            tokens: (T,) a sequence.
            start: Its first completion token.
            fresh: The first token that was not looked at before.
            last: Its last token so far.

        Returns:
            None where no stop string was completed since the last look.
        """
        if last < fresh:
            return None
        first = max(start, fresh - self._reach)
        own = tokens[first : last + 1].tolist()
        if not self._ends(own):
            return None
        # the shortest prefix that holds one: longer prefixes hold it too
        low, high = fresh - first + 1, len(own)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._ends(own[:middle]) else (middle + 1, high)
        return first + low - 1

    def _ends(self, tokens: list[int]) -> bool:
        text = str(self.tokenizer.decode(tokens, skip_special_tokens=False))
        return any(string in text for string in self.strings)
