"""The cost model against tables that were computed elsewhere, and against the speed-ups that Sparrow measured."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig

from sparse_rl_lightning.budgets import LengthSchedule, PublishedSchedule, Pyramid
from sparse_rl_lightning.calibration import H200, CostModel, Hardware, ModelShape, Work, entries_read
from sparse_rl_lightning.compressors import FullKV, SnapKV, StreamingLLM
from sparse_rl_lightning.retrievers import Centroid, Quest

TABLES = Path(__file__).parent / "cost_tables.md"
BUDGETS = (512, 1024, 2048, 4096)
LENGTHS = {"4k": 4096, "16k": 16384, "32k": 32768}
PROMPT, BUFFER, POOL, MOST = 512, 128, 100e9, 1024
NUMBER = re.compile(r"\d+\.?\d*")


def rows(table: str) -> list[list[str]]:
    """The cells of a table's rows, its header left out."""
    text = TABLES.read_text().split(f"### {table}")[1].split("###")[0]
    lines = [line.strip().strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def near(value: float, printed: str) -> bool:
    """Within 1 % of what is printed, and of what was rounded away."""
    digits = len(printed.partition(".")[2])
    return abs(value - float(printed)) <= 0.01 * float(printed) + 0.5 * 10**-digits


def evict(budget: int) -> StreamingLLM:
    return StreamingLLM(budget, buffer=BUFFER)


def cost(model: str, overhead: float = 0.0) -> CostModel:
    return CostModel(ModelShape.of(model.lower()), Hardware(H200.bandwidth, H200.flops, overhead))


def test_dense_steps_and_memory() -> None:
    compared = 0
    for model, batch, *cells in rows("A1"):
        found = cost(model)
        for length, cell in zip(LENGTHS.values(), cells, strict=True):
            step, linear, attention, gigabytes = NUMBER.findall(cell)
            work = Work(int(batch), PROMPT, length)
            assert near(1e3 * found.step_seconds(FullKV(), work), step)
            assert near(1e3 * found.linear_seconds(work.batch), linear)
            entries = float(entries_read(FullKV(), work, found.shape.num_layers).mean())
            assert near(1e3 * found.attention_seconds(work.batch * entries), attention)
            assert near(work.batch * found.bytes_per_sequence(FullKV(), PROMPT, length) / 1e9, gigabytes)
            compared += 1
    assert compared == 42


@pytest.mark.parametrize(("table", "overhead"), [("A2", 0.0), ("A3", 3e-3), ("A4", 25e-3), ("A5", 0.0)])
def test_speedups(table: str, overhead: float) -> None:
    compared = 0
    for model, batch, *cells in rows(table):
        found = cost(model, overhead)
        for length, cell in zip(LENGTHS.values(), cells, strict=True):
            for budget, printed in zip(BUDGETS, cell.split("/"), strict=True):
                method = Centroid(budget, num_dense_layers=0) if table == "A5" else evict(budget)
                speedup = found.speedup(method, Work(int(batch), PROMPT, length))
                assert near(speedup, printed), (model, batch, length, budget)
                compared += 1
    assert compared == 14 * 12


def test_memory_ratios() -> None:
    found = cost("qwen3-1.7b")
    for budget, *cells in rows("A6"):
        for length, cell in zip(LENGTHS.values(), cells, strict=True):
            peak, mean = NUMBER.findall(cell)
            own, full = (found.bytes_per_sequence(m, PROMPT, length) for m in (evict(int(budget)), FullKV()))
            assert near(own / full, peak)
            entries = [entries_read(m, Work(1, PROMPT, length), 28).mean() for m in (evict(int(budget)), FullKV())]
            assert near(float(entries[0] / entries[1]), mean)
    for retriever, ratio in ((Centroid(512), 1.03125), (Quest(512), 1.0625)):
        pages = found.bytes_per_sequence(retriever, PROMPT, 4096)
        assert pages / found.bytes_per_sequence(FullKV(), PROMPT, 4096) == pytest.approx(ratio, rel=1e-6)


def test_throughput_of_equal_memory() -> None:
    for model, tokens, dense, batches, *ratios in rows("B. iso-memory"):
        length = LENGTHS[tokens]
        own = [cost(model).best_batch(evict(b), POOL, PROMPT, length, MOST) for b in BUDGETS]
        assert own == list(map(int, batches.split("/")))
        full = Work(cost(model).best_batch(FullKV(), POOL, PROMPT, length, MOST), PROMPT, length)
        assert full.batch == int(dense)
        for overhead, cell in zip((0.0, 3e-3, 25e-3), ratios, strict=True):
            for budget, batch, printed in zip(BUDGETS, own, cell.split("/"), strict=True):
                speedup = cost(model, overhead).speedup(evict(budget), Work(batch, PROMPT, length), full)
                assert near(speedup, printed), (model, tokens, budget, overhead)


def test_tokens_per_second_of_equal_memory() -> None:
    for model, *cells in rows("B2"):
        found = cost(model, 3e-3)
        for length, cell in zip(LENGTHS.values(), cells, strict=True):
            for method, printed in zip((FullKV(), evict(1024)), NUMBER.findall(cell), strict=True):
                batch = found.best_batch(method, POOL, PROMPT, length, MOST)
                assert near(found.tokens_per_second(method, Work(batch, PROMPT, length)) / 1e3, printed)


# measured by Sparrow: tokens per second on 4 H200, completions of up to 32k tokens, 12k on average
MEASURED = {"qwen3-1.7b": 2.21, "qwen3-4b": 2.41, "qwen3-8b": 2.06, "qwen3-14b": 1.49}


@pytest.mark.parametrize("model", MEASURED)
def test_sparrows_measured_speedups(model: str) -> None:
    pages = Centroid(PublishedSchedule(f"{model}-0.86", reserved=48))
    for found, most in ((cost(model), 0.2), (CostModel(ModelShape.of(model), H200), 0.05)):
        assert found.speedup(pages, Work(60, PROMPT, 12_000)) == pytest.approx(MEASURED[model], rel=most)


def test_shapes_are_those_of_the_configurations() -> None:
    qwen = Qwen3Config(
        hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        intermediate_size=6144, vocab_size=151936,
    )  # fmt: skip
    assert ModelShape.of(qwen) == ModelShape.of("qwen3-1.7b")
    llama = LlamaConfig(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192,
        vocab_size=128256,
    )  # fmt: skip
    assert ModelShape.of(llama) == ModelShape.of("llama-3.2-1b")
    # weights read per step in GB and KiB per token, from the models' cards
    for name, gigabytes, kib in (("qwen2.5-1.5b", 3.09, 28), ("qwen2.5-7b", 14.14, 56), ("qwen3-8b", 15.14, 144)):
        shape = ModelShape.of(name)
        assert 2 * shape.weights_read / 1e9 == pytest.approx(gigabytes, rel=2e-3)
        assert shape.kv_bytes_per_token == kib * 1024
    with pytest.raises(ValueError, match=r"model must be one of qwen2.5-0.5b, qwen2.5-1.5b, .*got 'gpt'"):
        ModelShape.of("gpt")
    other = (Qwen3NextConfig(), "linear attention and experts"), (Gemma3TextConfig(), "sliding windows")
    for config, kinds in (*other, (Qwen3MoeConfig(), "experts")):
        with pytest.raises(ValueError, match=f"no price for the {kinds} of '{config.model_type}'"):
            ModelShape.of(config)


def test_entries_are_those_that_the_rule_leaves() -> None:
    """Token by token: append, read, cut to the budget of the length when budget + buffer are held."""
    schedule = LengthSchedule([0, 40, 70], [10, 16, 30])
    for prompt, rule in itertools.product((1, 12, 33), (None, Pyramid(2))):
        method = SnapKV(schedule, buffer=4, num_sinks=0, window=2, budget_rule=rule)
        budgets = {b: method.layer_budgets(3, b) for b in schedule.budgets}
        held = [b if prompt >= b + 4 else prompt for b in budgets[schedule.at(prompt)]]
        want = []
        for fed in range(prompt + 1, prompt + 101):
            held = [h + 1 for h in held]
            want.append(sum(held) / 3)
            own = budgets[schedule.at(fed)]
            if any(h >= b + 4 for h, b in zip(held, own, strict=True)):
                held = [min(h, b) for h, b in zip(held, own, strict=True)]
        assert entries_read(method, Work(1, prompt, 100), 3).tolist() == pytest.approx(want)


def test_retrieval_reads_all_of_a_short_sequence_and_its_dense_layers() -> None:
    read = entries_read(Quest(80, num_dense_layers=1), Work(1, 70, 20), 4)
    lengths = torch.arange(71, 91, dtype=torch.float64)
    want = torch.where(lengths <= 80, lengths, (lengths + 3 * (80 + lengths / 16)) / 4)
    torch.testing.assert_close(read, want)


def test_tokens_that_are_always_read_are_added_to_a_published_schedule() -> None:
    with pytest.warns(UserWarning, match="is known up to"):
        assert PublishedSchedule("qwen3-1.7b-0.75", reserved=48).budgets[0] == 560


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Not even one sequence fits into 1,000 bytes: it needs 528,482,304"):
        cost("qwen3-1.7b").best_batch(FullKV(), 1000, PROMPT, 4096)
    with pytest.raises(ValueError, match=r"^Hardware: bandwidth must be above 0, got bandwidth=0"):
        Hardware(0, 1)
    H200.save(tmp_path / "h200.json", device="H200")
    assert Hardware.from_file(tmp_path / "h200.json") == H200
    (tmp_path / "h200.json").write_text('{"bandwidth": 1}')
    with pytest.raises(ValueError, match="expected a JSON object with the numbers bandwidth, flops, step_overhead"):
        Hardware.from_file(tmp_path / "h200.json")
    for value in ("NaN", "1" + "0" * 400, '"fast"', "null"):
        (tmp_path / "h200.json").write_text(f'{{"bandwidth": 1, "flops": 1, "step_overhead": {value}}}')
        with pytest.raises(ValueError, match=r"h200.json: expected a JSON object .* step_overhead must be"):
            Hardware.from_file(tmp_path / "h200.json")
    with pytest.raises(ValueError, match=r"there is no file .* --hardware '.*my machine.json'` measures"):
        Hardware.from_file(tmp_path / "my machine.json")
