"""Calibration: what it picks against brute force, resuming, what cannot be judged, and the command line."""

from __future__ import annotations

import csv
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from families import family
from pretend_gpu import PretendGPU
from safetensors.torch import save
from tiny_run import run_console
from torch import Tensor

from sparse_rl_lightning import replay_logprobs
from sparse_rl_lightning.acceptance import tail_target
from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.calibration import Hardware, imitate_attention, pad
from sparse_rl_lightning.calibration.calibrate import calibrate
from sparse_rl_lightning.calibration.imitation import centered, future_attention
from sparse_rl_lightning.calibration.sweep import Sweep
from sparse_rl_lightning.calibration.table import Acceptances, Binning, Cell, cells, choose
from sparse_rl_lightning.calibration.watched import Seen, watch
from sparse_rl_lightning.compressors import FullKV, LearnedScore, SnapKV
from sparse_rl_lightning.compressors.learned_score import ScoreNetwork, save_network
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.logprobs import hidden_states
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.replay.hooks import REPLAY, attention_implementation, attention_inputs
from sparse_rl_lightning.retrievers import Centroid
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.options import OF_FULL_CACHE
from sparse_rl_lightning.testing import tiny_model

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [list(range(3 + i, 9 + i + i % 3)) for i in range(6)]
PARAMS = SamplingParams(num_generations=3, max_completion_length=30, top_logprobs=32, seed=2)
METHOD = SnapKV(12, buffer=3, num_sinks=1, window=3)
BUDGETS = (8, 12, 16, 24)
BINNING = Binning(bin_size=8, min_tokens=10)


@pytest.fixture(scope="module")
def policy() -> Any:
    return tiny_model(vocab_size=32, initializer_range=0.2, eos_token_id=None)


def sweep(policy: Any, folder: Path, **changes: Any) -> Sweep:
    given = {"prompts": PROMPTS, "params": PARAMS, "prompts_per_part": 4, "micro_batch": 5, **changes}
    return Sweep(policy, given.pop("prompts"), given.pop("params"), folder, **given)


@torch.no_grad()
def overlaps_by_hand(policy: Any, compressor: Any) -> list[tuple[int, float]]:
    """Length and overlap of every token drawn: both whole distributions, the sparse one under the replay mask."""
    rollout = RolloutSampler(policy, compressor).generate(PROMPTS, PARAMS)
    head = policy.get_output_embeddings()
    dense = head(hidden_states(policy, rollout.sequences)).double().softmax(dim=-1)
    with attention_implementation(policy, REPLAY):
        sparse = head(hidden_states(policy, rollout.sequences, death=rollout.evictions.death)).double().softmax(dim=-1)
    found = []
    for row, length in rollout.completion_mask.nonzero().tolist():
        p, q = dense[row, length - 1].tolist(), sparse[row, length - 1].tolist()
        found.append((length, sum(map(min, p, q))))
    return found


