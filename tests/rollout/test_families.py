"""Families of models: rollouts, replay, sessions, memory and training, and what is refused."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_same_logprobs
from lightning.pytorch import Callback
from rollouts import PARAMS, PROMPTS, SMALL, assert_generated, assert_replayed, assert_same, put_back_midway, roll_out
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel

import sparse_rl_lightning.compressors as c
from docs.families import CHECKPOINTS
from sparse_rl_lightning.calibration import gather_statistics
from sparse_rl_lightning.compressors.query_statistics import QueryStatistics
from sparse_rl_lightning.compressors.rotary import rotate
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.output_head import PLAIN, LogitScaling
from sparse_rl_lightning.policies import LoadedPolicy
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.policies.support import TESTED
from sparse_rl_lightning.records import LayerState, StateUpdate
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.rollout.engine.decoders import choice, linear_products
from sparse_rl_lightning.rollout.engine.decoders.agreement import EXACT, check_agreement
from sparse_rl_lightning.rollout.engine.decoders.choice import decoder_bytes
from sparse_rl_lightning.rollout.engine.decoders.hf_forward import TransformersDecoder
from sparse_rl_lightning.rollout.engine.decoders.linear_products import Joined
from sparse_rl_lightning.testing import character_tokenizer, tiny_model
from tests.families import FAMILIES, SIZES, WALKED, YARN, family
from tests.rollout.test_rollout_memory import allocated, attributes
from tests.tiny_grpo import ALPHABET, fit, module, weights

GREEDY = SamplingParams(max_completion_length=16, temperature=0)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral, wide heads": ("mistral", {"head_dim": 32}),
    "llama 3": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, a window that it does not read": ("llama", {"sliding_window": 8}),  # as one that was another model once
    "mistral, windows alone": ("mistral", {"sliding_window": 8}),
    "qwen2, windows": ("qwen2", {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 8,
                                 "max_window_layers": 2}),
}  # fmt: skip
each_family = pytest.mark.parametrize("name", FAMILIES)
NOT_GENERATED = "llama, a window that it does not read"  # transformers' own cache has it all the same
NOT_EVICTED = "mistral, windows alone"  # nothing is left to evict from


def variant(name: str) -> Any:
    """A model of a family, or a variant of one."""
    of, changed = VARIANTS.get(name, (name, {}))
    return family(of, **changed)


def test_what_is_said_to_be_tested_is() -> None:
    assert set(TESTED) == set(FAMILIES) == {checkpoint.model_type for checkpoint in CHECKPOINTS}


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    """Of prompts around windows of eight tokens too, read whole and in chunks."""
    model, prompts = variant(name), [list(range(5, 5 + n)) for n in (3, 17, 7, 8, 9, 40, 1)]
    is_walked = VARIANTS.get(name, (name, {}))[0] in WALKED
    assert RolloutSampler(model).decoder_kind == ("native" if is_walked else "transformers")
    rollout = roll_out(model, None, 3, prompts=prompts, params=GREEDY)
    if name != NOT_GENERATED:
        assert_generated(model, rollout, GREEDY.max_completion_length, prompts)
    assert_same(roll_out(model, None, 3, prompts=prompts, params=GREEDY, max_prefill_tokens=5), rollout)
    with torch.no_grad():
        dense = sequence_logprobs(model, rollout.sequences, rollout.completion_mask)[0]
        plain = model(rollout.sequences).logits.log_softmax(-1)[:, :-1].gather(-1, rollout.sequences[:, 1:, None])
    assert_same_logprobs(dense, rollout.sampler_logprobs)
    assert_same_logprobs(dense[:, 1:], plain.squeeze(-1) * rollout.completion_mask[:, 1:])


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", [name for name in (*FAMILIES, *VARIANTS) if name != NOT_EVICTED])
def test_replay_is_exact_and_slots_do_not_matter(name: str) -> None:
    """Slots with one compressor: they do not matter to any of them (test_compressor_rollouts.py)."""
    model, last = variant(name), c.RKV(**SMALL)
    for compressor in (c.StreamingLLM(**SMALL), last):
        rollout = roll_out(model, compressor)
        assert bool((rollout.kv.stored < rollout.kv.full).any())
        replayed = assert_replayed(model, rollout)
    assert_same(roll_out(model, last, 3, max_prefill_tokens=16), rollout)
    model.zero_grad()
    replayed.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


@pytest.mark.thinned(3)
@each_family
def test_slots_that_are_put_back_go_on(name: str) -> None:
    model = family(name)
    assert_same(put_back_midway(model, c.SnapKV(**SMALL)), roll_out(model, c.SnapKV(**SMALL)))


@pytest.mark.thinned(2)
@each_family
def test_the_memory_plan_is_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family(name)
    limit = 2**18 if (getattr(model.config, "head_dim", None) or 0) > 64 else 2**16
    sampler = RolloutSampler(model, c.SnapKV(**SMALL), memory_limit=limit)
    sampler.generate(PROMPTS, PARAMS)
    plan, engine = sampler.memory_plan, sampler.engine
    assert plan.num_slots < 10
    assert plan.total_bytes == allocated(attributes(engine.cache), vars(engine.logs)) <= limit
    monkeypatch.setattr(linear_products, "_copied_class", lambda modules, dtype: Joined)  # copies that can be counted
    geometry = CacheGeometry.of(model)
    decoder = TransformersDecoder(model, geometry)
    copied = [decoder._head, *(product for _, product in decoder._products)]
    assert len(copied) > 2 * geometry.num_layers
    want = sum(t.nbytes for each in copied for t in (each._weight, each._bias) if t is not None)
    assert decoder_bytes(model, geometry, 64, "transformers") == want


class Losses(Callback):
    """Keeps the loss of every micro-batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(float(outputs["loss"]))


