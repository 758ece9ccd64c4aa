"""What a trainer elsewhere asks of the server: eviction records to replay, and log-probabilities of prompts."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import sparse_rl_lightning
from sparse_rl_lightning.integrations.record import record_from_bytes
from sparse_rl_lightning.replay import replay_logprobs
from sparse_rl_lightning.serve import records
from tests.serve.test_server import Running, built, client, folder, running

__all__ = ["client", "folder", "running"]  # of the other file
httpx = pytest.importorskip("httpx", reason="needs the extra serve-test")
ROOT = Path(__file__).parents[2]
PROMPT = [7, 8, 9, 10, 11, 12]


def content(running: Running, sent: dict[str, Any]) -> bytes:
    """The record that an answer holds or names."""
    if "data" in sent:
        return base64.b64decode(sent["data"])
    return bytes(running.http.get(f"/v1/eviction_records/{sent['id']}").content)


# ---------------------------------------------------------------- records


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
@pytest.mark.parametrize("inline", [records.INLINE_BYTES, 0])
def test_a_record_replays_to_the_log_probs_of_the_server(
    running: Running, folder: Path, route: str, inline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "INLINE_BYTES", inline)
    truncates = not inline  # and then the record has the log-probs of the whole vocabulary, the answer others
    params: dict[str, Any] = {"n": 3, "temperature": 0.7, "max_tokens": 50, "seed": 5, "ignore_eos": True}
    params["top_p"] = 0.9 if truncates else 1
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": PROMPT, "logprobs": 0, "return_token_ids": True, **params},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "12"}], "logprobs": True, "return_token_ids": True, **params
        },
        "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {"logprobs": 0, **params}},
    }  # fmt: skip
    answer = running.post(route, return_eviction_record=True, **bodies[route]).json()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for choice in answer["choices"]:
        assert ("data" in choice["eviction_record"]) == bool(inline)
        record = record_from_bytes(content(running, choice["eviction_record"]))
        assert choice["eviction_record"]["bytes"] == len(content(running, choice["eviction_record"]))
        assert record.completion_tokens.tolist() == choice["token_ids"]
        rollout = record.rollout()
        assert rollout.evictions is not None
        assert int(rollout.evictions.num_dead.sum()) > 0
        replayed = replay_logprobs(model, rollout, record.temperature)
        torch.testing.assert_close(replayed, rollout.sampler_logprobs, rtol=0, atol=2e-5)
        said = choice["logprobs"].get("token_logprobs") or [token["logprob"] for token in choice["logprobs"]["content"]]
        is_same = rollout.sampler_logprobs[rollout.completion_mask].tolist() == pytest.approx(said, abs=1e-6)
        assert is_same != truncates
        nothing_evicted = rollout.sequences, rollout.completion_mask
        assert (dense(model, *nothing_evicted, record.temperature) - rollout.sampler_logprobs).abs().max() > 1e-3


def dense(model: Any, sequences: torch.Tensor, mask: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities of transformers' own forward."""
    logprobs = (model(sequences).logits[:, :-1] / temperature).log_softmax(-1)
    drawn = logprobs.gather(-1, sequences[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(drawn, (1, 0)) * mask


def test_the_page_is_right_about_the_openai_client(client: Any, folder: Path) -> None:
    extra = {"return_eviction_record": True}
    answer = client.completions.create(model="tiny", prompt="123456789", max_tokens=60, extra_body=extra)
    record = record_from_bytes(base64.b64decode(answer.choices[0].eviction_record["data"]))
    rollout, model = record.rollout(), AutoModelForCausalLM.from_pretrained(folder).eval()
    replayed = sparse_rl_lightning.replay_logprobs(model, rollout, record.temperature)
    torch.testing.assert_close(replayed, rollout.sampler_logprobs, rtol=0, atol=2e-5)


def test_old_records_are_forgotten_and_the_newest_stays(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "INLINE_BYTES", 0)
    monkeypatch.setattr(records, "KEPT_BYTES", 1)

    def ask() -> str:
        body = {"prompt": PROMPT, "max_tokens": 20, "return_eviction_record": True}
        return str(running.post("/v1/completions", **body).json()["choices"][0]["eviction_record"]["id"])

    first, second = ask(), ask()
    assert running.http.get(f"/v1/eviction_records/{second}").headers["content-type"] == "application/octet-stream"
    for gone in (first, "0" * 32, "..%2F..%2Fetc"):
        missing = running.http.get(f"/v1/eviction_records/{gone}")
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "NotFoundError")


def test_nothing_is_recorded_unless_it_is_asked_for(running: Running) -> None:
    before = dict(running.server.records._kept)
    choice = running.post("/v1/completions", prompt=PROMPT, max_tokens=20).json()["choices"][0]
    assert "eviction_record" not in choice
    assert running.server.records._kept == before


def test_a_full_cache_has_a_record_without_evictions(folder: Path) -> None:
    full = Running(built(folder, "--compressor", "FullKV"))
    try:
        body = {"prompt": PROMPT, "max_tokens": 50, "ignore_eos": True, "return_eviction_record": True}
        choice = full.post("/v1/completions", **body).json()["choices"][0]
        assert len(record_from_bytes(content(full, choice["eviction_record"])).evictions) == 0
    finally:
        full.close()


def test_the_example_replays_what_a_server_sends(running: Running, folder: Path) -> None:
    command = [sys.executable, "examples/replay_from_server.py", running.url, str(folder), "123456789" * 3, "50"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    numbers = re.fullmatch(r"(\d+) tokens, (\d+) evictions in \d+ bytes; .*replayed (\S+), dense (\S+)\n", run.stdout)
    assert numbers is not None, run.stdout
    evictions, replayed, of_dense = int(numbers[2]), float(numbers[3]), float(numbers[4])
    assert evictions > 0
    assert replayed < 2e-5
    assert of_dense > 1e-3


# ---------------------------------------------------------------- prompts


def scores(folder: Path, prompt: list[int], temperature: float) -> torch.Tensor:
    """Log-probabilities (T - 1, V) by transformers' own forward, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder).double().eval()
    with torch.no_grad():
        return (model(torch.tensor([prompt])).logits[0, :-1] / temperature).log_softmax(-1)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_log_probs_of_a_prompt_are_those_of_the_full_cache(
    running: Running, folder: Path, route: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparse_rl_lightning.serve.scoring.CHUNK", 7)
    prompt = [*range(5, 16)] * 4  # more than the cache holds
    params = {"temperature": temperature, "prompt_logprobs": 3, "max_tokens": 1}
    text = running.server.tokenizer.decode(prompt)
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": prompt, **params},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}], **params},
        "/inference/v1/generate": {"token_ids": prompt, "sampling_params": params},
    }
    answer = running.post(route, **bodies[route]).json()
    if "chat" in route:
        prompt = running.server.tokenizer(f"u{text};a", add_special_tokens=False)["input_ids"]
    first, *said = (answer["choices"][0] if "completions" in route and "chat" not in route else answer)[
        "prompt_logprobs"
    ]
    want = scores(folder, prompt, temperature or 1.0)
    assert first is None
    assert len(said) == len(prompt) - 1
    for entry, row, token in zip(said, want, prompt[1:], strict=True):
        top = row.topk(3).indices.tolist()
        assert set(entry) == {str(t) for t in [*top, token]}
        for name, value in entry.items():
            assert value["logprob"] == pytest.approx(float(row[int(name)]), abs=2e-5)
            assert value["rank"] == 1 + int((row > row[int(name)]).sum())
            assert value["decoded_token"] == running.server.tokenizer.decode([int(name)])


def test_who_leaves_is_not_scored(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on, scored = threading.Event(), list[int]()

    def slow(*args: Any) -> Any:
        scored.append(len(args[1]))
        may_go_on.wait(60)
        return []

    monkeypatch.setattr("sparse_rl_lightning.serve.drawing.prompt_scores", slow)
    body = {"prompt": [[7] * 3, [7] * 4, [7] * 5], "prompt_logprobs": 1, "max_tokens": 40, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        running.http.post("/v1/completions", json=body, timeout=0.5)
    running.until(lambda: running.server.drawing.num_open == 0)
    may_go_on.set()
    running.until(lambda: running.is_idle)
    assert scored == [3]


def test_an_error_of_a_score_is_its_own(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("sparse_rl_lightning.serve.drawing.prompt_scores", failing)
        answer = running.post("/v1/completions", prompt=PROMPT, max_tokens=3, prompt_logprobs=1)
    assert answer.status_code == 500
    assert "no memory" in caplog.text
    assert "no memory" not in answer.text
    assert running.post("/v1/completions", prompt=PROMPT, max_tokens=3, prompt_logprobs=1).status_code == 200


def test_an_answer_has_a_size(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparse_rl_lightning.serve.drawing.MOST_SCORES", 3 * len(PROMPT) - 1)
    for more, status in ((1, 200), (2, 400)):
        assert running.post("/v1/completions", prompt=PROMPT, prompt_logprobs=more).status_code == status
    assert running.post("/v1/completions", prompt=PROMPT, prompt_logprobs=0, n=3).status_code == 400
    assert running.post("/v1/completions", prompt=PROMPT, n=3).status_code == 200  # none are wanted


def test_each_prompt_has_its_own_log_probs(running: Running, folder: Path) -> None:
    prompts = [PROMPT, PROMPT[::-1], [7]]
    body = {"prompt": prompts, "n": 2, "prompt_logprobs": 0, "max_tokens": 1}
    choices = running.post("/v1/completions", **body).json()["choices"]
    for index, choice in enumerate(choices):
        prompt = prompts[index // 2]
        said = [
            entry[str(token)]["logprob"] for token, entry in zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
        ]
        want = scores(folder, prompt, 1.0).gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        assert said == pytest.approx(want, abs=2e-5)


def test_an_echo_is_the_prompt_and_its_completion(running: Running, folder: Path, client: Any) -> None:
    """As lm-eval sums the log-probabilities of an answer behind its question."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2, "logprobs": 2, "temperature": 0, "seed": 1}
    alone, echoed = client.completions.create(**body), client.completions.create(**body, echo=True)
    plain, whole = alone.choices[0], echoed.choices[0]
    tokenizer = running.server.tokenizer
    assert whole.text == tokenizer.decode(PROMPT) + plain.text
    assert whole.logprobs.tokens == [tokenizer.decode([t]) for t in PROMPT] + plain.logprobs.tokens
    assert whole.logprobs.token_logprobs[0] is None
    assert whole.logprobs.top_logprobs[0] is None
    want = scores(folder, PROMPT, 1.0).gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist()
    assert whole.logprobs.token_logprobs[1 : len(PROMPT)] == pytest.approx(want, abs=2e-5)
    assert whole.logprobs.token_logprobs[len(PROMPT) :] == plain.logprobs.token_logprobs
    assert [len(top) for top in whole.logprobs.top_logprobs[1 : len(PROMPT)]] >= [2] * (len(PROMPT) - 1)
    assert client.completions.create(**body | {"logprobs": None}, echo=True).choices[0].text == whole.text


@pytest.mark.parametrize(
    ("route", "body", "said"),
    [
        ("/v1/completions", {"prompt": "1", "echo": True, "stream": True}, "streamed"),
        ("/v1/completions", {"prompt": "1", "prompt_logprobs": 1, "stream": True}, "streamed"),
        ("/v1/completions", {"prompt": "1", "return_eviction_record": True, "stream": True}, "streamed"),
        ("/v1/completions", {"prompt": "1", "prompt_logprobs": -1}, "prompt_logprobs must be"),
        ("/v1/completions", {"prompt": "1", "return_eviction_record": 1}, "return_eviction_record must be"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}], "echo": True}, "echo=True"),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"echo": True}}, "echo=True"),
    ],
)
def test_what_is_not_there_is_refused(running: Running, route: str, body: dict[str, Any], said: str) -> None:
    answer = running.post(route, **body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
