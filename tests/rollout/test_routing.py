"""Choices of experts: recorded as they were made, and made again by the learner with gradient through its routers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from rollouts import PROMPTS, SMALL, put_back_midway
from torch import Tensor, nn

from sparse_rl_lightning.callbacks import DryRun, MismatchSplit
from sparse_rl_lightning.compressors import RKV, FullKV, SnapKV
from sparse_rl_lightning.learner.checkpointing import enable_checkpointing
from sparse_rl_lightning.learner.forward import Learner, LearnerOptions
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.modules import ReplayGRPO
from sparse_rl_lightning.policies import LoadedPolicy
from sparse_rl_lightning.policies.routing import RoutingShape
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.testing import character_tokenizer, tiny_model
from tests.families import family
from tests.rollout.test_rollout_memory import allocated, attributes
from tests.tiny_grpo import ALPHABET, Recorder, fit, module

PARAMS = SamplingParams(num_generations=2, max_completion_length=20, seed=5)
ROUTED = ("qwen3_moe", "mixtral", "olmoe", "glm4_moe", "gpt_oss")
each_routed = pytest.mark.parametrize("name", ROUTED)


def routers(model: Any) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith(("mlp.gate", "mlp.router"))]


def tied(name: str, **changed: Any) -> Any:
    """A model whose routers score four experts alike and four others, of which two are chosen by the least change."""
    model = family(name, **changed)
    for router in routers(model):
        router.weight.data = router.weight.data[::4].repeat_interleave(4, dim=0)
        if hasattr(router, "e_score_correction_bias"):
            router.e_score_correction_bias.copy_(torch.tensor([0.0, 0.1]).repeat_interleave(4))
        if getattr(router, "bias", None) is not None:
            router.bias.data = router.bias.data[::4].repeat_interleave(4)
    return model


def favoring(model: Any, parity: int) -> Any:
    """A copy whose routers score even or odd experts a little higher, or lower, as the token may be."""
    other = copy.deepcopy(model)
    for router in routers(other):
        router.weight.data[parity::2] *= 1 + 1e-5
    return other


def drawn(model: Any, *args: Any, prompts: Any = PROMPTS, **options: Any) -> Rollout:
    return RolloutSampler(model, *args, record_routing=True, **options).generate(prompts, PARAMS)


def fed(rollout: Rollout) -> Tensor:
    """The tokens (B, T) that went through the model: all but the last."""
    lengths = rollout.prompt_lengths + rollout.completion_lengths
    return torch.arange(rollout.sequences.shape[1]) < lengths[:, None] - 1


@each_routed
def test_the_record_is_what_the_routers_chose(name: str) -> None:
    model = family(name)
    rollout = drawn(model, FullKV(), 3, max_prefill_tokens=16)
    found: list[Tensor] = []
    hooks = [router.register_forward_hook(lambda _, __, out: found.append(out[2])) for router in routers(model)]
    with torch.no_grad():
        model(rollout.sequences)
    for hook in hooks:
        hook.remove()
    want = torch.stack([one.view(*rollout.sequences.shape, -1) for one in found], dim=2)
    assert rollout.routing.shape == want.shape
    assert rollout.routing.dtype == torch.uint8
    assert rollout.routing.shape[2:] == ({"glm4_moe": 1, "gpt_oss": 4}.get(name, 2), 2)
    mask = fed(rollout)
    assert torch.equal(rollout.routing[mask].sort(-1).values, want[mask].sort(-1).values.to(torch.uint8) + 1)
    assert not bool(rollout.routing[~mask].any())
    assert RolloutSampler(model).generate(PROMPTS, PARAMS).routing is None
    assert RoutingShape(4, 8, 256).dtype == torch.int16


@each_routed
def test_slots_chunks_and_sessions_do_not_matter(name: str) -> None:
    model = family(name)
    want = drawn(model, SnapKV(**SMALL))
    assert bool((want.kv.stored < want.kv.full).any())
    refilled = drawn(model, SnapKV(**SMALL), 3, max_prefill_tokens=16)
    moved = put_back_midway(model, SnapKV(**SMALL), PARAMS, record_routing=True)
    for rollout in (refilled, moved):
        assert torch.equal(rollout.sequences, want.sequences)
        assert torch.equal(rollout.routing, want.routing)
    restored = Rollout.from_state(moved.state())
    assert torch.equal(restored[torch.tensor([3, 1])].routing, want.routing[[3, 1]])


def test_the_memory_plan_counts_the_record() -> None:
    model = family("qwen3_moe")
    plain, sampler = (
        RolloutSampler(model, SnapKV(**SMALL), memory_limit=2**16, record_routing=record) for record in (False, True)
    )
    for one in (plain, sampler):
        one.generate(PROMPTS, PARAMS)
    plan, engine = sampler.memory_plan, sampler.engine
    assert plan.total_bytes == allocated(attributes(engine.cache), vars(engine.logs)) <= 2**16
    assert plan.bytes_per_slot - plain.memory_plan.bytes_per_slot == 60 * 2 * 2  # tokens, layers, choices


@each_routed
def test_a_flipped_choice_is_made_again(name: str) -> None:
    model = tied(name)
    sampler, learner = favoring(model, 0), favoring(model, 1)
    for compressor in (FullKV(), RKV(**SMALL)):
        rollout = drawn(sampler, compressor)
        free = replay_logprobs(learner, Rollout(**{**vars(rollout), "routing": None}))
        bound = replay_logprobs(learner, rollout)
        assert float((free - rollout.sampler_logprobs).detach().abs().max()) > 0.1
        torch.testing.assert_close(bound, rollout.sampler_logprobs, atol=1e-3, rtol=0)
        part = Learner(LearnerOptions(micro_batch_tokens=70), 1.0).replayed(learner, rollout)[0]
        torch.testing.assert_close(part, bound, atol=1e-5, rtol=0)


# ---------------------------------------------------------------- against a plain dense computation


def scores_of(router: Any, hidden: Tensor, name: str) -> Tensor:
    """The scores (R, E) of the experts before any choice, written from the models' papers."""
    logits = hidden @ router.weight.T + (router.bias if name == "gpt_oss" else 0)
    return logits.sigmoid() if name == "glm4_moe" else logits.softmax(-1)


