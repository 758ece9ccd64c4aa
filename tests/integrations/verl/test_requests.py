"""Requests that come at any time: what each gets is what it would get alone, and an abort leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from sparse_rl_lightning.compressors import RKV, Compressor, SnapKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.integrations.record import SampledRecord, check_record
from sparse_rl_lightning.integrations.verl.options import sampler_options, sampling_params
from sparse_rl_lightning.integrations.verl.requests import Request, RequestEngine
from sparse_rl_lightning.integrations.verl.weights import Bucket, WeightUpdates, buckets, check_names, tensors
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.testing import tiny_model
from tests.pretend_gpu import PretendGPU

STORIES = Path(os.environ.get("SPARSE_RL_STORIES", Path(__file__).parents[4] / "shared/models/stories260K"))
PARAMS = SamplingParams(max_completion_length=40, seed=3)
PROMPTS = [list(range(5, 8 + 3 * i)) for i in range(6)]
WAIT = 60  # seconds


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", initializer_range=0.06)


def sampler(
    model: PreTrainedModel, compressor: Compressor | None = None, ends: tuple[int, ...] = (1,)
) -> RolloutSampler:
    return RolloutSampler(model, compressor or RKV(budget=14, buffer=6, num_sinks=1, window=4), 3, ends)


def alone(model: PreTrainedModel, index: int, ends: tuple[int, ...] = ()) -> Rollout:
    return sampler(model, ends=ends).generate([PROMPTS[index]], PARAMS, sequence_ids=[index])


@pytest.fixture
def engine(model: PreTrainedModel) -> RequestEngine:
    return RequestEngine(sampler(model), max_prompt_length=32)


def request(index: int, params: SamplingParams = PARAMS) -> Request:
    return Request(f"r{index}", PROMPTS[index % len(PROMPTS)], params, number=index)


class Gate(RKV):
    """Stops the thread at the first compression until it is let on."""

    def __init__(self) -> None:
        super().__init__(budget=14, buffer=6, num_sinks=1, window=4)
        self.reached, self.go = threading.Event(), threading.Event()

    def score_cached(self, *args: Any, **kwargs: Any) -> Any:
        self.reached.set()
        assert self.go.wait(WAIT)
        return super().score_cached(*args, **kwargs)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def gated(model: PreTrainedModel, gate: Gate) -> RequestEngine:
    return RequestEngine(sampler(model, gate, ends=()), max_prompt_length=32)


def same(one: Rollout | None, other: Rollout) -> None:
    assert one.sequences.tolist() == other.sequences.tolist()
    assert (one.sampler_logprobs - other.sampler_logprobs).abs().max() < 1e-5


def test_each_gets_what_it_would_get_alone(engine: RequestEngine, model: PreTrainedModel) -> None:
    drawn = [engine.submit(request(i)) for i in range(6)]
    for index, future in enumerate(drawn):
        same(future.result(WAIT), alone(model, index, ends=(1,)))


def test_records_are_exact_and_of_one_policy(engine: RequestEngine, model: PreTrainedModel) -> None:
    drawn = [engine.submit(request(i)).result(WAIT) for i in range(2)]
    drawn += [future.result(WAIT) for future in [engine.submit(request(i)) for i in range(2, 9)]]
    record = SampledRecord.cat([SampledRecord.of(rollout) for rollout in drawn if rollout is not None])
    assert len(record) == 9
    assert len(record.evictions) > 9
    assert all((rollout.policy_versions == 1)[rollout.completion_mask].all() for rollout in drawn)
    assert check_record(record, model).largest < 1e-5


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs the real small Llama")
def test_a_real_model() -> None:
    model = AutoModelForCausalLM.from_pretrained(STORIES).eval()
    engine = RequestEngine(sampler(model, RKV(budget=24, buffer=8)), max_prompt_length=32)
    params = SamplingParams(max_completion_length=100)
    prompts = [[1, 403, 407, 261, 378], [1]] * 3
    drawn = [engine.submit(Request("", prompt, params, i)) for i, prompt in enumerate(prompts)]
    record = SampledRecord.cat([SampledRecord.of(future.result(WAIT)) for future in drawn])
    assert check_record(record, model).largest < 1e-4
    assert len(record.evictions) > 0


def test_one_that_comes_later_joins_those_that_run(
    gated: RequestEngine, gate: Gate, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = gated.submit(request(0))
    assert gate.reached.wait(WAIT)
    late = gated.submit(request(1))
    monkeypatch.setattr(gated, "_draw", None)  # a second session would fail
    assert not first.done()
    gate.go.set()
    for index, future in enumerate((first, late)):
        same(future.result(WAIT), alone(model, index))


def test_other_parameters_wait_and_are_not_overtaken(gated: RequestEngine, gate: Gate, model: PreTrainedModel) -> None:
    order: list[str] = []
    first = gated.submit(request(0))
    assert gate.reached.wait(WAIT)
    greedy = SamplingParams(max_completion_length=4, temperature=0)
    others = [request(1, greedy), request(2)]
    for one in others:
        gated.submit(one).add_done_callback(lambda _, name=one.name: order.append(name))
    gate.go.set()
    assert [f.result(WAIT) is not None for f in (first, *(one.done for one in others))] == [True] * 3
    assert order == ["r1", "r2"]
    same(others[0].done.result(0), sampler(model, ends=()).generate([PROMPTS[1]], greedy))


@pytest.mark.parametrize("reject", [False, True])
def test_an_abort_ends_all_and_a_closed_engine_holds_or_rejects(
    gated: RequestEngine, gate: Gate, model: PreTrainedModel, reject: bool
) -> None:
    drawn = [gated.submit(request(i)) for i in range(6)]
    assert gate.reached.wait(WAIT)
    threading.Timer(0.2, gate.go.set).start()
    assert sorted(gated.abort_all(reject)) == [f"r{i}" for i in range(6)]
    assert [future.result(0) for future in drawn] == [None] * 6
    assert gated._session is None  # the slots are free
    late = gated.submit(request(1))
    assert late.done() == reject
    gated.resume()
    if reject:
        assert late.result(0) is None
        late = gated.submit(request(1))
    same(late.result(WAIT), alone(model, 1))


def test_requests_join_and_leave_on_a_pretended_gpu(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)  # only this thread knows of the pretended device
    with PretendGPU() as gpu:
        engine = RequestEngine(sampler(gpu.copy_of(model)), max_prompt_length=32)
        drawn, late = [request(i) for i in range(4)], request(5)
        for one in drawn:
            engine.submit(one)
        drawn[1].done.add_done_callback(lambda _: engine._queue.append(late))
        engine._draw(PARAMS)
    for one in (*drawn, late):
        same(one.done.result(0), alone(model, one.number, ends=(1,)))
    assert gpu.captures.refused == []


def test_a_closed_engine_completes_what_runs_and_holds_back_the_rest(
    gated: RequestEngine, gate: Gate, model: PreTrainedModel
) -> None:
    running = gated.submit(request(0))
    assert gate.reached.wait(WAIT)
    threading.Timer(0.2, gate.go.set).start()
    gated.close("update")
    assert running.done()
    assert gated._session is None
    held = gated.submit(request(1))
    changed = model.lm_head.weight.detach().clone()
    model.lm_head.weight.data.mul_(1.5)
    assert not held.done()
    gated.open("update")
    after = held.result(WAIT)
    same(after, alone(model, 1))
    model.lm_head.weight.data.copy_(changed)
    before = alone(model, 1)
    assert before.sequences.tolist() != after.sequences.tolist()


@pytest.mark.parametrize("steps", [
    ("close a", "close b", "open a", "open b"),
    ("close a", "close b", "open b", "open a"),
    ("close a", "abort", "open a", "resume"),
    ("close a", "abort", "resume", "open a"),
    ("abort", "close a", "resume", "open a"),
    ("close a", "resume", "close a", "open a"),
])  # fmt: skip
def test_it_draws_when_nothing_closes_it_any_more(
    engine: RequestEngine, model: PreTrainedModel, steps: tuple[str, ...]
) -> None:
    does: dict[str, Any] = {"open": engine.open, "close": engine.close}
    does |= {"abort": engine.abort_all, "resume": engine.resume}
    for index, step in enumerate(steps):
        assert not engine._drawing
        assert engine._session is None
        name, *why = step.split()
        does[name](*why)
        drawn = engine.submit(request(index))
        threading.Event().wait(0.1)
    same(drawn.result(WAIT), alone(model, index, ends=(1,)))


def test_an_error_is_that_of_its_requests_alone(engine: RequestEngine, model: PreTrainedModel) -> None:
    broken = model.lm_head.weight.detach().clone()
    model.lm_head.weight.data.fill_(float("nan"))
    try:
        drawn = [engine.submit(request(i)) for i in range(4)]
        for future in drawn:
            with pytest.raises(UserError, match="NaN"):
                future.result(WAIT)
    finally:
        model.lm_head.weight.data.copy_(broken)
    same(engine.submit(request(2)).result(WAIT), alone(model, 2, ends=(1,)))


@pytest.mark.parametrize(
    ("prompt", "says"), [([], "empty"), ([5] * 33, r"33 tokens, .* made for 32"), ([5, 10**6], "vocabulary|token")]
)
def test_wrong_prompts_are_refused_to_the_caller(engine: RequestEngine, prompt: list[int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        engine.submit(Request("bad", prompt, PARAMS, 0))


def test_a_session_that_cannot_be_made_fails_and_does_not_hang(model: PreTrainedModel) -> None:
    small = RequestEngine(RolloutSampler(model, RKV(budget=14, buffer=6), 2, memory_limit=10), max_prompt_length=32)
    for _ in range(2):
        with pytest.raises(UserError, match="memory"):
            small.submit(request(0)).result(WAIT)


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


def test_an_update_is_of_the_whole_model() -> None:
    own, other = tiny_model("llama"), tiny_model("llama", seed=1)
    weights = {name: p.detach().bfloat16() for name, p in other.named_parameters()}  # the head is the embedding
    assert "lm_head.weight" not in weights
    updates = WeightUpdates(own)
    for one in packed(weights):
        updates.load(*one)
    assert updates.is_whole
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[name].float(), rtol=0, atol=0)
    for one in packed(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}):
        updates.load(*one)
    assert updates.is_whole


def test_buffers_that_are_saved_are_weights() -> None:
    own, other = tiny_model("llama"), tiny_model("llama", seed=1)
    for number, model in enumerate((own, other)):
        model.model.register_buffer("bias", torch.full((3,), float(number)))
        model.model.register_buffer("unsaved", torch.full((3,), float(number)), persistent=False)
    updates = WeightUpdates(own)
    for one in packed(other.state_dict()):
        updates.load(*one)
    assert updates.is_whole
    assert (own.model.bias.tolist(), own.model.unsaved.tolist()) == ([1.0] * 3, [0.0] * 3)


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("model.adapter.weight", torch.zeros(2), "no weight of this name: .*lora.merge=true"),
        ("model.norm.weight", torch.zeros(2), r"shape \(2,\), and the server's model has \(64,\)"),
    ],
)
def test_what_does_not_fit_is_an_error(name: str, tensor: Tensor, says: str) -> None:
    updates = WeightUpdates(tiny_model("llama"))
    with pytest.raises(UserError, match=says):
        updates.load(*packed({name: tensor})[0])
    assert updates.is_whole  # nothing was written
    with pytest.raises(UserError, match=says):
        updates.load(*packed({"model.embed_tokens.weight": updates.model.lm_head.weight, name: tensor}, 10**9)[0])
    assert not updates.is_whole


def test_after_an_update_that_was_not_completed_the_next_starts_afresh() -> None:
    own = tiny_model("llama")
    weights, updates = own.state_dict(), WeightUpdates(own)
    norm = weights.pop("model.norm.weight")
    with pytest.raises(UserError, match=r"left out 1 weights .* 'model.norm.weight'"):
        [updates.load(*one) for one in packed(weights)]
    assert not updates.is_whole
    with pytest.raises(UserError, match=r"left out \d\d weights"):  # what the first has written does not count
        updates.load(*packed({"model.norm.weight": norm})[0])
    assert not updates.is_whole
    [updates.load(*one) for one in packed(own.state_dict())]
    assert updates.is_whole


def test_packed_experts_are_refused() -> None:
    config = {
        "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 4, "intermediate_size": 8, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    with pytest.raises(UserError, match=r"packs its experts \('model.layers.0.mlp.experts.gate_up_proj'\)"):
        check_names(Qwen3MoeForCausalLM(Qwen3MoeConfig(**config)))
    check_names(tiny_model("llama"))
