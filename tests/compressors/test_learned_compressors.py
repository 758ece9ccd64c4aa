"""Compressors that hold networks or read hidden states and output norms, in the manner of published ones.

KVzap (arXiv 2601.07891): a network on hidden states says what a token is worth. CriticalKV (arXiv 2502.03805):
attention times |W_o v|_1.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_run import run_console
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparse_rl_lightning.calibration import gather_statistics, pad
from sparse_rl_lightning.compressors import (
    H2O,
    Compressor,
    KeyDiff,
    KNorm,
    LearnedScore,
    QFilters,
    QueryStatistics,
    SnapKV,
    TriAttention,
)
from sparse_rl_lightning.compressors.base import ModelSizes
from sparse_rl_lightning.compressors.combined import Combined
from sparse_rl_lightning.compressors.learned_score import ScoreNetwork, save_network
from sparse_rl_lightning.compressors.query_statistics import QueryMoments
from sparse_rl_lightning.compressors.rotary import rotate, rotate_to_mean
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies.geometry import CacheGeometry, model_sizes
from sparse_rl_lightning.records import NEVER, LayerState, StateUpdate
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.testing import (
    ARCHITECTURES,
    character_tokenizer,
    check_compressor,
    random_layer,
    tiny_model,
)
from tests.learned import learned_score

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


class Recorder(KNorm):
    """The sum of a token's hidden state, and the norms of the first group."""

    state_fields = ("hidden", "norms")
    needs_hidden_states = needs_output_norms = True

    def update_state(self, update: StateUpdate) -> None:
        hidden = update.hidden_states.sum(dim=-1)[:, None].expand_as(update.entries)
        norms = update.output_norms[:, :1] + 10 * update.output_norms[:, 1:2]
        update.state["hidden"].scatter_(2, update.entries, hidden)
        update.state["norms"].scatter_(2, update.entries, norms.expand_as(update.entries))


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


SIZES: dict[str, Any] = {"budget": 8, "buffer": 3, "num_sinks": 1, "window": 2}
SOUND = [*METHODS.values(), Learned, learned_score(**SIZES), Combined([learned_score(**SIZES), KeyDiff(**SIZES)])]


@pytest.mark.parametrize("method", SOUND, ids=lambda method: repr(method)[:30])
def test_they_keep_the_contract(method: Compressor | type[Compressor]) -> None:
    check_compressor(method)


def test_a_worth_is_that_of_the_formula() -> None:
    """Written out for one entry in float64."""
    keys, values, hidden = torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 5, 64)
    network = ScoreNetwork(ModelSizes(2, 2, 16, 64), width=7)
    with torch.no_grad():
        network.outer.normal_()
        network.bias.normal_()
    found = network(1, keys, values, hidden)
    parts = [t.double() / (t.double().square().mean().sqrt()) for t in (keys[1, 0, 3], values[1, 0, 3], hidden[1, 3])]
    inner = torch.cat([network.key[1, 0], network.value[1, 0], network.hidden[1, 0]]).double()
    units = torch.tanh(torch.cat(parts) @ inner + network.bias[1, 0].double())
    want = float((units @ network.outer[1, 0].double()).detach())
    assert float(found[1, 0, 3].detach()) == pytest.approx(want, abs=1e-5)


def test_other_weights_evict_something_else() -> None:
    policy = tiny_model(initializer_range=0.3, eos_token_id=None)
    params, deaths = SamplingParams(num_generations=2, max_completion_length=30, seed=1), []
    for seed in (0, 20):
        rollout = RolloutSampler(policy, learned_score(seed, **SIZES)).generate([list(range(5, 20)), [3, 4, 5]], params)
        assert rollout.evictions is not None
        deaths.append(rollout.evictions.death[..., :20])
    assert not torch.equal(*deaths)


def test_weights_travel_in_a_file(tmp_path: Path) -> None:
    own = learned_score(**SIZES)
    file = tmp_path / "network.safetensors"
    save_network(own.network, file)
    again = LearnedScore(**SIZES, weights=str(file))
    policy, params = tiny_model(eos_token_id=None), SamplingParams(max_completion_length=30)
    first, second = (RolloutSampler(policy, c).generate([[1, 2, 3]], params) for c in (own, again))
    assert first.evictions is not None
    assert second.evictions is not None
    assert torch.equal(first.evictions.death, second.evictions.death)
    with pytest.raises(UserError, match="is for a model of"):
        again.check_model(ModelSizes(9, 1, 8, 32))
    (tmp_path / "other").write_bytes(b"no tensors")
    integers = {name: value.to(torch.int32) for name, value in load_file(file).items()}
    save_file(integers, tmp_path / "integers")
    for path in ("missing", str(tmp_path / "other"), str(tmp_path / "integers")):
        with pytest.raises(UserError, match=r"weights=.*sparse-rl statistics --method LearnedScore"):
            LearnedScore(**SIZES, weights=path)


