"""A trainer's routes: pauses that keep, complete or abort; weights that are whole or not written at all."""

from __future__ import annotations

import base64
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sparse_rl_lightning.cli import options
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.integrations.record import record_from_bytes
from sparse_rl_lightning.replay import replay_logprobs
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.request_thread import RequestThread
from sparse_rl_lightning.testing import tiny_model
from tests.serve.test_server import RKV, Running, built, folder, serve

__all__ = ["folder"]  # of the other file
KEY = {"authorization": "Bearer trainer"}
PROMPT = [7, 8, 9]


@pytest.fixture(scope="module")
def other(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of folders with other weights of the same model."""
    path = tmp_path_factory.mktemp("weights")
    shutil.copytree(folder, path / "step_1")
    config = AutoModelForCausalLM.from_pretrained(folder).config
    sizes = {"vocab_size": config.vocab_size, "initializer_range": 0.08, "max_position_embeddings": 256}
    tiny_model("llama", seed=1, **sizes).save_pretrained(path / "step_1")
    return path


@pytest.fixture
def running(folder: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    admit = RequestThread._admit
    monkeypatch.setattr(RequestThread, "_admit", lambda *args: (time.sleep(0.01), admit(*args)))  # seen while it draws
    running = Running(built(folder, "--allow_updates", "--weights_from", str(other), update_key="trainer"))
    yield running
    running.close()


def order(running: Running, path: str, **body: Any) -> Any:
    return running.http.post(path, json=body, headers=KEY)


def drawn(path: Path, **params: Any) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    sampler = RolloutSampler(model, serve.built("RKV", {"budget": 14, "buffer": 6, "num_sinks": 1, "window": 4}), 1, ())
    rollout = sampler.generate([PROMPT], SamplingParams(seed=5, **params))
    return rollout.sequences[0, rollout.completion_mask[0]].tolist()


class Asking(threading.Thread):
    """A request that is under way."""

    def __init__(self, running: Running, **more: Any) -> None:
        super().__init__(daemon=True)
        self.running, self.more = running, more
        self.answer: Any = None
        self.start()

    def run(self) -> None:
        body = {
            "prompt": PROMPT,
            "seed": 5,
            "max_tokens": 70,
            "ignore_eos": True,
            "return_token_ids": True,
            **self.more,
        }
        self.answer = self.running.post("/v1/completions", **body)

    @property
    def choice(self) -> Any:
        self.join(60)
        assert self.answer.status_code == 200, self.answer.text
        return self.answer.json()["choices"][0]


def test_without_the_key_there_is_no_control(running: Running, folder: Path) -> None:
    for route in running.server.control.routes:
        method = next(iter(route.methods - {"HEAD"}))
        for path, status in ((route.path, 401), (route.path + "%0A", 403)):  # which the router takes for the same
            for key in ("", "Bearer client", "Basic !", "Basic YQ==", "trainer", "Basic \xff"):
                headers = {"authorization": key.encode("latin-1")}
                assert running.http.request(method, path, headers=headers).status_code == status
        of_a_page = KEY | {"origin": "https://evil.example"}
        assert running.http.request(method, route.path, headers=of_a_page).status_code == 403
    for path in ("/is_paused", "/server_info", "/get_world_size"):
        assert running.http.get(path, headers=KEY).status_code == 200
    assert running.http.post("/resume", headers=KEY).status_code == 200  # without a body
    plain = Running(built(folder))
    assert plain.http.post("/pause", headers=KEY | {"content-type": "application/json"}).status_code == 404
    plain.close()


def test_a_pause_that_keeps_changes_no_text(running: Running, folder: Path) -> None:
    asking = Asking(running)
    running.until(lambda: running.server.thread.usage.num_running)
    assert order(running, "/pause?mode=keep").json() == {"status": "paused", "mode": "keep"}
    assert running.http.get("/is_paused", headers=KEY).json() == {"is_paused": True}
    time.sleep(0.3)
    assert asking.answer is None
    assert running.server.thread.usage.num_running == 1
    order(running, "/resume")
    assert asking.choice["token_ids"] == drawn(folder, max_completion_length=70)
    assert running.http.get("/is_paused", headers=KEY).json() == {"is_paused": False}


def test_what_was_kept_can_be_aborted(running: Running, folder: Path) -> None:
    asking = Asking(running)
    running.until(lambda: running.server.thread.usage.num_running)
    order(running, "/pause?mode=keep")
    assert order(running, "/sleep").status_code == 400
    order(running, "/pause?mode=abort")
    assert asking.choice["finish_reason"] == "abort"
    order(running, "/sleep")
    order(running, "/resume")
    order(running, "/wake_up")
    assert Asking(running).choice["token_ids"] == drawn(folder, max_completion_length=70)


def test_pauses_that_complete_or_abort(running: Running, folder: Path) -> None:
    whole = drawn(folder, max_completion_length=70)
    for mode, reason in (("wait", "length"), ("abort", "abort")):
        asking = Asking(running)
        running.until(lambda: running.server.thread.usage.num_running)
        order(running, f"/pause?mode={mode}")
        choice = asking.choice
        assert choice["finish_reason"] == reason
        assert choice["token_ids"] == whole[: len(choice["token_ids"])]
        late = Asking(running)
        time.sleep(0.1)
        assert late.answer is None
        order(running, "/resume")
        assert late.choice["token_ids"] == whole
    assert order(running, "/pause?mode=later").status_code == 400
    asking = Asking(running)
    running.until(lambda: running.server.thread.usage.num_running)
    assert order(running, "/abort_requests", request_ids=["cmpl-1"]).status_code == 400
    assert order(running, "/abort_requests", request_ids=[]).json() == {"status": "ok", "aborted": 1}
    assert asking.choice["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("path", "mode", "reason"),
    [
        ("/pause?wait_for_inflight_requests=true", "wait", "length"),
        ("/pause?wait_for_inflight_requests=false", "abort", "abort"),
        ("/pause?mode=abort&wait_for_inflight_requests=yes", "wait", "length"),
        ("/sleep", None, "length"),
        ("/sleep?level=2&mode=wait", None, "length"),
        ("/sleep?mode=abort", None, "abort"),
    ],
)
def test_what_runs_is_completed_or_aborted(running: Running, path: str, mode: str | None, reason: str) -> None:
    asking = Asking(running)
    running.until(lambda: running.server.thread.usage.num_running)
    assert order(running, path).json().get("mode") == mode
    assert asking.choice["finish_reason"] == reason
    assert order(running, "/sleep?mode=later").status_code == order(running, "/sleep?mode=keep").status_code == 400


def test_weights_may_wake_up_before_anything_is_drawn(running: Running, folder: Path) -> None:
    order(running, "/sleep")
    late = Asking(running)
    assert order(running, "/wake_up?tags=weights").json() == {"status": "awake", "tags": ["weights"]}
    assert order(running, "/wake_up?tags=weight").status_code == 400
    time.sleep(0.1)
    assert late.answer is None
    order(running, "/wake_up?tags=kv_cache&tags=scheduling")
    assert late.choice["token_ids"] == drawn(folder, max_completion_length=70)
    order(running, "/sleep")
    late = Asking(running)
    order(running, "/wake_up?tags=kv_cache")  # weights are still elsewhere
    time.sleep(0.1)
    assert late.answer is None
    order(running, "/wake_up")
    assert late.choice["token_ids"] == drawn(folder, max_completion_length=70)


@pytest.mark.parametrize("paused", [False, True])
def test_requests_go_on_with_the_weights_of_a_folder(running: Running, folder: Path, other: Path, paused: bool) -> None:
    asking = Asking(running, return_weight_versions=True, return_eviction_record=True)
    running.until(lambda: running.server.thread.usage.num_running)
    if paused:
        order(running, "/pause?mode=keep")
    answer = order(running, "/update_weights", weight_dir="step_1", weight_version="s1")
    assert answer.json() == {"status": "ok", "weight_version": "s1"}
    assert running.http.get("/weight_info", headers=KEY).json() == {"weight_version": "s1"}
    order(running, "/resume")
    before, after, ids = drawn(folder, max_completion_length=70), None, asking.choice["token_ids"]
    assert len(ids) == 70
    shared = next(index for index, (one, two) in enumerate(zip(ids, before, strict=True)) if one != two)
    assert shared > 0  # of the old weights
    first, second = asking.choice["weight_versions"]
    assert (first["version"], second["version"]) == ("0", "s1")
    assert (first["start"], first["end"], second["end"]) == (0, second["start"], 70)
    assert first["end"] <= shared
    assert asking.choice["eviction_record"] is None
    assert "weights changed" in asking.choice["eviction_record_error"]
    after = Asking(running).choice["token_ids"]
    assert after == drawn(other / "step_1", max_completion_length=70)
    order(running, "/sleep")
    order(running, "/wake_up")
    awake = Asking(running, return_weight_versions=True, return_eviction_record=True).choice
    assert awake["token_ids"] == after
    assert awake["weight_versions"] == [{"version": "s1", "start": 0, "end": 70}]
    record = record_from_bytes(base64.b64decode(awake["eviction_record"]["data"]))
    model, rollout = AutoModelForCausalLM.from_pretrained(other / "step_1").eval(), record.rollout()
    torch.testing.assert_close(replay_logprobs(model, rollout), rollout.sampler_logprobs, rtol=0, atol=2e-5)


def damaged(other: Path, name: str) -> str:
    """A folder that must not be read."""
    path = other / name
    if path.exists():
        return name
    if name == "linked":
        os.symlink(other.parent, path)
        return name
    shutil.copytree(other / "step_1", path)
    weights = load_file(path / "model.safetensors")
    if name == "nan":
        weights["model.norm.weight"][3] = torch.nan
    elif name == "missing":
        del weights["model.norm.weight"]
    elif name == "pickled":
        torch.save(weights, path / "pytorch_model.bin")
        (path / "model.safetensors").unlink()
        return name
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return name


@pytest.mark.parametrize("name", ["nan", "missing", "pickled", "linked", "..", "/etc", "nowhere", 3, None, "a\0b"])
def test_nothing_is_written_of_weights_that_are_wrong(running: Running, folder: Path, other: Path, name: Any) -> None:
    asked = damaged(other, name) if name in ("nan", "missing", "pickled", "linked") else name
    answer = order(running, "/update_weights", weight_dir=asked)
    assert answer.status_code == 400, answer.text
    assert "root" not in answer.text
    assert Asking(running).choice["token_ids"] == drawn(folder, max_completion_length=70)
    assert running.http.get("/weight_info", headers=KEY).json() == {"weight_version": "0"}


def test_facts(running: Running) -> None:
    told = running.http.get("/server_info?config_format=json", headers=KEY).json()
    assert told["vllm_config"]["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert told["sparse_rl"]["compressor"].startswith("RKV(budget=14")
    assert (told["sparse_rl"]["slots"], told["sparse_rl"]["max_length"]) == (4, 80)
    assert running.http.get("/get_world_size", headers=KEY).json() == {"world_size": 1}
    assert order(running, "/update_weight_version", weight_version=7).json() == {"weight_version": "7"}
    assert order(running, "/update_weight_version", new_version="s8").json() == {"weight_version": "s8"}
    assert order(running, "/update_weight_version").status_code == 400
    assert order(running, "/reset_prefix_cache").json() == {"success": True}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--allow_updates"], "needs a key of its own"),
        (["--weights_from", "."], "goes with --allow_updates"),
        (["--allow_updates", "--update_key_file", "nowhere"], "cannot be read"),
    ],
)
def test_options_that_are_wrong(folder: Path, more: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        serve.main(["--policy", str(folder), "--compressor", RKV, *more])


def test_keys_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = options.serve().parse_args(["--policy", "x", "--allow_updates"])
    monkeypatch.setenv("SPARSE_RL_API_KEY", "a")
    monkeypatch.setenv("SPARSE_RL_UPDATE_KEY", "a")
    with pytest.raises(UserError, match="a key of its own"):
        serve._keys(arguments)
    monkeypatch.setenv("SPARSE_RL_UPDATE_KEY", "b")
    assert serve._keys(arguments) == ("a", "b")
