"""DESIGN property 7.2: the learner finds the sampler's log-probs again, for every compressor and budget rule."""

from __future__ import annotations

import functools
import inspect
import io
import itertools
from typing import Any

import pytest
import torch
from closeness import assert_same_logprobs
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparse_rl_lightning import compressors
from sparse_rl_lightning.budgets import Adaptive, BudgetRule, Pyramid
from sparse_rl_lightning.calibration import gather_statistics
from sparse_rl_lightning.compressors import RKV, FullKV, QueryStatistics, SnapKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.learner.checkpointing import checkpoint_layers
from sparse_rl_lightning.learner.forward import Learner, LearnerOptions
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.records import NEVER, EvictionRecord, Rollout
from sparse_rl_lightning.replay import shared_prompts
from sparse_rl_lightning.replay.death_attention import BLOCK, flex_death_attention, sdpa_death_attention
from sparse_rl_lightning.replay.logprobs import replay_statistics
from sparse_rl_lightning.replay.shared_prompts import SharedPrompts, shared_statistics
from sparse_rl_lightning.retrievers import Quest
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.testing import tiny_model
from tests.families import FAMILIES, HYBRIDS, family
from tests.replay.test_death_attention import SCALE, compile_for, inputs

PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 33, 1)]
SIZES: dict[str, Any] = {"budget": 12, "buffer": 5, "num_sinks": 1, "window": 3}
PARAMS = SamplingParams(num_generations=2, max_completion_length=26, temperature=0.9, seed=4)
NOT_ALONE = ("Compressor", "FullKV", "QueryStatistics", "Combined", "LearnedScore", "Smoothed")
EVICTING = sorted(name for name in compressors.__all__ if name not in NOT_ALONE)
RULES: dict[str, BudgetRule | None] = {
    "uniform": None,
    "pyramid": Pyramid(beta=2),
    "adaptive": Adaptive(floor=4),
    "both": Adaptive(floor=4, layers=Pyramid(beta=1.5)),
}


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return tiny_model(initializer_range=0.2, num_layers=3, eos_token_id=None).to(dtype)


def build(name: str, rule: BudgetRule | None = None, **options: Any) -> compressors.Compressor:
    """A compressor by name, with statistics of the test's model where it wants them."""
    cls = getattr(compressors, name)
    if "statistics" in inspect.signature(cls).parameters:
        options["statistics"] = gathered()
    if name == "LagKV":
        options["lag_size"] = 4  # the default is for large slots
    if name in ("RandomAttention", "OldestTurns"):
        options["protect_prompt"] = False  # which is larger than the slot
    return cls(**SIZES, budget_rule=rule, **options)


@functools.cache
def gathered() -> QueryStatistics:
    ids = torch.randint(3, 128, (4, 40), generator=torch.Generator().manual_seed(0))
    return gather_statistics(model(), ids, torch.full((4,), 40))


def roll_out(policy: torch.nn.Module, compressor: compressors.Compressor) -> tuple[Rollout, torch.Tensor, torch.Tensor]:
    """A rollout with its replayed (with gradient) and its dense log-probs; three slots, so refills happen."""
    rollout = RolloutSampler(policy, compressor, num_slots=3).generate(PROMPTS, PARAMS)
    with torch.no_grad():
        dense, _ = sequence_logprobs(policy, rollout.sequences, rollout.completion_mask, 0.9)
    return rollout, replay_logprobs(policy, rollout, 0.9), dense


def assert_exact(compressor: compressors.Compressor) -> Rollout:
    policy = model()
    rollout, replayed, dense = roll_out(policy, compressor)
    assert_same_logprobs(replayed, rollout.sampler_logprobs)
    assert (dense - rollout.sampler_logprobs).abs().max() > 1e-2, "nothing that matters died: this proves nothing"
    replayed.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.parameters())
    return rollout


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("name", "rule"),
    [*((name, "both") for name in EVICTING), *itertools.product(["H2O", "SnapKV"], ["uniform", "pyramid", "adaptive"])],
)
def test_replay_is_exact(name: str, rule: str) -> None:
    death = assert_exact(build(name, RULES[rule])).evictions.death
    died = (death != NEVER).sum(dim=-1)  # layers, sequences, heads
    assert bool((died[0] != died[-1]).any()) == (rule in ("pyramid", "both")) or rule == "adaptive"


@pytest.mark.parametrize("name", ["H2O", "RKV", "SnapKV", "StreamingLLM"])
@pytest.mark.parametrize("rule", ["uniform", "both"])
def test_replay_is_exact_when_the_prompt_is_stored_whole(name: str, rule: str) -> None:
    death = assert_exact(build(name, RULES[rule], compress_prompt=False)).evictions.death
    lengths = torch.tensor([len(prompt) for prompt in PROMPTS]).repeat_interleave(2)
    assert not bool((death == lengths[:, None, None]).any())  # at the end of a prompt nothing died


