"""verl's configuration as settings of the sampler: what is given arrives, what cannot work is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparse_rl_lightning.compressors import SnapKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.integrations.verl.options import sampler_options, sampling_params
from sparse_rl_lightning.rollout import SamplingParams

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
