"""Clients of others, unmodified: both of verifiers, and lm-eval; where they are installed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from tests.serve.test_server import Running, built, folder

__all__ = ["folder"]  # of the other file


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    pytest.importorskip("starlette", reason="needs the extra serve")
    running = Running(built(folder))
    yield running
    running.close()


def ask(running: Running, folder: Path, kind: str, body: dict[str, Any], **sampling: Any) -> Any:
    """The response of a client of verifiers."""
    from verifiers.v1.clients.client import resolve_client
    from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.types import SamplingConfig

    where = {"base_url": running.url + "/v1", "api_key_var": "NO_KEY"}
    of_train = {"renderer_model_name": str(folder)}
    config = EvalClientConfig(**where) if kind == "eval" else TrainClientConfig(**where, **of_train)

    async def respond() -> Any:
        client = resolve_client(config)
        try:
            return await client.get_response(ChatDialect(), body, SamplingConfig(**sampling), session_id="a")
        finally:
            await client.close()

    return asyncio.run(respond())


@pytest.mark.parametrize("kind", ["eval", "train"])
def test_verifiers(running: Running, folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers", reason="verifiers is somebody else's client")
    monkeypatch.setenv("NO_KEY", "none")
    sampling = {"temperature": 0.8, "max_tokens": 30, "seed": 5}
    messages = [{"role": "user", "content": "12"}]
    response = ask(running, folder, kind, {"model": "tiny", "messages": messages, **sampling}, **sampling)
    served = running.server.thread.sampler
    prompt = running.server.tokenizer("u12;a", add_special_tokens=False)["input_ids"]
    params = SamplingParams(max_completion_length=30, temperature=0.8, seed=5)
    want = RolloutSampler(served.model, served.compressor, 2, served.end_token_ids).generate([prompt], params)
    at = want.completion_mask[0]
    ids, logprobs = want.sequences[0, at].tolist(), want.sampler_logprobs[0, at].tolist()
    assert response.usage.completion_tokens == len(ids)
    if kind == "train":
        assert response.tokens.completion_ids == ids
        assert response.tokens.completion_logprobs == pytest.approx(logprobs, abs=1e-5)
    else:
        assert response.message.content == running.server.tokenizer.decode(ids, skip_special_tokens=True)


def evaluated(running: Running, folder: Path, where: Path, task: dict[str, Any]) -> list[dict[str, Any]]:
    """What lm-eval has kept of each question of a task."""
    rows = [{"question": f"{i}+1=", "answer": i % 3, "choices": ["0", "12", "1xy"]} for i in range(6)]
    (where / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    task = task | {
        "task": "sums", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(where / "rows.jsonl")}},
        "test_split": "test", "doc_to_text": "{{question}}", "doc_to_target": "answer",
    }  # fmt: skip
    (where / "sums.yaml").write_text(json.dumps(task), encoding="utf-8")
    server = f"model=tiny,base_url={running.url}/v1/completions,tokenizer={folder},num_concurrent=3,max_retries=1"
    command = ["-m", "lm_eval", "run", "--model", "local-completions", "--model_args", server, "--tasks", "sums",
               "--include_path", str(where), "--output_path", str(where / "out"), "--log_samples"]  # fmt: skip
    subprocess.run([sys.executable, *command], check=True, cwd=where, timeout=300)
    (samples,) = (where / "out").rglob("samples_*.jsonl")
    answers = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    assert len(answers) == 6
    return answers


def test_lm_eval_generates(running: Running, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is somebody else's client")
    task = {
        "output_type": "generate_until", "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": ["x", ";"], "max_gen_toks": 12, "temperature": 0.0},
    }  # fmt: skip
    for answer in evaluated(running, folder, tmp_path, task):
        prompt = answer["arguments"]["gen_args_0"]["arg_0"]
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "stop": ["x", ";"]}
        assert answer["resps"][0][0] == running.post("/v1/completions", **body).json()["choices"][0]["text"]


def test_lm_eval_compares_likelihoods(running: Running, folder: Path, tmp_path: Path) -> None:
    """Its log-likelihoods of answers are those of transformers' own forward, by an echo of question and answer."""
    pytest.importorskip("lm_eval", reason="lm-eval is somebody else's client")
    task = {
        "output_type": "multiple_choice", "doc_to_choice": "choices", "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).double(), running.server.tokenizer
    for answer in evaluated(running, folder, tmp_path, task):
        for (said, greedy), asked in zip(answer["filtered_resps"], answer["arguments"].values(), strict=True):
            question, ids = (
                tokenizer(t, add_special_tokens=False)["input_ids"] for t in (asked["arg_0"], asked["arg_1"])
            )
            with torch.no_grad():
                logprobs = model(torch.tensor([question + ids])).logits[0, len(question) - 1 : -1].log_softmax(-1)
            want = logprobs.gather(-1, torch.tensor(ids)[:, None]).sum()
            assert float(said) == pytest.approx(float(want), abs=1e-4)
            assert str(greedy) == str(logprobs.argmax(-1).tolist() == ids)