@pytest.mark.parametrize("name", EVICTING)
def test_replay_in_bfloat16(name: str) -> None:
    """Bound: a log-prob is off by 0.03 on average (logits around 8 are rounded by 2^-6) and 0.25 at most.

    The compression of so small a cache moves it by more than 1.
    """
    rollout, replayed, dense = roll_out(model(torch.bfloat16), build(name, Adaptive(floor=4)))
    mask, sampler = rollout.completion_mask, rollout.sampler_logprobs
    noise, compression = ((own.detach() - sampler)[mask].abs() for own in (replayed, dense))
    assert noise.mean() < 0.03
    assert noise.max() < 0.25
    assert compression.mean() > 20 * noise.mean()


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
    params = SamplingParams(num_generations=2, max_completion_length=30)
    rollout = sampler.generate([list(range(3, 20)), [4, 5]], params)
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


HEAD = (0.9, 16, False)
SHARED = [list(range(5, 26)), [7, 8, 9], [30, 31, 32, 33, 34, 35, 36, 37]]


def drawn(model: Any, compressor: Any = None, **options: Any) -> Rollout:
    sampler = RolloutSampler(model, compressor or SnapKV(12, buffer=4, num_sinks=1, window=3), **options)
    params = SamplingParams(num_generations=3, max_completion_length=24, temperature=0.9, seed=0)
    rollout = sampler.generate(SHARED, params)
    lengths = rollout.completion_lengths
    assert len(set(lengths.tolist())) > 1 or not options, "padding is not tested"
    return rollout


def outcome(model: Any, rollout: Rollout, replays: bool, shared: bool) -> tuple[list[Tensor], Tensor]:
    """Log-probs, entropies and the gradients of a random sum of both; what each token weighs."""
    model.zero_grad()
    torch.manual_seed(1)
    factors = torch.randn(2, *rollout.sequences.shape)
    if shared:
        found = shared_statistics(model, replays, *HEAD, rollout)
    elif replays:
        found = replay_statistics(model, rollout, *HEAD)
    else:
        found = sequence_logprobs(model, rollout.sequences, rollout.completion_mask, *HEAD, rollout.routing)
    (found[0] * factors[0] + found[1] * factors[1]).sum().backward()
    return [*(one.detach() for one in found), *(p.grad for p in model.parameters() if p.grad is not None)], factors


@pytest.mark.thinned(3)
@pytest.mark.parametrize("replays", [False, True], ids=["dense", "replay"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in HYBRIDS])
def test_numbers_and_gradients_are_those_of_separate_sequences(name: str, replays: bool) -> None:
    model = family(name)
    rollout = drawn(model)
    model.train()
    apart, _ = outcome(model, rollout, replays, shared=False)
    together, _ = outcome(model, rollout, replays, shared=True)
    assert len(apart) == len(together)
    for want, got in zip(apart, together, strict=True):
        torch.testing.assert_close(got, want, atol=3e-5 * max(1.0, float(want.abs().max())), rtol=1e-4)
    if replays:
        torch.testing.assert_close(together[0], rollout.sampler_logprobs, atol=2e-4, rtol=0)


def test_in_float64_they_are_the_same_to_its_precision() -> None:
    model = tiny_model(initializer_range=0.2).double()
    rollout = drawn(model)
    for replays in (False, True):
        apart, together = (outcome(model, rollout, replays, shared)[0] for shared in (False, True))
        for want, got in zip(apart[:2], together[:2], strict=True):
            torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    assert not torch.equal(outcome(model, rollout, False, True)[0][0], together[0]), "nothing was evicted"


def test_every_prompt_stands_once() -> None:
    """Also one that two groups have, one that begins another, and one whose samples are apart."""
    sequences = torch.tensor(
        [[3, 4, 5, 9, 9, 0], [3, 4, 7, 9, 9, 9], [3, 4, 5, 8, 0, 0], [3, 4, 5, 8, 8, 8], [3, 4, 5, 9, 9, 9]]
    )
    prompt_lengths = torch.tensor([3, 2, 3, 3, 4])
    lengths = torch.tensor([5, 6, 4, 6, 6])
    at = torch.arange(6)
    mask = (at >= prompt_lengths[:, None]) & (at < lengths[:, None])
    rollout = Rollout(sequences, prompt_lengths, mask, torch.ones(5, dtype=torch.bool), torch.zeros(5, 6))
    shared = SharedPrompts.of(rollout)
    assert shared.rows.tolist() == [0] * 5 + [1] * 6 + [2] + [3] * 3 + [4] * 6
    assert shared.positions.tolist() == [*range(5), *range(6), 3, *range(3, 6), *range(6)]
    row = sequences[shared.rows, shared.positions]
    is_token = at < lengths[:, None]
    assert torch.equal(row[shared.places][is_token], sequences[is_token])
    assert (shared.places[2, :3] == shared.places[0, :3]).all()
    assert not set(shared.places[4].tolist()) & set(shared.places[0].tolist()), "another prompt, though it begins alike"


