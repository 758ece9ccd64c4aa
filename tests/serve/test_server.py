"""The server, asked by a client of somebody else over real sockets: what it answers is what the sampler draws."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparse_rl_lightning.cli import options
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.rollout import RequestSession, RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.request_thread import RequestThread
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

httpx = pytest.importorskip("httpx", reason="needs the extra serve-test")
openai = pytest.importorskip("openai", reason="needs the extra serve-test")
uvicorn = pytest.importorskip("uvicorn", reason="needs the extra serve")
serve = pytest.importorskip("sparse_rl_lightning.cli.serve")

LENGTH = 80
RKV = "{class_path: RKV, init_args: {budget: 14, buffer: 6, num_sinks: 1, window: 4}}"
TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' and loop.index == 2 %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role[0] }}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}"
    "{% endfor %};{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer, path = character_tokenizer(), tmp_path_factory.mktemp("serve") / "tiny"
    tokenizer.chat_template = TEMPLATE
    model = tiny_model("llama", vocab_size=len(tokenizer), initializer_range=0.08, max_position_embeddings=256)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def built(folder: Path, *more: str, key: str | None = None, update_key: str | None = None) -> Any:
    given = ["--policy", str(folder), "--compressor", RKV, "--num_slots", "4", "--max_length", str(LENGTH), *more]
    return serve.build(options.serve().parse_args(given), key, update_key)


class Running:
    """A server on a free port, in a thread."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.uvicorn = uvicorn.Server(uvicorn.Config(server.app, log_level="critical"))
        self.thread = threading.Thread(target=self.uvicorn.run, args=([self.socket],), daemon=True)
        self.thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.until(lambda: self.uvicorn.started)

    @staticmethod
    def until(condition: Any) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)

    def close(self) -> None:
        self.http.close()
        self.uvicorn.should_exit = True
        self.thread.join(30)

    def post(self, path: str, **body: Any) -> Any:
        return self.http.post(path, json=body)

    @property
    def is_idle(self) -> bool:
        thread = self.server.thread
        return thread.usage.num_running == thread.usage.num_waiting == 0


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    running = Running(built(folder))
    yield running
    running.close()


@pytest.fixture(scope="module")
def client(running: Running) -> Any:
    return openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture
def sampler(running: Running) -> RolloutSampler:
    """Another sampler of the served policy."""
    served = running.server.thread.sampler
    return RolloutSampler(served.model, served.compressor, 4, served.end_token_ids, tokenizer=served.tokenizer)


def drawn(sampler: RolloutSampler, prompt: list[int], **params: Any) -> Any:
    settings = SamplingParams(**({"seed": 5, "max_completion_length": 30} | params))
    return sampler.generate([prompt], settings, sequence_ids=range(settings.num_generations))


def texts(sampler: RolloutSampler, rollout: Any) -> list[str]:
    rows = zip(rollout.sequences, rollout.completion_mask, strict=True)
    return [sampler.tokenizer.decode(row[mask], skip_special_tokens=True) for row, mask in rows]


# ---------------------------------------------------------------- what clients get


def test_completions_are_what_the_sampler_draws(client: Any, sampler: RolloutSampler) -> None:
    prompt = sampler.tokenizer("ab12")["input_ids"]
    asked = {"model": "tiny", "seed": 5, "max_tokens": 30}
    answer = client.completions.create(prompt="ab12", n=3, temperature=1.3, **asked)
    want = drawn(sampler, prompt, num_generations=3, temperature=1.3)
    assert [choice.text for choice in answer.choices] == texts(sampler, want)
    reasons = ["stop" if ended else "length" for ended in want.finished.tolist()]
    assert [choice.finish_reason for choice in answer.choices] == reasons
    assert answer.usage.completion_tokens == int(want.completion_mask.sum())
    assert answer.usage.prompt_tokens == len(prompt)
    several = client.completions.create(prompt=[[7, 8], prompt], temperature=0, **asked)
    assert [choice.text for choice in several.choices] == [
        *texts(sampler, drawn(sampler, [7, 8], temperature=0)), *texts(sampler, drawn(sampler, prompt, temperature=0)),
    ]  # fmt: skip


