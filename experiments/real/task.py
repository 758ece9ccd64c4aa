"""Task and reward of this study as they were when it began: ``examples/stories.py`` may change, this file may not."""

from __future__ import annotations

import re
from random import Random
from typing import Any

from sparse_rl_lightning.data import PromptDataModule

WORDS = (
    "apple blanket bread bridge candle castle dragon engine feather forest garden guitar hammer island jacket kettle "
    "kitchen ladder lantern lemon market mirror mountain needle ocean pencil piano pocket queen rabbit river rope "
    "shadow ship ticket tower umbrella violin whistle window"
).split()
PROMPT = "Write a short story of about 60 words. It must contain all of these words: {}."


class Stories(PromptDataModule):
    """Prompts that ask for a story with given words; columns ``prompt``, a chat, and ``words``.

    Args:
        num_words: Words that a story must contain.
        num_train: Training prompts.
        num_val: Held-out prompts, with other draws of words.
        **blocks: Arguments of PromptDataModule.
    """

    def __init__(self, num_words: int = 6, num_train: int = 4000, num_val: int = 64, **blocks: Any) -> None:
        super().__init__(**blocks)
        self.num_words, self.num_train, self.num_val = num_words, num_train, num_val

    def train_rows(self) -> list[dict[str, Any]]:
        """The training prompts."""
        return self._rows(self.num_train, "train")

    def val_rows(self) -> list[dict[str, Any]]:
        """The held-out prompts."""
        return self._rows(self.num_val, "held out")

    def _rows(self, count: int, part: str) -> list[dict[str, Any]]:
        random = Random(f"{self.seed}/{part}")
        drawn = [random.sample(WORDS, self.num_words) for _ in range(count)]
        return [
            {"prompt": [{"role": "user", "content": PROMPT.format(", ".join(own))}], "answer": "", "words": own}
            for own in drawn
        ]


def story_reward(completions: list[str], words: list[list[str]], **_: Any) -> list[float]:
    """The share of the words that stand in whole sentences, among the first 60 words of the story.

    A sentence has at least four different words for each of at most three wanted ones. So a list of the words earns
    nothing, and neither does a longer story, a sentence that is cut off, or one that is said twice.
    """
    return [len(told(text, own)) / len(own) for text, own in zip(completions, words, strict=True)]


def told(story: str, wanted: list[str]) -> set[str]:
    """The wanted words that a story has in such sentences."""
    found, length = set[str](), 0
    for sentence, end in re.findall(r"([^.!?\n]+)([.!?]?)", story.lower()):
        spoken = re.findall(r"[a-z]+", sentence)
        length += len(spoken)
        own = {word for word in wanted if word in spoken}
        if end and length <= 60 and len(own) <= 3 and len({*spoken}) >= 4 * len(own):
            found |= own
    return found
