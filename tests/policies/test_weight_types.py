"""Types of weights: those that are trained take the optimizer's steps, frozen ones are as their folder has them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import tiny_grpo
import torch
from tiny_grpo import ALPHABET, likes_a
from torch import Tensor, nn

from sparse_rl_lightning import RolloutSampler, SamplingParams
from sparse_rl_lightning.compressors import RKV, FullKV, SnapKV
from sparse_rl_lightning.distributed.deepspeed import SparseRLDeepSpeed
from sparse_rl_lightning.logprobs import logprobs_at, sequence_logprobs
from sparse_rl_lightning.modules import DistillSparse, Evaluation, GRPOLoss, SparseGRPO, SupervisedWarmup
from sparse_rl_lightning.modules.base import PolicyModule
from sparse_rl_lightning.modules.optimizers import lost_steps
from sparse_rl_lightning.ops.live_bytes import LiveBytes
from sparse_rl_lightning.policies import LoadedPolicy, LoraPolicy, PretrainedPolicy
from sparse_rl_lightning.policies.lora import adapters
from sparse_rl_lightning.policies.patched import is_changed
from sparse_rl_lightning.policies.sharding import ShadowPolicy
from sparse_rl_lightning.rollout import replay_logprobs
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

HALF, WHOLE = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A policy that is published in bfloat16, with weights as large as those of real ones."""
    path, tokenizer = tmp_path_factory.mktemp("half") / "policy", character_tokenizer(ALPHABET)
    tiny_model(vocab_size=len(tokenizer), hidden_size=32).to(HALF).save_pretrained(path)  # type: ignore[arg-type]
    tokenizer.save_pretrained(path)
    return str(path)


def types(model: Any, trained: bool | None = None) -> set[torch.dtype]:
    return {p.dtype for p in model.parameters() if trained is None or p.requires_grad == trained}


def grpo(policy: Any, kind: type[SparseGRPO] = SparseGRPO, **options: Any) -> SparseGRPO:
    sampling = SamplingParams(num_generations=4, max_completion_length=8, seed=3)
    return kind(policy, FullKV(), likes_a, sampling=sampling, **options)


