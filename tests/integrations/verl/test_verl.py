"""Programs of verl on a CPU: its replica, agent loop, way of weights and rollout correction, with Ray on one machine.

Ray is told of a GPU that is not there, because verl's worker of a replica asks for one.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from sparse_rl_lightning.corrections import importance_weights, reject_sequences
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.integrations.record import (
    Kept,
    Request,
    SampledRecord,
    check_record,
    record_bytes,
    record_from_bytes,
    record_of_kept,
)
from sparse_rl_lightning.integrations.verl.batches import record_of_batch
from sparse_rl_lightning.integrations.verl.weights import Bucket, buckets
from sparse_rl_lightning.testing import character_tokenizer, tiny_model
from tests.integrations.verl import test_options

REGISTER = "sparse_rl_lightning.integrations.verl.register"
HERE = Path(__file__).parents[3]
needs_verl = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("verl", "ray", "hydra")),
    reason="needs verl and Ray: pip install 'sparse-rl-lightning[verl]' and pip install --no-deps verl",
)
SNAPKV = "{class_path: SnapKV, init_args: {budget: 16, buffer: 8, num_sinks: 2, window: 4}}"
SPARSE_RL = [  # the correction of the paper, in verl's words (docs/from_verl.md)
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.rollout_is_threshold=1e9",
    "algorithm.rollout_correction.rollout_rs=seq_max_k2",
    "algorithm.rollout_correction.rollout_rs_threshold=42.41",
]


@pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl is installed")
def test_without_verl_it_says_what_to_install() -> None:
    found = subprocess.run([sys.executable, "-c", f"import {REGISTER}"], capture_output=True, text=True, cwd=HERE)
    assert "needs verl" in found.stderr
    assert "pip install 'sparse-rl-lightning[verl]'" in found.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer, path = character_tokenizer(), tmp_path_factory.mktemp("verl") / "model"
    tiny_model("llama", vocab_size=len(tokenizer), initializer_range=0.06).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder).eval()
    return loaded


def configured(folder: Path, *more: str) -> Any:
    """The configuration of verl with the lines that a user writes."""
    from hydra import compose, initialize_config_module

    rollout = "actor_rollout_ref.rollout."
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[
            f"actor_rollout_ref.model.path={folder}", f"{rollout}name=sparse_rl", f"{rollout}dtype=float32",
            f"{rollout}tensor_model_parallel_size=1", f"{rollout}calculate_log_probs=true",
            f"{rollout}prompt_length=64", f"{rollout}response_length=40", f"{rollout}max_num_seqs=4",
            f"{rollout}agent.num_workers=1", f"{rollout}nnodes=1", f"{rollout}n_gpus_per_node=1",
            f"+{rollout}engine_kwargs.sparse_rl.compressor={SNAPKV}", f"+{rollout}engine_kwargs.sparse_rl.record=true",
            *SPARSE_RL, *more,
        ])  # fmt: skip


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("VERL_USE_EXTERNAL_MODULES", REGISTER), ("RAY_AUTH_MODE", "disabled")):
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(HERE))
        import ray

        importlib.import_module("sparse_rl_lightning.integrations.verl.register")  # verl may have been imported without
        ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, object_store_memory=2 * 10**8, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def manager(ray_here: None, folder: Path) -> Any:
    from verl.workers.rollout.llm_server import LLMServerManager

    return LLMServerManager.create(configured(folder))


@pytest.fixture(scope="module")
def batch(manager: Any, folder: Path) -> Any:
    """What verl's agent loop makes of four prompts, two samples each."""
    import numpy as np
    from verl import DataProto
    from verl.experimental.agent_loop import AgentLoopManager

    prompts = [[{"role": "user", "content": f"{i} + 12 ="}] for i in range(4) for _ in range(2)]
    loop = AgentLoopManager.create(configured(folder), manager.get_client())
    return loop.generate_sequences(DataProto.from_single_dict({"raw_prompt": np.array(prompts, dtype=object)}))


def ask(manager: Any, index: int, **params: Any) -> Any:
    given = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True, **params}
    prompt = list(range(5, 9 + 4 * index))
    handle = manager.get_replicas()[0].server_handle
    return handle.generate.remote(request_id=f"r{index}", prompt_ids=prompt, sampling_params=given)


