"""Adapters by name: each draws what it draws in a model of its own, and none is loaded unless it is whole."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.integrations.record import record_from_bytes
from sparse_rl_lightning.replay import replay_logprobs
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from tests.serve.test_control import order
from tests.serve.test_records import content
from tests.serve.test_server import Running, built, folder, serve

peft = pytest.importorskip("peft", reason="needs the extra lora")
__all__ = ["folder"]  # of the other file
ROOT = Path(__file__).parents[2]
PROMPT = [7, 8, 9]


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of adapters that change what is drawn."""
    path = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "second")):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).save_pretrained(path / name)
    return path


@pytest.fixture
def running(folder: Path, adapters: Path) -> Iterator[Running]:
    options = ("--allow_updates", "--weights_from", str(adapters), "--max_lora_rank", "8")
    running = Running(built(folder, *options, update_key="trainer"))
    yield running
    running.close()


def adapted(folder: Path, adapters: Path, name: str | None) -> Any:
    """A model of its own under an adapter, or without."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    return (model if name is None else peft.PeftModel.from_pretrained(model, adapters / name).get_base_model()).eval()


def drawn(folder: Path, adapters: Path, name: str | None, seed: int) -> list[int]:
    compressor = serve.built("RKV", {"budget": 14, "buffer": 6, "num_sinks": 1, "window": 4})
    sampler = RolloutSampler(adapted(folder, adapters, name), compressor, 1, ())
    return [
        int(t) for t in sampler.generate([PROMPT], SamplingParams(max_completion_length=40, seed=seed)).sequences[0, 3:]
    ]


def ask(running: Running, name: str | None, seed: int = 5, **more: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 40, "seed": seed, "ignore_eos": True, "return_token_ids": True, **more}
    answer = running.post("/v1/completions", **body | ({} if name is None else {"model": name}))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_each_draws_what_it_draws_alone(running: Running, folder: Path, adapters: Path) -> None:
    for name in ("first", "second"):
        assert order(running, "/v1/load_lora_adapter", lora_name=name, lora_path=name).status_code == 200
    assert [card["id"] for card in running.http.get("/v1/models").json()["data"]] == ["tiny", "first", "second"]
    asked = [(name, seed) for seed in range(3) for name in (None, "first", "second")]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda each: ask(running, *each)["token_ids"], asked))
    assert answers == [drawn(folder, adapters, *each) for each in asked]
    assert len({tuple(ids) for ids in answers}) == len(asked)


def test_a_record_and_the_log_probs_of_a_prompt_are_the_adapters(
    running: Running, folder: Path, adapters: Path
) -> None:
    order(running, "/v1/load_lora_adapter", lora_name="a", lora_path=str(adapters / "first"))
    ask(running, None)
    choice = ask(running, "a", return_eviction_record=True, prompt_logprobs=0)
    model, record = adapted(folder, adapters, "first"), record_from_bytes(content(running, choice["eviction_record"]))
    rollout = record.rollout()
    torch.testing.assert_close(replay_logprobs(model, rollout), rollout.sampler_logprobs, rtol=0, atol=2e-5)
    with torch.no_grad():
        want = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    said = [
        entry[str(token)]["logprob"] for token, entry in zip(PROMPT[1:], choice["prompt_logprobs"][1:], strict=True)
    ]
    assert said == pytest.approx(want.gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist(), abs=2e-5)


def test_what_is_unloaded_is_unknown_and_what_is_loaded_again_is_the_new_one(
    running: Running, folder: Path, adapters: Path
) -> None:
    order(running, "/v1/load_lora_adapter", lora_name="a", lora_path="first")
    assert ask(running, "a")["token_ids"] == drawn(folder, adapters, "first", 5)
    assert order(running, "/v1/unload_lora_adapter", lora_name="a").status_code == 200
    assert order(running, "/v1/unload_lora_adapter", lora_name="a").status_code == 400
    assert running.post("/v1/completions", prompt=PROMPT, model="a").status_code == 404
    assert ask(running, None)["token_ids"] == drawn(folder, adapters, None, 5)
    order(running, "/load_lora_adapter", lora_name="a", lora_path="second")
    assert ask(running, "a")["token_ids"] == drawn(folder, adapters, "second", 5)
    order(running, "/load_lora_adapter", lora_name="a", lora_path="first")
    assert ask(running, "a")["token_ids"] == drawn(folder, adapters, "first", 5)


def test_who_waits_for_an_adapter_gets_that_one(running: Running, folder: Path, adapters: Path) -> None:
    order(running, "/v1/load_lora_adapter", lora_name="a", lora_path="first")
    order(running, "/pause")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, running, "a")
        running.until(lambda: running.server.thread.usage.num_waiting)
        order(running, "/v1/unload_lora_adapter", lora_name="a")
        order(running, "/v1/load_lora_adapter", lora_name="a", lora_path="second")
        order(running, "/resume")
        assert waiting.result()["token_ids"] == drawn(folder, adapters, "first", 5)
    assert ask(running, "a")["token_ids"] == drawn(folder, adapters, "second", 5)


def damaged(adapters: Path, name: str) -> str:
    """An adapter that must not be loaded."""
    path = adapters / name
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(adapters / "first", path)
    weights, config = (
        load_file(path / "adapter_model.safetensors"),
        json.loads((path / "adapter_config.json").read_text()),
    )
    key = next(iter(weights))
    if name == "nan":
        weights[key][0, 0] = torch.nan
    elif name == "missing":
        del weights[key]
    elif name == "shape":
        weights[key] = weights[key][:-1].clone()
    elif name == "types":
        weights = {key: weight.double() for key, weight in weights.items()}
    elif name == "pickled":
        torch.save(weights, path / "adapter_model.bin")
    else:
        config |= {
            "rank": {"r": 9}, "pattern": {"rank_pattern": {"q_proj": 9}}, "dora": {"use_dora": True},
            "kind": {"peft_type": "IA3"}, "pattern of names": {"target_modules": "(.*)*(.*)*(.*)*(.*)*!"},
            "pattern of ranks": {"rank_pattern": {"(.*)*(.*)*!": 2}}, "pissa": {"init_lora_weights": "pissa"},
            "infinite": {"lora_alpha": float("inf")}, "alpha": {"alpha_pattern": {"q_proj": float("nan")}},
            "head": {"modules_to_save": ["lm_head"]}, "targets": {"target_modules": ["nothing"]}, "text": {"r": "four"},
            "layers": {"layer_replication": [[0, 2], [0, 2]]},
        }[name]  # fmt: skip
    save_file(weights, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text("[" if name == "json" else json.dumps(config))
    if name == "pickled":
        (path / "adapter_model.safetensors").unlink()
    return name


@pytest.mark.parametrize("name", [
    "nan", "missing", "shape", "pickled", "types", "pattern of names", "pattern of ranks", "pissa", "infinite", "alpha",
    "rank", "pattern", "dora", "kind", "head", "targets", "text", "layers",
])  # fmt: skip
def test_an_adapter_that_is_wrong_is_refused(running: Running, folder: Path, adapters: Path, name: str) -> None:
    answer = order(running, "/v1/load_lora_adapter", lora_name="a", lora_path=damaged(adapters, name))
    assert answer.status_code == 400
    assert str(adapters) not in answer.text
    assert running.server.control.adapter_names == []
    assert ask(running, None)["token_ids"] == drawn(folder, adapters, None, 5)


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/etc"}, "no folder below"),
        ("/v1/load_lora_adapter", {"lora_name": "a"}, "lora_path must be"),
        ("/v1/load_lora_adapter", {"lora_name": "", "lora_path": "first"}, "lora_name must be"),
        ("/v1/load_lora_adapter", {"lora_name": "tiny", "lora_path": "first"}, "the served model's"),
        ("/v1/load_lora_adapter", {"lora_name": "a\n", "lora_path": "first"}, "lora_name must be"),
        ("/update_weights", {"weight_dir": "first"}, "--max_lora_rank"),
        ("/start_weight_update", {}, "--max_lora_rank"),
    ],
)
def test_what_is_wrong_is_refused(running: Running, path: str, body: dict[str, Any], says: str) -> None:
    answer = order(running, path, **body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_an_adapter_of_embeddings_is_refused(running: Running, folder: Path, adapters: Path) -> None:
    """Its file has the embeddings themselves, which would overwrite the model's."""
    config = peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"])
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).save_pretrained(adapters / "embeddings")
    assert order(running, "/v1/load_lora_adapter", lora_name="a", lora_path="embeddings").status_code == 400


