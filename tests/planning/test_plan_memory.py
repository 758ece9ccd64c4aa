"""What a plan counts is what a real model, optimizer, cache and pass of the same shapes hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel

from sparse_rl_lightning.calibration import ModelShape
from sparse_rl_lightning.compressors import RKV, FullKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.learner.block import BlockPlan
from sparse_rl_lightning.learner.forward import Learner, LearnerOptions
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.ops.live_bytes import LiveBytes
from sparse_rl_lightning.planning import Job, Sharding, card_of, make_plan
from sparse_rl_lightning.planning.blueprint import Blueprint
from sparse_rl_lightning.planning.memory import (
    CONTEXT,
    LOST,
    empty_model,
    learner,
    optimizer_bytes,
    prefill_bytes,
    reference_bytes,
    slot_size,
    states,
)
from sparse_rl_lightning.planning.plan import forward_flops, passes
from sparse_rl_lightning.policies import PretrainedPolicy
from sparse_rl_lightning.rollout import RolloutOptions, RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.engine.scheduler import steps_past_end
from sparse_rl_lightning.testing import tiny_model

LENGTH, COMPLETION = 40, 24
LORA: tuple[tuple[str, Any], ...] = ()  # as LoraPolicy adds adapters by default
INT8, NF4 = ((("quantization", kind),) for kind in ("int8", "nf4"))
SOME = (("r", 4), ("target_modules", ("q_proj", "v_proj")))
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": ADAMW,
    "AdamW one by one": partial(ADAMW, foreach=False),
    "SGD": partial(torch.optim.SGD, lr=1e-3),
    "SGD with momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,  # reads numbers in its step, and has a state that is no multiple
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The configuration of a tiny model, without weights."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("qwen3", vocab_size=300, num_layers=3).config.save_pretrained(path)
    return str(path)


def job(folder: str, **changes: Any) -> Job:
    """Four sequences of 40 tokens, of which 24 are drawn."""
    own = Job(
        Blueprint(folder, "float32"), RKV(budget=16, buffer=8),
        SamplingParams(num_generations=2, max_completion_length=COMPLETION), RolloutOptions(), LearnerOptions(),
        ADAMW, BlockPlan(2, 2, 2, 1, accumulate=2), prompt=LENGTH - COMPLETION,
    )  # fmt: skip
    return replace(own, **changes)


def real(job: Job, attention: str = "sdpa") -> PreTrainedModel:
    """The model with its weights."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        job.blueprint.config, dtype=job.dtype, attn_implementation=attention
    )
    job.blueprint.adapt(model)
    return model.train()


