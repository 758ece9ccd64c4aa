"""The tail of the acceptance by length bin: against numpy, over updates and two real ranks, and where there is none."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparse_rl_lightning.metrics import AcceptanceTail, SampledAcceptanceTail

ACCURACY, SMALLEST = 0.005, 1e-7
SIZES: dict[str, Any] = {"bin_size": 4, "num_bins": 4}


def batch(seed: int, rows: int = 5, width: int = 21) -> tuple[Tensor, Tensor]:
    """Acceptance (B, T) with a tail, and ragged completion masks behind prompts."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.arange(width)
    starts, ends = (torch.randint(1, width, (rows, 1), generator=generator) for _ in range(2))
    touched = torch.rand(rows, width, generator=generator) < 0.6
    values = torch.where(touched, torch.rand(rows, width, generator=generator) ** 0.1, 1.0)
    return values, (index >= starts) & (index < torch.maximum(ends, starts + 1))


def expected(batches: list[tuple[Tensor, Tensor]], quantile: float = 0.05) -> dict[str, Any]:
    """The same by the book: lists and numpy."""
    bins: list[list[float]] = [[] for _ in range(4)]
    for values, mask in batches:
        for row, t in mask.nonzero().tolist():
            bins[min(t // 4, 3)].append(float(values[row, t]))
    every = [value for own in bins for value in own]
    return {
        "tail": [np.percentile(own, 100 * quantile) if own else math.nan for own in bins],
        "tokens": [len(own) for own in bins],
        "tail_all": np.percentile(every, 100 * quantile),
        "mean": np.mean(every),
        "near_one": np.mean(np.array(every) > 0.999),
    }


def assert_agrees(found: dict[str, Tensor], want: dict[str, Any]) -> None:
    assert found["tokens"].tolist() == want["tokens"]
    pairs = zip([*found["tail"].tolist(), float(found["tail_all"])], [*want["tail"], want["tail_all"]], strict=True)
    for got, exact in pairs:
        assert math.isnan(got) == math.isnan(exact)
        assert math.isnan(got) or abs(got - exact) <= ACCURACY * (1 - exact) + SMALLEST
    assert float(found["mean"]) == pytest.approx(want["mean"], rel=1e-6)
    assert float(found["near_one"]) == pytest.approx(want["near_one"], rel=1e-6)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=4), st.sampled_from([0.0, 0.05, 0.5, 1.0]))
def test_the_tail_is_numpys_over_several_updates(seeds: list[int], quantile: float) -> None:
    metric, batches = AcceptanceTail(**SIZES, quantile=quantile), [batch(seed) for seed in seeds]
    for values, mask in batches:
        metric.update(values, mask)
    assert_agrees(metric.compute(), expected(batches, quantile))


def test_ranks_merge_states_survive_pickling_and_reset() -> None:
    batches = [batch(seed) for seed in range(5)]
    here, there = AcceptanceTail(**SIZES), AcceptanceTail(**SIZES)
    for own in batches[:2]:
        here.update(*own)
    for own in batches[2:]:
        there.update(*own)
    here.merge_state(pickle.loads(pickle.dumps(there)))
    assert_agrees(here.compute(), expected(batches))
    here.reset()
    here.update(*batches[0])
    assert_agrees(here.compute(), expected(batches[:1]))
    assert_agrees(here(*batches[1]), expected(batches[1:2]))  # forward: of this update
    assert_agrees(here.compute(), expected(batches[:2]))


def of_rank(rank: int, folder: str) -> None:
    """One of two processes: its own batches, then what both see together."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    metric = AcceptanceTail(**SIZES)
    for seed in (0, 1, 2) if rank else (3,):
        metric.update(*batch(seed))
    found = metric.compute()
    assert int(metric.counts.sum()) == sum(int(batch(seed)[1].sum()) for seed in ((0, 1, 2) if rank else (3,)))
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_reduce_to_the_same_numbers(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(of_rank, (str(tmp_path),), nprocs=2, start_method="fork")
    want = expected([batch(seed) for seed in range(4)])
    for rank in range(2):
        assert_agrees(torch.load(tmp_path / f"rank{rank}.pt"), want)


def test_bins_by_tokens_before_and_their_names() -> None:
    metric = AcceptanceTail()
    assert metric.bin_names[:2] == ["0-2000", "2000-4000"]
    assert metric.bin_names[-1] == "38000+"
    assert len(metric.bin_names) == 20
    mask = torch.zeros(1, 90_000, dtype=torch.bool)
    for t, value in ((1999, 0.25), (2000, 0.5), (89_999, 0.75)):
        mask[0, t] = True
        metric.update(torch.full(mask.shape, value), mask)
        mask[0, t] = False
    found = metric.compute()
    named = dict(zip(metric.bin_names, found["tail"].tolist(), strict=True))
    assert {name: value for name, value in named.items() if value == value} == {
        "0-2000": pytest.approx(0.25, abs=0.004),
        "2000-4000": pytest.approx(0.5, abs=0.003),
        "38000+": pytest.approx(0.75, abs=0.002),
    }


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_nothing_seen_is_nan_and_no_error() -> None:
    found = AcceptanceTail(**SIZES).compute()
    assert found["tokens"].tolist() == [0] * 4
    assert all(bool(found[name].isnan().all()) for name in ("tail", "tail_all", "mean", "near_one"))


def test_the_sampled_tokens_have_a_class_of_their_own() -> None:
    generator = torch.Generator().manual_seed(1)
    _, mask = batch(7)
    dense, sparse = (-3 * torch.rand(mask.shape, generator=generator) for _ in range(2))
    metric = SampledAcceptanceTail(**SIZES)
    metric.update(dense, sparse, mask)
    assert_agrees(metric.compute(), expected([((dense - sparse).exp().clamp(max=1), mask)]))


def test_what_is_not_finite_is_refused_where_it_counts() -> None:
    values, mask = batch(0)
    values[~mask] = math.nan
    metric = AcceptanceTail(**SIZES)
    metric.update(values, mask)
    values[mask.nonzero()[0, 0], mask.nonzero()[0, 1]] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        metric.update(values, mask)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"bin_size": 0}, "bin_size=0"), ({"num_bins": 0}, "num_bins=0"), ({"quantile": 2.0}, "quantile=2.0")],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AcceptanceTail(**options)
