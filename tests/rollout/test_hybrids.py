"""Hybrids: linear-attention layers with a state per slot, beside full attention that is evicted from."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from closeness import assert_same_logprobs
from packaging.version import Version
from rollouts import PROMPTS, SMALL, assert_replayed, roll_out
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from sparse_rl_lightning.cache.linear_states import LinearStates, recur_pieces, recur_rows
from sparse_rl_lightning.compressors import RKV, FullKV, SnapKV
from sparse_rl_lightning.learner.forward import Learner, LearnerOptions
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.policies.support import attention_modules, cache_layer
from sparse_rl_lightning.records import NEVER, Rollout
from sparse_rl_lightning.retrievers import Quest
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.rollout.teacher_forcing import forced_rollout
from tests.families import family

PARAMS = SamplingParams(num_generations=2, max_completion_length=30, seed=5)
each_hybrid = pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next"])


def full_states(model: PreTrainedModel, text: Tensor) -> LinearStates:
    """The states that transformers' own cache holds after a text."""
    with torch.no_grad():
        layers = model(input_ids=text[None], use_cache=True).past_key_values.layers
    linear = [layer for layer in layers if hasattr(layer, "recurrent_states")]
    return LinearStates(*(torch.stack([getattr(layer, f"{part}_states")[0] for layer in linear]) for part in
                          LinearStates.content))  # fmt: skip


def last_states(sampler: RolloutSampler) -> LinearStates:
    states = sampler.cache.storage(LinearStates)
    assert states is not None
    return states


def test_pools_and_deaths_are_of_the_full_layers_alone() -> None:
    model = family("qwen3_5_text")
    assert [module.layer_idx for module in attention_modules(model)] == [3, 5]
    assert [cache_layer(module) for module in attention_modules(model)] == [0, 1]
    g = CacheGeometry.of(model)
    assert (g.num_layers, g.head_dim, 2 * len(g.inv_freq)) == (2, 256, 64)
    assert g.linear.num_layers == 4
    rollout = roll_out(model, RKV(**SMALL), params=PARAMS)
    assert rollout.evictions.death.shape[0] == 2
    assert all(bool((layer < NEVER).any()) for layer in rollout.evictions.death)


@each_hybrid
def test_a_state_is_that_of_transformers_after_the_same_tokens(name: str) -> None:
    """Prompts of one token, of fewer than the convolution sees, in chunks, of a group, and decode steps."""
    model = family(name)
    for limit in (1024, 16):
        sampler = RolloutSampler(model, FullKV(), max_prefill_tokens=limit, end_token_ids=[])
        rollout = sampler.generate(PROMPTS, PARAMS)
        for row, (prompt, kept) in enumerate(zip(rollout.prompt_lengths, rollout.sequences, strict=True)):
            want = full_states(model, kept[: int(prompt) + 29])  # the last token drawn was not fed
            for own, other in zip(last_states(sampler).tensors, want.tensors, strict=True):
                torch.testing.assert_close(own[:, row], other[:, 0], atol=2e-5, rtol=1e-3)


def test_replay_is_exact_at_the_sizes_of_a_checkpoint() -> None:
    """States of 2 MiB, and a text of several of the chunks in which the learner reads."""
    sizes: dict[str, Any] = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
                             "linear_value_head_dim": 128}  # fmt: skip
    kinds = ["linear_attention", "full_attention"]
    model = family("qwen3_5_text", **sizes, layer_types=kinds, num_hidden_layers=2)
    prompt = [index * 7919 % 120 + 3 for index in range(110)]
    params = SamplingParams(max_completion_length=40, seed=1)
    sampler = RolloutSampler(model, RKV(**SMALL | {"budget": 64}), max_prefill_tokens=90, end_token_ids=[])
    rollout = sampler.generate([prompt], params)
    assert rollout.completion_lengths.tolist() == [40]
    assert_replayed(model, rollout)


def spoil_fork(states: LinearStates, sources: Tensor, destinations: Tensor) -> None:
    states.recurrent[:, destinations] = 0