@contextmanager
def every_expert(model: Any, rollout: Rollout, name: str) -> Iterator[None]:
    """Blocks that compute all experts for all tokens, and weigh those of the record, in float64."""
    blocks = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    for index, block in enumerate(blocks):
        chosen = rollout.routing[:, :, index].long()

        def forward(hidden: Tensor, block: Any = block, chosen: Tensor = chosen) -> Any:
            scores = scores_of(block.router if name == "gpt_oss" else block.gate, hidden, name)
            picked = nn.functional.one_hot(chosen, scores.shape[-1] + 1)[..., 1:].sum(-2).double()
            weights = scores * picked
            if name != "olmoe":  # whose weights do not sum to one
                weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
            if name == "glm4_moe":
                weights = weights * block.gate.routed_scaling_factor
            experts = block.experts
            if name == "gpt_oss":  # whose matrices are transposed, with biases
                both = torch.einsum("btc,ecj->btej", hidden, experts.gate_up_proj) + experts.gate_up_proj_bias
                gate, up = both[..., ::2].clamp(max=7), both[..., 1::2].clamp(-7, 7)
                each = torch.einsum("btej,ejc->btec", (up + 1) * gate * (1.702 * gate).sigmoid(), experts.down_proj)
                return (weights[..., None] * (each + experts.down_proj_bias)).sum(-2), scores
            gate, up = torch.einsum("btc,ejc->btej", hidden, experts.gate_up_proj).chunk(2, -1)
            out = torch.einsum("bte,btej,ecj->btc", weights, nn.functional.silu(gate) * up, experts.down_proj)
            return out + block.shared_experts(hidden) if name == "glm4_moe" else out

        block.forward = forward
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