def test_without_a_seed_no_two_answers_are_the_same(client: Any) -> None:
    answers = {client.completions.create(model="tiny", prompt="ab", max_tokens=30).choices[0].text for _ in range(4)}
    assert len(answers) == 4
    together = client.completions.create(model="tiny", prompt=["ab", "ab"], n=2, max_tokens=30)
    assert len({choice.text for choice in together.choices}) == 4


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.7}])
def test_logprobs_are_those_of_what_was_drawn_from(
    client: Any, running: Running, sampler: RolloutSampler, truncation: dict[str, Any]
) -> None:
    want = drawn(sampler, [7, 8, 9], top_logprobs=3, **truncation)
    at = want.completion_mask[0]
    logprobs = want.behavior_logprobs if truncation else want.sampler_logprobs
    ids, expected, top = want.sequences[0, at].tolist(), logprobs[0, at].tolist(), want.topk_ids[0, at.cpu()].tolist()
    asked = {"seed": 5, "max_tokens": 30, **truncation}
    answer = client.completions.create(model="tiny", prompt=[7, 8, 9], logprobs=3, **asked).choices[0].logprobs
    assert answer.token_logprobs == pytest.approx(expected, abs=1e-5)
    assert [1 <= len(each) <= 4 for each in answer.top_logprobs] == [True] * len(ids)
    raw = running.post("/v1/completions", prompt=[7, 8, 9], logprobs=0, return_tokens_as_token_ids=True,
                       return_token_ids=True, **asked).json()["choices"][0]  # fmt: skip
    assert raw["token_ids"] == ids
    assert raw["prompt_token_ids"] == [7, 8, 9]
    assert raw["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
    settings = {"logprobs": 3, **asked}
    raw = running.post("/inference/v1/generate", token_ids=[7, 8, 9], sampling_params=settings).json()["choices"][0]
    assert raw["token_ids"] == ids
    content = raw["logprobs"]["content"]
    assert [(each["token"], each["token_id"]) for each in content] == [(f"token_id:{token}", token) for token in ids]
    assert [each["logprob"] for each in content] == pytest.approx(expected, abs=1e-5)
    left = [3] * len(ids) if want.support is None else want.support[0, at.cpu()].tolist()
    likely = [[(each["token_id"], each["logprob"]) for each in entry["top_logprobs"]] for entry in content]
    assert [[token for token, _ in row] for row in likely] == [t[:n] for t, n in zip(top, left, strict=True)]
    for token, logprob, row in zip(ids, expected, likely, strict=True):  # one distribution, in one list
        assert token not in dict(row) or dict(row)[token] == pytest.approx(logprob, abs=1e-4)
        assert sum(np.exp([p for _, p in row])) < 1.0001


def test_the_support_of_truncated_draws(running: Running, sampler: RolloutSampler) -> None:
    import base64

    asked = {"top_k": 6, "top_p": 0.8, "seed": 5, "max_tokens": 20, "temperature": 0.2}
    raw = running.post("/inference/v1/generate", token_ids=[7, 8], sampling_params=asked, return_sample_support=True)
    support = raw.json()["choices"][0]["rollout_sample_support"]
    got = np.frombuffer(base64.b64decode(support["data"]), support["dtype"]).reshape(support["shape"])
    given = {"temperature": 0.2, "top_k": 6, "top_p": 0.8, "top_logprobs": 6}
    want = drawn(sampler, [7, 8], max_completion_length=20, **given)
    at = want.completion_mask[0]
    counts, ids = want.support[0, at].tolist(), want.topk_ids[0, at.cpu()].tolist()
    assert got.tolist() == [row[:count] + [-1] * (6 - count) for row, count in zip(ids, counts, strict=True)]
    assert len(set(counts)) > 2
    answer = running.post("/inference/v1/generate", token_ids=[7], sampling_params={}, return_sample_support=True)
    assert answer.status_code == 400


def test_stop_strings_and_tokens(client: Any, running: Running, sampler: RolloutSampler) -> None:
    asked = {"prompt": "ab", "seed": 5, "max_tokens": 60, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(model="tiny", **asked).choices[0].text
    stop = whole[9:11]
    at = whole.index(stop)
    assert client.completions.create(model="tiny", stop=[stop, "#never"], **asked).choices[0].text == whole[:at]
    asked |= asked.pop("extra_body")
    raw = running.post("/v1/completions", stop=stop, include_stop_str_in_output=True, **asked).json()["choices"][0]
    assert (raw["text"], raw["finish_reason"]) == (whole[:at] + stop, "stop")
    token = sampler.tokenizer.convert_tokens_to_ids(whole[5])
    raw = running.post("/v1/completions", stop_token_ids=[token], return_token_ids=True, **asked).json()["choices"][0]
    assert raw["token_ids"][-1] == token
    assert len(raw["token_ids"]) == whole.index(whole[5]) + 1
    assert raw["text"] == whole[: whole.index(whole[5])]
    with client.completions.create(
        model="tiny", stream=True, prompt="ab", seed=5, max_tokens=60, extra_body={"stop_token_ids": [token]}
    ) as stream:
        assert "".join(event.choices[0].text for event in stream) == raw["text"]
    assert running.post("/v1/completions", min_tokens=60, stop=stop, **asked).json()["choices"][0]["text"] == whole


def test_a_sample_that_has_ended_before_others_streams_no_stop_string(client: Any) -> None:
    asked = {"model": "tiny", "prompt": "ab", "seed": 5, "max_tokens": 60, "n": 4, "extra_body": {"ignore_eos": True}}
    wholes = [choice.text for choice in client.completions.create(**asked).choices]
    stop = wholes[0][4:6]
    choices = client.completions.create(stop=stop, **asked).choices
    assert len({len(choice.text) for choice in choices}) > 1
    pieces = dict.fromkeys(range(4), "")
    with client.completions.create(stop=stop, stream=True, **asked) as stream:
        for event in stream:
            pieces[event.choices[0].index] += event.choices[0].text
    assert pieces == {choice.index: choice.text for choice in choices}


def test_chats_are_rendered_and_streamed_as_a_whole_answer(client: Any, running: Running) -> None:
    messages = [{"role": "system", "content": None}, {"role": "user", "content": [{"type": "text", "text": "12"}]}]
    asked: dict[str, Any] = {"model": "tiny", "messages": messages, "seed": 5, "n": 2, "temperature": 1.2}
    answer = client.chat.completions.create(max_completion_tokens=40, logprobs=True, top_logprobs=2, **asked)
    tokens = running.post("/tokenize", messages=messages).json()
    rendered = running.server.tokenizer.decode(tokens["tokens"])
    assert rendered == "s;u12;a"
    assert (tokens["count"], tokens["max_model_len"]) == (7, LENGTH)
    assert running.post("/detokenize", tokens=tokens["tokens"]).json() == {"prompt": rendered}
    assert answer.usage.prompt_tokens == 7
    assert [len(choice.logprobs.content[0].top_logprobs) for choice in answer.choices] == [2, 2]
    with client.chat.completions.create(
        max_tokens=40, stream=True, stream_options={"include_usage": True}, **asked
    ) as stream:
        events = list(stream)
    pieces = {0: "", 1: ""}
    reasons: dict[int, str] = {}
    for event in events[:-1]:
        (choice,) = event.choices
        pieces[choice.index] += choice.delta.content
        reasons |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert pieces == {choice.index: choice.message.content for choice in answer.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in answer.choices}
    assert events[-1].usage == answer.usage
    assert len(events) > 10
    longest = client.chat.completions.create(model="tiny", messages=messages[1:], temperature=0)
    assert longest.usage.total_tokens <= LENGTH


def test_calls_of_tools(running: Running) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    messages = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 7}'}}]},
        {"role": "tool", "content": "8"},
    ]  # fmt: skip
    tokens = running.post("/tokenize", messages=messages, tools=[tool]).json()["tokens"]
    assert running.server.tokenizer.decode(tokens) == "<add>u1;a7;t8;a"
    wrong = running.post("/tokenize", messages=[{**messages[1], "tool_calls": [{"function": 3}]}, messages[2]])
    assert wrong.status_code == 400


