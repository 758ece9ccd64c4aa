"""The benchmark of equal memory: slots fill the same bytes, and every ratio is of what was measured."""

from __future__ import annotations

from benchmarks import equal_memory
from sparse_rl_lightning.testing import tiny_model


def test_slots_fill_the_memory_of_the_full_cache() -> None:
    sizes = equal_memory.QUICK
    *_, (table, steps) = equal_memory.measured(tiny_model(vocab_size=64), [[5] * 12, [7] * 15], sizes, rounds=2)
    full, compressed = table.rows
    assert full[1] == str(sizes.full_slots)
    assert full[2] == "1.0"
    assert full[4] == "1.00"
    slots, times = int(compressed[1]), 75 / 32  # tokens of a full slot over those of a compressed one
    assert sizes.full_slots < slots <= times * sizes.full_slots
    assert compressed[2] == f"{slots / sizes.full_slots:.1f}"
    for row in (full, compressed):
        assert sizes.least <= float(row[6]) <= sizes.most
    assert table.note.startswith("0 MiB of slots, prompts of at most 15 tokens")
    assert [row[0] for row in steps.rows] == 2 * [full[0], compressed[0]]
    assert [row[2] for row in steps.rows] == ["4 of 4", "4 of 4", "1 of 4", "1 of 4"]


def test_the_rollout_of_a_step_draws_what_the_step_does() -> None:
    """And not a share of a rollout that keeps all slots busy: fewer sequences at once are slower, each."""
    sizes = equal_memory.QUICK
    sampler = equal_memory.RolloutSampler(tiny_model(vocab_size=64), memory_limit=2**20)
    busy, step = (equal_memory.rolled_out(sampler, [[5] * 12], sizes, 0, drawn) for drawn in (0, sizes.drawn))
    assert busy.slots > sizes.drawn == step.slots == step.sequences
    assert busy.sequences == sizes.waves * busy.slots


def test_ratios_are_of_the_rounds() -> None:
    def run(slots: int, seconds: float) -> equal_memory.Run:
        return equal_memory.Run(slots, 2 * slots, 100 * slots, seconds, 2**20)

    found = {"FullKV": [run(8, 10.0), run(8, 20.0)], "RKV": [run(96, 40.0), run(96, 40.0)]}
    full, compressed = equal_memory.table(found, "").rows
    assert compressed == ("RKV", "96", "12.0", "240", "4.50", "17,280", "50", "1")
    assert full[3] == "60"


def test_steps_are_of_rollout_and_learner() -> None:
    """32 sequences take 20 s with the full cache and 4 s with the other; the learner takes 1 s for each."""
    found = {name: [equal_memory.Run(8, 32, 3200, seconds, 0)] for name, seconds in (("FullKV", 20.0), ("RKV", 4.0))}
    rows = equal_memory.steps_table(found, learner=1.0).rows
    assert rows[:2] == [
        ("FullKV", "20", "32 of 32", "32", "69.2", "1.00"),
        ("RKV", "4", "32 of 32", "32", "100.0", "1.44"),
    ]
    assert rows[2:] == [
        ("FullKV", "20", "8 of 32", "8", "128.6", "1.00"),
        ("RKV", "4", "8 of 32", "8", "300.0", "2.33"),
    ]