@pytest.mark.thinned(3)
@each_family
def test_a_few_steps_of_training(name: str) -> None:
    tokenizer = character_tokenizer(ALPHABET)
    grpo = module(compressor=c.RKV(budget=8, buffer=3, num_sinks=1, window=2), lr=0.05)
    model = family(name, vocab_size=len(tokenizer), initializer_range=0.1)
    grpo.policy_source = LoadedPolicy(model, tokenizer)
    grpo.configure_model()
    before = weights(grpo)
    losses = Losses()
    fit(grpo, 2, [losses])
    after = weights(grpo)
    assert len(losses.seen) >= 2
    assert all(math.isfinite(loss) for loss in losses.seen)
    assert bool(after.isfinite().all())
    assert not torch.equal(before, after)


# ---------------------------------------------------------------- both ways through the layers


class Notes(c.Compressor):
    """Keeps by what the running numbers say of hidden states, attention and output norms."""

    needs_attention = needs_hidden_states = needs_output_norms = True

    @property
    def state_fields(self) -> tuple[str, ...]:
        return ("worth",)

    def update_state(self, update: StateUpdate) -> None:
        worth = update.hidden_states.square().sum(-1)[:, None] * update.output_norms.mean(1)[:, None]
        update.state["worth"].scatter_(2, update.entries, worth.expand(update.entries.shape))
        update.state["worth"].add_(update.mass.sum(2))

    def score(self, layer: LayerState) -> Tensor:
        return layer.state["worth"]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("compressor", [c.SnapKV(**SMALL), Notes(**SMALL)], ids=["SnapKV", "running state"])
def test_both_decoders_give_the_same_rollout(architecture: str, compressor: c.Compressor) -> None:
    model = tiny_model(architecture, initializer_range=0.2)
    kinds = ("native", "transformers")
    native, theirs = (RolloutSampler(model, compressor, decoder=kind) for kind in kinds)
    assert (native.decoder_kind, theirs.decoder_kind) == kinds
    assert RolloutSampler(model).decoder_kind == "native"
    for factor in (1.0, 1.1):  # the second time with weights that have changed
        for parameter in model.parameters():
            parameter.data *= factor
        assert_same(*(sampler.generate(PROMPTS, PARAMS) for sampler in (native, theirs)))


class ScaledModel(LlamaModel):
    def forward(self, input_ids: Tensor | None = None, **options: Any) -> Any:
        return super().forward(**options | {"inputs_embeds": 3 * self.embed_tokens(input_ids)})