def spoil_clear(states: LinearStates, places: Tensor) -> None:
    """Leaves what the last sequence in the slot left."""


def spoil_save(states: LinearStates, place: int, length: int) -> dict[str, Tensor]:
    return {name: torch.zeros_like(getattr(states, name)[:, place]) for name in LinearStates.content}


@pytest.mark.parametrize(("name", "spoilt"), [("fork", spoil_fork), ("begin", spoil_clear), ("save", spoil_save)])
def test_exactness_needs_each_of_fork_begin_and_save(
    name: str, spoilt: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family("qwen3_5_text")
    monkeypatch.setattr(LinearStates, name, spoilt)
    rollout = RolloutSampler(model, RKV(**SMALL), 4).generate(PROMPTS, PARAMS)
    with torch.no_grad():
        assert float((replay_logprobs(model, rollout) - rollout.sampler_logprobs).abs().max()) > 1e-2


def test_a_sequence_is_the_same_alone_and_beside_others_to_the_bit() -> None:
    """Products of torch 2.11 round a row as those beside it have it: 1.4e-6, and no token changes (docs/models.md)."""
    last_bits = 5e-6 if Version(torch.__version__) < Version("2.12") else 0
    model = family("qwen3_5_text")
    sampler = RolloutSampler(model, SnapKV(**SMALL))
    both = sampler.generate(PROMPTS, PARAMS)
    alone = sampler.generate(PROMPTS[3:4], PARAMS, sequence_ids=[6, 7])
    width = alone.sequences.shape[1]
    assert torch.equal(both.sequences[6:8, :width], alone.sequences)
    torch.testing.assert_close(both.sampler_logprobs[6:8, :width], alone.sampler_logprobs, atol=last_bits, rtol=0)


@each_hybrid
def test_a_neighbour_changes_nothing_in_the_learner(name: str) -> None:
    """Sequences of a micro-batch lie below each other, right-padded, however they were packed."""
    model = family(name)
    rollout = roll_out(model, RKV(**SMALL), params=PARAMS)
    changed = copy.deepcopy(rollout)
    changed.sequences[:6] = changed.sequences[:6].flip(1) % 100 + 3
    for options in (LearnerOptions(), LearnerOptions(micro_batch_tokens=150), LearnerOptions(micro_batch_tokens=400)):
        for learner in (Learner(options), Learner(options, replays=True)):
            with torch.no_grad():
                want, other = (learner.logprobs(model, part)[0][6:8] for part in (rollout, changed))
                alone = learner.logprobs(model, rollout[torch.tensor([6, 7])])[0]
            torch.testing.assert_close(other, want, atol=0, rtol=0)
            torch.testing.assert_close(alone, want, atol=1e-5, rtol=0)


def gradients(model: PreTrainedModel, rollout: Rollout, options: LearnerOptions) -> list[Tensor]:
    model = copy.deepcopy(model).train()
    learner = Learner(options, replays=True)
    learner.prepare(model)
    learner.logprobs(model, rollout)[0].sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_checkpointed_and_packed_gradients_are_those_of_one_pass() -> None:
    model = family("qwen3_5_text")
    rollout = roll_out(model, RKV(**SMALL), params=PARAMS)
    want = gradients(model, rollout, LearnerOptions())
    assert len(want) == len(list(model.parameters())), "linear layers have gradients"
    for options in (LearnerOptions(gradient_checkpointing=True), LearnerOptions(micro_batch_tokens=150)):
        for own, other in zip(gradients(model, rollout, options), want, strict=True):
            torch.testing.assert_close(own, other, atol=1e-3, rtol=1e-3)


def test_states_stand_in_the_plan_and_go_with_the_pool() -> None:
    model, params = family("qwen3_5_text"), SamplingParams(max_completion_length=2)
    sizes = CacheGeometry.of(model).linear
    sampler = RolloutSampler(model, SnapKV(**SMALL), 4, keep_pool=False, memory_limit=2**22)
    sampler.generate(PROMPTS, params)
    assert sampler.cache is None
    sampler.keep_pool = True
    sampler.generate(PROMPTS, params)
    states = last_states(sampler)
    assert sum(tensor.nbytes for tensor in states.tensors) == 5 * sizes.nbytes, "four slots, and a row for padding"
    assert sizes.nbytes == 4 * (80 * 4 + 4 * 8 * 12) * 4
    before = [tensor.data_ptr() for tensor in states.tensors]
    sampler.generate(PROMPTS, params)
    assert [tensor.data_ptr() for tensor in last_states(sampler).tensors] == before, "allocated once"
    tokens = sizes.nbytes // (4 * 2 * 256 * 4)
    said = rf"11,264 for linear attention \(4 layers; as much as .* of {tokens} tokens\)"
    with pytest.raises(ValueError, match=said):
        RolloutSampler(model, SnapKV(**SMALL), memory_limit=1000).generate(PROMPTS, params)


def test_a_parked_prompt_is_counted_with_its_states() -> None:
    model = family("qwen3_5_text")
    sizes = CacheGeometry.of(model).linear
    params = SamplingParams(num_generations=3, max_completion_length=2)
    few, many = (RolloutSampler(model, FullKV(), slots).generate([PROMPTS[3]], params).kv for slots in (2, 3))
    entries = 2 * 2 * 2 * 256 * 4 * len(PROMPTS[3])  # full layers, KV heads, key and value, head dimension, bytes
    assert few.prefill_peak_bytes - many.prefill_peak_bytes == entries + sizes.nbytes


def test_a_decoder_that_is_kept_holds_no_states() -> None:
    sampler = RolloutSampler(family("qwen3_5_text"), SnapKV(**SMALL), 4)
    sampler.generate(PROMPTS, PARAMS)
    assert sampler.engine is not None
    decoder = sampler.engine.decoder
    own = [StorageWeakRef(tensor.untyped_storage()) for tensor in last_states(sampler).tensors]
    assert not any(storage.expired() for storage in own)
    sampler.release()
    gc.collect()
    assert all(storage.expired() for storage in own)
    assert decoder.decoder_kind == "transformers"


@each_hybrid
def test_texts_and_pages_are_followed_too(name: str) -> None:
    model = family(name)
    rollout = roll_out(model, RKV(**SMALL), params=PARAMS)
    forced = forced_rollout(model, rollout, RKV(**SMALL), seed=5)
    assert_same_logprobs(forced.sampler_logprobs, rollout.sampler_logprobs)
    quest = Quest(budget=16, page_size=4, num_dense_layers=0)
    read = RolloutSampler(model, FullKV(), retriever=quest).generate(PROMPTS, PARAMS)
    with torch.no_grad():
        followed = Learner(LearnerOptions(), retriever=quest, replays=True).logprobs(model, read)[0]
    assert_same_logprobs(followed, read.sampler_logprobs)


def test_rows_go_on_from_their_own_places() -> None:
    """Whatever the layer computes: here it counts tokens, and says what it found."""

    def run(hidden: Tensor, conv: Tensor, recurrent: Tensor) -> Tensor:
        found = recurrent[:, 0, 0, 0].clone()
        recurrent += hidden.shape[1]
        conv.copy_(hidden[:, -1:, :1].transpose(1, 2).expand_as(conv))
        return found[:, None, None].expand(*hidden.shape[:2], 1)

    states = LinearStates(torch.zeros(2, 4, 1, 2), torch.zeros(2, 4, 1, 1, 1))
    hidden = torch.arange(8.0).view(1, 8, 1)
    first = recur_pieces(states, [(2, 3), (0, 1)], 1, hidden, run)
    second = recur_rows(states, torch.tensor([0, 2, 3]), 1, hidden[:, :3], run)
    assert first.flatten().tolist() == [0.0] * 8
    assert second.flatten().tolist() == [1, 3, 0]
    assert states.recurrent[1].flatten().tolist() == [2, 0, 4, 1]
    assert states.conv[1, :, 0, 0].tolist() == [0, 0, 1, 2]
    assert not states.recurrent[0].any()