# ---------------------------------------------------------------- what is refused


ROUTES = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/tokenize")


@pytest.mark.parametrize(
    ("route", "body", "status", "says"),
    [
        ("/v1/completions", {"prompt": "a", "temperature": "hot"}, 400, "temperature must be a number"),
        ("/v1/completions", {"prompt": "a", "temperature": float("nan")}, 400, "temperature must be a number"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "between 0 and"),
        ("/v1/completions", {"prompt": "a", "temperature": True}, 400, "temperature"),
        ("/v1/completions", {"prompt": "a", "top_p": 0}, 400, "top_p"),
        ("/v1/completions", {"prompt": "a", "seed": 2**70}, 400, "seed"),
        ("/v1/completions", {"prompt": [-5]}, 400, "token ids from 0"),
        ("/v1/completions", {"prompt": [2**40]}, 400, "token ids from 0"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt must be"),
        ("/v1/completions", {"prompt": []}, 400, "prompt must be"),
        ("/v1/completions", {}, 400, "prompt must be"),
        ("/v1/completions", {"prompt": "a" * 3000}, 400, "may have 2560 characters"),
        ("/v1/completions", {"prompt": "a" * 100}, 400, "maximum context length is 80 tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 100}, 400, "max_tokens is 100: shorten"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "min_tokens": 30}, 400, "at most max_tokens, which is 16"),
        ("/v1/completions", {"prompt": "a", "n": 65}, 400, "n must be"),
        ("/v1/completions", {"prompt": "a", "stop": ["a"] * 5}, 400, "stop must be at most 4"),
        ("/v1/completions", {"prompt": "a", "stop": "a" * 257}, 400, "stop must be"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": list(range(17))}, 400, "16 entries, got 17"),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, 400, "logprobs"),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "stream": True}, 400, "not streamed"),
        ("/v1/completions", {"prompt": "a", "return_token_ids": True, "stream": True}, 400, "not streamed"),
        ("/v1/completions", {"prompt": "a", "return_sample_support": True}, 400, "is for /inference/v1/generate"),
        ("/v1/completions", {"prompt": "a", "n": 64, "max_tokens": 2, "stop": ["\ud800"]}, 400, "no JSON"),
        ("/tokenize", {"prompt": "a", "model": "gpt-5"}, 404, "does not exist"),
        ("/tokenize", {"prompt": ["a", "b"]}, 400, "one text"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens must be"),
        ("/inference/v1/generate", {"token_ids": [5], "features": {}}, 400, "features"),
        ("/v1/chat/completions",
         {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"foo": 1}}, 400, "of 'tiny' does"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"3": 1}}, 400, "logit_bias=.* is not supported"),
        ("/v1/completions", {"prompt": "a", "frequency_penalty": 0.5}, 400, "frequency_penalty=0.5"),
        ("/v1/completions", {"prompt": "a", "repetition_penalty": 1.1}, 400, "repetition_penalty=1.1"),
        ("/v1/completions", {"prompt": "a", "guided_regex": "a+"}, 400, "guided_regex is not supported"),
        ("/v1/completions", {"prompt": "a", "model": "gpt-5"}, 404, "'gpt-5' does not exist"),
        ("/v1/chat/completions",
         {"messages": [{"role": "user", "content": "a" * 400}, {"role": "tool", "content": "b"}]}, 400, ": no tools"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages must be"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}, 3]}, 400, "messages must be"),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": "a"}]}, 400, "continue_final_message"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content"),
        ("/v1/chat/completions",
         {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}, 400, "tool_choice=.*supported"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, 400, "chat_t"),
        ("/v1/chat/completions",
         {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tools": "x"}}, 400, "tools"),
        ("/v1/chat/completions",
         {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}}, 400, "response"),
        ("/inference/v1/generate", {"token_ids": "abc"}, 400, "token_ids must be"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": 3}, 400, "sampling_params must be"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": []}, 400, "sampling_params must be"),
        ("/v1/completions", {"prompt": "a", "stop": 0}, 400, "stop must be"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": 0}, 400, "stop_token_ids must be"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": 0}, 400, "tools must be"),
        ("/v1/chat/completions",
         {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": 0}, 400, "chat_template_kwargs must"),
        ("/v1/chat/completions",
         {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, 400, "top_logprobs needs logprobs"),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": '{"x": "\\ud83d"}'}}]}, {"role": "user", "content": "a"}]},
         400, "tool_calls of a message"),
        ("/nowhere", {}, 404, "Not Found"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_openais_shape(
    running: Running, route: str, body: dict[str, Any], status: int, says: str
) -> None:
    answer = running.http.post(route, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert re.search(says, error["message"]), error["message"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"[" * 100_000, b'"a"', b"\xff\xfe", b'{"prompt": "\\ud800"}', b'{"prompt": "\xed\xa0\x80"}'],
)
@pytest.mark.parametrize("route", ROUTES)
def test_bodies_that_are_no_requests(running: Running, route: str, content: bytes) -> None:
    answer = running.http.post(route, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert running.http.get("/health").status_code == 200


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    "prompt messages token_ids sampling_params temperature top_p top_k min_p seed n stop stop_token_ids max_tokens "
    "min_tokens logprobs top_logprobs stream stream_options tools tool_choice chat_template_kwargs model ignore_eos "
    "return_sample_support continue_final_message add_generation_prompt echo prompt_logprobs return_eviction_record "
    "return_weight_versions"
).split()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    route=st.sampled_from(ROUTES), body=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=5),
    fine=st.booleans(),
)  # fmt: skip
def test_whatever_is_sent_the_engine_lives(running: Running, route: str, body: dict[str, Any], fine: bool) -> None:
    good = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "token_ids": [5], "max_tokens": 2}
    sent = {**good, **body} if fine else body
    answer = running.http.post(route, content=json.dumps(sent), headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), answer.text
    assert "Traceback" not in answer.text
    assert running.server.thread.failed_at is None