class PlainLlama(LlamaForCausalLM):
    """Without a forward of its own."""


class ScaledLlama(LlamaForCausalLM):
    def forward(self, *inputs: Any, **options: Any) -> Any:
        out: Any = super().forward(*inputs, **options)
        out.logits = 2 * out.logits
        return out


class ClampedMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-0.02, 0.02)


def derived(kind: type[LlamaForCausalLM], part: str = "") -> Any:
    model: Any = kind(family("llama").config)
    layer = model.model.layers[1]
    if part == "decoder":
        model.model = ScaledModel(model.config)
    elif part == "feed-forward":
        layer.mlp = ClampedMLP(model.config)
    return model.eval()


@pytest.mark.parametrize(("part", "kind"), [("", "native"), ("feed-forward", "native"), ("decoder", "transformers")])
def test_forwards_of_derived_classes_count(part: str, kind: str) -> None:
    """Layers that are transformers' do not make the model so: classes derived from others may do more around them."""
    model = derived(PlainLlama, part)
    sampler = RolloutSampler(model, c.FullKV())
    assert sampler.decoder_kind == kind
    rollout = sampler.generate(PROMPTS, PARAMS)
    for row, prompt in enumerate(rollout.prompt_lengths.tolist()):
        own = slice(prompt, prompt + int(rollout.completion_lengths[row]))
        ids = rollout.sequences[row : row + 1, : own.stop]
        with torch.no_grad():
            logprobs = model(ids).logits[0].log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None]).squeeze(-1)
        assert_same_logprobs(rollout.sampler_logprobs[row, own], logprobs[prompt - 1 :])


def test_a_derived_class_that_changes_logits_is_refused_and_has_no_native_decoder() -> None:
    model = derived(ScaledLlama)
    with pytest.raises(UserError, match="not those of ScaledLlama, nor a forward of a derived class"):
        RolloutSampler(model, decoder="native")
    with pytest.raises(UserError, match="differ from those of its own forward pass"):
        roll_out(model, params=GREEDY)


def test_hooks_and_replaced_forwards_of_any_module_count() -> None:
    model: Any = family("olmo2")
    plain = roll_out(model, params=GREEDY)
    layer, attention, linear = model.model.layers[1], model.model.layers[0].self_attn, model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, inputs, out: out * 1.1)
    before, own = attention.forward, linear.forward
    attention.forward = lambda *args, **kwargs: (before(*args, **kwargs)[0] * 1.2, None)
    linear.forward = lambda x: own(x) * 0.9
    rollout = roll_out(model, params=GREEDY)
    assert not torch.equal(rollout.sampler_logprobs[:, :60], plain.sampler_logprobs[:, :60])
    with torch.no_grad():
        dense = sequence_logprobs(model, rollout.sequences, rollout.completion_mask)[0]
    assert_same_logprobs(dense, rollout.sampler_logprobs)
    assert "forward" in vars(attention), "a replaced forward is there afterwards"
    assert "forward" not in vars(model.model.layers[1].self_attn)


def test_an_error_in_a_rollout_leaves_the_model_as_it_was() -> None:
    class Broken(c.KeyDiff):
        def score(self, layer: LayerState) -> Tensor:
            raise RuntimeError("broken")

    model = family("qwen3_moe")
    with pytest.raises(RuntimeError, match="broken"):
        RolloutSampler(model, Broken(**SMALL)).generate(PROMPTS, PARAMS)
    assert not any("forward" in vars(part) for part in model.modules())
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["granite", "qwen2, windows", "gemma3_text", "gpt_oss"])
def test_other_types_stay_as_close_as_their_rounding(name: str, dtype: torch.dtype) -> None:
    model = variant(name).to(dtype)
    if name == "gpt_oss":
        model.config._experts_implementation = "eager"  # the fast ones know no float64
    rollout = roll_out(model, c.RKV(**SMALL), record_routing=name == "gpt_oss")
    apart = (replay_logprobs(model, rollout) - rollout.sampler_logprobs).abs()[rollout.completion_mask].mean()
    assert float(apart.detach()) < (0.05 if dtype == torch.bfloat16 else 1e-6)


