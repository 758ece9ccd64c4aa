"""The predicted memory of a micro-batch is that of the pass itself, to the masks and scalars of its bookkeeping."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import pytest
import torch
from closeness import assert_same_logprobs, assert_same_sums
from largest import Largest
from test_replay_grpo import ADAPTERS, part_of
from test_replay_grpo import module as replay_module
from tiny_grpo import Recorder, fit, is_checkpointing, weights
from tiny_grpo import module as sparse_module
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from sparse_rl_lightning.callbacks import ImportanceReweighting, SparsityAwareRejection
from sparse_rl_lightning.compressors import RKV
from sparse_rl_lightning.learner import memory
from sparse_rl_lightning.learner.forward import Learner, LearnerOptions
from sparse_rl_lightning.learner.memory import LearnerBytes, MicroBatch, learner_bytes
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.ops.live_bytes import LiveBytes
from sparse_rl_lightning.policies.lora import add_adapter
from sparse_rl_lightning.records import NEVER, EvictionRecord, Rollout
from sparse_rl_lightning.replay.masked_attention import MASK_BYTES
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.testing import tiny_model
from tests.families import family as tiny_family

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
}  # fmt: skip
HOW: tuple[Any, ...] = (False, True, "selective", "offload")
FAMILIES = [Qwen2Config, Qwen3Config, LlamaConfig]


def lora(model: Any) -> None:
    pytest.importorskip("peft", reason="peft is an extra")
    add_adapter(model, target_modules="all-linear", seed=0, r=4, lora_alpha=8.0, lora_dropout=0.0)


SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {}, "bf16-mixed": {"autocast": torch.bfloat16}, "bf16-true": {"dtype": torch.bfloat16},
    "LoRA": {"adapt": lora}, "LoRA on 16 bits": {"adapt": lora, "dtype": torch.bfloat16},
}  # fmt: skip


def measured(
    config: PreTrainedConfig, part: MicroBatch, options: LearnerOptions, dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None, adapt: Any = None,
) -> LearnerBytes:  # fmt: skip
    """Of real tensors, through the learner's own function, with transformers' own attention."""
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if adapt is not None:
        adapt(model)
    model.train()
    Learner(options).prepare(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    ids = torch.zeros(part.rows, part.length, dtype=torch.int64)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    mask[:, -part.completion :] = True
    mixed = contextlib.nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    with LiveBytes() as live:
        with mixed:
            logprobs, _ = sequence_logprobs(model, ids, mask, 1.0, options.head_chunk_size, options.head_in_float32)
            loss = logprobs.sum()
            del logprobs
        kept = live.now
        loss.backward()
    return LearnerBytes(kept, live.most)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
@pytest.mark.parametrize("options", [LearnerOptions(gradient_checkpointing=how) for how in HOW], ids=repr)
@pytest.mark.parametrize(
    "setting", [pytest.param(one, marks=[pytest.mark.slow] * ("16" in one and one != "bf16-mixed")) for one in SETTINGS]
)
def test_prediction_is_what_the_pass_takes(family: Any, options: LearnerOptions, setting: str) -> None:
    config, part = family(**SIZES, num_hidden_layers=3), MicroBatch(rows=2, length=40, completion=25)
    given = SETTINGS[setting]
    found, want = learner_bytes(config, part, options, **given), measured(config, part, options, **given)
    bookkeeping = 8 * part.rows * part.length  # masks of real tokens, and log-probs put back in their place
    if options.gradient_checkpointing == "offload":
        inputs = 3 * part.rows * part.length * SIZES["hidden_size"] * given.get("dtype", torch.float32).itemsize
        assert found.host == inputs
        assert found.peak < want.peak  # here everything is on the host
    else:
        assert found.host == 0
        assert abs(found.peak - want.peak) <= bookkeeping
    assert abs(found.kept + found.host - want.kept) <= bookkeeping
    assert want.kept > 40 * bookkeeping, "nothing that matters was measured"


@pytest.mark.thinned(3)
@pytest.mark.parametrize("options", [LearnerOptions(gradient_checkpointing=how) for how in HOW], ids=repr)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("vocabulary", [300, 9000], ids=["deepest in the layers", "at the embeddings"])
def test_layers_that_are_alike_need_not_all_be_passed(options: LearnerOptions, setting: str, vocabulary: int) -> None:
    """The prediction through three of seven layers is that through all of them."""
    config, part = Qwen3Config(**SIZES | {"vocab_size": vocabulary}, num_hidden_layers=7), MicroBatch(2, 40, 25)
    found = learner_bytes(config, part, options, **SETTINGS[setting])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "PASSED", 7)
        assert learner_bytes(config, part, options, **SETTINGS[setting]) == found


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "gemma3_text"])
def test_layers_that_differ_are_all_passed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are alike; linear and full attention, windows and none are not."""
    model = tiny_family(name)
    monkeypatch.setattr(memory, "PASSED", 1)
    assert len(model.get_decoder().layers) > 1
    assert (memory._shortened(model)[1] > 0) == (name == "qwen3_moe")


