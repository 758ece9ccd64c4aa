"""Sums of many different numbers: solutions of a thousand characters, in which every step reads the question."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, islice
from random import Random
from typing import Any

from sparse_rl_lightning.data import PromptDataModule


class LongSums(PromptDataModule):
    """``07+12+25=`` with its steps ``07+12=19;19+25=44`` and ``44``, of numbers from 00 to 99, each once at most.

    What comes next is the number behind that of the last step: who still knows the question finds it without counting.
    Held-out questions are the same for every seed.

    Args:
        num_terms: Numbers per question, at most 100.
        num_train: Training questions.
        num_val: Held-out questions.
        **blocks: Arguments of PromptDataModule.
    """

    def __init__(self, num_terms: int = 80, num_train: int = 4000, num_val: int = 128, **blocks: Any) -> None:
        super().__init__(**blocks)
        self.num_terms, self.num_train, self.num_val = num_terms, num_train, num_val

    def train_rows(self) -> list[dict[str, Any]]:
        """The training questions."""
        return list(islice(self._rows(f"train {self.seed}"), self.num_train))

    def val_rows(self) -> list[dict[str, Any]]:
        """The held-out questions."""
        return list(islice(self._rows("held out"), self.num_val))

    def _rows(self, seed: str) -> Iterator[dict[str, Any]]:
        """Questions without end; two are hardly ever the same, of 100!/20! of eighty numbers."""
        random = Random(seed)
        while True:
            terms = random.sample(range(100), self.num_terms)
            totals = list(accumulate(terms))
            before = [f"{terms[0]:02d}", *map(str, totals[1:])]
            steps = [f"{a}+{b:02d}={c}" for a, b, c in zip(before, terms[1:], totals[1:], strict=False)]
            yield {
                "prompt": "+".join(f"{term:02d}" for term in terms) + "=",
                "answer": str(totals[-1]),
                "solution": f"{';'.join(steps)}#{totals[-1]}",
            }
