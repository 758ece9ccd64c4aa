"""The benchmark of eight-bit caches runs, and its rows say what they should of each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import float8
from benchmarks.common.tables import Table


@pytest.mark.slow
def test_eight_bits_cost_more_than_sixteen_and_less_than_the_compression(tmp_path: Path) -> None:
    table = Table("", ["model", "completion tokens", "keys and values", "k1", "k3", "P5"])
    (case,) = float8.cases(tmp_path, length=24)  # no stories here
    float8.measured(case, table)
    assert [row[1] for row in table.rows] == ["960"] * 3
    compression, sixteen, eight = ([float(cell) for cell in row[3:]] for row in table.rows)
    assert 0 < 10 * sixteen[1] < eight[1] < compression[1] / 10
    assert compression[2] < eight[2] < sixteen[2] <= 1.0