@pytest.mark.parametrize("how", HOW[:2])
def test_attention_that_transformers_has_no_kernel_for_counts_its_probabilities(how: Any) -> None:
    """gpt-oss: eager attention, and experts, whose products have shapes without numbers in 16 bits alone."""
    config, options = tiny_family("gpt_oss").config, LearnerOptions(gradient_checkpointing=how)
    part, sixteen = MicroBatch(rows=2, length=40, completion=25), torch.bfloat16
    found, want = (bytes_of(config, part, options, sixteen) for bytes_of in (learner_bytes, measured))
    assert abs(found.peak - want.peak) <= 8 * 2 * 40
    assert abs(found.kept - want.kept) <= 8 * 2 * 40
    assert how or found.kept > 4 * 2 * (2 * 4 * 40 * 40) * 2, "two layers' probabilities and logits, at least"


def test_chunks_of_the_head_and_one_sequence_count() -> None:
    config = Qwen2Config(**{**SIZES, "vocab_size": 5000}, num_hidden_layers=2)
    peaks = []
    for chunk in (4, 64):
        options, part = LearnerOptions(head_chunk_size=chunk, head_in_float32=True), MicroBatch(1, 70, 64)
        found, want = learner_bytes(config, part, options), measured(config, part, options)
        assert found.peak == pytest.approx(want.peak, abs=8 * 70)
        peaks.append(found.peak)
    assert peaks[1] - peaks[0] > 50 * 5000 * 4, "the logits of a chunk are there at a time"


def test_offload_leaves_no_input_of_a_layer_on_the_device() -> None:
    config, part = Qwen2Config(**SIZES, num_hidden_layers=8), MicroBatch(rows=2, length=200, completion=20)
    found = {how: learner_bytes(config, part, LearnerOptions(gradient_checkpointing=how)) for how in HOW}
    inputs, bookkeeping = 8 * 2 * 200 * SIZES["hidden_size"] * 4, 8 * 2 * 200
    assert found["offload"].host == inputs
    assert abs(found[True].kept - inputs - found["offload"].kept) <= bookkeeping
    assert found[True].peak - found["offload"].peak > 0.8 * inputs
    attended = inputs + 8 * 2 * 200 * SIZES["num_attention_heads"] * 4  # as wide as a layer, and a number per query
    assert abs(found["selective"].kept - found[True].kept - attended) <= bookkeeping