def fit(module: PolicyModule, steps: int = 20, **options: Any) -> list[str]:
    """Warnings of a run, about rounded steps."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tiny_grpo.fit(module, steps, **options)
    return [str(one.message) for one in said if "rounds small steps" in str(one.message)]


def moved(module: PolicyModule, steps: int = 20, **options: Any) -> tuple[float, list[str]]:
    """Share of the trained weights that are others after a run, and what it warned of."""
    module.configure_model()
    before = [p.detach().clone().float() for p in module.policy.parameters() if p.requires_grad]
    said = fit(module, steps, **options)
    after = [p.detach().float() for p in module.policy.parameters() if p.requires_grad]
    pairs = list(zip(before, after, strict=True))
    return sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs), said


@pytest.mark.parametrize("kind", [SparseGRPO, SupervisedWarmup, DistillSparse])
def test_auto_is_float32_for_what_is_trained(folder: str, kind: Any) -> None:
    if kind is DistillSparse:
        pytest.importorskip("peft", reason="peft is an extra")
    module = SupervisedWarmup(folder) if kind is SupervisedWarmup else grpo(folder, kind)
    module.configure_model()
    assert types(module.policy) == {WHOLE}
    assert {p.dtype for group in module.configure_optimizers().param_groups for p in group["params"]} == {WHOLE}


def test_frozen_weights_stay_as_the_folder_has_them(folder: str) -> None:
    module = grpo(folder, loss=GRPOLoss(beta=0.1))
    module.configure_model()
    assert types(module._reference[0]) == {HALF}
    judge = Evaluation(folder)
    judge.configure_model()
    assert types(judge.policy) == {HALF}
    assert types(PretrainedPolicy(folder).as_stored().load()[0]) == {HALF}


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", HALF), ("bf16-true", HALF), ("32-true", WHOLE)])
def test_deepspeed_in_16_bits_takes_the_steps_on_weights_of_its_own(folder: str, precision: Any, dtype: Any) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is an extra")
    module = grpo(folder)
    module.trainer = tiny_grpo.quiet(devices=1, strategy=SparseRLDeepSpeed(stage=2), precision=precision)
    module.configure_model()
    assert types(module.policy) == {dtype}


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_adapters_are_float32_on_a_base_that_stays(folder: str, quantization: Any) -> None:
    pytest.importorskip("peft", reason="peft is an extra")
    model, _ = LoraPolicy(folder, r=4, quantization=quantization).load()
    assert types(model, trained=True) == {WHOLE}
    assert types(model, trained=False) <= {HALF, torch.int8, torch.uint8}
    double = LoraPolicy(LoadedPolicy(tiny_model().double(), character_tokenizer(ALPHABET))).load()[0]
    assert types(double) == {torch.float64}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_type_that_is_asked_for_is_taken(folder: str, dtype: str) -> None:
    source = PretrainedPolicy(folder, dtype=dtype)
    for each in (source, source.as_stored()):
        assert types(each.load()[0]) == {getattr(torch, dtype)}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_nearly_all_weights_move_at_the_default_rate(folder: str, precision: Any) -> None:
    share, said = moved(grpo(folder), precision=precision)
    assert share > 0.99
    assert not said


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_all_adapters_move(folder: str, precision: Any) -> None:
    pytest.importorskip("peft", reason="peft is an extra")
    adamw = partial(torch.optim.AdamW, lr=1e-5, weight_decay=0.0)
    share, said = moved(grpo(LoraPolicy(folder, r=4), optimizer=adamw), precision=precision)
    assert share > 0.97  # lora_A waits a step for the first gradient
    assert not said


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("bfloat16", {}), ("auto", {"precision": "bf16-true"}), ("bfloat16", {"precision": "bf16-mixed"})],
)  # fmt: skip
def test_the_share_that_will_not_move_is_told(folder: str, dtype: str, options: Any) -> None:
    """The first step is the size of the rate: what does not move in it is what is told, and hardly any moves later."""
    first, said = moved(grpo(PretrainedPolicy(folder, dtype=dtype)), 1, **options)
    assert len(said) == 1
    share, end = re.search(r"are bfloat16, .* away\. ([\d.]+)% of them (.*)", said[0]).groups()  # type: ignore[union-attr]
    assert float(share) / 100 == pytest.approx(1 - first, abs=0.005)
    assert end.startswith("do not move by a step of the learning rate, lr=1e-06. Train float32 weights")
    assert moved(grpo(PretrainedPolicy(folder, dtype=dtype)), 5, **options)[0] < first + 0.05


def told(weights: Tensor, kind: Any = torch.optim.AdamW, **options: Any) -> str | None:
    return lost_steps([kind([torch.nn.Parameter(weights)], **options)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rate", [1e-6, 3e-6, 1e-5, 1e-4])
def test_the_share_is_that_of_adding_the_step(dtype: torch.dtype, rate: float) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = 10 ** (-5 * torch.rand(20_000, generator=generator))
    weights = (sizes * torch.randn(20_000, generator=generator)).to(dtype)
    stuck = ((weights.double() + rate).to(dtype) == weights) & ((weights.double() - rate).to(dtype) == weights)
    share = float(stuck.double().mean())
    assert 0.02 < share < 0.98
    said = told(weights, lr=rate)
    assert abs(float(said.split("%")[0].rpartition(" ")[2]) / 100 - share) < 0.01


def test_a_step_of_half_the_distance_moves_nothing_and_one_of_nothing_neither() -> None:
    """Below 1 the numbers of bfloat16 are 2 ** -8 apart."""
    weights = torch.tensor([1.0, 1 - 2**-8], dtype=torch.bfloat16)
    assert ((weights.double() - 2**-9).to(torch.bfloat16) == weights).tolist() == [True, False]
    assert " 50.0% of them" in str(told(weights, lr=2**-9))
    assert " 100.0% of them" in str(told(weights, lr=0.0))


def test_what_is_not_rounded_is_not_told() -> None:
    assert told(torch.ones(3), lr=1e-6) is None
    assert told(torch.ones(3, dtype=HALF), lr=0.1) is not None
    said = told(torch.ones(3, dtype=HALF), torch.optim.SGD, lr=1e-6)  # whose steps are no size of the rate alone
    assert "Most of them may not move" in said
    warm = torch.optim.AdamW([torch.nn.Parameter(torch.full((8,), 1e-3, dtype=HALF))], lr=1e-2)
    torch.optim.lr_scheduler.LinearLR(warm, 1e-6)  # a warm-up: the rate that counts is the one it leads to
    found = lost_steps([warm])
    assert " 0.0% of them do not move by a step of the learning rate, lr=0.01." in found


def test_the_sampler_and_the_learner_agree_with_mixed_types(folder: str) -> None:
    """Adapters in float32 on weights in bfloat16 are computed alike in both, and act."""
    pytest.importorskip("peft", reason="peft is an extra")
    model = LoraPolicy(folder, r=4).load()[0].eval()
    with torch.no_grad():
        for parameter in adapters(model):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    for compressor in (FullKV(), RKV(budget=8, buffer=3, num_sinks=1, window=2)):
        params = SamplingParams(num_generations=2, max_completion_length=12, seed=3)
        rollout = RolloutSampler(model, compressor).generate([[3, 4, 5], [6, 7]], params)
        assert bool(rollout.sampler_logprobs.isfinite().all())
        if isinstance(compressor, FullKV):
            with torch.no_grad():
                found, _ = sequence_logprobs(model, rollout.sequences, rollout.completion_mask)
                stored = PretrainedPolicy(folder).as_stored().load()[0]
                base, _ = sequence_logprobs(stored, rollout.sequences, rollout.completion_mask)
            torch.testing.assert_close(rollout.sampler_logprobs, found, atol=0.1, rtol=0)
            assert (found - base).abs().max() > 0.3


def test_adapters_in_float32_keep_no_inputs_of_their_own_under_autocast(folder: str) -> None:
    """Autocast casts once what several layers read; a cast for each adapter would be kept beside it for nothing."""
    pytest.importorskip("peft", reason="peft is an extra")
    found, results = [], []
    for outside, adapters_too in ((None, False), (True, False), (None, True)):
        model = LoraPolicy(folder, r=4).load()[0].train()
        for module in model.modules():
            if outside is not None and hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = outside  # as peft has it
        for parameter in adapters(model) if adapters_too else ():
            parameter.data = parameter.data.to(HALF)
        ids = torch.full((2, 60), 4)
        with LiveBytes() as live, torch.autocast("cpu", HALF):
            logits = model(ids, use_cache=False).logits
            found.append(live.now)
        results.append(logits.detach())
        del logits
    assert torch.equal(*results[:2])
    assert found[0] < 1.03 * found[2] < found[1]


def test_an_export_is_of_the_type_that_was_trained(folder: str, tmp_path: Path) -> None:
    module = grpo(folder)
    module.configure_model()
    module.export(tmp_path)
    assert types(PretrainedPolicy(str(tmp_path)).as_stored().load()[0]) == {WHOLE}


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