def test_web_pages_of_others_cannot_ask(running: Running) -> None:
    body = json.dumps({"prompt": "a"}).encode()
    assert running.http.get("/v1/models/tiny").json()["id"] == "tiny"
    assert running.http.get("/v1/models/other").status_code == 404
    for headers, status in (
        ({"content-type": "text/plain"}, 415), ({}, 415),
        ({"content-type": "application/json", "host": "evil.example"}, 400),
        ({"content-type": "application/json; charset=utf-8"}, 200),
    ):  # fmt: skip
        answer = running.http.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == status
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_bodies_have_a_limit(running: Running) -> None:
    answer = running.post("/v1/completions", prompt="a" * 2**24)
    assert answer.status_code == 413


def test_who_has_no_key_is_refused(folder: Path) -> None:
    running = Running(built(folder, key="a-kéy"))
    try:
        for header, status in (("", 401), ("Bearer a-key", 401), ("a-kéy", 401), ("Bearer a-kéy", 200)):
            headers = {"authorization": header.encode(), "host": "proxy.example", "x-request-id": "7"}
            answer = running.http.get("/v1/models", headers=headers)
            assert (answer.status_code, answer.headers["x-request-id"]) == (status, "7")
        assert running.http.get("/health").status_code == 200
    finally:
        running.close()