def live_pass(model: PreTrainedModel, job: Job) -> int:
    """Bytes at the peak of a real forward and backward pass of the learner."""
    part = job.micro_batch
    Learner(job.learner).prepare(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    ids = torch.zeros(part.rows, part.length, dtype=torch.int64)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    mask[:, -part.completion :] = True
    with LiveBytes() as live:
        logprobs, _ = sequence_logprobs(model, ids, mask, 1.0, job.learner.head_chunk_size)
        logprobs.sum().backward()
    return live.most


def test_eager_attention_is_counted_with_the_square_of_the_length(folder: str) -> None:
    source = PretrainedPolicy(folder, dtype="float32", attn_implementation="eager")
    eager, plain = (job(folder, blueprint=Blueprint.of(s)) for s in (source, PretrainedPolicy(folder, "float32")))
    assert learner(eager).peak > learner(plain).peak
    assert real(eager, attention="eager").config._attn_implementation == eager.blueprint.config._attn_implementation


def test_experts_of_mixtral_are_as_wide_as_a_layer(folder: str, tmp_path: Path) -> None:
    config = MixtralConfig(hidden_size=32, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2)
    config.save_pretrained(tmp_path)
    one = MixtralConfig(hidden_size=32, intermediate_size=64, num_local_experts=4, num_experts_per_tok=1)
    one.save_pretrained(tmp_path / "one")
    both, single = (prefill_bytes(job(folder, blueprint=Blueprint(str(p)))) for p in (tmp_path, tmp_path / "one"))
    assert both - single == 2 * (LENGTH - COMPLETION) * 3 * 64 * 4


@pytest.mark.parametrize("adapters", [None, LORA, INT8, NF4, SOME], ids=["all weights", "LoRA", "int8", "nf4", "some"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_those_of_a_real_optimizer(folder: str, name: str, adapters: Any) -> None:
    given = job(folder, optimizer=OPTIMIZERS[name], blueprint=Blueprint(folder, "float32", adapters))
    model, found = real(given), states(given)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = given.optimizer(trained)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor) and t.ndim]
    assert found.weights == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert found.gradients == sum(parameter.nbytes for parameter in trained)
    assert found.optimizer == sum(t.nbytes for t in held)
    assert (len(trained) < len(list(model.parameters()))) == (adapters is not None)


@pytest.mark.parametrize("foreach", [True, False])
def test_temporaries_of_a_step_are_measured(folder: str, foreach: bool) -> None:
    """On a GPU ``foreach`` is the default; here it is asked for."""
    given = job(folder, optimizer=partial(ADAMW, foreach=foreach))
    trained = list(real(given).parameters())
    optimizer = given.optimizer(trained)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with LiveBytes() as live:
        optimizer.step()
    predicted = states(given).temporary
    assert 0.5 * predicted <= live.most <= 1.05 * predicted


def test_an_optimizer_that_needs_a_gpu_is_refused_in_words(folder: str) -> None:
    def picky(parameters: Any) -> torch.optim.Optimizer:
        raise RuntimeError("only on CUDA.")

    with pytest.raises(UserError, match=r"cannot be made on tensors without memory: only on CUDA\. Plan with"):
        optimizer_bytes(job(folder, optimizer=picky), [])


@pytest.mark.parametrize(
    ("stage", "per_parameter"), [(1, 2 + 2 + 16 / 4), (2, 2 + 18 / 4), (3, 20 / 4)], ids=lambda value: str(value)
)
def test_sharded_states_by_hand(folder: str, stage: int, per_parameter: float) -> None:
    """Weights and gradients in 16 bits; the optimizer has float32 weights, two moments and gradients: 2 + 2 + 16."""
    given = job(folder, precision="bf16-mixed", sharding=Sharding(stage, ranks=4))
    count = sum(parameter.numel() for parameter in empty_model(given.blueprint, torch.float32).parameters())
    own = sum(buffer.nbytes for buffer in empty_model(given.blueprint, torch.float32).buffers())
    assert states(given).total == pytest.approx(per_parameter * count + own)
    offloaded = states(replace(given, sharding=Sharding(stage, 4, offloads_optimizer=True)))
    assert (offloaded.optimizer, offloaded.host) == (0, pytest.approx(16 / 4 * count))
    if stage == 3:  # with the weights, and only buffers and gradients stay
        offloaded = states(replace(given, sharding=Sharding(stage, 4, True, True)))
        assert (offloaded.total, offloaded.host) == (pytest.approx(2 / 4 * count + own), pytest.approx(18 / 4 * count))


def test_ddp_keeps_gradients_twice(folder: str) -> None:
    alone, two = states(job(folder)), states(job(folder, sharding=Sharding(0, 2)))
    assert two.total - alone.total == alone.gradients


def test_the_reference_is_whole_and_no_wider_than_the_policy(folder: str) -> None:
    given = job(folder, beta=0.1, precision="bf16-mixed", sharding=Sharding(2, ranks=4))
    whole = sum(parameter.nbytes for parameter in real(job(folder)).parameters())
    assert reference_bytes(given) == whole / 2  # which DeepSpeed has in 16 bits
    assert reference_bytes(replace(given, sharding=Sharding(0, 4))) == whole
    assert reference_bytes(replace(given, beta=0.0)) == 0
    assert reference_bytes(replace(given, blueprint=Blueprint(folder, "float32", LORA))) == 0


def test_auto_is_float32_for_what_trains_and_the_folders_type_for_the_rest(tmp_path: Path) -> None:
    config = tiny_model("qwen3", vocab_size=300, num_layers=3).config
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    path = str(tmp_path)
    plain, explicit = (job(path, blueprint=Blueprint(path, dtype), beta=0.1) for dtype in ("auto", "float32"))
    assert states(plain) == states(explicit)
    assert reference_bytes(plain) == reference_bytes(explicit) / 2
    lora = job(path, blueprint=Blueprint(path, "auto", LORA))
    model, found = real(lora), states(lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {parameter.dtype for parameter in trained} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad} == {torch.bfloat16}
    assert found.weights == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert (found.gradients, found.optimizer) == (sum(p.nbytes for p in trained), sum(2 * p.nbytes for p in trained))
    mixed = replace(lora, precision="bf16-mixed")  # of DeepSpeed: adapters in 16 bits, and masters and moments in 32
    sharded = states(replace(mixed, sharding=Sharding(2, ranks=1)))
    half = sum(p.numel() for p in trained) * 2
    assert (found.weights - sharded.weights, sharded.gradients) == (half, half)
    assert sharded.optimizer == 16 * sum(p.numel() for p in trained)
    assert job(path, blueprint=Blueprint(path), sharding=Sharding(2, 2), precision="bf16-mixed").dtype == torch.bfloat16
    assert learner(lora).peak == pytest.approx(live_pass(model, lora), rel=0.01)


@pytest.mark.parametrize(
    ("precision", "loaded", "weights", "computed"),
    [
        ("32-true", "bfloat16", torch.bfloat16, torch.bfloat16),  # the trainer converts nothing
        ("bf16-mixed", "float32", torch.float32, torch.bfloat16),
        ("bf16-true", "float32", torch.bfloat16, torch.bfloat16),
        ("16-mixed", "float32", torch.float32, torch.float16),
        ("64-true", "float32", torch.float64, torch.float64),
    ],
)
def test_types_by_precision(folder: str, precision: str, loaded: str, weights: Any, computed: Any) -> None:
    given = job(folder, precision=precision, blueprint=Blueprint(folder, loaded))
    assert (given.dtype, given.compute_dtype) == (weights, computed)
    if precision.endswith("mixed"):  # DeepSpeed has no autocast: its weights are in 16 bits
        assert replace(given, sharding=Sharding(2, 2)).dtype == computed


@pytest.mark.parametrize("compressor", [RKV(budget=16, buffer=8), FullKV()], ids=repr)
def test_slots_are_those_of_the_sampler(folder: str, compressor: Any) -> None:
    given = job(folder, compressor=compressor)
    sampler = RolloutSampler(real(given).eval(), compressor, num_slots=3)
    params = replace(given.sampling, num_generations=4, seed=0)
    sampler.generate([[5] * given.prompt], params)
    past = 0 if compressor.evicts else steps_past_end(torch.device("cuda"))  # the host looks later on a GPU
    assert 3 * slot_size(given).pool == sampler.cache.pool_bytes * (LENGTH + past) // LENGTH


def test_a_pool_that_is_freed_is_not_there_when_the_learner_works(folder: str) -> None:
    card = card_of(memory="24GB")
    kept, freed = (make_plan(job(folder, rollout=RolloutOptions(keep_pool=keep)), card) for keep in (True, False))
    cache = next(phases for part, phases in kept.parts.items() if part.startswith("cache"))
    assert cache[0] == cache[1] == cache[2] > 0
    gone = next(phases for part, phases in freed.parts.items() if part.startswith("cache"))
    assert gone == (cache[0], 0, 0)


def test_a_memory_limit_chooses_the_slots(folder: str) -> None:
    slot = slot_size(job(folder))
    given = job(folder, rollout=RolloutOptions(memory_limit=slot.of(3)))
    assert make_plan(given, card_of()).slots == 3
    assert make_plan(job(folder, rollout=RolloutOptions(memory_limit=float(slot.of(3)))), card_of()).slots == 3
    assert make_plan(job(folder, rollout=RolloutOptions(memory_limit=0.5)), card_of()).slots == given.sequences


@pytest.mark.parametrize("adapters", [None, LORA], ids=["all weights", "LoRA"])
@pytest.mark.parametrize(
    "options", [LearnerOptions(), LearnerOptions(micro_batch_tokens=40, gradient_checkpointing=True)], ids=repr
)
def test_the_learners_part_is_that_of_a_real_pass(folder: str, options: LearnerOptions, adapters: Any) -> None:
    block = BlockPlan(2, 2, 4 if options.packs else 2, 1, accumulate=2)  # several parts: see test_plan_forms
    given = job(folder, learner=options, blueprint=Blueprint(folder, "float32", adapters), block=block)
    bookkeeping = 8 * given.micro_batch.rows * given.micro_batch.length
    assert given.micro_batch.rows == (1 if options.packs else 2)
    assert learner(given).peak == pytest.approx(live_pass(real(given), given), abs=bookkeeping)


def test_the_phases_are_sums_with_what_is_taken_for_granted(folder: str) -> None:
    plan = make_plan(job(folder), card_of(memory="24GB"))
    for place, count in enumerate(plan.phases.values()):
        assert count == pytest.approx(CONTEXT + (1 + LOST) * sum(phases[place] for phases in plan.parts.values()))
    assert plan.peak == max(plan.phases.values())
    assert plan.fits
    assert not make_plan(plan.job, card_of(memory="1GB")).fits


def test_operations_are_those_of_a_real_pass(folder: str) -> None:
    """The counter takes attention as a whole square; backward is twice forward."""
    given = job(folder)
    model, ids = real(given, "eager"), torch.zeros(given.sequences, given.length, dtype=torch.int64)
    forward, both = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with forward:
        model(ids)
    with both:
        model(ids).logits.sum().backward()
    s = ModelShape.of(given.blueprint.config)
    triangles = given.sequences * 2 * s.num_layers * s.num_heads * s.head_dim * given.length**2
    assert forward_flops(given) == forward.get_total_flops() - triangles
    assert both.get_total_flops() / forward.get_total_flops() == pytest.approx(passes(given), rel=0.02)
