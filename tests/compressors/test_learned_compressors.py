"""Compressors that hold networks or read hidden states and output norms, in the manner of published ones.

KVzap (arXiv 2601.07891): a network on hidden states says what a token is worth. CriticalKV (arXiv 2502.03805):
attention times |W_o v|_1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparse_rl_lightning.compressors import H2O, Compressor, KNorm, SnapKV
from sparse_rl_lightning.compressors.combined import Combined
from sparse_rl_lightning.records import NEVER, LayerState, StateUpdate
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.testing import ContractError, check_compressor, tiny_model

PROMPTS = [list(range(5, 5 + n)) for n in (3, 12, 9, 40)]
SMALL: dict[str, Any] = {"budget": 12, "buffer": 5, "num_sinks": 2, "window": 4}
PARAMS = SamplingParams(num_generations=2, max_completion_length=36, temperature=0.9, seed=3)
LAYERS, HEADS, GROUP, DIM, HIDDEN = 2, 2, 2, 16, 64  # of tiny_model()


class KVzapLike(Compressor):
    """What a network on hidden states predicts."""

    num_queries = 0
    state_fields = ("worth",)
    needs_hidden_states = True

    def __init__(self, budget: int, **sizes: Any) -> None:
        super().__init__(budget, **sizes)
        torch.manual_seed(5)
        self.gates = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 8), nn.GELU(), nn.Linear(8, HEADS)) for _ in range(LAYERS)
        )

    def update_state(self, update: StateUpdate) -> None:
        worth = self.worth(update.hidden_states, update.layer_index)
        update.state["worth"].scatter_(2, update.entries, worth)

    def worth(self, hidden: Tensor, layer: int) -> Tensor:
        """(S, H, Q)."""
        return self.gates[layer].to(hidden.device)(hidden).transpose(-1, -2)

    def score(self, layer: LayerState) -> Tensor:
        return layer.state["worth"]


class CriticalKVLike(Combined):
    """Any score times the mean over the group of |W_o v|_1."""

    def __init__(self, compressor: Compressor) -> None:
        super().__init__([compressor])

    @property
    def state_fields(self) -> tuple[str, ...]:
        return (*super().state_fields, "norm")

    needs_output_norms = True

    def update_state(self, update: StateUpdate) -> None:
        super().update_state(update)
        norms = update.output_norms.unflatten(1, (update.keys.shape[1], -1)).mean(dim=2)
        update.state["norm"].scatter_(2, update.entries, norms)

    def score(self, layer: LayerState) -> Tensor:
        (scores,) = self.part_scores(layer)
        return scores * layer.state["norm"]


METHODS = {
    "KVzap": KVzapLike(**SMALL),
    "CriticalKV": CriticalKVLike(SnapKV(**SMALL)),
    "CriticalKV of H2O": CriticalKVLike(H2O(**SMALL)),
}
every_method = pytest.mark.parametrize("name", METHODS)


@every_method
def test_they_keep_the_contract(name: str) -> None:
    check_compressor(METHODS[name])


@every_method
def test_their_rollouts_are_replayed(name: str) -> None:
    policy = tiny_model(initializer_range=0.2, eos_token_id=None).double()  # chunks of a prompt round otherwise
    rollout = RolloutSampler(policy, METHODS[name], num_slots=3).generate(PROMPTS, PARAMS)
    assert bool((rollout.evictions.death != NEVER).any())
    with torch.no_grad():
        replayed = replay_logprobs(policy, rollout, temperature=0.9)
    torch.testing.assert_close(replayed.float(), rollout.sampler_logprobs, atol=2e-5, rtol=0)
    again = RolloutSampler(policy, METHODS[name], max_prefill_tokens=7).generate(PROMPTS, PARAMS)
    assert torch.equal(again.sequences, rollout.sequences)
    assert torch.equal(again.evictions.death, rollout.evictions.death)


def hidden_of(policy: PreTrainedModel, tokens: Tensor) -> list[Tensor]:
    """(L) of (T, E): what each layer's attention reads in a plain forward pass."""
    seen: list[Tensor] = []
    hooks = [
        layer.input_layernorm.register_forward_hook(lambda module, args, out: seen.append(out[0]))
        for layer in policy.get_decoder().layers
    ]
    policy(tokens[None])
    for hook in hooks:
        hook.remove()
    return seen


def survivors(worth: Tensor, prompt_length: int, fed: int, size: dict[str, int]) -> list[int]:
    """Positions that one head holds at the end: cut whenever it is full, token by token in plain Python."""
    held, capacity = list(range(prompt_length)), size["budget"] + size["buffer"]

    def cut() -> None:
        first, last = [p for p in held if p < size["num_sinks"]], held[-size["window"] :]
        others = [p for p in held if p not in first and p not in last]
        best = sorted(others, key=lambda p: -float(worth[p]))[: size["budget"] - len(first) - len(last)]
        held[:] = sorted({*first, *last, *best})

    for position in range(prompt_length, fed + 1):
        if len(held) >= capacity:
            cut()
        if position < fed:
            held.append(position)
    return held


@torch.no_grad()
def test_gates_keep_what_brute_force_keeps() -> None:
    """In float64; the hidden states of the first layer depend on nothing that is evicted."""
    policy, method = tiny_model(initializer_range=0.2, eos_token_id=None).double(), METHODS["KVzap"]
    sampler = RolloutSampler(policy, method)
    rollout = sampler.generate(PROMPTS, SamplingParams(max_completion_length=36, seed=3))
    for row, prompt in enumerate(PROMPTS):
        fed = len(prompt) + 35
        worth = method.worth(hidden_of(policy, rollout.sequences[row, :fed])[0].float()[None], 0)[0]
        for head in range(HEADS):
            offset, count = (int(t[0, row, head]) for t in (sampler.cache.pools.offsets, sampler.cache.lengths))
            held = sampler.cache.pools.positions[offset : offset + count].tolist()
            assert held == survivors(worth[head], len(prompt), fed, SMALL)