# ---------------------------------------------------------------- positions

ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": YARN,
    "partial yarn": {**YARN, "partial_rotary_factor": 0.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "rope"),
    [*(("qwen3_moe", rope) for rope in ROPES if rope != "partial yarn"), ("glm4_moe", "partial yarn"),
     ("llama", "yarn"), ("llama", "dynamic")],
)  # fmt: skip
def test_scaled_positions(name: str, rope: str) -> None:
    """Beyond the original context, except where frequencies would change; also for compressors that read them."""
    model = family(name, head_dim=16, rope_parameters=ROPES[rope])
    params = SamplingParams(max_completion_length=100, seed=3)
    prompt = list(range(3, 103))
    for compressor in (c.SnapKV(**SMALL), c.ExpectedAttention(query_window=6, num_future=9, **SMALL)):
        assert_replayed(model, roll_out(model, compressor, prompts=[prompt], params=params))


@pytest.mark.parametrize(
    ("name", "changed"),
    [("phi3", {}), ("olmoe", {"rope_parameters": ROPES["dynamic"], "max_position_embeddings": 100})],
)
def test_frequencies_that_change_with_the_length_are_refused_where_they_would(
    name: str, changed: dict[str, Any]
) -> None:
    model = family(name, **changed)
    sampler = RolloutSampler(model, c.SnapKV(**SMALL))
    sampler.generate([list(range(3, 83))], SamplingParams(max_completion_length=20))
    said = "whose frequencies change beyond 100 tokens, and sequences may have up to 101"
    with pytest.raises(ValueError, match=said):
        sampler.generate([list(range(3, 83))], SamplingParams(max_completion_length=21))


def test_partial_rotation_is_that_of_the_model() -> None:
    """Keys of a token at position p are those at position 0, turned by the geometry's frequencies."""
    for name, rotated in (("phi3", 12), ("glm4_moe", 8), ("olmo2", 16)):
        model = family(name)
        geometry, seen = CacheGeometry.of(model), list[Tensor]()
        assert 2 * len(geometry.inv_freq) == rotated

        def attend(layer: int, rows: Tensor, turn: Any, hidden: Tensor, sinks: Any) -> Tensor:
            seen.append(rows[:, geometry.num_heads : -geometry.num_kv_heads])  # noqa: B023
            return rows[:, : geometry.num_heads] * 0  # noqa: B023

        with torch.no_grad():
            TransformersDecoder(model, geometry)(torch.full((8,), 9), torch.arange(8) * 5, attend)
        want = rotate(seen[0][:1], torch.arange(8)[:, None] * 5, geometry.inv_freq)
        torch.testing.assert_close(seen[0], want, atol=1e-5, rtol=1e-5)


