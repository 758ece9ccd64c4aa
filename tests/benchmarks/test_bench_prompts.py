"""The benchmark of shared prompts: what arithmetic allows, counted token by token, and a row of what was measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks import prompts
from sparse_rl_lightning.testing import tiny_model


@pytest.mark.parametrize("case", [prompts.Case(5, 3, 4), prompts.Case(1, 7, 2), prompts.Case(30, 2, 1)])
def test_what_is_allowed(case: prompts.Case) -> None:
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 20}
    config = SimpleNamespace(**sizes, num_hidden_layers=2, vocab_size=50)

    def token(place: int, completes: bool) -> float:
        """Queries and output, keys and values, three products of the body, and what it sees, half of itself."""
        layer = 2 * 12 * 12 + 2 * 12 * 4 + 3 * 12 * 20 + 2 * 12 * (place + 0.5)
        return 2 * layer + (12 * 50 if completes else 0)

    prompt = sum(token(place, False) for place in range(case.prompt))
    completion = sum(token(place, True) for place in range(case.prompt, case.prompt + case.completion))
    expected = case.samples * (prompt + completion) / (prompt + case.samples * completion)
    assert case.allowed(config) == pytest.approx(expected)


def test_a_row() -> None:
    row = prompts.measured(tiny_model(), prompts.Case(24, 4, 6), mixed=False, rounds=1)
    assert row[:4] == ["24", "4", "6", "float32"]
    assert float(row[4]) > 0
    assert len(row) == len(prompts.HEADER)