# ---------------------------------------------------------------- many at a time, clients that go, engines that fail


def test_many_clients_some_of_whom_leave(running: Running, sampler: RolloutSampler) -> None:
    def ask(index: int) -> Any:
        body = {"prompt": [5 + index, 6], "seed": index, "max_tokens": 5 + index, "temperature": 0.5 + index / 10}
        if index % 3:
            return running.post("/v1/completions", return_token_ids=True, **body).json()["choices"][0]["token_ids"]
        long = {**body, "max_tokens": 70, "ignore_eos": True, "stream": bool(index % 2)}
        with (
            suppress(httpx.ReadTimeout),
            httpx.Client(base_url=running.url, timeout=httpx.Timeout(60, read=0.1)) as one,
        ):
            with one.stream("POST", "/v1/completions", json=long) as answer:
                next(answer.iter_lines())
        return None

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(24)))
    for index, ids in enumerate(answers):
        if index % 3:
            want = drawn(
                sampler, [5 + index, 6], seed=index, max_completion_length=5 + index, temperature=0.5 + index / 10
            )
            assert ids == want.sequences[0, want.completion_mask[0]].tolist()
    running.until(lambda: running.is_idle)
    counted = running.http.get("/metrics").text
    assert 'vllm:num_requests_running{model_name="tiny"} 0' in counted
    assert 'finished_reason="length"' in counted
    evicted = next(line for line in counted.splitlines() if line.startswith("sparse_rl:evicted_tokens_total"))
    assert int(evicted.split()[-1]) > 0


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_client_wanted_that_left_is_cancelled(
    running: Running, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit, cancel, canceled = RequestThread._admit, RequestSession.cancel, list[int]()
    monkeypatch.setattr(RequestThread, "_admit", lambda *args: (time.sleep(0.02), admit(*args)))
    monkeypatch.setattr(RequestSession, "cancel", lambda *args: canceled.append(args[1]) or cancel(*args))
    body = {"prompt": "a", "n": 4, "max_tokens": 75, "ignore_eos": True, "stream": stream}
    with httpx.Client(base_url=running.url, timeout=httpx.Timeout(60, read=60 if stream else 0.3)) as client:
        if stream:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body)
    running.until(lambda: running.is_idle)
    assert len(canceled) == 1


