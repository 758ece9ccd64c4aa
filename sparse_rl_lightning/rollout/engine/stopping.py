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
        # a token is at least one byte of the text
        self._reach = max(len(text.encode()) for text in strings) + ROOM

    def find(self, tokens: Tensor, start: int, fresh: int, last: int) -> int | None:
        """The index of the token that completes a stop string first; one that begins in the prompt is none.

        Args:
            tokens: (T,) a sequence.
            start: Its first completion token.
            fresh: The first token that may complete one.
            last: Its last token so far.

        Returns:
            None where none of these tokens completes a stop string.
        """
        if last < fresh:
            return None
        # some tokens before the string keep what a decoder does to the first token of a text out of it
        first = max(0, start - ROOM, fresh - self._reach)
        own = tokens[first : last + 1].tolist()
        text = self._decode(own)
        if not any(string in text for string in self.strings):
            return None
        begin = len(self._known(own[: max(0, start - first)]))
        known = len(self._known(own[: fresh - first]))
        if not self._completes(own, begin, known):
            return None
        # the shortest prefix that holds one: longer prefixes hold it too
        low, high = fresh - first + 1, len(own)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._completes(own[:middle], begin, known) else (middle + 1, high)
        return first + low - 1

    def _completes(self, tokens: list[int], begin: int, known: int) -> bool:
        """Whether the text holds a string that begins at ``begin`` or later and ends behind ``known``."""
        text = self._decode(tokens)
        return any(string in text[max(begin, known - len(string) + 1) :] for string in self.strings)

    def _known(self, tokens: list[int]) -> str:
        """Text that further tokens do not change: without a character whose last bytes are still to come."""
        return self._decode(tokens).rstrip("\ufffd") if tokens else ""

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))