def dense(model: PreTrainedModel, batch: Any) -> torch.Tensor:
    """The log-probabilities (B, R) of the actor, from verl's own tensors."""
    width = batch.batch["responses"].shape[1]
    with torch.no_grad():
        logits = model(
            batch.batch["input_ids"], attention_mask=batch.batch["attention_mask"],
            position_ids=batch.batch["position_ids"],
        ).logits[:, -width - 1 : -1]  # fmt: skip
    found = logits.log_softmax(-1).gather(-1, batch.batch["responses"][..., None])[..., 0]
    return found * batch.batch["response_mask"]


def started(folder: Path, *more: str) -> Any:
    """A server in this process."""
    from sparse_rl_lightning.integrations.verl.server import SparseServer

    config = configured(folder, *more).actor_rollout_ref
    return SparseServer(config.rollout, config.model)


async def answer(server: Any) -> Any:
    given = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
    return await asyncio.wait_for(server.generate(list(range(5, 25)), given, "r"), 60)


async def held(server: Any) -> asyncio.Task[Any]:
    """A request that is not answered now."""
    task = asyncio.create_task(answer(server))
    assert not (await asyncio.wait([task], timeout=0.5))[0]
    return task


async def sent(model: PreTrainedModel) -> list[tuple[Bucket, bool, bool]]:
    async def weights() -> AsyncIterator[tuple[str, torch.Tensor]]:
        for item in model.state_dict().items():
            yield item

    return [one async for one in buckets(weights(), 100_000)]


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The server's module with as much of verl as it imports."""
    monkeypatch.setitem(sys.modules, "verl.utils.config", SimpleNamespace(omega_conf_to_dataclass=lambda given: given))
    monkeypatch.setitem(sys.modules, "verl.workers.rollout.replica", SimpleNamespace(TokenOutput=SimpleNamespace))
    spec = importlib.util.find_spec("sparse_rl_lightning.integrations.verl.server")
    module = importlib.util.module_from_spec(spec)  # known to nobody else
    spec.loader.exec_module(module)
    return module


class TestWithoutVerl:
    def server(self, pretended: Any, folder: Path) -> Any:
        options = {"sparse_rl": {"compressor": test_options.SNAPKV, "record": True}}
        given = test_options.config(dtype="float32", engine_kwargs=options)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return pretended.SparseServer(given, SimpleNamespace(local_path=str(folder), tokenizer=tokenizer))

    def test_it_loads_on_the_host_and_answers_with_a_record(
        self, pretended: Any, folder: Path, model: PreTrainedModel
    ) -> None:
        with torch.device("meta"):  # as if verl had another default
            server = self.server(pretended, folder)
        assert {p.device.type for p in server.model.parameters()} == {"cpu"}
        given = asyncio.run(answer(server))
        record = record_from_bytes(given.extra_fields["eviction_record"])
        assert len(record.evictions) > 1
        assert given.token_ids == record.completion_tokens.tolist()
        assert check_record(record, model).largest < 1e-5

    @pytest.mark.parametrize("kind", ["pickles", "quantized", "missing"])
    def test_a_folder_that_training_refuses_is_refused(
        self, pretended: Any, folder: Path, tmp_path: Path, kind: str
    ) -> None:
        broken = Path(shutil.copytree(folder, tmp_path / "model"))
        weights = broken / "model.safetensors"
        if kind == "quantized":
            config = json.loads((broken / "config.json").read_text(encoding="utf-8"))
            config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
            (broken / "config.json").write_text(json.dumps(config), encoding="utf-8")
        elif kind == "missing":
            save_file({"other": torch.zeros(1)}, weights, {"format": "pt"})
        else:
            torch.save(load_file(weights), broken / "pytorch_model.bin")
            weights.unlink()
        says = {"pickles": "weights are pickles", "quantized": "holds quantized weights", "missing": "are missing"}
        with pytest.raises(UserError, match=f"policy: .*{says[kind]}"):
            self.server(pretended, broken)

    def test_the_tokens_of_a_batch_are_compared_without_its_evictions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        requests = [Request([1, 2], [3, 4], [-1.0] * 2, [Kept(2, [0])]), Request([5], [6, 7, 8], [-1.0] * 3)]
        records = [record_of_kept([one], 2, 2) for one in requests]
        monkeypatch.setattr(SampledRecord, "_records", None)
        tensors = {
            "responses": torch.tensor([[3, 4, 0], [6, 7, 8]]),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]),
        }
        contents = np.array([record_bytes(one) for one in records], dtype=object)
        batch = SimpleNamespace(batch=tensors, non_tensor_batch={"eviction_record": contents})
        assert record_of_batch(batch).lengths.tolist() == [4, 4]
        tensors["responses"][1, 2] = 9
        with pytest.raises(UserError, match="not of its responses"):
            record_of_batch(batch)


