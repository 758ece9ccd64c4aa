"""Rollouts joined, stored and moved to another process: nothing is lost, and bytes from outside run nothing."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from sparse_rl_lightning.compressors import RKV
from sparse_rl_lightning.records import NEVER, Rollout
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.rollout.exchange import broadcast_rollout, from_bytes, gather_rollouts, to_bytes
from sparse_rl_lightning.testing import tiny_model

PROMPTS = [[list(range(3, 20)), [4, 5]], [[9, 8, 7], [6], list(range(30, 41))]]  # of rank 0 and rank 1
LENGTHS = (30, 18)


def model() -> Any:
    return tiny_model(initializer_range=0.2, eos_token_id=None)


def roll_out(rank: int) -> Rollout:
    """What a rank samples, with what a training module adds."""
    sampler = RolloutSampler(model(), RKV(budget=12, buffer=5, num_sinks=1, window=3), num_slots=2)
    params = SamplingParams(num_generations=2, max_completion_length=LENGTHS[rank], top_logprobs=3)
    rollout = sampler.generate(PROMPTS[rank], params)
    count = len(rollout)
    return replace(
        rollout, old_logprobs=rollout.sampler_logprobs - 0.1, keep=rollout.completion_mask.clone(),
        weights=rollout.sampler_logprobs.exp(), advantages=torch.linspace(-1, 1, count), rewards=torch.ones(count),
    )  # fmt: skip


def assert_same(found: Any, expected: Any) -> None:
    """The same state, bit by bit."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_same(found[name], expected[name])
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    else:
        assert found == expected


# ---------------------------------------------------------------- joined


def test_parts_of_a_rollout_give_it_back() -> None:
    whole = roll_out(0)
    assert bool((whole.evictions.death != NEVER).any())
    for cuts in ([1], [2, 3], [1, 2, 3]):
        bounds = [0, *cuts, len(whole)]
        parts = [whole[start:stop] for start, stop in pairwise(bounds)]
        assert_same(Rollout.cat(parts).state(), whole.state())


def test_sequences_of_different_lengths_are_padded() -> None:
    one, other = roll_out(0), roll_out(1)
    joined = Rollout.cat([one, other])
    width = one.sequences.shape[1]
    assert joined.sequences.shape == (len(one) + len(other), width)
    assert other.sequences.shape[1] < width
    assert not bool(joined.completion_mask[len(one) :, other.sequences.shape[1] :].any())
    assert torch.equal(joined.completion_lengths, torch.cat([one.completion_lengths, other.completion_lengths]))
    assert joined.topk_ids.shape == (len(joined), width, 3)
    assert joined.kv.peak_bytes == max(one.kv.peak_bytes, other.kv.peak_bytes)
    assert_same(joined[: len(one)].state() | {"kv": None}, one.state() | {"kv": None})
    replayed = replay_logprobs(model(), joined)
    torch.testing.assert_close(replayed, joined.sampler_logprobs, atol=2e-5, rtol=0)


def test_rollouts_that_know_different_things_are_not_joined() -> None:
    whole = roll_out(0)
    with pytest.raises(ValueError, match=r"must know the same fields, got \['weights'\] in some"):
        Rollout.cat([whole, replace(whole, weights=None)])
    with pytest.raises(ValueError, match="no rollouts"):
        Rollout.cat([])


# ---------------------------------------------------------------- as bytes


class Evil:
    """Something whose reading would run code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_bytes_are_a_rollout_and_nothing_else(tmp_path: Path) -> None:
    whole = roll_out(0)
    assert_same(from_bytes(to_bytes(whole)).state(), whole.state())
    assert len(to_bytes(whole[:1])) < 0.6 * len(to_bytes(whole))  # not the memory that the part is a view of
    trap = tmp_path / "ran"
    torch.save({"sequences": Evil(trap)}, tmp_path / "evil.pt")
    others = [b"", b"nothing", to_bytes(whole)[:500], pickle.dumps(Evil(trap)), (tmp_path / "evil.pt").read_bytes()]
    torch.save({"unknown": 1}, tmp_path / "other.pt")
    for data in (*others, (tmp_path / "other.pt").read_bytes()):
        with pytest.raises(ValueError, match=f"These {len(data)} bytes are no rollout"):
            from_bytes(data)
    assert not trap.exists()


# ---------------------------------------------------------------- two processes


def rank_main(rank: int, folder: str) -> None:
    """What each of the two processes does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        own = roll_out(rank)
        gathered = gather_rollouts(own)
        sent = broadcast_rollout(own if rank == 1 else None, src=1)
    finally:
        dist.destroy_process_group()
    for name, rollout in (("gathered", gathered), ("sent", sent)):
        torch.save(rollout.state(), Path(folder) / f"{name}-{rank}.pt")


def test_evictions_survive_the_way_to_another_rank(tmp_path: Path) -> None:
    mp.spawn(rank_main, (str(tmp_path),), nprocs=2)
    ranks = [roll_out(0), roll_out(1)]
    expected = {"gathered": Rollout.cat(ranks), "sent": ranks[1]}
    for name, want in expected.items():
        for rank in (0, 1):
            found = Rollout.from_state(torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True))
            assert torch.equal(found.evictions.death, want.evictions.death)
            assert found.evictions.nbytes == want.evictions.nbytes < want.evictions.dense_nbytes
            assert_same(found.state(), want.state())