def test_calibration_picks_what_brute_force_picks(policy: Any, tmp_path: Path) -> None:
    found = calibrate(sweep(policy, tmp_path), METHOD, BUDGETS, BINNING, target=0.8, monotone=False)
    rising = calibrate(sweep(policy, tmp_path), METHOD, BUDGETS, BINNING, target=0.8)
    full = [overlap for _, overlap in overlaps_by_hand(policy, FullKV())]
    assert found.ceiling == pytest.approx(np.percentile(full, 5), abs=1e-5)
    tails: dict[int, dict[int, float]] = {}
    for budget in BUDGETS:
        overlaps = overlaps_by_hand(policy, METHOD.with_budget(budget))
        bins = {length // 8 for length, _ in overlaps}
        own = {b: [overlap for length, overlap in overlaps if length // 8 == b] for b in bins}
        tails[budget] = {b: float(np.percentile(values, 5)) for b, values in own.items() if len(values) >= 10}
        for number, cell in enumerate(found.table[budget]):
            assert (cell is None) == (number not in tails[budget])
            if cell is not None:
                assert cell.tail == pytest.approx(tails[budget][number], abs=1e-5)
                assert cell.tail <= cell.tail_upper + 1e-6 <= cell.tail + 1e-4  # the whole vocabulary: exact
                assert cell.low <= cell.tail <= cell.high or cell.low == pytest.approx(cell.high)
                assert cell.tokens == len(own[number]) if budget == BUDGETS[-1] else cell.tokens > 0
    want = []
    for number in range(5):
        serving = [budget for budget in BUDGETS if tails[budget].get(number, 0.0) >= 0.8]
        want.append(min(serving, default=BUDGETS[-1]) if number in tails[8] else None)
    known = [budget for budget in want if budget is not None]
    assert len(set(known)) > 1, "every length picks the same budget: nothing is tested"
    first = next(i for i, budget in enumerate(want) if budget is not None)
    last = max(i for i, budget in enumerate(want) if budget is not None)
    filled = [want[first]] * first + want[first : last + 1] + [want[last]] * (len(want) - 1 - last)
    assert found.choice.budgets == filled
    assert found.schedule == LengthSchedule.of_bins(filled, 8)
    assert rising.choice.budgets == [max(filled[: number + 1]) for number in range(len(filled))]


def test_the_default_target_is_the_published_one_scaled_to_the_own_ceiling(policy: Any, tmp_path: Path) -> None:
    found = calibrate(sweep(policy, tmp_path), METHOD, BUDGETS[-1:], BINNING, check=False)
    assert found.target == tail_target(found.ceiling)
    with pytest.raises(ValueError, match=r"target=1\.1000 is above the ceiling: even a dense sampler reaches 1\.0000"):
        calibrate(sweep(policy, tmp_path), METHOD, BUDGETS[-1:], BINNING, target=1.1)
    with pytest.raises(ValueError, match="above the ceiling"):
        calibrate(sweep(policy, tmp_path / "new"), METHOD, BUDGETS, BINNING, target=1.1)
    assert [path.name for path in (tmp_path / "new").iterdir() if path.is_dir()] == ["dense"]  # nothing swept for it
    for target in (math.nan, -3.0):
        with pytest.raises(ValueError, match=r"^target must be"):
            calibrate(sweep(policy, tmp_path / "none"), METHOD, BUDGETS, BINNING, target=target)
    assert not (tmp_path / "none").exists()


def test_results_replace_links_and_not_what_they_lead_to(policy: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for name in ("schedule.yaml", "table.csv", "calibration.json"):
        (tmp_path / name).symlink_to("mine.txt")
    calibrate(sweep(policy, tmp_path), METHOD, BUDGETS[-1:], BINNING, check=False).write(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert LengthSchedule.from_file(tmp_path / "schedule.yaml").maximum == BUDGETS[-1]


def test_few_tokens_bound_the_tail_from_both_sides(policy: Any, tmp_path: Path) -> None:
    few = SamplingParams(num_generations=3, max_completion_length=30, top_logprobs=4, seed=2)
    bounded = calibrate(sweep(policy, tmp_path / "few", params=few), METHOD, (8,), BINNING, target=0.1, check=False)
    exact = calibrate(sweep(policy, tmp_path / "all"), METHOD, (8,), BINNING, target=0.1, check=False)
    pairs = [(b, e) for b, e in zip(bounded.table[8], exact.table[8], strict=True) if e is not None]
    assert len(pairs) > 2
    for bound, own in pairs:
        assert bound.tail - 1e-6 <= own.tail <= bound.tail_upper + 1e-6
    assert any(bound.tail < own.tail - 1e-3 for bound, own in pairs)


def test_retrieval_is_calibrated_alike(policy: Any, tmp_path: Path) -> None:
    """Budgets in pages; with all pages read the tail is the ceiling; alone and on top of an evicting cache."""
    method = Centroid(16, page_size=4, num_dense_layers=0)
    found = calibrate(sweep(policy, tmp_path / "alone"), method, (12, 16, 24, 48), BINNING, target=0.6)
    known = [(cells[0], cells[-1]) for cells in zip(*found.table.values(), strict=True) if cells[0] is not None]
    assert all(whole.tail == pytest.approx(1, abs=1e-4) for _, whole in known)
    assert min(few.tail for few, _ in known) < 0.6
    for number, budget in enumerate(found.choice.budgets):
        cells = {b: own[number] for b, own in found.table.items() if own[number] is not None}
        if cells:
            assert budget == min(b for b, own in cells.items() if own.tail >= 0.6)
    hybrid = sweep(policy, tmp_path / "hybrid", keeps=SnapKV(20, buffer=4, num_sinks=1, window=3))
    both = calibrate(hybrid, method, (48,), BINNING, target=0.1, check=False)
    assert min(own.tail for own in both.table[48] if own is not None) < 0.9
    with pytest.raises(ValueError, match="another method"):
        sweep(policy, tmp_path / "hybrid").claim(method)
    with pytest.raises(ValueError, match="page_size=4 does not divide budget=18"):
        calibrate(hybrid, method, (18,), BINNING)


def test_a_sweep_goes_on_where_it_was(policy: Any, tmp_path: Path) -> None:
    whole = calibrate(sweep(policy, tmp_path / "whole"), METHOD, BUDGETS[:2], BINNING, target=0.8)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    lost = [tmp_path / "cut/budget_12/part_0001.safetensors", tmp_path / "cut/dense/part_0000.safetensors"]
    kept = tmp_path / "cut/budget_8/part_0000.safetensors"
    for path in lost:
        path.unlink()
    stamp = kept.stat().st_mtime_ns
    again = calibrate(sweep(policy, tmp_path / "cut"), METHOD, BUDGETS[:2], BINNING, target=0.8)
    assert again == whole
    assert kept.stat().st_mtime_ns == stamp, "a finished part was drawn again"
    assert all(path.exists() for path in lost)
    # more budgets, other bins and another target use what is there
    more = calibrate(sweep(policy, tmp_path / "cut"), METHOD, BUDGETS[:3], Binning(4, 10), target=0.7, check=False)
    assert set(more.table) == set(BUDGETS[:3])
    assert kept.stat().st_mtime_ns == stamp


def test_parts_that_are_damaged_are_made_anew(policy: Any, tmp_path: Path) -> None:
    """As a full disk or a copy that was cut off leaves them: each ended the command until someone removed it."""
    whole = calibrate(sweep(policy, tmp_path), METHOD, BUDGETS, BINNING, target=0.8).summary()
    first, second, *_ = sorted(tmp_path.glob("*/part_*.safetensors"))
    for content in (b"", first.read_bytes()[:-3], b"no tensors", save({"lengths": torch.zeros(1)})):
        first.write_bytes(content)
        second.write_bytes(content)
        assert calibrate(sweep(policy, tmp_path), METHOD, BUDGETS, BINNING, target=0.8).summary() == whole


def test_parts_of_something_else_are_refused(policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(policy, tmp_path).claim(METHOD)
    other = tiny_model(vocab_size=32, initializer_range=0.2, eos_token_id=None, seed=1)
    for wrong, method, what in [
        (sweep(other, tmp_path), METHOD, "policy"),
        (sweep(policy, tmp_path, prompts=PROMPTS[1:]), METHOD, "prompts"),
        (sweep(policy, tmp_path), SnapKV(12, buffer=4, num_sinks=1, window=3), "method"),
        (sweep(policy, tmp_path, params=SamplingParams(top_logprobs=32)), METHOD, "sampling"),
        (sweep(policy, tmp_path, sampler_options={"head_in_float32": True}), METHOD, "sampling"),
    ]:
        with pytest.raises(ValueError, match=rf"fingerprint.json is of another {what}\. Choose another folder"):
            wrong.claim(method)
    monkeypatch.setattr("sparse_rl_lightning.calibration.sweep.__version__", "a later one")
    with pytest.raises(ValueError, match="another version"):
        sweep(policy, tmp_path).claim(METHOD)


def test_progress_is_told_from_none_to_all(policy: Any, tmp_path: Path) -> None:
    told: list[float] = []
    calibrate(sweep(policy, tmp_path), METHOD, (8, 12), BINNING, 0.5, progress=lambda name, done: told.append(done))
    assert told == sorted(told)
    assert told[0] < 1 < told[-1] == 4  # dense, two budgets, the schedule


def cell(value: float) -> Cell:
    return Cell(100, value, value, value, value, value, value)


def test_bins_without_data_follow_the_next_known_one() -> None:
    table = {8: [None, cell(0.9), None, cell(0.5), None], 16: [None, cell(0.95), None, cell(0.85), None]}
    found = choose(table, 0.8, bin_size=10)
    assert found.budgets == [8, 8, 16, 16, 16]
    assert found.schedule == LengthSchedule([0, 20], [8, 16])
    assert found.notes == [
        "lengths 0 to 9: too few tokens, so budget 8 of lengths 10 to 19.",
        "lengths 20 to 29: too few tokens, so budget 16 of lengths 30 to 39.",
        "lengths 40 to 49: too few tokens, so budget 16 of lengths 30 to 39.",
    ]
    missed = choose({8: [cell(0.2)], 16: [cell(0.3)]}, 0.8, bin_size=10)
    assert missed.budgets == [16]
    assert "no budget meets the target of 0.8000, the best reaches 0.3000; the largest, 16, is taken" in missed.notes[0]
    with pytest.raises(ValueError, match="no bin of lengths has enough tokens"):
        choose({8: [None, None]}, 0.8, bin_size=10)


def test_a_bin_is_its_lengths() -> None:
    lengths = torch.tensor([7, 8, 15, 16, 16], dtype=torch.int32)
    values = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.6])
    found = Acceptances(lengths, values, values, torch.arange(5, dtype=torch.int32))
    got = cells(found, Binning(bin_size=8, min_tokens=2), num_bins=4)
    assert [None if own is None else own.tokens for own in got] == [None, 2, 2, None]
    assert got[2].tail == pytest.approx(0.4 + 0.05 * 0.2)
    assert got[2].mean == pytest.approx(0.5)


def test_errors_say_what_to_change(policy: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no prompts to calibrate on"):
        sweep(policy, tmp_path, prompts=[])
    with pytest.raises(ValueError, match="top_logprobs must be at least 1"):
        sweep(policy, tmp_path, params=SamplingParams())
    with pytest.raises(ValueError, match=r"whole distribution: min_completion_length=0, top_k=0, top_p=1\.0"):
        sweep(policy, tmp_path, params=SamplingParams(top_logprobs=5, top_p=0.9))
    for budgets, method, message in [
        ((), METHOD, "budgets must be positive"),
        ((0, 8), METHOD, r"budgets=\[0, 8\]"),
        ((8,), FullKV(), "FullKV never evicts"),
        ((3,), METHOD, r"SnapKV: budget=3 is smaller than num_sinks \+ window"),
    ]:
        with pytest.raises(ValueError, match=message):
            calibrate(sweep(policy, tmp_path), method, budgets, BINNING)
    with pytest.raises(ValueError, match="bin_size must be at least 1"):
        Binning(bin_size=0)
    silent = sweep(policy, tmp_path, sampler_options={"end_token_ids": list(range(32))})
    with pytest.raises(ValueError, match=r"dense: all 18 completions are a single token, the end .*chat template"):
        calibrate(silent, METHOD, (8,), BINNING)


@pytest.fixture
def quick(folder: Path) -> str:
    """configs/calibrate.yaml with a random policy, two budgets and a handful of prompts."""
    values = yaml.safe_load((ROOT / "configs/calibrate.yaml").read_text(encoding="utf-8"))
    values |= {
        "policy": {"class_path": "TinyPolicy", "init_args": {"hidden_size": 32, "num_layers": 2}},
        "budgets": [20, 32], "num_prompts": 6, "num_threads": 1,
        "sampling": {"num_generations": 2, "max_completion_length": 30, "top_logprobs": 32},
        "binning": {"bin_size": 4, "min_tokens": 10},
    }  # fmt: skip
    Path("calibrate.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return "calibrate.yaml"


def test_the_shipped_configuration_calibrates(
    quick: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_console(monkeypatch, "calibrate", "--config", quick) is None
    out = capsys.readouterr().out
    names = ("schedule.yaml", "table.csv", "calibration.json", "table.png")
    assert f"Written: {', '.join(f'runs/calibrate/{name}' for name in names)}" in out
    schedule = LengthSchedule.from_file("runs/calibrate/schedule.yaml")
    assert f"Schedule: {schedule!r}" in out
    summary = json.loads(Path("runs/calibrate/calibration.json").read_text())
    assert summary["schedule"] == list(schedule.budgets)
    assert summary["ceiling"] == pytest.approx(1, abs=1e-5)
    rows = list(csv.DictReader(Path("runs/calibrate/table.csv").open()))
    assert {row["budget"] for row in rows} == {"20", "32", "schedule"}
    assert len(rows) == 3 * len(summary["budgets"])
    for row in rows:
        assert (row["chosen"] == "1") == (summary["budgets"][int(row["first_length"]) // 4] == _number(row["budget"]))
    assert Path("runs/calibrate/table.png").read_bytes().startswith(b"\x89PNG")
    finished = {path: path.stat().st_mtime_ns for path in Path("runs/calibrate/parts").rglob("*.safetensors")}
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    assert run_console(monkeypatch, "calibrate", "--config", quick, "--binning.bin_size=8") is None
    assert capsys.readouterr().out.endswith("runs/calibrate/calibration.json\n")
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in finished.items())


def test_rollouts_are_those_of_training(quick: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that say how is computed reach the sampler, and the dense passes beside it."""
    seen = []

    def looked(sweep: Sweep, *_: Any) -> None:
        sampler = sweep._sampler(METHOD)
        seen.extend([sampler.head_in_float32, sampler.decoder_kind, sampler.kv_dtype])
        raise UserError("enough")

    monkeypatch.setattr(Sweep, "acceptances", looked)
    options = ["--rollout.head_in_float32=true", "--rollout.decoder=transformers", "--rollout.kv_dtype=bfloat16"]
    assert run_console(monkeypatch, "calibrate", "--config", quick, *options) == 1
    assert seen == [True, "transformers", torch.bfloat16]


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def test_mistakes_end_with_one_line(
    quick: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in [
        (["--target=2"], "error: target=2.0000 is above the ceiling"),
        (["--compressor=SnapKv"], "Did you mean 'SnapKV'"),
        (["--compressor=null"], "give a compressor or a retriever"),
    ]:
        assert run_console(monkeypatch, "calibrate", "--config", quick, *arguments) in (1, 2)
        err = capsys.readouterr().err
        assert message in err
        assert "Traceback" not in err


def test_the_machine_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sparse_rl_lightning.calibration.hardware.SIZES", {"cpu": (2**22, 128), "cuda": (2**22, 128)})
    assert run_console(monkeypatch, "calibrate", "--hardware", "hardware.json", "--num_layers=2") is None
    found = Hardware.from_file("hardware.json")
    assert 1e7 < found.bandwidth < 1e13
    assert 1e7 < found.flops < 1e15
    assert 1e-5 < found.step_overhead < 10
    assert "ms per decode step of 2 layers without work. Written: hardware.json" in capsys.readouterr().out
    assert run_console(monkeypatch, "calibrate", "--hardware=own.json", "--num_layers=1") is None
    assert Hardware.from_file("own.json").flops > 1e7


def test_sweeps_that_keep_everything_take_what_a_gpu_has_free(tmp_path: Path) -> None:
    params = SamplingParams(max_completion_length=4, top_logprobs=3, seed=1)
    with PretendGPU() as gpu:
        for device, limit in (("cpu", None), ("cuda", OF_FULL_CACHE)):
            policy = tiny_model() if device == "cpu" else gpu.copy_of(tiny_model())
            own = Sweep(policy, [[3, 4]], params, tmp_path / device)
            for method in (FullKV(), Centroid(budget=64, num_dense_layers=1)):
                assert own._sampler(method).memory_limit == limit
            assert own._sampler(SnapKV(budget=16)).memory_limit is None


HORIZON = 5


def texts(seed: int = 0, count: int = 6, vocabulary: int = 97) -> tuple[Tensor, Tensor]:
    """Random ids of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [int(n) for n in torch.randint(8, 24, (count,), generator=generator)]
    return pad([torch.randint(1, vocabulary, (n,), generator=generator).tolist() for n in lengths])


def everything_seen(model: torch.nn.Module, ids: Tensor) -> list[Seen]:
    found: list[Seen] = []
    watch(model, ids, found.append)
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "gpt_oss"])
def test_the_target_is_the_largest_attention_that_transformers_computes(name: str) -> None:
    model = family(name)
    ids, lengths = texts(vocabulary=model.config.get_text_config().vocab_size)
    seen = everything_seen(model, ids)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(ids, attention_mask=torch.ones_like(ids), output_attentions=True).attentions
    compared, geometry = 0, CacheGeometry.of(model)
    for own, attention in zip(seen, attentions, strict=True):
        if geometry.window_of(own.layer):
            continue
        compared += 1
        found, shown = future_attention(own, lengths, HORIZON)
        batch, heads, length, _ = own.query.shape
        group = heads // own.key.shape[1]
        assert found.shape == (batch, heads // group, (length - 1) // HORIZON, length)
        for b in range(batch):
            for place in range(found.shape[2]):
                start, end = (place + 1) * HORIZON, min((place + 2) * HORIZON, int(lengths[b]))
                assert shown[b, place].tolist() == [j < start < int(lengths[b]) for j in range(length)]
                for h in range(heads // group):
                    for j in range(start if end > start else 0):
                        expected = attention[b, h * group : (h + 1) * group, start:end, j].max()
                        assert found[b, h, place, j].item() == pytest.approx(expected.item(), rel=1e-3, abs=1e-6)
    assert compared


def test_numbers_are_centered_where_they_count() -> None:
    numbers = torch.tensor([[[[1.0, 2, 9], [4, 4, 4]]]])
    shown = torch.tensor([[[True, True, False], [False, False, False]]])
    assert centered(numbers, shown).tolist() == [[[[-0.5, 0.5, 0], [0, 0, 0]]]]


def kept_attention(model: torch.nn.Module, network: ScoreNetwork | None, ids: Tensor) -> float:
    """The share of what is looked at next that the best third by a network keeps in new texts, or a third by chance."""
    total = kept = 0.0
    lengths, hidden = torch.full((len(ids),), ids.shape[1]), list[Tensor]()
    with attention_inputs(model, hidden.append):
        seen = everything_seen(model, ids)
    for layer, own in enumerate(seen):
        attention = future_attention(own, lengths, HORIZON)[0][:, :, -1]
        count = (ids.shape[1] - 1) // HORIZON * HORIZON
        score = torch.rand((*attention.shape[:2], count), generator=torch.Generator().manual_seed(layer))
        if network is not None:
            with torch.no_grad():
                age = torch.log1p((count - 1 - torch.arange(count)).float())
                worth = network(layer, own.key, own.value, hidden[layer])[..., :count]
                score = worth - network.recency[layer][:, None] * age
        best = score.topk(count // 3, dim=-1).indices
        total += float(attention[..., :count].sum())
        kept += float(attention.gather(-1, best).sum())
    return kept / total


def test_it_foresees_new_texts_and_leaves_the_policy_alone(tmp_path: Path) -> None:
    """Texts of few tokens, some of which all others look at: what a token's own states tell."""
    model = tiny_model(vocab_size=12, initializer_range=0.5).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids, lengths = texts(count=32, vocabulary=12)
    network, explained = imitate_attention(model, ids, lengths, horizon=HORIZON, epochs=12, seed=1)
    assert explained > 0.1
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    unseen = torch.randint(1, 12, (16, 21), generator=torch.Generator().manual_seed(9))
    assert kept_attention(model, network, unseen) > kept_attention(model, None, unseen) + 0.07
    save_network(network, tmp_path / "network.safetensors")
    learned = LearnedScore(budget=8, buffer=4, weights=str(tmp_path / "network.safetensors"), num_sinks=0, window=2)
    rollout = RolloutSampler(model.eval(), learned).generate([[3, 4, 5]], SamplingParams(max_completion_length=30))
    off = (replay_logprobs(model, rollout) - rollout.sampler_logprobs).abs().max()
    assert off < 1e-4


def test_the_same_seed_gives_the_same_network() -> None:
    model, (ids, lengths) = tiny_model(), texts()
    one, two, other = (imitate_attention(model, ids, lengths, horizon=4, epochs=1, seed=s)[0] for s in (1, 1, 2))
    assert torch.equal(one.key, two.key)
    assert not torch.equal(one.key, other.key)


def test_texts_up_to_the_horizon_teach_nothing() -> None:
    model, (ids, lengths) = tiny_model(), texts()
    short = pad([[5] * 4])
    longer = torch.zeros(len(ids) + 1, ids.shape[1], dtype=ids.dtype)
    longer[:-1] = ids
    longer[-1, :4] = short[0][0]
    alone, _ = imitate_attention(model, ids, lengths, horizon=4, epochs=1, seed=1)
    beside, _ = imitate_attention(model, longer, torch.cat([lengths, short[1]]), horizon=4, epochs=1, seed=1)
    assert torch.equal(alone.key, beside.key)
    with pytest.raises(ValueError, match=r"longest text has 4 tokens, .* LearnedScore learns from begins behind 4"):
        imitate_attention(model, *short, horizon=4)
    with pytest.raises(ValueError, match="The longest text has 0 tokens"):
        imitate_attention(model, torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))


def test_windows_in_all_layers_count_beyond_their_length() -> None:
    """Up to there rollouts evict from them, so the network learns them; beyond nothing is left to evict from."""
    model = family("mistral", sliding_window=30)
    ids, lengths = texts(vocabulary=model.config.vocab_size)
    network, explained = imitate_attention(model, ids, lengths, horizon=4, epochs=4)
    assert 0 < explained < 1
    assert network.outer.abs().sum(dim=(1, 2)).min() > 0, "a layer has learned nothing"
    with pytest.raises(ValueError, match="no layer is left for LearnedScore"):
        imitate_attention(family("mistral", sliding_window=8), ids, lengths, horizon=4)


@pytest.mark.parametrize("name", ["width", "horizon", "epochs", "batch_size", "learning_rate"])
def test_sizes_are_checked(name: str) -> None:
    ids, lengths = texts()
    with pytest.raises(ValueError, match=f"imitate_attention.*{name}|{name}.*imitate_attention"):
        imitate_attention(tiny_model(), ids, lengths, **{name: 0})
