"""verl's options, requests' parameters and weights, without verl."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from sparse_rl_lightning.compressors import SnapKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.integrations.verl.options import sampler_options, sampling_params
from sparse_rl_lightning.integrations.verl.weights import Bucket, buckets, check_names, tensors
from sparse_rl_lightning.policies.updates import WeightUpdates
from sparse_rl_lightning.rollout import SamplingParams
from sparse_rl_lightning.testing import tiny_model

SNAPKV = {"class_path": "SnapKV", "init_args": {"budget": 16, "buffer": 8, "num_sinks": 2, "window": 4}}


def config(**changed: Any) -> SimpleNamespace:
    """The fields of verl's RolloutConfig that are read; tests/integrations/verl/test_verl.py has the real one."""
    given = {
        "tensor_model_parallel_size": 1, "data_parallel_size": 1, "pipeline_model_parallel_size": 1, "seed": 7,
        "calculate_log_probs": True, "enable_rollout_routing_replay": False, "gpu_memory_utilization": 0.5,
        "ignore_eos": False, "max_num_seqs": 3, "prompt_length": 32, "response_length": 60,
        "engine_kwargs": {"sparse_rl": {"compressor": SNAPKV}},
    }  # fmt: skip
    return SimpleNamespace(**(given | changed))


def of(**options: Any) -> SimpleNamespace:
    return config(engine_kwargs={"sparse_rl": options})


def test_options_arrive() -> None:
    found = sampler_options(of(compressor=SNAPKV, kv_dtype="bfloat16", head_in_float32=True))
    assert isinstance(found["compressor"], SnapKV)
    assert (found["compressor"].budget, found["compressor"].buffer) == (16, 8)
    assert (found["kv_dtype"], found["head_in_float32"], found["num_slots"]) == ("bfloat16", True, 3)
    assert (found["memory_limit"], found["end_token_ids"]) == (0.5, None)  # as verl's share, and the model's own
    assert not found["record"]  # a record of 32k tokens is of many megabytes
    assert sampler_options(of(compressor=SNAPKV, record=True))["record"]
    assert sampler_options(of(compressor=SNAPKV, memory_limit=0.25))["memory_limit"] == 0.25
    without_end = sampler_options(config(ignore_eos=True))
    assert without_end["end_token_ids"] == []


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"tensor_model_parallel_size": 2}, "rollout.tensor_model_parallel_size must be 1, got 2"),
        ({"calculate_log_probs": False}, "rollout.calculate_log_probs must be true"),
        ({"enable_rollout_routing_replay": True}, "enable_rollout_routing_replay is not for this rollout"),
        ({"engine_kwargs": {}}, r"engine_kwargs.sparse_rl.compressor is missing. .* class_path: SnapKV"),
        ({"engine_kwargs": {"sparse_rl": {"kv_dtype": "bfloat16"}}}, "compressor is missing"),
    ],
)
def test_what_cannot_work_is_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        sampler_options(config(**changed))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"compressor": {"class_path": "Nope"}}, "engine_kwargs.sparse_rl: (?s:.*)Nope"),
        ({"compressor": {"class_path": "SnapKV", "init_args": {"bugdet": 1}}}, "'bugdet' is not accepted"),
        ({"compressor": {"class_path": "SnapKV", "init_args": {"budget": -3}}}, "got budget=-3"),
        ({"compressor": SNAPKV, "num_slots": 4}, "num_slots"),
        ({"compressor": SNAPKV, "decoder": "fast"}, "decoder"),
        ({"compressor": SNAPKV, "record": "some"}, "record"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        sampler_options(of(**options))


def test_parameters_of_a_request() -> None:
    given = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    expected = SamplingParams(max_completion_length=60, seed=7, temperature=0.7, top_p=0.9)
    assert sampling_params(config(), given) == expected
    assert sampling_params(config(), {"max_tokens": 9}).max_completion_length == 9
    assert sampling_params(config(), {"max_tokens": 900}).max_completion_length == 60
    with pytest.raises(UserError, match="best_of is not honored, remove it"):
        sampling_params(config(), {"best_of": 2})


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"stop_token_ids": [3]}, "eos_token_id in the model's generation_config.json"),
        ({"eos_token_id": 3}, "eos_token_id in the model's generation_config.json"),
        ({"n": 4}, "actor_rollout_ref.rollout.n"),
        ({"num_return_sequences": 4}, "actor_rollout_ref.rollout.n"),
        ({"max_length": 9}, "max_tokens"),
    ],
)
def test_the_advice_of_a_request_is_of_verl(given: dict[str, Any], instead: str) -> None:
    """``end_tokens of rollout (RolloutOptions)`` is nothing that verl's users could set."""
    with pytest.raises(UserError, match=f"{next(iter(given))} is not honored, set {instead} instead"):
        sampling_params(config(), given)