def test_what_a_body_began_is_ended_when_a_later_prompt_is_refused(folder: Path) -> None:
    running = Running(built(folder, "--compressor", RKV.replace("window: 4", "window: 4, protect_prompt: true")))
    try:
        for stream in (False, True):
            answer = running.post("/v1/completions", prompt=["a", "a" * 30], max_tokens=45, stream=stream)
            assert answer.status_code == 400
            assert "protect_prompt" in answer.json()["error"]["message"]
            assert running.is_idle
    finally:
        running.close()


@pytest.mark.parametrize("stream", [False, True])
def test_too_many_wait_for_others(folder: Path, stream: bool) -> None:
    server = built(folder, "--max_queue", "2")
    asked = {"prompt": "a", "max_tokens": 70, "ignore_eos": True, "stream": stream}

    async def ask() -> list[Any]:
        transport = httpx.ASGITransport(app=server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answers = await asyncio.gather(*(client.post("/v1/completions", json=asked) for _ in range(8)))
            return [*answers, await client.post("/v1/completions", json=asked | {"n": 3})]

    *answers, never = asyncio.run(ask())
    assert sorted(answer.status_code for answer in answers) == [200] * 2 + [429] * 6
    assert {answer.headers.get("retry-after") for answer in answers if answer.status_code == 429} == {"1"}
    assert never.status_code == 400
    assert server.drawing.num_open == 0


def test_a_request_that_takes_too_long_ends_with_what_it_has(folder: Path) -> None:
    running = Running(built(folder, "--request_timeout", "0.001"))
    try:
        for stream in (False, True):
            asked = {"prompt": ["a", "b"], "n": 3, "max_tokens": 75, "ignore_eos": True, "stream": stream}
            answer = running.post("/v1/completions", **asked)
            assert answer.status_code == 200
            assert answer.text.count('"abort"') == 6
    finally:
        running.close()


def test_an_engine_that_fails_says_so_and_is_started_again(folder: Path) -> None:
    running = Running(built(folder))
    model = running.server.thread.sampler.model
    try:
        weights = model.lm_head.weight.detach().clone()
        model.lm_head.weight.data.fill_(float("nan"))
        failed = running.post("/v1/completions", prompt="a")
        assert (failed.status_code, failed.json()["error"]["type"]) == (500, "InternalServerError")
        assert "NaN" in failed.json()["error"]["message"]
        assert running.http.get("/health").status_code == 503
        streamed = running.post("/v1/completions", prompt="a", stream=True)
        assert '"error"' in streamed.text
        model.lm_head.weight.data.copy_(weights)
        assert running.post("/v1/completions", prompt="a").status_code == 200
        assert running.http.get("/health").status_code == 200
    finally:
        running.close()


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--host", "0.0.0.0"], "needs a key"),
        (["--api_key_file", "nowhere"], "cannot be read"),
        (["--num_slots", "0"], "--num_slots"),
        (["--request_timeout", "nan"], "--request_timeout"),
        (["--max_length", "100000"], "256|context|positions"),
        (["--max_logprobs", "1000"], "--max_logprobs must be"),
        (["--memory_limit", "10"], "memory"),
        (["--compressor", "{class_path: SnapKV, init_args: {bugdet: 3}}"], "bugdet"),
        (["--compressor", "Nope"], "Nope"),
    ],
)
def test_options_that_are_wrong(folder: Path, more: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        serve.main(["--policy", str(folder), *more])


def test_a_folder_in_ones_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert built(Path("~/tiny")).settings.name == "tiny"


def test_the_command_serves_until_it_is_told_to_end(folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "key").write_text("secret\n", encoding="utf-8")
    command = [sys.executable, "-c", "from sparse_rl_lightning.cli import console; console()", "serve"]
    given = ["--policy", str(folder), "--compressor", RKV, "--port", str(port), "--api_key_file", str(tmp_path / "key")]
    process = subprocess.Popen([*command, *given], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 120
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
                break
            except httpx.TransportError:
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < end
                time.sleep(0.2)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret")
        assert client.models.list().data[0].id == folder.name
        assert client.completions.create(model=folder.name, prompt="ab", max_tokens=4, seed=0).choices[0].text
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert f"Serving 'tiny' at http://127.0.0.1:{port} with RKV" in printed
    assert "64 slots" in printed
    assert process.returncode in (0, -signal.SIGTERM)
