"""A replaced ``forward`` is honored by sampler and learner alike or refused by name; soft prompts are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparse_rl_lightning.compressors import SnapKV
from sparse_rl_lightning.logprobs import logprobs_at, sequence_logprobs
from sparse_rl_lightning.policies.patched import is_changed
from sparse_rl_lightning.policies.sharding import ShadowPolicy
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.testing import tiny_model

PROMPTS = [[5, 9, 33], [7, 8, 20, 41, 3]]
PARAMS = SamplingParams(num_generations=2, max_completion_length=10, seed=3)
Find = Callable[[Any], nn.Module]

CALLED: dict[str, Find] = {
    "a linear layer": lambda model: model.model.layers[0].self_attn.q_proj,
    "a feed-forward block": lambda model: model.model.layers[1].mlp,
    "a norm": lambda model: model.model.layers[1].input_layernorm,
    "the embedding": lambda model: model.model.embed_tokens,
    "the output head": lambda model: model.lm_head,
}
PASSED_OVER: dict[str, Find] = {
    "the decoder": lambda model: model.model,
    "its rotary embedding": lambda model: model.model.rotary_emb,
    "a layer": lambda model: model.model.layers[1],
    "attention": lambda model: model.model.layers[0].self_attn,
}


def as_accelerate_does(module: nn.Module) -> None:
    """A function on the object that knows the module and what it was, and changes its output."""
    before = module.forward

    def forward(module: nn.Module, *args: Tensor, **kwargs: Any) -> Any:
        out = before(*args, **kwargs)
        return out * 1.5 if isinstance(out, Tensor) else out

    module.forward = partial(forward, module)  # type: ignore[method-assign]


def as_liger_does(module: nn.Module) -> None:
    """A method of another class on the object."""

    def forward(self: nn.Module, *args: Tensor) -> Tensor:
        out: Tensor = type(self).forward(self, *args)
        return out * 1.5

    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


@pytest.mark.parametrize("replace", [as_accelerate_does, as_liger_does])
@pytest.mark.parametrize("part", CALLED)
def test_parts_that_are_called_are_called_as_they_are(part: str, replace: Callable[[nn.Module], None]) -> None:
    model = tiny_model(initializer_range=0.2, eos_token_id=None)
    sampler = RolloutSampler(model, SnapKV(budget=8, buffer=3, num_sinks=1, window=4))
    plain = sampler.generate(PROMPTS, PARAMS)  # whose weights made for decoding are there when it is replaced
    replace(CALLED[part](model))
    rollout = sampler.generate(PROMPTS, PARAMS)
    assert not torch.equal(plain.sequences, rollout.sequences)
    replayed = replay_logprobs(model, rollout)
    torch.testing.assert_close(replayed, rollout.sampler_logprobs, atol=2e-5, rtol=0)

    short, mask = rollout.sequences[:, :6], rollout.completion_mask[:, :6]
    with torch.no_grad():  # and both are what the model itself says
        logs = model(short).logits.log_softmax(-1)[:, :-1].gather(-1, short[:, 1:, None]).squeeze(-1) * mask[:, 1:]
        dense = sequence_logprobs(model, short, mask)[0]
    torch.testing.assert_close(dense[:, 1:], logs, atol=2e-5, rtol=0)
    torch.testing.assert_close(logprobs_at(model, short, short[..., None], mask)[:, 1:, 0], logs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("part", PASSED_OVER)
def test_parts_that_a_rollout_walks_itself_are_refused(part: str) -> None:
    model = tiny_model(eos_token_id=None)
    sampler = RolloutSampler(model, SnapKV(budget=8, buffer=3, num_sinks=1, window=4))
    sampler.generate(PROMPTS, PARAMS)
    module = PASSED_OVER[part](model)
    as_accelerate_does(module)
    with pytest.raises(ValueError, match=f"The forward of this {type(module).__name__} has been replaced"):
        sampler.generate(PROMPTS, PARAMS)
    del module.forward
    sampler.generate(PROMPTS, PARAMS)


def test_what_stands_above_decoder_and_head_is_refused_by_both() -> None:
    model = tiny_model()
    sampler, refused = RolloutSampler(model), "The forward of this Qwen2ForCausalLM has been replaced"
    model.forward = torch.compile(model.forward, backend="eager")  # changes no number
    sampler.generate(PROMPTS, PARAMS)
    as_accelerate_does(model)
    with pytest.raises(ValueError, match=refused):
        sampler.generate(PROMPTS, PARAMS)
    with pytest.raises(ValueError, match=refused):
        RolloutSampler(model)
    ids = torch.tensor(PROMPTS[:1])
    with pytest.raises(ValueError, match=refused):
        sequence_logprobs(model, ids, ids > 5)


def test_an_adapter_that_its_own_forward_switches_on_is_refused() -> None:
    peft = pytest.importorskip("peft", reason="peft is an extra (lora)")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[5, 6])
    with pytest.raises(ValueError, match=r"'default' of PeftModelForCausalLM is on behind its .* \(aLoRA\)"):
        RolloutSampler(peft.get_peft_model(tiny_model(), config))


def test_a_copy_of_a_sharded_policy_would_lack_a_replaced_forward() -> None:
    model = tiny_model()
    ShadowPolicy(model)
    as_liger_does(model.model.layers[0].mlp)
    with pytest.raises(ValueError, match="Where weights are sharded"):
        ShadowPolicy(model)


@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig", "PromptEncoderConfig"])
def test_soft_prompts_are_refused_and_other_adapters_are_not(kind: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is an extra (lora)")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    adapted: Any = peft.get_peft_model(tiny_model(), config)
    ids = torch.tensor(PROMPTS[:1])
    with pytest.raises(ValueError, match="'default' of PeftModelForCausalLM is a soft prompt"):
        RolloutSampler(adapted)
    with pytest.raises(ValueError, match="is a soft prompt"):
        sequence_logprobs(adapted, ids, ids > 5)
    lora: Any = peft.get_peft_model(tiny_model(), peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    rollout = RolloutSampler(lora).generate(PROMPTS, PARAMS)
    torch.testing.assert_close(replay_logprobs(lora, rollout), rollout.sampler_logprobs, atol=2e-5, rtol=0)


def test_what_is_compiled_is_not_replaced() -> None:
    """Nothing is compiled here: rollouts and log-probabilities call the parts of a compiled module."""
    model, compiled = (tiny_model(initializer_range=0.2, eos_token_id=None) for _ in range(2))
    compiled.model.layers[1] = torch.compile(compiled.model.layers[1], backend="eager")
    found = [
        RolloutSampler(policy, SnapKV(budget=8, buffer=3, num_sinks=1, window=4)).generate(PROMPTS, PARAMS)
        for policy in (model, compiled, torch.compile(compiled, backend="eager"))
    ]
    assert all(torch.equal(found[0].sampler_logprobs, other.sampler_logprobs) for other in found[1:])
    for policy in (model, torch.compile(model, backend="eager")):
        as_liger_does(model)
        with pytest.raises(ValueError, match="has been replaced"):
            RolloutSampler(policy)


def test_hooks_inside_a_compiled_block_count() -> None:
    block = nn.Linear(3, 3)
    compiled = torch.compile(block, backend="eager")
    assert not is_changed(compiled)
    block.register_forward_hook(lambda *_: None)
    assert is_changed(compiled)
