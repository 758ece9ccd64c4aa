"""EvictionRecord: its compact form says exactly what the dense tensor says, however it is cut, joined and stored."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparse_rl_lightning.compressors import RKV
from sparse_rl_lightning.records import NEVER, EvictionRecord
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.testing import tiny_model


@st.composite
def deaths(draw: st.DrawFn) -> Tensor:
    """(L, B, H, T) of random deaths: none, few distinct or many distinct ones, small and large numbers."""
    shape = [draw(st.integers(1, size)) for size in (3, 5, 3, 40)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    top = draw(st.sampled_from([2, 50, 40_000, 2_000_000]))
    death = torch.randint(1, top, shape, generator=generator, dtype=torch.int32)
    alive = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
    return death.masked_fill(alive, NEVER)


@given(deaths())
def test_round_trip(death: Tensor) -> None:
    record = EvictionRecord.from_dense(death)
    assert torch.equal(record.death, death)
    assert record.death.dtype == torch.int32
    assert record.num_dead.tolist() == (death != NEVER).sum(dim=(0, 2, 3)).tolist()
    file = io.BytesIO()
    torch.save(dict(vars(record)), file)
    file.seek(0)
    assert torch.equal(EvictionRecord(**torch.load(file, weights_only=True)).to("cpu").death, death)


@given(deaths(), st.data())
def test_slicing_commutes(death: Tensor, data: st.DataObject) -> None:
    record, batch = EvictionRecord.from_dense(death), death.shape[1]
    rows = torch.tensor(data.draw(st.lists(st.integers(0, batch - 1), max_size=7)), dtype=torch.int64)
    chosen = torch.tensor(data.draw(st.lists(st.booleans(), min_size=batch, max_size=batch)))
    start, stop = data.draw(st.integers(-6, 6)), data.draw(st.integers(-6, 6))
    for index in (rows, chosen, slice(start, stop), slice(None, None, 2)):
        part = record[index]
        assert torch.equal(part.death, death[:, index])
        assert torch.equal(EvictionRecord.from_dense(death[:, index]).death, part.death)


@given(deaths(), st.integers(0, 5), st.integers(0, 9))
def test_joining_gives_the_whole_back(death: Tensor, cut: int, shorter: int) -> None:
    record = EvictionRecord.from_dense(death)
    assert torch.equal(EvictionRecord.cat([record[:cut], record[cut:]]).death, death)
    length = max(1, death.shape[-1] - shorter)
    joined = EvictionRecord.cat([record, EvictionRecord.from_dense(death[..., :length])]).death
    assert torch.equal(joined[:, : death.shape[1]], death)
    assert torch.equal(joined[:, death.shape[1] :, :, :length], death[..., :length])
    assert bool((joined[:, death.shape[1] :, :, length:] == NEVER).all())


def test_records_of_different_models_are_not_joined() -> None:
    records = [EvictionRecord.from_dense(torch.full((layers, 1, 2, 3), NEVER)) for layers in (1, 2)]
    with pytest.raises(ValueError, match="same layers and KV heads"):
        EvictionRecord.cat(records)


@pytest.mark.parametrize(("length", "dtype"), [(32_768, torch.int16), (32_769, torch.int32)])
def test_positions_are_as_narrow_as_they_fit(length: int, dtype: torch.dtype) -> None:
    death = torch.full((1, 1, 1, length), NEVER)
    death[..., -1] = 7
    record = EvictionRecord.from_dense(death)
    assert (record.positions.dtype, record.steps.dtype, record.counts.dtype) == (dtype, torch.int16, torch.int16)
    assert torch.equal(record.death, death)


def test_size_is_two_bytes_per_dead_token_and_one_number_per_compression_and_head() -> None:
    layers, batch, heads, length, buffer = 4, 3, 2, 4096, 128
    token = torch.arange(length, dtype=torch.int32)
    death = ((token // buffer + 5) * buffer).where(token < length - 4 * buffer, NEVER)  # a sliding window
    record = EvictionRecord.from_dense(death.expand(layers, batch, heads, length))
    events, sequences = (length - 4 * buffer) // buffer, layers * batch * heads
    assert record.nbytes == sequences * (2 * (length - 4 * buffer) + 2 * events) + batch * (2 * events + 2 * 8)
    assert record.dense_nbytes == record.death.nbytes == 4 * sequences * length
    assert record.nbytes < 0.45 * record.dense_nbytes


def test_a_rollout_carries_its_record_everywhere() -> None:
    model = tiny_model(initializer_range=0.2, eos_token_id=None)
    sampler = RolloutSampler(model, RKV(budget=12, buffer=5, num_sinks=1, window=3), num_slots=2)
    rollout = sampler.generate(
        [list(range(3, 20)), [4, 5]], SamplingParams(num_generations=2, max_completion_length=30)
    )
    death = rollout.evictions.death
    assert death.shape == (2, 4, 2, rollout.sequences.shape[1])
    assert bool((death != NEVER).any())
    index = torch.tensor([3, 0])
    part = rollout[index].to("cpu")
    assert torch.equal(part.evictions.death, death[:, index])
    assert torch.equal(type(rollout).from_state(part.state()).evictions.death, death[:, index])


@pytest.mark.parametrize(("length", "kind"), [(2**15 - 1, torch.int16), (2**15, torch.int32)])
def test_a_short_sequence_is_recorded_in_16_bits(length: int, kind: torch.dtype) -> None:
    death = torch.full((1, 1, 1, length), NEVER, dtype=torch.int32)
    death[0, 0, 0, 3] = 7
    record = EvictionRecord.of_sequence(death, torch.tensor([7]), 1)
    assert (record.positions.dtype, record.counts.dtype) == (kind, kind)
    assert torch.equal(record.death, death)
