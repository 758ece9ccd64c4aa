"""Numbers per entry and per head: exact however a prompt is read, and never lost when entries and slots move."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_cases import put_back_midway
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparse_rl_lightning.budgets import Adaptive
from sparse_rl_lightning.cache.slots import SlotCache
from sparse_rl_lightning.compressors import H2O, Combined, Compressor, SnapKV
from sparse_rl_lightning.ops.pools import gather_heads
from sparse_rl_lightning.policies.modes import sampling_mode
from sparse_rl_lightning.records import LayerState, Rollout, StateUpdate
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.testing import check_compressor, tiny_model

DOCS = Path(__file__).resolve().parents[2] / "docs" / "own_compressor.md"
SMALL: dict[str, Any] = {"budget": 12, "buffer": 5, "num_sinks": 2, "window": 4}
PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 9, 40)]
PARAMS = SamplingParams(num_generations=3, max_completion_length=30, seed=3)


def fading() -> type[Compressor]:
    """The class of the documentation's example."""
    (source,) = [code for code in re.findall(r"```python\n(.*?)```", DOCS.read_text("utf-8"), re.S) if "Fading" in code]
    namespace: dict[str, Any] = {"check_compressor": check_compressor}
    exec(source, namespace)
    found: type[Compressor] = namespace["Fading"]
    return found


def attention_of(policy: Any, tokens: Tensor) -> list[Tensor]:
    """(L) of (H, T, T) in float64, summed over the heads of a group: a plain forward pass."""
    before, policy.config._attn_implementation = policy.config._attn_implementation, "eager"
    out = policy.double()(tokens[None], output_attentions=True)
    policy.config._attn_implementation = before
    return [attention[0].unflatten(0, (2, -1)).sum(dim=1) for attention in out.attentions]


def numbers_of(cache: SlotCache, layer: int, slot: int) -> Tensor:
    """(H, N, C) as the cache holds them."""
    lengths = cache.lengths[layer, slot]
    rows, _ = gather_heads(cache.pools.offsets[layer, slot], lengths, int(lengths.max()))
    return cache.state_pool[rows]