@needs_verl
class TestServerInThisProcess:
    @pytest.fixture(scope="class")
    def server(self, folder: Path) -> Any:
        return started(folder)

    def test_it_has_what_verl_calls(self, server: Any) -> None:
        from verl.workers.rollout import replica

        called = set(re.findall(r"servers?(?:\[0\])?\.(\w+)\.remote", inspect.getsource(replica)))
        assert {"sleep", "wake_up", "clear_kv_cache", "start_profile", "stop_profile"} <= called
        assert [name for name in called if not hasattr(server, name)] == []

    def test_asleep_it_waits(self, server: Any) -> None:
        async def story() -> None:
            before = await answer(server)
            await server.sleep()
            late = await held(server)
            await server.wake_up(["weights"])
            assert not late.done()
            another = await held(server)
            await server.wake_up(["kv_cache"])
            assert (await late).token_ids == (await another).token_ids == before.token_ids
            await server.sleep()
            await server.wake_up(["kv_cache"])
            late = await held(server)  # the weights are away
            await server.wake_up(["weights"])
            assert (await late).token_ids == before.token_ids
            await server.sleep()
            await server.wake_up()
            assert (await answer(server)).token_ids == before.token_ids

        asyncio.run(story())

    def test_without_a_cache_it_waits(self, server: Any) -> None:
        async def story() -> None:
            await server.release_kv_cache()
            late = await held(server)
            await server.resume_generation()  # of an abort that was not
            assert not late.done()
            await server.resume_kv_cache()
            assert (await late).stop_reason == "completed"

        asyncio.run(story())

    def test_half_an_update_changes_nothing(
        self, server: Any, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = tiny_model("llama", vocab_size=model.config.vocab_size, initializer_range=0.06, seed=1)
        wrong: Bucket = {"model.norm.weight": ("float32", (3,), torch.zeros(12, dtype=torch.uint8).numpy())}
        monkeypatch.setattr("sparse_rl_lightning.policies.updates.UPDATE_SECONDS", 0.2)

        async def story() -> None:
            before = await answer(server)
            first, *rest = await sent(other)
            assert rest
            await server.load_weights(*first)
            assert (await answer(server)).token_ids == before.token_ids
            with pytest.raises(UserError, match=r"has \(64,\)"):
                await server.load_weights(wrong, False, False)
            await server.load_weights(*first)
            await asyncio.sleep(0.5)  # the trainer is gone
            with pytest.raises(UserError, match="it was given up"):
                await server.load_weights(*rest[0])
            assert (await answer(server)).token_ids == before.token_ids
            for one in (first, *rest):
                await server.load_weights(*one)
            record = record_from_bytes((await answer(server)).extra_fields["eviction_record"])
            assert check_record(record, other).largest < 1e-5
            for one in await sent(model):
                await server.load_weights(*one)
            assert (await answer(server)).token_ids == before.token_ids

        asyncio.run(story())

    def test_the_record_can_be_left_out_and_is_encoded_in_another_thread(
        self, server: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from sparse_rl_lightning.integrations.verl import server as module

        threads: list[threading.Thread] = []
        monkeypatch.setattr(module, "_record", lambda *_: threads.append(threading.current_thread()))
        assert "eviction_record" in asyncio.run(answer(server)).extra_fields
        assert len(threads) == 1
        assert threads[0] is not threading.main_thread()
        without = started(folder, "actor_rollout_ref.rollout.engine_kwargs.sparse_rl.record=false")
        assert asyncio.run(answer(without)).extra_fields == {"global_steps": None}
        assert len(threads) == 1

    def test_a_mixture_of_experts_is_refused_at_the_start(self, folder: Path, tmp_path: Path) -> None:
        tokenizer = character_tokenizer()
        config = Qwen3MoeConfig(
            vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_experts=4,
            num_key_value_heads=1, head_dim=4, intermediate_size=8, moe_intermediate_size=8, num_experts_per_tok=2,
        )  # fmt: skip
        Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        with pytest.raises(UserError, match="packs its experts"):
            started(tmp_path)


@needs_verl
@pytest.mark.slow
class TestServer:
    def test_answers_have_the_record_of_what_drew_them(self, manager: Any, model: PreTrainedModel) -> None:
        import ray

        answers = ray.get([ask(manager, index) for index in range(7)])
        records = [record_from_bytes(one.extra_fields["eviction_record"]) for one in answers]
        assert check_record(SampledRecord.cat(records), model).largest < 1e-5
        assert sum(len(record.evictions) for record in records) > 7
        for one, record in zip(answers, records, strict=True):
            rollout = record.rollout()
            assert one.token_ids == rollout.sequences[rollout.completion_mask].tolist()
            assert one.log_probs == rollout.sampler_logprobs[rollout.completion_mask].tolist()
            assert one.stop_reason == "completed"
        assert len(answers[0].token_ids) != len(answers[1].token_ids)  # ends are ragged
        again = ray.get([ask(manager, index) for index in (3, 1)])
        assert [one.token_ids for one in again] == [answers[3].token_ids, answers[1].token_ids]

    def test_greedy_and_shorter(self, manager: Any) -> None:
        import ray

        one, other = ray.get([ask(manager, 2, temperature=0, max_tokens=5), ask(manager, 2, temperature=0)])
        assert len(one.token_ids) == 5
        assert one.token_ids == other.token_ids[:5]

    def test_wrong_requests_are_refused(self, manager: Any) -> None:
        import ray

        with pytest.raises(UserError, match="best_of is not honored"):
            ray.get(ask(manager, 1, best_of=2))
        with pytest.raises(UserError, match="made for 64"):
            ray.get(ask(manager, 20))
        handle = manager.get_replicas()[0].server_handle
        with pytest.raises(UserError, match="images"):
            ray.get(handle.generate.remote([5], {}, "r", image_data=["x"]))

    def test_abort_resume_sleep_and_wake(self, manager: Any) -> None:
        import ray

        replica = manager.get_replicas()[0]
        before = ray.get(ask(manager, 5))
        drawn = [ask(manager, index) for index in range(8)]
        asyncio.run(replica.abort_all_requests())
        reasons = {one.stop_reason for one in ray.get(drawn)}
        assert "aborted" in reasons
        held = ask(manager, 5)
        assert ray.wait([held], timeout=1)[0] == []
        asyncio.run(replica.resume_generation())
        assert ray.get(held).token_ids == before.token_ids
        asyncio.run(replica.sleep())
        asyncio.run(replica.wake_up())
        assert ray.get(ask(manager, 5)).token_ids == before.token_ids

    def test_weights_come_by_verls_way_and_change_what_is_drawn(self, manager: Any, model: PreTrainedModel) -> None:
        import ray

        worker = manager.get_replicas()[0].workers[0]
        other = tiny_model("llama", vocab_size=model.config.vocab_size, initializer_range=0.06, seed=1)

        def send(source: PreTrainedModel, steps: int) -> None:
            weights = [(name, p.detach()) for name, p in source.named_parameters()]
            ray.get(worker.execute_checkpoint_engine.remote("send_weights", weights))
            ray.get(worker.update_weights.remote(global_steps=steps))

        before = ray.get(ask(manager, 4))
        send(other, 3)
        after = ray.get(ask(manager, 4))
        assert after.extra_fields["global_steps"] == 3
        assert check_record(record_from_bytes(after.extra_fields["eviction_record"]), other).largest < 1e-5
        send(model, 4)
        back = ray.get(ask(manager, 4))
        assert check_record(record_from_bytes(back.extra_fields["eviction_record"]), model).largest < 1e-5
        assert before.token_ids != after.token_ids
        ray.get(worker.execute_checkpoint_engine.remote("send_weights", [("other", torch.zeros(1))]))
        with pytest.raises(UserError, match="no weight of this name"):
            ray.get(worker.update_weights.remote(global_steps=5))
        assert ray.get(ask(manager, 4)).extra_fields["global_steps"] == 4  # it goes on with what it had

    @pytest.mark.parametrize(
        ("more", "says"),
        [
            ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "tensor_model_parallel_size must be 1"),
            ("actor_rollout_ref.rollout.calculate_log_probs=false", "calculate_log_probs must be true"),
            ("actor_rollout_ref.rollout.engine_kwargs.sparse_rl.compressor.init_args.budget=-1", "got budget=-1"),
        ],
    )
    def test_wrong_options_are_refused_before_anything_starts(
        self, ray_here: None, folder: Path, more: str, says: str
    ) -> None:
        from verl.workers.rollout.replica import get_rollout_replica_class

        config = configured(folder, more).actor_rollout_ref
        with pytest.raises(UserError, match=says):
            get_rollout_replica_class("sparse_rl")(0, config.rollout, config.model)


@needs_verl
@pytest.mark.slow
class TestBatch:
    def test_the_agent_loop_brings_the_records(self, batch: Any, model: PreTrainedModel) -> None:
        record = record_of_batch(batch)
        assert len(record) == 8
        assert len(record.evictions) > 8
        assert check_record(record, model).largest < 1e-5
        assert batch.batch["responses"][0].tolist() != batch.batch["responses"][1].tolist()
        drawn, mask = batch.batch["rollout_log_probs"], batch.batch["response_mask"].bool()
        assert record.rollout().sampler_logprobs[record.rollout().completion_mask].equal(drawn[mask])
        assert ((dense(model, batch) - drawn) * mask).abs().max() > 0.01  # what there is to correct

    def test_the_records_follow_the_samples(self, batch: Any, model: PreTrainedModel) -> None:
        chosen = batch.select_idxs([5, 0, 2])
        assert check_record(record_of_batch(chosen), model).largest < 1e-5
        mixed = batch.select_idxs([1, 2])
        mixed.non_tensor_batch["eviction_record"] = batch.non_tensor_batch["eviction_record"][[1, 3]]
        with pytest.raises(UserError, match="not of its responses"):
            record_of_batch(mixed)
        mixed.non_tensor_batch["eviction_record"][1] = None
        with pytest.raises(UserError, match="have no 'eviction_record'"):
            record_of_batch(mixed)

    @pytest.mark.parametrize("cap", [1.2, 1e9])
    def test_verls_weights_are_ours(self, batch: Any, model: PreTrainedModel, folder: Path, cap: float) -> None:
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

        chosen = batch.select_idxs(list(range(8)))
        chosen.batch["old_log_probs"] = dense(model, batch)
        given = configured(folder, f"algorithm.rollout_correction.rollout_is_threshold={cap}").algorithm
        corrected, metrics = compute_rollout_correction_and_add_to_batch(chosen, given.rollout_correction)
        mask = batch.batch["response_mask"].bool()
        log_ratio = (chosen.batch["old_log_probs"] - batch.batch["rollout_log_probs"]) * mask
        ours = importance_weights(log_ratio, mask, clip_max=cap)
        torch.testing.assert_close(corrected.batch["rollout_is_weights"], ours)
        assert metrics["rollout_corr/rollout_is_max"] > 1.1
        assert corrected.batch["response_mask"].bool().equal(mask)  # nothing is near the paper's threshold here

    @pytest.mark.parametrize(("threshold", "below"), [(1e-4, 9.5), (1e-4, 9.0), (0.5, 0.7), (0.5, 0.68)])
    def test_verls_rejection_is_sparse_rls(self, batch: Any, folder: Path, threshold: float, below: float) -> None:
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

        chosen, mask = batch.select_idxs(list(range(8))), batch.batch["response_mask"].bool()
        log_ratio = torch.zeros(mask.shape)
        log_ratio[3, 1], log_ratio[5, 0], log_ratio[0, 2] = -below, 0.3, -0.2  # one token nears or passes the border
        chosen.batch["old_log_probs"] = batch.batch["rollout_log_probs"] + log_ratio
        bound = 0.5 * torch.tensor(threshold).log().square().item()
        given = configured(folder, f"algorithm.rollout_correction.rollout_rs_threshold={bound}").algorithm
        corrected, _ = compute_rollout_correction_and_add_to_batch(chosen, given.rollout_correction)
        kept = reject_sequences(log_ratio * mask, mask, threshold)
        assert corrected.batch["response_mask"].bool().equal(mask & kept[:, None])
        assert len(record_of_batch(corrected)) == 8  # of rejected samples too
        assert kept.tolist() == [True] * 3 + [below < -torch.tensor(threshold).log().item()] + [True] * 4