@pytest.mark.parametrize("failing", ["set_peft_model_state_dict", "PeftModel"])
def test_an_adapter_that_does_not_fit_leaves_the_model_as_it_was(
    running: Running, folder: Path, adapters: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as for want of memory, after some or all layers have been replaced; nobody else's request fails."""
    order(running, "/v1/load_lora_adapter", lora_name="a", lora_path="first")
    made = list[Any]()

    def fails(model: Any, *arguments: Any) -> None:
        if failing == "PeftModel":
            made.append(whole(model, *arguments))
        raise torch.OutOfMemoryError

    whole = getattr(peft, failing)
    order(running, "/pause")
    with monkeypatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setattr(peft, failing, fails)
        body = {"prompt": PROMPT, "max_tokens": 4}
        refused = [pool.submit(running.post, "/v1/completions", model="a", **body) for _ in range(2)]
        running.until(lambda: running.server.thread.usage.num_waiting == 2)
        plain = pool.submit(ask, running, None)
        running.until(lambda: running.server.thread.usage.num_waiting == 3)
        order(running, "/resume")
        assert [answer.result().status_code for answer in refused] == [500, 500]
        assert plain.result()["token_ids"] == drawn(folder, adapters, None, 5)
    assert ask(running, "a")["token_ids"] == drawn(folder, adapters, "first", 5)
    assert ask(running, None)["token_ids"] == drawn(folder, adapters, None, 5)


def test_there_are_so_many_and_no_more(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparse_rl_lightning.serve.adapters.MOST_ADAPTERS", 1)
    assert order(running, "/v1/load_lora_adapter", lora_name="a", lora_path="first").status_code == 200
    assert order(running, "/v1/load_lora_adapter", lora_name="b", lora_path="first").status_code == 400
    assert order(running, "/v1/load_lora_adapter", lora_name="a", lora_path="second").status_code == 200


def test_nothing_is_loaded_unless_the_server_was_told_so(folder: Path, adapters: Path) -> None:
    running = Running(built(folder, "--allow_updates", "--weights_from", str(adapters), update_key="trainer"))
    answer = order(running, "/v1/load_lora_adapter", lora_name="a", lora_path="first")
    assert "--max_lora_rank" in answer.json()["error"]["message"]
    running.close()


@pytest.mark.parametrize(
    "more",
    [
        ["--max_lora_rank", "8"],
        ["--allow_updates", "--max_lora_rank", "8"],
        ["--allow_updates", "--max_lora_rank", "0"],
    ],
)
def test_options_that_are_wrong(folder: Path, more: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_RL_UPDATE_KEY", "trainer")
    with pytest.raises(UserError, match="--max_lora_rank"):
        serve.main(["--policy", str(folder), *more])


def test_async_grpo_publishes_adapters(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="trl is an extra")
    options = ["--compressor", "FullKV", "--allow_updates", "--weights_from", str(tmp_path), "--max_lora_rank", "8"]
    options += ["--num_slots", "8", "--served_model_name", str(folder)]
    running = Running(built(folder, *options, update_key="trainer"))
    url = running.url.replace("http://", "http://trl:trainer@")
    command = [sys.executable, "-m", "tests.serve.async_trainer", url, str(folder), str(tmp_path), "lora"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    first, *_ = [step for step in json.loads(run.stdout.splitlines()[-1]) if "loss" in step]
    assert first["ratio"] == pytest.approx(1, abs=1e-5)
    assert running.server.control.adapter_names
    running.close()
