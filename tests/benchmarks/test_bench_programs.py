"""Benchmarks that are a program and a table: each runs in toy sizes, and its numbers mean what they say."""

from __future__ import annotations

import re
import string
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import ROOT, centering, equal_memory, float8, learner, prompts, routing
from benchmarks.common.tables import Table
from benchmarks.trainer.contenders import DENSE, PLAIN, SPARSE, TRL
from sparse_rl_lightning.policies import TinyPolicy
from sparse_rl_lightning.testing import tiny_model

needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc")
RETRIEVAL = [
    f"{method}, 64 of {length} tokens, {dtype}"
    for length, dtype in ((96, "float32"), (128, "float32"), (96, "bfloat16"), (128, "bfloat16"))
    for method in ("Centroid", "Quest")
]


@pytest.mark.slow  # processes that import torch
@pytest.mark.parametrize(("program", "page", "arguments", "rows"), [
    ("checker", "checker-cpu", [], ["rationals", "symbolic"]),
    ("ops", "retrieval-cpu", ["--device=cpu", "--rounds=1", "--parts=retrieval"], RETRIEVAL),
    pytest.param("learner", "learner-cpu", ["--device=cpu"], [*learner.WAYS], marks=needs_proc),
    pytest.param(
        "centering", "centering-cpu", ["--rounds=1", "--steps=1", "--policy=work"], [*centering.WAYS], marks=needs_proc
    ),
    ("ceiling", "ceiling-work", ["--policy=work"], ["full cache", "SnapKV 72 + 8", "SnapKV 32 + 8"]),
    pytest.param("trainer", "trainer-cpu", ["--work=work"], [TRL, DENSE, SPARSE, PLAIN], marks=needs_proc),
])  # fmt: skip
def test_a_quick_run_saves_its_table(
    program: str, page: str, arguments: list[str], rows: list[str], tmp_path: Path
) -> None:
    if program == "trainer":
        pytest.importorskip("trl", reason='needs TRL: pip install "sparse-rl-lightning[trl]"')
    if program in ("centering", "ceiling"):
        for item in TinyPolicy(alphabet=string.printable, max_position_embeddings=256).load():
            item.save_pretrained(tmp_path / "work")
    sizes = {"checker": ["--quick"], "centering": ["--threads=1"]}.get(program, ["--quick", "--threads=1"])
    command = [sys.executable, "-m", f"benchmarks.{program}", *sizes, f"--save={tmp_path}"]
    command += [argument.replace("=work", f"={tmp_path}/work") for argument in arguments]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    text = (tmp_path / f"{page}.md").read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    found = [row for row in cells if row[0] in rows]
    assert [row[0] for row in found] == rows
    assert all(re.search(r"\d", "".join(row[1:5])) for row in found)  # the plain loop has no rollout


@needs_proc
@pytest.mark.slow
def test_chunks_of_the_head_need_the_least_memory() -> None:
    """In bytes, at sizes where the ways are tens of megabytes apart and a process's own ups and downs are not."""
    sizes = learner.Sizes(vocabulary=20_000, tokens=1024, width=256, chunk=64, threads=1)
    logits, head = 4 * sizes.vocabulary * sizes.tokens, 4 * sizes.vocabulary * sizes.width
    # the least of three: what the allocator keeps of a process's freed memory differs from run to run
    peaks = {way: min(learner.measure(way, sizes).peak for _ in range(3)) for way in learner.WAYS}
    assert peaks["plain"] > 2 * logits
    # a chunk's gradient of the head stands beside the sum of them: what the other way adds up in place
    assert peaks["checkpointed"] > peaks["chunked"] + head / 2
    assert peaks["plain"] > peaks["checkpointed"] + head / 2


# ---------------------------------------------------------------- equal memory