def statistics(heads: int, kv_heads: int, dim: int) -> QueryStatistics:
    return QueryStatistics(torch.ones(2, heads, dim), torch.ones(2, heads, dim // 2), torch.ones(2, kv_heads, dim))


@pytest.mark.parametrize(
    ("name", "compressor", "reason"),
    [
        ("smollm3", c.ExpectedAttention(**SMALL), r"rotates the keys of layers \[1, 3\] not at all, or not by halves"),
        ("glm4", c.ExpectedAttention(**SMALL), r"rotates the keys of layers \[0, 1\] not at all, or not by halves"),
        ("phi3", c.TriAttention(statistics=statistics(4, 2, 16), **SMALL), "rotates 12 of 16 channels"),
        (
            "phi3",
            c.Combined([c.SnapKV(**SMALL), c.TriAttention(statistics=statistics(4, 2, 16), **SMALL)]),
            "rotates 12 of 16",
        ),
    ],
    ids=["no positions", "other pairs", "partial", "inside another"],
)
def test_compressors_that_turn_queries_are_refused_where_they_could_not(
    name: str, compressor: c.Compressor, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"{type(compressor).__name__} turns queries .* but .* {reason}"):
        RolloutSampler(family(name), compressor).generate(PROMPTS, PARAMS)


def test_compressors_that_turn_queries_work_where_all_is_turned_by_halves() -> None:
    method = c.TriAttention(statistics=statistics(4, 2, 16), **SMALL)
    assert_replayed(model := family("qwen3_moe"), roll_out(model, method))


MIXTURE: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 16, "moe_intermediate_size": 48, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "sliding_window": 8,
}  # fmt: skip


@pytest.mark.parametrize("name", ["afmoe", "beam"])
def test_layers_without_positions_and_views_of_what_attention_returns(name: str) -> None:
    """Beam's configuration has null for the rotation of its full layers; afmoe views what the attention returned."""
    model = family(name, **MIXTURE, **({"num_experts": 8} if name == "afmoe" else {"n_routed_experts": 8}))
    assert_replayed(model, roll_out(model, c.StreamingLLM(**SMALL)))


# ---------------------------------------------------------------- what is refused, and how

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gemma2": (SIZES, "its attention caps logits"),
    "kimi_linear": ({}, r"it has layers of type \['linear_attention'\], and rollouts know full attention, or linear"),
    "deepseek_v3": ({}, r"its attention is latent \(MLA\)"),
    "gpt2": ({}, "its GPT2Model has no list of layers"),
    "gpt_neox": ({}, "cannot be rolled out"),
    "diffllama": ({}, r"its forward pass called attention in the layers 0, 0, 1, 1, not in \[0, 1\]"),
    # by 0.0 or 1.1, which depends on the release of transformers
    "doge": (
        {},
        r"log-probabilities of the rollout differ from those of its own forward pass by [01]\.",
    ),  # 0.0 or 1.1, by the release
    "gemma4_text": (
        {"head_dim": 16, "num_hidden_layers": 4, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8},
        r"its layers differ in head_dim \(per_layer_config\)",
    ),
    "llama": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": math.nan}},
        r"its rotary frequencies are not finite, look at config.json, rope_parameters: .*nan",
    ),
    "persimmon": ({}, r"layer 0 has queries, keys and values of shapes .* not 4 heads and 2 KV heads of 16"),
    "stablelm": ({}, "does not receive the arguments of the model's call"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_rolled_out_are_refused_by_name(name: str) -> None:
    changed, reason = REFUSED[name]
    with pytest.raises(ValueError, match=rf"(?s){reason}.*docs/models\.md"):
        RolloutSampler(family(name, **changed), c.FullKV()).generate([[3, 4]], GREEDY)


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])
def test_models_of_images_too_are_refused_by_name(name: str) -> None:
    text, vision = {**SIZES, "head_dim": 16}, {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
                                               "num_attention_heads": 2, "depth": 1, "num_heads": 2,
                                               "out_hidden_size": 64}  # fmt: skip
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, text_config=text, vision_config=vision))
    said = r"reads more than text. Load its language model alone, such as Gemma3ForCausal"
    with pytest.raises(UserError, match=said):
        RolloutSampler(model)


def test_a_forward_pass_of_other_numbers_is_found_before_the_first_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family("granite")
    with monkeypatch.context() as patch:
        patch.setattr(LogitScaling, "of", lambda config: PLAIN)
        with pytest.raises(ValueError, match=r"granite.*differ from those of its own forward pass by"):
            roll_out(model, params=GREEDY)
    calls: list[nn.Module] = []
    real: Callable[..., None] = choice.check_agreement
    monkeypatch.setattr(choice, "check_agreement", lambda model, *rest: calls.append(model) or real(model, *rest))
    for _ in range(2):
        roll_out(model, params=GREEDY)
    assert calls == [model], "once for each model"


@pytest.mark.parametrize(("share", "refused"), [(0.2, False), (5.0, True)])
def test_numbers_that_differ_by_more_than_rounding_are_found_however_flat_a_policy_is(
    share: float, refused: bool
) -> None:
    """Measured by the spread of the policy's log-probabilities, here 0.1, and not by its inverse."""
    model = tiny_model(initializer_range=0.02)
    with torch.no_grad():
        spread = float(model(torch.arange(3, 35)[None]).logits.log_softmax(-1).std())
    assert 0.02 < spread < 0.3

    class Noisy(TransformersDecoder):
        def logits(self, hidden: Tensor) -> Tensor:
            noise = 1.25 * share * EXACT * spread  # a mean of 0.8 of its deviation
            return super().logits(hidden) + noise * torch.randn(len(hidden), 128)

    geometry = CacheGeometry.of(model)
    with pytest.raises(ValueError, match="differ from those of its own") if refused else contextlib.nullcontext():
        check_agreement(model, Noisy(model, geometry), geometry)


