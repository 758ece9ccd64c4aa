"""The predicted memory of a micro-batch is that of the pass itself, to the masks and scalars of its bookkeeping."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from sparse_rl_lightning.learner import memory
from sparse_rl_lightning.learner.forward import Learner, LearnerOptions
from sparse_rl_lightning.learner.memory import LearnerBytes, MicroBatch, learner_bytes
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.ops.live_bytes import LiveBytes
from sparse_rl_lightning.policies.lora import add_adapter
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