def test_slots_fill_the_memory_of_the_full_cache() -> None:
    sizes = equal_memory.QUICK
    *_, (table, steps) = equal_memory.measured(tiny_model(vocab_size=64), [[5] * 12, [7] * 15], sizes, rounds=2)
    full, compressed = table.rows
    assert (full[1], full[2], full[4]) == (str(sizes.full_slots), "1.0", "1.00")
    slots, times = int(compressed[1]), 75 / 32  # tokens of a full slot over those of a compressed one
    assert sizes.full_slots < slots <= times * sizes.full_slots
    assert compressed[2] == f"{slots / sizes.full_slots:.1f}"
    assert all(sizes.least <= float(row[6]) <= sizes.most for row in (full, compressed))
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


def test_ratios_are_of_the_rounds_and_steps_of_rollout_and_learner() -> None:
    def run(slots: int, seconds: float) -> equal_memory.Run:
        return equal_memory.Run(slots, 2 * slots, 100 * slots, seconds, 2**20)

    rounds = {"FullKV": [run(8, 10.0), run(8, 20.0)], "RKV": [run(96, 40.0), run(96, 40.0)]}
    full, compressed = equal_memory.table(rounds, "").rows
    assert compressed == ("RKV", "96", "12.0", "240", "4.50", "17,280", "50", "1")
    assert full[3] == "60"
    # 32 sequences take 20 s with the full cache and 4 s with the other; the learner takes 1 s for each
    runs = {name: [equal_memory.Run(8, 32, 3200, seconds, 0)] for name, seconds in (("FullKV", 20.0), ("RKV", 4.0))}
    assert equal_memory.steps_table(runs, learner=1.0).rows == [
        ("FullKV", "20", "32 of 32", "32", "69.2", "1.00"), ("RKV", "4", "32 of 32", "32", "100.0", "1.44"),
        ("FullKV", "20", "8 of 32", "8", "128.6", "1.00"), ("RKV", "4", "8 of 32", "8", "300.0", "2.33"),
    ]  # fmt: skip


# ---------------------------------------------------------------- rounding and routing


@pytest.mark.slow
def test_eight_bits_cost_more_than_sixteen_and_less_than_the_compression(tmp_path: Path) -> None:
    table = Table("", ["model", "completion tokens", "keys and values", "k1", "k3", "P5"])
    (case,) = float8.cases(tmp_path, length=24)  # no stories here
    float8.measured(case, table)
    assert [row[1] for row in table.rows] == ["960"] * 3
    compression, sixteen, eight = ([float(cell) for cell in row[3:]] for row in table.rows)
    assert 0 < 10 * sixteen[1] < eight[1] < compression[1] / 10
    assert compression[2] < eight[2] < sixteen[2] <= 1.0


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


def test_in_float32_no_choice_flips() -> None:
    table = Table("", routing.COLUMNS)
    routing.measured("olmoe", 12, table, torch.float32)
    assert {row[3] for row in table.rows} == {"0.00%"}
    assert all(float(row[6]) < 1e-8 for row in table.rows)


# ---------------------------------------------------------------- shared prompts


@pytest.mark.parametrize("case", [prompts.Case(5, 3, 4), prompts.Case(1, 7, 2), prompts.Case(30, 2, 1)])
def test_what_a_shared_prompt_allows(case: prompts.Case) -> None:
    """By arithmetic, token by token."""
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 20}
    config = SimpleNamespace(**sizes, num_hidden_layers=2, vocab_size=50)

    def token(position: int, completes: bool) -> float:
        """Queries and output, keys and values, three products of the body, and what it sees, half of itself."""
        layer = 2 * 12 * 12 + 2 * 12 * 4 + 3 * 12 * 20 + 2 * 12 * (position + 0.5)
        return 2 * layer + (12 * 50 if completes else 0)

    prompt = sum(token(position, False) for position in range(case.prompt))
    completion = sum(token(position, True) for position in range(case.prompt, case.prompt + case.completion))
    expected = case.samples * (prompt + completion) / (prompt + case.samples * completion)
    assert case.allowed(config) == pytest.approx(expected)


def test_a_row_of_shared_prompts() -> None:
    row = prompts.measured(tiny_model(), prompts.Case(24, 4, 6), mixed=False, rounds=1)
    assert row[:4] == ["24", "4", "6", "float32"]
    assert float(row[4]) > 0
    assert len(row) == len(prompts.HEADER)
