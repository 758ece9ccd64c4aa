"""R-KV's redundancy on rows small enough to work out by hand, and how far its search goes."""

from __future__ import annotations

import math

import pytest
import torch
from native_cases import no_kernels
from torch.utils.flop_counter import FlopCounterMode

from sparse_rl_lightning.ops import key_redundancy


def test_redundancy_worked_by_hand() -> None:
    # Cosines of e1, e1, e2, e1, e2, diagonal zeroed. The last similar columns are 3, 3, 4, 1, 2: what remains is
    #   row 0: column 1;  row 1: column 0;  row 3: column 0.
    e1, e2 = [2.0, 0.0], [0.0, 0.5]
    keys = torch.tensor([e1, e1, e2, e1, e2]).view(1, 1, 5, 2)
    assert key_redundancy(keys, torch.tensor([[5]])).flatten().tolist() == pytest.approx([2 / 5, 1 / 5, 0, 0, 0])
    # Nothing is above 0.9 among keys 45 degrees apart: each row spares column 0 and the other cosines stay.
    half = math.sqrt(0.5)
    keys = torch.tensor([[1.0, 0.0], [half, half], [0.0, 1.0]]).view(1, 1, 3, 2)
    rows = key_redundancy(keys, torch.tensor([[3]]), threshold=0.9).flatten().tolist()
    assert rows == pytest.approx([0, 2 * half / 3, half / 3], abs=1e-7)


@pytest.mark.parametrize("live", [1, 2, 9])
def test_redundancy_of_equal_keys(live: int) -> None:
    keys = torch.ones(1, 1, 9, 4).masked_fill((torch.arange(9) >= live)[:, None], torch.inf)
    # Every row spares its last neighbor: all but the last spare the last, which spares the one before.
    counts = torch.full((live,), live - 1.0)
    if live > 1:
        counts[-1] -= live - 1
        counts[-2] -= 1
    torch.testing.assert_close(
        key_redundancy(keys, torch.tensor([[live]]))[0, 0, :live], counts / live, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(("last_key", "num_blocks"), [([1.0, 0.0], 1), ([0.0, 1.0], 8)])
def test_redundancy_search_stops_when_every_row_has_found(last_key: list[float], num_blocks: int) -> None:
    # 60 keys in a slot of 64, in blocks of 8; alike but for the last one, which finds none like it in the second case.
    keys = torch.tensor([[1.0, 0.0]]).repeat(64, 1)
    keys[59] = torch.tensor(last_key)
    with no_kernels(block_size=8), FlopCounterMode(display=False) as counter:
        key_redundancy(keys.view(1, 1, 64, 2), torch.tensor([[60]]))
    assert counter.get_total_flops() == num_blocks * 2 * 64 * 8 * 2