def test_a_decoder_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(ValueError, match=r"decoder='native' knows the layers of .*, not those of OlmoeForCausalLM"):
        RolloutSampler(family("olmoe"), decoder="native")
    with pytest.raises(ValueError, match="decoder must be one of"):
        RolloutSampler(tiny_model(), decoder="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["phi3", "ministral3", "gemma3_text", "gpt_oss"])
def test_statistics_are_of_queries_before_they_are_turned(name: str) -> None:
    """Fused projections, partial rotation, YaRN's scale on cos and sin, windows, sinks and norms included."""
    model: Any = family(name, head_dim=16) if name == "gemma3_text" else family(name)
    ids, inputs = torch.arange(3, 43)[None], list[Tensor]()
    statistics = gather_statistics(model, ids, torch.tensor([40]))
    attention = model.model.layers[-1].self_attn  # whose input depends on all others
    hook = attention.register_forward_pre_hook(
        lambda _, args, named: inputs.append(named["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        model(ids)
        hook.remove()
        projected = attention.qkv_proj(inputs[0])[..., :64] if name == "phi3" else attention.q_proj(inputs[0])
        queries = getattr(attention, "q_norm", nn.Identity())(projected.view(40, 4, 16))
    torch.testing.assert_close(statistics.mean[-1], queries.mean(0), atol=1e-5, rtol=1e-4)
    if name in ("gemma3_text", "gpt_oss"):
        assert_replayed(model, roll_out(model, c.TriAttention(statistics=statistics, **SMALL)))


# ---------------------------------------------------------------- a trained model of 260,032 parameters


STORIES = ["Once upon a time, there was a little girl named Lily.", "Tom and his dog", "The sun was hot and"]


@pytest.fixture(scope="module")
def story_teller(models_dir: Path) -> tuple[torch.nn.Module, object, list[list[int]]]:
    folder = models_dir / "stories260K"
    model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return model, tokenizer, [tokenizer(text)["input_ids"] for text in STORIES]


@pytest.mark.parametrize("compressor", [c.FullKV(), c.StreamingLLM(budget=250, buffer=50)], ids=["full", "large"])
def test_large_budget_tells_the_same_story(story_teller: tuple, compressor: c.Compressor) -> None:
    model, _, prompts = story_teller
    params = SamplingParams(max_completion_length=200, temperature=0)
    assert_generated(model, roll_out(model, compressor, prompts=prompts, params=params), 200, prompts)


def test_half_the_cache_still_tells_a_story(story_teller: tuple) -> None:
    """Dense per-token loss of the compressed story: near the model's own text, far from a broken one.

    The model's validation loss on real stories is 1.30 nats; a uniform guess costs ln 512 = 6.24.
    """
    model, tokenizer, prompts = story_teller
    compressor = c.StreamingLLM(budget=96, buffer=4)
    params = SamplingParams(max_completion_length=200, temperature=0.8, seed=1)
    rollout = RolloutSampler(model, compressor).generate(prompts, params)
    assert (rollout.kv.stored <= 0.5 * rollout.kv.full).all()
    for row, prompt in enumerate(prompts):
        length = len(prompt) + int(rollout.completion_lengths[row])
        ids = rollout.sequences[row : row + 1, :length]
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        assert -logprobs[len(prompt) :].mean() < 1.5
        words = tokenizer.decode(ids[0, len(prompt) :], skip_special_tokens=True).split()
        assert len(set(words)) > 0.3 * len(words), "the story goes round in circles"


@pytest.mark.parametrize("compressor", [c.SnapKV, c.RKV, c.StreamingLLM, c.RandomEviction])
def test_replay_of_a_real_model(story_teller: tuple, compressor: type) -> None:
    model, _, prompts = story_teller
    params = SamplingParams(num_generations=2, max_completion_length=120, seed=5)
    rollout = roll_out(model, compressor(budget=40, buffer=10), 4, prompts=prompts, params=params)
    assert_replayed(model, rollout, share=5e-5)  # five layers