def packed(weights: dict[str, Tensor], num_bytes: int = 10_000) -> list[tuple[Bucket, bool, bool]]:
    async def each() -> AsyncIterator[tuple[str, Tensor]]:
        for item in weights.items():
            yield item

    async def collect() -> list[tuple[Bucket, bool, bool]]:
        return [pickle.loads(pickle.dumps(one)) async for one in buckets(each(), num_bytes)]

    return asyncio.run(collect())


def test_tensors_come_back_bit_by_bit() -> None:
    weights = {
        "a": torch.randn(5, 7).bfloat16(), "b": torch.randn(30, 40)[:, ::2], "c": torch.tensor(3.5),
        "d": torch.arange(6, dtype=torch.float16).view(2, 3).T, "e": torch.zeros(0, 4), "f": torch.randn(9000),
    }  # fmt: skip
    sent = packed(weights)
    assert [flags for _, *flags in sent] == [[True, False], [False, True]]
    assert [list(bucket) for bucket, *_ in sent] == [["a", "b", "c", "d", "e"], ["f"]]
    back = dict(item for bucket, *_ in sent for item in tensors(bucket))
    for name, tensor in weights.items():
        assert back[name].dtype == tensor.dtype
        torch.testing.assert_close(back[name], tensor, rtol=0, atol=0)


def update(updates: WeightUpdates, sent: list[tuple[Bucket, bool, bool]]) -> None:
    for bucket, is_first, _ in sent:
        updates.take(tensors(bucket), is_first)
    updates.write(updates.whole())


def assert_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[name].float(), rtol=0, atol=0)


def test_an_update_is_of_the_whole_model() -> None:
    own, other = tiny_model("llama"), tiny_model("llama", seed=1)
    weights = {name: p.detach().bfloat16() for name, p in other.named_parameters()}  # the head is the embedding
    assert "lm_head.weight" not in weights
    updates = WeightUpdates(own, "merge adapters")
    update(updates, packed(weights))
    assert_weights(own, weights)
    weights = {name: p.detach().mul(2) for name, p in other.named_parameters()}
    update(updates, packed(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}))
    assert_weights(own, weights)


def test_buffers_that_are_saved_are_weights() -> None:
    own, other = tiny_model("llama"), tiny_model("llama", seed=1)
    for number, model in enumerate((own, other)):
        model.model.register_buffer("bias", torch.full((3,), float(number)))
        model.model.register_buffer("unsaved", torch.full((3,), float(number)), persistent=False)
    update(WeightUpdates(own, "merge adapters"), packed(other.state_dict()))
    assert (own.model.bias.tolist(), own.model.unsaved.tolist()) == ([1.0] * 3, [0.0] * 3)


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("model.adapter.weight", torch.zeros(2), "no weight of this name: merge adapters"),
        ("model.norm.weight", torch.zeros(2), r"shape \(2,\), and the server's model has \(64,\)"),
    ],
)
def test_nothing_is_written_of_an_update_with_what_does_not_fit(name: str, tensor: Tensor, says: str) -> None:
    own, other = tiny_model("llama"), tiny_model("llama", seed=1)
    before = {key: weight.clone() for key, weight in own.state_dict().items()}
    updates = WeightUpdates(own, "merge adapters")
    with pytest.raises(UserError, match=says):
        update(updates, packed({**other.state_dict(), name: tensor}))
    assert_weights(own, before)
    with pytest.raises(UserError, match="No update of the weights has begun"):  # the rest of it comes too late
        updates.take([("model.norm.weight", other.model.norm.weight)], is_first=False)
    update(updates, packed(other.state_dict()))
    assert_weights(own, other.state_dict())


def test_nothing_is_written_of_an_update_that_leaves_weights_out() -> None:
    own, other = tiny_model("llama"), tiny_model("llama", seed=1)
    before = {key: weight.clone() for key, weight in own.state_dict().items()}
    weights, updates = other.state_dict(), WeightUpdates(own, "merge adapters")
    norm = weights.pop("model.norm.weight")
    with pytest.raises(UserError, match=r"left out 1 weights .* 'model.norm.weight'"):
        update(updates, packed(weights))
    with pytest.raises(UserError, match=r"left out \d\d weights"):  # what came of the first does not count
        update(updates, packed({"model.norm.weight": norm}))
    assert_weights(own, before)


def test_packed_experts_are_refused() -> None:
    config = {
        "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 4, "intermediate_size": 8, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    with pytest.raises(UserError, match=r"packs its experts \('model.layers.0.mlp.experts.gate_up_proj'\)"):
        check_names(Qwen3MoeForCausalLM(Qwen3MoeConfig(**config)))
    check_names(tiny_model("llama"))