TINY_SIZES = {"budget": 10, "buffer": 4, "num_sinks": 2, "window": 3}
INV_FREQ = random_layer().inv_freq


def test_rotation_is_that_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    vectors, positions = torch.randn(2, 3, 7, 16), torch.randint(0, 900, (2, 7))
    angle = torch.cat([positions.unsqueeze(-1) * INV_FREQ] * 2, dim=-1)
    expected, _ = apply_rotary_pos_emb(vectors, vectors, angle.cos(), angle.sin())
    turned = rotate(vectors, positions[:, None], INV_FREQ)
    torch.testing.assert_close(turned, expected)
    torch.testing.assert_close(rotate(turned, -positions[:, None], INV_FREQ), vectors)
    ahead = torch.tensor([1, 5, 30])
    each = torch.stack([rotate(vectors, positions[:, None] + a, INV_FREQ) for a in ahead])
    mean = rotate_to_mean(vectors, positions[:, None], ahead, INV_FREQ)
    torch.testing.assert_close(mean, each.mean(dim=0), rtol=1e-4, atol=1e-4)


def test_moments_are_means_and_singular_vectors() -> None:
    queries = torch.randn(3, 4, 9, 16, dtype=torch.float64) + torch.randn(4, 1, 16, dtype=torch.float64)
    positions, lengths = torch.arange(9).expand(3, 9), torch.tensor([9, 4, 7])
    mask = positions < lengths[:, None]
    padded = queries.masked_fill(~mask[:, None, :, None], torch.nan)
    statistics = QueryStatistics.of_layers([QueryMoments(padded, positions, mask, INV_FREQ)], 2)
    filters = []
    for head in range(4):
        own = torch.cat([queries[b, head, :n] for b, n in enumerate(lengths)])
        torch.testing.assert_close(statistics.mean[0, head].double(), own.mean(dim=0), rtol=0, atol=1e-6)
        pairs = torch.complex(*own.chunk(2, dim=-1)).abs()
        torch.testing.assert_close(statistics.lengths[0, head].double(), pairs.mean(dim=0), rtol=0, atol=1e-6)
        turned = rotate(own, torch.cat([positions[0, :n] for n in lengths]), INV_FREQ)
        left, _, right = torch.linalg.svd(turned, full_matrices=False)
        filters.append(right[0] * left[:, 0].sum().sign())
    expected = torch.stack([(filters[0] + filters[1]) / 2, (filters[2] + filters[3]) / 2])
    torch.testing.assert_close(statistics.filters[0].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_recorded_queries_are_those_of_the_cache(architecture: str) -> None:
    """The ring holds the last queries after rotation; turned back, their mean is the statistics of these tokens."""
    model = tiny_model(architecture, initializer_range=0.2, eos_token_id=None)
    sampler = RolloutSampler(model, SnapKV(budget=60, buffer=4, window=12))
    rollout = sampler.generate([[5, 9, 7]], SamplingParams(max_completion_length=10, seed=0))
    lengths = torch.tensor([12])  # the last token drawn is never fed
    statistics = gather_statistics(model, rollout.sequences, lengths)
    ring = sampler.cache.queries[:, 0]  # (L, Hq, 12, D), position 0 first
    still = rotate(ring, -torch.arange(12), model.get_decoder().rotary_emb.inv_freq)
    torch.testing.assert_close(statistics.mean, still.mean(dim=2), rtol=0, atol=1e-5)
    directions = torch.linalg.svd(ring)[2][:, :, 0]  # (L, Hq, D)
    side = (ring.sum(dim=2) * directions).sum(dim=-1, keepdim=True).sign()
    pairs = (directions * side).unflatten(1, (2, 2)).mean(dim=2)
    torch.testing.assert_close(statistics.filters, pairs, rtol=0, atol=1e-4)


def test_batches_and_padding_do_not_matter() -> None:
    model = tiny_model(initializer_range=0.2)
    texts = [list(range(5, 5 + n)) for n in (3, 17, 9, 40, 1)]
    ids, lengths = pad(texts)
    whole = gather_statistics(model, ids, lengths)
    for size in (1, 2):
        part = gather_statistics(model, ids, lengths, batch_size=size)
        for name in ("mean", "lengths", "filters"):
            torch.testing.assert_close(getattr(part, name), getattr(whole, name), rtol=0, atol=1e-5)
    other = gather_statistics(model, ids.masked_fill(ids == 0, 77), lengths)
    torch.testing.assert_close(other.mean, whole.mean, rtol=0, atol=1e-6)
    assert not model.model.layers[0].self_attn.q_proj._forward_hooks


def test_a_file_gives_the_same_scores(tmp_path: Path) -> None:
    model = tiny_model(initializer_range=0.2)
    statistics = gather_statistics(model, torch.arange(3, 43)[None], torch.tensor([40]))
    path = tmp_path / "statistics.safetensors"
    statistics.save(path)
    layer = random_layer()
    for method in (QFilters, TriAttention):
        ours = method(**TINY_SIZES, statistics=statistics).score(layer)
        torch.testing.assert_close(method(**TINY_SIZES, statistics=str(path)).score(layer), ours, equal_nan=True)


@pytest.fixture
def policy(folder: Path) -> Path:
    tokenizer = character_tokenizer("0123456789+=")
    tokenizer.save_pretrained("policy")
    tiny_model(vocab_size=len(tokenizer), initializer_range=0.2).save_pretrained("policy")
    return folder


def test_the_command_that_messages_name_makes_the_file(
    policy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "1+2=", "completion": "3"}, {"prompt": "4+50=", "answer": "54"}, {"prompt": "12345"}]
    Path("texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["policy", "texts.jsonl", "s.safetensors", "--batch_size=2", "--max_length=4"]
    assert run_console(monkeypatch, "statistics", *given) is None
    assert "statistics of 12 tokens of 3 texts to s.safetensors" in capsys.readouterr().out
    model = tiny_model(vocab_size=15, initializer_range=0.2)
    tokenizer = character_tokenizer("0123456789+=")
    ids, lengths = pad([tokenizer(text)["input_ids"] for text in ("1+2=", "4+50", "1234")])
    expected = gather_statistics(model, ids, lengths)
    torch.testing.assert_close(QueryStatistics.load("s.safetensors", "Test").mean, expected.mean, rtol=0, atol=1e-6)
    assert TriAttention(**TINY_SIZES, statistics="s.safetensors").score(random_layer()).shape == (3, 2, 14)


def test_the_command_teaches_the_network_of_learned_scores(
    policy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("texts.jsonl").write_text(json.dumps({"prompt": "1+2=3" * 9}) + "\n")
    given = ["policy", "texts.jsonl", "network.safetensors", "--method=LearnedScore", "--max_length=40"]
    assert run_console(monkeypatch, "statistics", *given) is None
    assert re.search(r"a network that explains -?\d+% of .* of 40 tokens of 1 texts", capsys.readouterr().out)
    model = tiny_model(vocab_size=15, initializer_range=0.2)
    learned = LearnedScore(**TINY_SIZES, weights="network.safetensors")
    learned.check_model(model_sizes(model, CacheGeometry.of(model)))
    given[2:] = ["s.safetensors", "--method=SnapKV"]
    assert "LearnedScore" in str(run_console(monkeypatch, "statistics", *given)) + capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "There is no data file 'texts.jsonl'"),
        ("", "there is no text"),
        ('{"prompt": "1"}\noops\n', "texts.jsonl, line 2 is not JSON"),
        ('{"text": "1"}\n', "texts.jsonl, line 1: .*'prompt'"),
        ('{"prompt": ""}\n', "texts.jsonl, line 1: .*empty prompt"),
    ],
)
def test_wrong_texts_are_named(
    policy: Path, content: str | None, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        Path("texts.jsonl").write_text(content)
    assert run_console(monkeypatch, "statistics", "policy", "texts.jsonl", "s.safetensors") == 1
    assert re.match(f"error: .*{message}", capsys.readouterr().err)
    assert not Path("s.safetensors").exists()


@pytest.mark.parametrize("method", [QFilters, TriAttention])
def test_missing_or_foreign_statistics_name_the_command(
    method: type[QFilters] | type[TriAttention], folder: Path
) -> None:
    command = r"with: sparse-rl statistics POLICY TEXTS.jsonl \S+\.safetensors"
    name = method.__name__
    with pytest.raises(ValueError, match=rf"{name}: there is no file statistics='no.safetensors'.*{command}"):
        method(**TINY_SIZES, statistics="no.safetensors")
    save_file({"weight": torch.zeros(3)}, "other.safetensors")
    Path("text.safetensors").write_text("no tensors")
    whole = {name: torch.ones(2, 4, 8, dtype=torch.int32) for name in ("mean", "lengths", "filters")}
    save_file(whole, "integers.safetensors")
    for path in ("other.safetensors", "text.safetensors", "integers.safetensors"):
        with pytest.raises(ValueError, match=rf"{name}: statistics='{path}' does not hold .*{command}"):
            method(**TINY_SIZES, statistics=path)
    wide = tiny_model(hidden_size=128, num_heads=8, num_layers=1)
    foreign = gather_statistics(wide, torch.arange(3, 13)[None], torch.tensor([10]))
    message = rf"{name}: the statistics are of a model with 1 layers .* \(8, 2, 16\), but layer 1 .* \(4, 2, 16\).*"
    with pytest.raises(ValueError, match=message + command):
        method(**TINY_SIZES, statistics=foreign).score(random_layer())