@each_routed
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_all_experts_under_fixed_choices(name: str, checkpointing: bool) -> None:
    model = tied(name, **({"norm_topk_prob": True} if name == "qwen3_moe" else {})).double()
    model.config._experts_implementation = "eager"  # the fast ones know no float64
    rollout = drawn(favoring(model, 0), RKV(**SMALL), prompts=PROMPTS[:2])
    learner = favoring(model, 1).train()
    if checkpointing:
        enable_checkpointing(learner, use_reentrant=False)
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    for _ in range(2):
        learner.zero_grad()
        mask = rollout.completion_mask
        if found:
            with every_expert(learner, rollout, name):
                logprobs = sequence_logprobs(learner, rollout.sequences, mask)[0]
                logprobs.square().sum().backward()
        else:
            logprobs = sequence_logprobs(learner, rollout.sequences, mask, routing=rollout.routing)[0]
            logprobs.square().sum().backward()
        found.append((logprobs.detach(), {n: p.grad.clone() for n, p in learner.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=0)
    for parameter, gradient in found[0][1].items():  # the models' routers compute in float32 whatever their type
        assert float((gradient - found[1][1][parameter]).abs().max() / gradient.abs().max()) < 1e-5, parameter
    gates = [value for name, value in found[0][1].items() if name.endswith(("gate.weight", "router.weight"))]
    assert all(float(gate.abs().max()) > 0 for gate in gates)


# ---------------------------------------------------------------- in training, and in 16 bits


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ROUTED)
@pytest.mark.parametrize("kind", [None, ReplayGRPO])
def test_training_steps_with_packed_rows_and_checkpointing(name: str, kind: Any) -> None:
    tokenizer = character_tokenizer(ALPHABET)
    options = {} if kind is None else {"kind": kind}
    grpo = module(
        compressor=RKV(budget=8, buffer=3, num_sinks=1, window=2), lr=0.05, record_routing=True, num_slots=5,
        micro_batch_tokens=60, gradient_checkpointing=True, **options,
    )  # fmt: skip
    grpo.policy_source = LoadedPolicy(family(name, vocab_size=len(tokenizer), initializer_range=0.1), tokenizer)
    recorder = Recorder()
    trainer = fit(grpo, 2, [recorder, MismatchSplit(1)])
    assert all(scored.rollout.routing is not None for scored in recorder.scored)
    values = {n: float(v) for n, v in trainer.callback_metrics.items()}
    assert abs(values["mismatch_split/routing/kl_k3"]) < 1e-5  # float32: nothing flips
    assert values["mismatch_split/rounding/kl_k3"] < 1e-8
    assert values["mismatch_split/compression/kl_k3"] > 1e-5


# ---------------------------------------------------------------- refusals


def test_models_without_known_routers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mixtures of experts.*no router"):
        RolloutSampler(tiny_model(), record_routing=True)
    model: Any = family("olmoe")
    for layer in model.model.layers:
        del layer.mlp.gate.top_k
    with pytest.raises(ValueError, match="does not know how OlmoeSparseMoeBlock routes"):
        RolloutSampler(model, record_routing=True)
    model = family("olmoe")
    model.model.layers[1].mlp.gate.top_k = 3
    with pytest.raises(ValueError, match=r"routers with \(top_k, num_experts\) \[\(2, 8\), \(3, 8\)\]"):
        RolloutSampler(model, record_routing=True)


def test_routers_that_choose_otherwise_and_records_of_another_model_are_refused() -> None:
    model: Any = family("olmoe")
    gate = model.model.layers[1].mlp.gate
    own = gate.forward

    def forward(hidden: Tensor) -> Any:
        logits, _, _ = own(hidden)
        order = logits.softmax(-1).argsort(-1, descending=True)[:, :2]
        torch.topk(logits, 2)
        return logits, logits.softmax(-1).gather(-1, order), order

    gate.forward = forward
    with pytest.raises(ValueError, match="OlmoeTopKRouter choose 2 times in a pass"):
        drawn(model)
    with pytest.raises(ValueError, match=r"\(2, 2\), the model's routers \(1, 2\)"):
        replay_logprobs(family("glm4_moe"), drawn(family("olmoe")))


def test_the_dry_run_goes_the_way_that_makes_choices_again() -> None:
    """The first pass through the learner of a run that records choices is told choices, none of them made yet."""
    tokenizer, told = character_tokenizer(ALPHABET), list[Tensor | None]()
    grpo = module(compressor=RKV(budget=8, buffer=3, num_sinks=1, window=2), record_routing=True)
    grpo.policy_source = LoadedPolicy(family("qwen3_moe", vocab_size=len(tokenizer)), tokenizer)
    loss = grpo.micro_batch_loss
    grpo.micro_batch_loss = lambda part, own: told.append(part.routing) or loss(part, own)  # type: ignore[method-assign]
    fit(grpo, 1, [DryRun(enabled=True)])
    assert told[0].shape[2:] == told[1].shape[2:]
    assert not told[0].any()
    assert told[1].any()
