"""The benchmark of routing runs: in 16 bits choices flip, and the record takes most of the mismatch away."""

from __future__ import annotations

import pytest
import torch

from benchmarks import routing
from benchmarks.common.tables import Table


@pytest.mark.parametrize("name", routing.MODELS)
def test_in_16_bits_choices_flip_and_the_record_removes_what_comes_of_it(name: str) -> None:
    table = Table("", routing.COLUMNS)
    routing.measured(name, 24, table)
    assert len(table.rows) == len(routing.METHODS)
    for row in table.rows:
        layer, token, free, bound, most, most_bound = (float(cell.rstrip("%")) for cell in row[3:])
        assert 1 < layer < token
        assert 5 * bound < free
        assert 3 * most_bound < most


def test_in_float32_nothing_flips() -> None:
    table = Table("", routing.COLUMNS)
    routing.measured("olmoe", 12, table, torch.float32)
    assert {row[3] for row in table.rows} == {"0.00%"}
    assert all(float(row[6]) < 1e-8 for row in table.rows)