@pytest.mark.filterwarnings("ignore:Budget and buffer:UserWarning", "ignore:Forward hooks:UserWarning")
@pytest.mark.parametrize("max_prefill_tokens", [1000, 70])
@pytest.mark.parametrize("decay", [0.9, 0.99])
@torch.no_grad()
def test_the_documented_decay_is_exact_for_long_prompts(decay: float, max_prefill_tokens: int) -> None:
    """Nothing is evicted: column sums of the attention matrices, each row weighed by its age."""
    policy = tiny_model(initializer_range=0.2, eos_token_id=None)
    prompts = [torch.randint(3, 128, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (300, 1)]
    sampler = RolloutSampler(policy, fading()(400, decay=decay), max_prefill_tokens=max_prefill_tokens)
    rollout = sampler.generate(prompts, SamplingParams(max_completion_length=61, seed=3))
    for row, prompt in enumerate(prompts):
        fed = len(prompt) + 60
        weights = decay ** torch.arange(fed - 1, -1, -1, dtype=torch.float64)
        for layer, attention in enumerate(attention_of(policy, rollout.sequences[row, :fed])):
            want = (attention * weights[:, None]).sum(dim=1)
            held = numbers_of(sampler.cache, layer, row)[..., 0]
            torch.testing.assert_close(held.double(), want, atol=2e-4, rtol=0)
            mass = (1 - decay**fed) / (1 - decay) * 2  # every query pays 1 with each of two heads
            assert held.sum(dim=-1).tolist() == pytest.approx([mass, mass], rel=1e-5)


class Ledger(Compressor):
    """Writes down what can be known otherwise, and looks whether it is still so whenever it is asked for scores."""

    num_queries = 0
    state_fields = ("born", "age", "seen_by")
    looks = 0

    def head_state_fields(self, head_dim: int) -> dict[str, int]:
        return {"count": 1, "keys": head_dim}

    def update_state(self, update: StateUpdate) -> None:
        count, newest = update.positions.shape[1], update.positions[:, -1]
        update.state["age"].add_(count)
        born = update.positions[:, None].expand_as(update.entries).float()
        update.state["born"].scatter_(2, update.entries, born)
        update.state["age"].scatter_(2, update.entries, newest[:, None, None] - born + 1)
        update.state["seen_by"].copy_(newest[:, None, None].expand_as(update.state["seen_by"]))  # a time stamp
        update.head_state["count"].add_(count)
        update.head_state["keys"].add_(update.keys.float().sum(dim=2))

    def score(self, layer: LayerState) -> Tensor:
        valid, newest = layer.valid, layer.positions.masked_fill(~layer.valid, -1).amax(dim=(1, 2))[:, None, None]
        type(self).looks += 1
        assert bool((layer.state["born"] == layer.positions)[valid].all())
        assert bool((layer.state["age"] == newest - layer.positions + 1)[valid].all())
        assert bool((layer.state["seen_by"] == newest)[valid].all())
        assert bool((layer.head_state["count"] == newest + 1).all())
        mean = layer.head_state["keys"] / layer.head_state["count"]
        keys = layer.keys.float().masked_fill(~valid.unsqueeze(-1), 0.0)
        return -torch.cosine_similarity(keys, mean.unsqueeze(2), dim=-1)


def assert_same(a: Rollout, b: Rollout) -> None:
    assert torch.equal(a.sequences, b.sequences)
    assert torch.equal(a.evictions.death, b.evictions.death)


@pytest.mark.filterwarnings("ignore:Budget and buffer:UserWarning")
def test_what_is_told_of_a_key_is_what_the_cache_holds() -> None:
    """In float8, of prompts and of steps alike: nothing is evicted, so the sums are those of the pool."""
    sampler = RolloutSampler(tiny_model(eos_token_id=None), Ledger(**SMALL | {"budget": 90}), kv_dtype="fp8")
    sampler.generate(PROMPTS, SamplingParams(max_completion_length=9))
    cache = sampler.cache
    for layer, row in product(range(2), range(len(PROMPTS))):
        rows, live = gather_heads(cache.pools.offsets[layer, row], cache.lengths[layer, row], 49)
        want = (cache.pools.keys[rows].float() * live.unsqueeze(-1)).sum(dim=1)
        torch.testing.assert_close(cache.head_state[layer, row, :, 1:], want, atol=1e-5, rtol=1e-5)


def test_mixed_precision_rounds_no_sums() -> None:
    products = set()

    class Multiplies(Ledger):
        def update_state(self, update: StateUpdate) -> None:
            products.add((update.state["age"].mT @ update.state["age"]).dtype)
            super().update_state(update)

    with torch.autocast("cpu", torch.bfloat16):
        RolloutSampler(tiny_model(), Multiplies(**SMALL)).generate(PROMPTS, PARAMS)
    assert products == {torch.float32}


@pytest.mark.parametrize("rule", [None, Adaptive(floor=7)], ids=["equal", "adaptive"])
def test_numbers_move_with_their_entries(rule: Any) -> None:
    """Through compressions, forks, refilled slots, cached prompts, chunked prompts, and slots that are put back."""
    policy = tiny_model(initializer_range=0.2, eos_token_id=[100, 101, 102])
    compressor = Ledger(**SMALL, budget_rule=rule)
    Ledger.looks = 0
    whole = RolloutSampler(policy, compressor).generate(PROMPTS, PARAMS)
    assert Ledger.looks > 10  # at all layers at once
    assert 0 < whole.finished.sum() < len(whole)  # those that go on are no neighbors
    with torch.no_grad():
        replayed = replay_logprobs(policy, whole)
    torch.testing.assert_close(replayed, whole.sampler_logprobs, atol=2e-5, rtol=0)
    for num_slots, max_prefill_tokens in ((2, 1000), (5, 7)):
        sampler = RolloutSampler(policy, compressor, num_slots, max_prefill_tokens=max_prefill_tokens)
        assert_same(whole, sampler.generate(PROMPTS, PARAMS))
    assert_same(whole, put_back_midway(RolloutSampler(policy, compressor, 4), PROMPTS, PARAMS))


def test_numbers_of_heads_speak_of_evicted_tokens_too() -> None:
    """In the first layer keys depend on nothing that is evicted: their sum is that of a plain forward pass."""
    policy = tiny_model(initializer_range=0.2, eos_token_id=None)
    sampler = RolloutSampler(policy, Ledger(**SMALL), num_slots=2)
    rollout = sampler.generate(PROMPTS[2:], SamplingParams(max_completion_length=30, seed=3))
    for row, prompt in enumerate(PROMPTS[2:]):
        fed = len(prompt) + 29
        cached = policy(rollout.sequences[row : row + 1, :fed]).past_key_values
        want = cached.layers[0].keys[0].double().sum(dim=1)
        count, keys = sampler.cache.head_state[0, row].double().split([1, 16], dim=-1)
        assert count.flatten().tolist() == [fed, fed]
        torch.testing.assert_close(keys, want, atol=1e-4, rtol=0)


def test_wrappers_keep_the_numbers_of_their_parts_apart() -> None:
    mixture = Combined([Ledger(**SMALL), H2O(**SMALL), Combined([Ledger(**SMALL)], across_heads="max")])
    assert mixture.head_state_fields(16) == {"0.count": 1, "0.keys": 16, "2.0.count": 1, "2.0.keys": 16}
    assert mixture.needs_attention
    policy = tiny_model(initializer_range=0.2, eos_token_id=None)
    rollout = RolloutSampler(policy, mixture, 3).generate(PROMPTS, PARAMS)
    with torch.no_grad():
        replayed = replay_logprobs(policy, rollout)
    torch.testing.assert_close(replayed, rollout.sampler_logprobs, atol=2e-5, rtol=0)


def test_attention_that_nobody_writes_down_is_not_kept() -> None:
    """A captured step has no rows in use, so their probabilities would be of nothing, and so would the attention."""

    class Forgetful(SnapKV):
        needs_attention = True

    sampler = RolloutSampler(tiny_model(eos_token_id=None), Forgetful(**SMALL))
    sampler.generate(PROMPTS, PARAMS)
    assert sampler.cache.probabilities(0, 2) is None


class Largest(TorchDispatchMode):
    """The most bytes that any operation allocates."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = ({s.data_ptr(): s.nbytes() for s in storages(tensors)} for tensors in (args, out))
        self.most = max([self.most, *(size for address, size in made.items() if address not in given)])
        return out


def storages(tensors: Any) -> list[Any]:
    found = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor) and not leaf.is_mkldnn]
    return [tensor.untyped_storage() for tensor in found]


@pytest.mark.parametrize("rule", [None, Adaptive(floor=20)], ids=["equal", "adaptive"])
def test_a_step_copies_no_keys_and_makes_no_probabilities(rule: Any) -> None:
    """With free slots between those in use; the sums of a group are half of the probabilities of a layer."""
    policy = tiny_model(initializer_range=0.2, eos_token_id=None, vocab_size=64)
    sampler = RolloutSampler(policy, H2O(budget=300, budget_rule=rule))
    params = SamplingParams(num_generations=16, max_completion_length=500)
    with sampling_mode(policy):
        engine = sampler.engine_for(sampler.engine_key(params, 16, 3))
        run = sampler.scheduler(engine, params, 16)
        run.add([[3, 4, 5]], range(16))
        run.step()
        run.logs.end[1::3] = 0  # these are found ended at the next look
        run.step()
        assert sorted(run.running) == [slot for slot in range(16) if slot % 3 != 1]
        with Largest() as largest:
            for _ in range(5):
                run.step()
    probabilities = len(run.running) * 4 * sampler.cache.most_entries[0] * 4
    assert 0 < largest.most < probabilities <= sampler.cache._probabilities.nbytes