@pytest.mark.filterwarnings("ignore:Budget and buffer:UserWarning")
@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "lora"])
@torch.no_grad()
def test_what_is_offered_is_that_of_a_plain_forward_pass(adapted: bool) -> None:
    """Nothing is evicted, in float64: hidden states of all layers and norms of their values behind the projection."""
    policy: Any = tiny_model(initializer_range=0.2, eos_token_id=None).double()
    if adapted:
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["o_proj", "v_proj"], init_lora_weights=False)
        policy = peft.get_peft_model(policy, config).base_model.model
    sampler = RolloutSampler(policy, Recorder(90), max_prefill_tokens=16)
    rollout = sampler.generate(PROMPTS[1:], SamplingParams(max_completion_length=20, seed=3))
    for row, prompt in enumerate(PROMPTS[1:]):
        fed = len(prompt) + 19
        for layer, hidden in enumerate(hidden_of(policy, rollout.sequences[row, :fed])):
            own = policy.get_decoder().layers[layer].self_attn
            values = own.v_proj(hidden).view(fed, HEADS, DIM).repeat_interleave(GROUP, dim=1)
            norms = torch.stack(
                [own.o_proj(nn.functional.pad(values[:, h], (h * DIM, (3 - h) * DIM))).abs().sum(-1) for h in range(4)]
            )
            span = slice(int(sampler.cache.pools.offsets[layer, row, 0]), None)
            held = sampler.cache.state_pool[span][:fed].double()
            torch.testing.assert_close(held[:, 0], hidden.sum(dim=-1), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(held[:, 1], norms[0] + 10 * norms[1], atol=1e-4, rtol=1e-5)


@torch.no_grad()
def test_adapters_under_autocast_are_offered_too() -> None:
    """Their weights stay float32, what they multiply does not."""
    peft = pytest.importorskip("peft")
    policy: Any = tiny_model(initializer_range=0.2, eos_token_id=None)
    policy = peft.get_peft_model(policy, peft.LoraConfig(r=4, target_modules=["o_proj"])).base_model.model
    norms = []
    for enabled in (False, True):
        sampler = RolloutSampler(policy, Recorder(**SMALL))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            sampler.generate([PROMPTS[1]], SamplingParams(max_completion_length=2))
        norms.append(sampler.cache.state_pool[:12, 1])
        assert bool((sampler.cache.state_pool[:12, 1] > 0).all())
    torch.testing.assert_close(norms[1], norms[0], rtol=0.05, atol=0)


def test_who_asks_for_nothing_pays_nothing() -> None:
    policy = tiny_model(initializer_range=0.2, eos_token_id=None)
    for method, wanted in ((Recorder(**SMALL), True), (H2O(**SMALL), False), (SnapKV(**SMALL), False)):
        sampler = RolloutSampler(policy, method)
        sampler.generate(PROMPTS, PARAMS)
        assert ("output_weights" in vars(sampler.engine.decoder)) == wanted
        assert bool(sampler.cache._probabilities.nbytes) == isinstance(method, H2O)


class Unasked(H2O):
    needs_attention = False


def test_what_is_read_must_be_asked_for() -> None:
    policy = tiny_model()
    with pytest.raises(ValueError, match=r"update_state reads mass, .* does not ask for: needs_attention = True"):
        RolloutSampler(policy, Unasked(**SMALL)).generate(PROMPTS, PARAMS)


class Recorder(KNorm):
    """The sum of a token's hidden state, and the norms of the first group."""

    state_fields = ("hidden", "norms")
    needs_hidden_states = needs_output_norms = True

    def update_state(self, update: StateUpdate) -> None:
        hidden = update.hidden_states.sum(dim=-1)[:, None].expand_as(update.entries)
        norms = update.output_norms[:, :1] + 10 * update.output_norms[:, 1:2]
        update.state["hidden"].scatter_(2, update.entries, hidden)
        update.state["norms"].scatter_(2, update.entries, norms.expand_as(update.entries))


# ---------------------------------------------------------------- networks and check_compressor


class Learned(Compressor):
    """A network on keys and values, a module within a module and a plain tensor."""

    num_queries = 0

    def __init__(self, budget: int, **sizes: Any) -> None:
        super().__init__(budget, **sizes)
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2 * DIM, 8), nn.GELU(), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 1)))
        self.scale, self.activation = torch.ones(3), nn.functional.silu

    def score(self, layer: LayerState) -> Tensor:
        both = torch.cat([layer.keys, layer.values], dim=-1).float()
        return self.activation(self.net.to(both.device)(both).squeeze(-1)) * self.scale[0]


class Counts(Learned):
    def score(self, layer: LayerState) -> Tensor:
        self.net[1].calls = getattr(self.net[1], "calls", 0) + 1
        return super().score(layer)


def test_a_compressor_may_hold_networks_and_tensors() -> None:
    check_compressor(Learned)


def test_but_not_change_them() -> None:
    with pytest.raises(
        ContractError, match=r"(?s)breaks the rule '(no state|determinism)'.*(score changed self.net|again)"
    ):
        check_compressor(Counts)