def test_the_policy_sees_as_many_tokens_as_there_are() -> None:
    model = tiny_model(initializer_range=0.2)
    rollout = drawn(model)
    seen = list[int]()
    model.model.layers[0].register_forward_pre_hook(lambda _module, given: seen.append(given[0].shape[:2].numel()))
    options = LearnerOptions(share_prompts=True)
    for replays in (False, True):
        Learner(options, 0.9, replays=replays).logprobs(model, rollout)
    assert seen == [sum(map(len, SHARED)) + int(rollout.completion_mask.sum())] * 2


def test_attention_knows_where_sequences_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a GPU leaves out the padding of shorter ones."""
    model, ends = tiny_model(initializer_range=0.2), list[Any]()
    rollout, own = drawn(model), shared_prompts.death_attention
    monkeypatch.setattr(shared_prompts, "death_attention", lambda *given: ends.append(given[-1]) or own(*given))
    shared_statistics(model, False, *HEAD, rollout)
    assert [one.tolist() for one in ends] == [rollout.lengths.tolist()] * 2  # layers


@pytest.mark.parametrize("form", [False, True, "selective", "offload"])
@pytest.mark.parametrize("tokens", [None, 60, 1])
def test_parts_and_checkpointing_change_nothing(form: Any, tokens: int | None) -> None:
    model = tiny_model(initializer_range=0.2)
    rollout = drawn(model)
    want, factors = outcome(model, rollout, True, shared=False)
    checkpoint_layers(model, form)
    model.train()
    model.zero_grad()
    learner = Learner(LearnerOptions(tokens, 16, share_prompts=True), 0.9, replays=True)
    found = learner.logprobs(model, rollout)
    (found[0] * factors[0] + found[1] * factors[1]).sum().backward()
    got = [*(one.detach() for one in found), *(p.grad for p in model.parameters() if p.grad is not None)]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=3e-5 * max(1.0, float(other.abs().max())), rtol=1e-4)


def test_recorded_experts_are_those_of_each_token() -> None:
    model = family("qwen3_moe")
    rollout = drawn(model, FullKV(), record_routing=True)
    assert rollout.routing is not None
    rollout.routing = 1 + (rollout.routing + 1) % 8  # others than the routers would choose
    apart, together = (outcome(model, rollout, False, shared)[0] for shared in (False, True))
    torch.testing.assert_close(together[0], apart[0], atol=3e-5, rtol=1e-4)
    rollout.routing = None
    assert (outcome(model, rollout, False, True)[0][0] - apart[0]).abs().max() > 1e-2


@pytest.mark.parametrize("deaths", [True, False])
@pytest.mark.parametrize("asked", [1, BLOCK, BLOCK + 30, 2 * BLOCK + 17])
def test_flex_attention_of_the_last_queries(asked: int, deaths: bool) -> None:
    """Without gradient: on the CPU FlexAttention has none."""
    query, key, value, death = (t.detach() for t in inputs(3 * BLOCK + 17, batch=2))
    given = death if deaths else None
    whole = sdpa_death_attention(query, key, value, given, SCALE)
    for attend in (sdpa_death_attention, lambda *args: flex_death_attention(*args, compiled=False)):
        got = attend(query[:, :, -asked:], key, value, given, SCALE)
        torch.testing.assert_close(got, whole[:, :, -asked:], atol=2e-6, rtol=0)


def test_compiled_flex_attention_of_the_last_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients too, and one kernel for all numbers of queries."""
    compile_for(lambda graph, args: graph.forward, monkeypatch)
    for asked in (BLOCK, BLOCK + 30, 2 * BLOCK + 17):
        *given, death = inputs(3 * BLOCK + 17, width=64)
        last = given[0].detach()[:, :, -asked:].requires_grad_()
        got = flex_death_attention(last, *given[1:], death, SCALE, compiled=True)
        want = sdpa_death_attention(last, *given[1:], death, SCALE)
        torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)
        direction = torch.randn_like(want)
        found = [torch.autograd.grad((one * direction).sum(), (last, *given[1:])) for one in (got, want)]
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a / b.abs().max(), b / b.abs().max(), atol=2e-3, rtol=0)


def test_what_cannot_share_is_refused() -> None:
    learner = Learner(LearnerOptions(share_prompts=True))
    with pytest.raises(UserError, match="share_prompts: this policy has layers with a recurrent state"):
        learner.prepare(family("qwen3_next"))
    retriever = Quest(budget=64)
    with pytest.raises(UserError, match=r"share_prompts: .* chooses pages"):
        Learner(LearnerOptions(share_prompts=True), retriever=retriever).prepare(tiny_model())