@pytest.mark.slow
def test_shapes_of_real_models_need_no_weights() -> None:
    """Qwen3-4B at 16,384 tokens: 8 GB of weights in 16 bits, of which nothing is allocated."""
    config = Qwen3Config(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    part, sixteen = MicroBatch(1, 16384, 16000), torch.bfloat16
    found = learner_bytes(config, part, LearnerOptions(gradient_checkpointing=True), dtype=sixteen)
    inputs = 36 * 16384 * 2560 * 2
    assert inputs < found.kept < 1.2 * inputs
    assert 1.5 * inputs < found.peak < 6 * inputs


CHECKPOINTING = LearnerOptions(gradient_checkpointing=True)


def rollout(length: int) -> Rollout:
    """One sequence, of which two tokens in three die 256 tokens later."""
    token, inside = torch.arange(length), torch.arange(length)[None] > 0
    death = torch.where((token % 3 > 0) & (token + 256 < length), token + 256, NEVER).to(torch.int32)
    return Rollout(
        sequences=token[None] % 60 + 3, prompt_lengths=torch.tensor([1]), completion_mask=inside,
        finished=torch.tensor([True]), sampler_logprobs=torch.zeros(1, length),
        evictions=EvictionRecord.from_dense(death.expand(1, 1, 1, length)),
    )  # fmt: skip


@cache
def measured_long(length: int, replays: bool) -> tuple[int, int]:
    """Peak bytes of a forward and backward pass, and those of its largest tensor."""
    sizes: dict[str, int] = {"hidden_size": 8, "num_heads": 1, "num_kv_heads": 1, "num_layers": 1, "vocab_size": 64}
    model = tiny_model(max_position_embeddings=length, **sizes).train()  # type: ignore[arg-type]
    learner, part = Learner(CHECKPOINTING, replays=replays), rollout(length)
    learner.prepare(model)
    with LiveBytes() as live, Largest() as largest:
        learner.logprobs(model, part)[0].sum().backward()
    return live.most, largest.bytes


@pytest.mark.parametrize("replays", [False, True], ids=["dense", "replay"])
def test_memory_grows_with_the_length_and_not_with_its_square(replays: bool) -> None:
    length = 16384
    (half, _), (whole, largest) = measured_long(length // 2, False), measured_long(length, replays)
    masks = MASK_BYTES if replays else 0
    assert largest <= max(masks, 64 * 4 * length)  # a mask of its limit, or a row of numbers for each token
    assert masks + 2.1 * half < 5 * length**2, "a whole mask would not be seen"
    assert whole < masks + 2.1 * half


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "dense": (sparse_module, {}),
    "packed": (sparse_module, {"micro_batch_tokens": 40}),
    "replay": (replay_module, {}),
    "mixed": (replay_module, {"replay_objective": "mixed"}),
    "adapters": (replay_module, {"adapters": ADAPTERS}),
}


FORMS: list[Any] = [(case, True) for case in CASES]
FORMS += [(case, how) for case in ("packed", "mixed") for how in ("selective", "offload")]


def build(case: str, checkpointing: Any) -> Any:
    kind, options = CASES[case]
    options = dict(options)
    if "adapters" in options:
        pytest.importorskip("peft", reason="peft is an extra")
    tokens = options.pop("micro_batch_tokens", None)
    learner = LearnerOptions(micro_batch_tokens=tokens, gradient_checkpointing=checkpointing)
    grpo = kind(learner=learner, beta=0.05, steps_per_generation=2, **options)
    grpo.configure_model()
    return grpo


def trained(case: str, checkpointing: Any) -> tuple[torch.Tensor, list[Rollout], list[int]]:
    """Weights after two rollouts, the rollouts, and passes through a layer with gradient and without."""
    grpo, recorder, passes = build(case, checkpointing), Recorder(), [0, 0]

    def count(*_: Any) -> None:
        passes[torch.is_grad_enabled()] += 1

    grpo.policy.model.layers[0].input_layernorm.register_forward_hook(count)
    fit(grpo, 4, [SparsityAwareRejection(0.3), ImportanceReweighting(), recorder])
    return weights(grpo), [scored.rollout for scored in recorder.scored], passes


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("case", "how"), FORMS)
def test_training_is_the_same_and_layers_run_twice(case: str, how: Any) -> None:
    plain, rollouts, (without, once) = trained(case, False)
    checkpointed, same, (still_without, twice) = trained(case, how)
    untrained = build(case, False)
    assert (plain - weights(untrained)).abs().max() > 1e-4
    assert_same_sums(checkpointed, plain, size=weights(untrained))
    assert len(rollouts) == len(same) == 2
    for one, other in zip(rollouts, same, strict=True):  # the second under weights that were trained so
        assert torch.equal(one.sequences, other.sequences)
        assert_same_logprobs(one.sampler_logprobs, other.sampler_logprobs, share=1e-5)
        assert_same_logprobs(one.old_logprobs, other.old_logprobs, share=1e-5)
    # a split micro-batch goes through the layers twice anyway, part by part
    assert twice == (1.5 if case == "packed" else 2) * once > 0
    assert still_without == without  # rollouts and rescoring


@pytest.mark.parametrize("micro_batch_tokens", [None, 60])
@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("how", [True, "selective", "offload"])
def test_gradients_are_the_same_bit_by_bit(how: Any, replays: bool, micro_batch_tokens: int | None) -> None:
    gradients = []
    for checkpointing in (False, how):
        model = tiny_model(initializer_range=0.2, eos_token_id=None)
        sampler = RolloutSampler(model, RKV(budget=12, buffer=5, num_sinks=1, window=3))
        rollout = sampler.generate([list(range(3, 20)), [4, 5]], SamplingParams(max_completion_length=30))
        options = LearnerOptions(micro_batch_tokens=micro_batch_tokens, gradient_checkpointing=checkpointing)
        learner = Learner(options, replays=replays)
        learner.prepare(model.train())
        learner.logprobs(model, rollout)[0].square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("how", [None, "layers", 2])
def test_an_unknown_form_is_refused(how: Any) -> None:
    with pytest.raises(ValueError, match="must be true, false, 'selective' or 'offload', got gradient_checkpointing="):
        LearnerOptions(gradient_checkpointing=how)


@pytest.mark.parametrize("case", [case for case in CASES if case != "packed"])
def test_what_is_kept_for_the_backward_pass_is_far_less(case: str) -> None:
    kept = []
    for checkpointing in (False, True):
        grpo = build(case, checkpointing)
        rollout, sizes = part_of(grpo), []
        own = {p.untyped_storage().data_ptr() for p in grpo.policy.parameters()}

        def pack(tensor: torch.Tensor, own: set[int] = own, sizes: list[int] = sizes) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            grpo.micro_batch_loss(rollout, grpo.denominators(rollout))
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 2


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_embeddings_have_no_hook(checkpointing: bool) -> None:
    """The sampler calls them too, and packs what has none."""
    grpo = build("dense", checkpointing)
    assert is_checkpointing(grpo.policy) == checkpointing
    assert not grpo.policy.get_input_embeddings()._forward_hooks
