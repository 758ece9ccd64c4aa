"""Requests drawn in a thread: what each gets is what it would get alone, and an abort leaves nothing behind."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from sparse_rl_lightning.compressors import RKV, Compressor
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.integrations.record import SampledRecord, check_record
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout import CompletedRequest, Request, RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.request_thread import PendingRequest, RequestThread
from sparse_rl_lightning.testing import tiny_model
from tests.pretend_gpu import PretendGPU

STORIES = Path(os.environ.get("SPARSE_RL_STORIES", Path(__file__).parents[3] / "shared/models/stories260K"))
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
def engine(model: PreTrainedModel) -> RequestThread:
    return RequestThread(sampler(model), PARAMS, max_prompt_length=32)


def request(index: int, params: SamplingParams = PARAMS) -> PendingRequest:
    return PendingRequest(Request(PROMPTS[index % len(PROMPTS)], params, (index,)), f"r{index}")


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
def gated(model: PreTrainedModel, gate: Gate) -> RequestThread:
    return RequestThread(sampler(model, gate, ends=()), PARAMS, max_prompt_length=32)


def same(completed: CompletedRequest | None, other: Rollout) -> None:
    one = completed.rollout
    assert one.sequences.tolist() == other.sequences.tolist()
    assert (one.sampler_logprobs - other.sampler_logprobs).abs().max() < 1e-5


def test_each_gets_what_it_would_get_alone(engine: RequestThread, model: PreTrainedModel) -> None:
    drawn = [engine.submit(request(i)) for i in range(6)]
    for index, future in enumerate(drawn):
        same(future.result(WAIT), alone(model, index, ends=(1,)))


def test_records_are_exact_and_of_one_policy(engine: RequestThread, model: PreTrainedModel) -> None:
    completed = [engine.submit(request(i)).result(WAIT) for i in range(2)]
    completed += [future.result(WAIT) for future in [engine.submit(request(i)) for i in range(2, 9)]]
    drawn = [one.rollout for one in completed]
    record = SampledRecord.cat([SampledRecord.of(rollout) for rollout in drawn])
    assert len(record) == 9
    assert len(record.evictions) > 9
    assert all((rollout.policy_versions == 1)[rollout.completion_mask].all() for rollout in drawn)
    assert check_record(record, model).largest < 1e-5


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs the real small Llama")
def test_a_real_model() -> None:
    model = AutoModelForCausalLM.from_pretrained(STORIES).eval()
    params = SamplingParams(max_completion_length=100)
    engine = RequestThread(sampler(model, RKV(budget=24, buffer=8)), params, max_prompt_length=32)
    prompts = [[1, 403, 407, 261, 378], [1]] * 3
    drawn = [engine.submit(PendingRequest(Request(prompt, params, (i,)))) for i, prompt in enumerate(prompts)]
    record = SampledRecord.cat([SampledRecord.of(future.result(WAIT).rollout) for future in drawn])
    assert check_record(record, model).largest < 1e-4
    assert len(record.evictions) > 0


def test_one_that_comes_later_joins_those_that_run(
    gated: RequestThread, gate: Gate, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = gated.submit(request(0))
    assert gate.reached.wait(WAIT)
    late = gated.submit(request(1))
    monkeypatch.setattr(gated, "_draw", None)  # a second session would fail
    assert not first.done()
    gate.go.set()
    for index, future in enumerate((first, late)):
        same(future.result(WAIT), alone(model, index))


def test_other_parameters_join_too(gated: RequestThread, gate: Gate, model: PreTrainedModel) -> None:
    first = gated.submit(request(0))
    assert gate.reached.wait(WAIT)
    greedy = gated.submit(request(1, SamplingParams(max_completion_length=4, temperature=0)))
    gate.go.set()
    assert greedy.result(WAIT) is not None
    assert not first.done()
    same(first.result(WAIT), alone(model, 0))
    want = sampler(model, ends=()).generate([PROMPTS[1]], SamplingParams(max_completion_length=4, temperature=0))
    same(greedy.result(0), want)


@pytest.mark.parametrize("reject", [False, True])
def test_an_abort_ends_all_and_a_closed_engine_holds_or_rejects(
    gated: RequestThread, gate: Gate, model: PreTrainedModel, reject: bool
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
        engine = RequestThread(sampler(gpu.copy_of(model)), PARAMS, max_prompt_length=32)
        drawn, late = [request(i) for i in range(4)], request(5)
        for one in drawn:
            engine.submit(one)
        drawn[1].done.add_done_callback(lambda _: engine._queue.append(late))
        engine._draw()
    for one in (*drawn, late):
        same(one.done.result(0), alone(model, *one.request.sequence_ids, ends=(1,)))
    assert gpu.captures.refused == []


def test_a_closed_engine_completes_what_runs_and_holds_back_the_rest(
    gated: RequestThread, gate: Gate, model: PreTrainedModel
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
    assert before.sequences.tolist() != after.rollout.sequences.tolist()


@pytest.mark.parametrize("steps", [
    ("close a", "close b", "open a", "open b"),
    ("close a", "close b", "open b", "open a"),
    ("close a", "abort", "open a", "resume"),
    ("close a", "abort", "resume", "open a"),
    ("abort", "close a", "resume", "open a"),
    ("close a", "resume", "close a", "open a"),
])  # fmt: skip
def test_it_draws_when_nothing_closes_it_any_more(
    engine: RequestThread, model: PreTrainedModel, steps: tuple[str, ...]
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


def test_an_error_is_that_of_its_requests_alone(engine: RequestThread, model: PreTrainedModel) -> None:
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
    ("prompt", "says"),
    [([], "empty"), ([5] * 33, r"33 tokens, .*max_prompt_length=32"), ([5, 10**6], "vocabulary|token")],
)
def test_wrong_prompts_are_refused_to_the_caller(engine: RequestThread, prompt: list[int], says: str) -> None:
    engine.abort_all()  # at once, and not when it draws again
    with pytest.raises(UserError, match=says):
        engine.pending(Request(prompt, PARAMS))


def test_a_session_that_cannot_be_made_fails_and_does_not_hang(model: PreTrainedModel) -> None:
    limited = RolloutSampler(model, RKV(budget=14, buffer=6), 2, memory_limit=10)
    small = RequestThread(limited, PARAMS, max_prompt_length=32)
    for _ in range(2):
        with pytest.raises(UserError, match="memory"):
            small.submit(request(0)).result(WAIT)


def test_a_request_is_cancelled_wherever_it_is(gated: RequestThread, gate: Gate, model: PreTrainedModel) -> None:
    pending = [request(index) for index in range(5)]  # three slots
    drawn = [gated.submit(each) for each in pending]
    assert gate.reached.wait(WAIT)
    late = request(5)
    gated.submit(late)
    for each in (pending[1], pending[4], late):  # in a slot, waiting for one, in the queue
        gated.cancel(each)
    assert late.done.result(0) is None
    gate.go.set()
    assert drawn[4].result(WAIT) is None
    completed = drawn[1].result(WAIT)
    assert completed.endings == ("canceled",)
    text = completed.rollout.sequences[0].tolist()
    assert text == alone(model, 1).sequences[0, : len(text)].tolist()
    for index in (0, 2, 3):
        same(drawn[index].result(WAIT), alone(model, index))
    assert (gated.usage.num_running, gated.usage.num_waiting, gated.usage.num_occupied) == (0, 0, 0)


def test_a_future_that_is_cancelled_harms_nobody(gated: RequestThread, gate: Gate, model: PreTrainedModel) -> None:
    first = gated.submit(request(0))
    assert gate.reached.wait(WAIT)
    assert gated.submit(request(1)).cancel()
    gate.go.set()
    same(first.result(WAIT), alone(model, 0))
    same(gated.submit(request(2)).result(WAIT), alone(model, 2))


def test_tokens_are_told_as_they_come(engine: RequestThread, model: PreTrainedModel) -> None:
    seen = list[list[int]]()

    def tell(drawn: dict[int, list[int]]) -> None:
        seen.append(drawn.get(0, []))
        raise RuntimeError("the loop of the client is closed")

    pending = PendingRequest(request(0).request, on_tokens=tell)
    same(engine.submit(pending).result(WAIT), alone(model, 0, ends=(1,)))
    text = alone(model, 0, ends=(1,)).sequences[0, len(PROMPTS[0]) :].tolist()
    assert [tokens == text[: len(tokens)] for tokens in seen] == [True] * len(seen)
    assert len({len(tokens) for tokens in seen}) > 5


def test_an_error_is_known_until_something_is_drawn_again(
    engine: RequestThread, model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    weights = model.lm_head.weight.detach().clone()
    model.lm_head.weight.data.fill_(float("nan"))
    try:
        with pytest.raises(UserError, match="NaN"):
            engine.submit(request(0)).result(WAIT)
        assert engine.failed_at is not None
        assert "NaN" in caplog.text
    finally:
        model.lm_head.weight.data.copy_(weights)
    engine.submit(request(1)).result(WAIT)
    assert engine.failed_at is None
