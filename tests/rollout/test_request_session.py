"""Requests drawn together: what each gets is what it would get alone, whoever else is there, comes, or is canceled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import CHECK_EVERY
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

from sparse_rl_lightning.budgets import Pyramid
from sparse_rl_lightning.compressors import RKV, Compressor, FullKV, SnapKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.retrievers import Quest
from sparse_rl_lightning.rollout import (
    Request,
    RequestSession,
    RolloutSampler,
    RolloutSession,
    SamplingParams,
    replay_logprobs,
)
from sparse_rl_lightning.testing import character_tokenizer, tiny_model
from tests.pretend_gpu import PretendGPU

TOKENIZER = character_tokenizer()
ENDS = (3, 4)
LIMITS = SamplingParams(max_completion_length=40, top_logprobs=5)
LONGEST = 32
SMALL: dict[str, Any] = {"budget": 14, "buffer": 6, "num_sinks": 1, "window": 4}
COMPRESSORS: dict[str, Callable[[], Compressor]] = {
    "full": FullKV, "rkv": lambda: RKV(**SMALL), "snapkv": lambda: SnapKV(**SMALL),
    "whole prompt": lambda: RKV(**SMALL, compress_prompt=False),
}  # fmt: skip
UNLIKE = [
    Request([5, 6, 7], SamplingParams(temperature=0, max_completion_length=20)),
    Request(range(8, 30), SamplingParams(num_generations=3, seed=3, temperature=1.5, max_completion_length=30)),
    Request([9] * 9, SamplingParams(top_k=5, seed=4, max_completion_length=40, top_logprobs=5), (12,), ()),
    Request([5, 6, 7], SamplingParams(top_p=0.6, seed=4, max_completion_length=33), (-3,), (7, 9, 30)),
    Request(range(40, 72), SamplingParams(min_p=0.1, seed=5, max_completion_length=1, top_logprobs=2)),
    Request(
        [11, 12], SamplingParams(min_completion_length=18, max_completion_length=24, stop_strings=("e", "at"), seed=6)
    ),
    Request([11, 12], SamplingParams(max_completion_length=24, stop_strings=("e", "at"), seed=6), None, ()),
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", initializer_range=0.08, vocab_size=len(TOKENIZER), eos_token_id=None)


def session(
    model: PreTrainedModel, compressor: Compressor | None = None, num_slots: int = 4, **options: Any
) -> RequestSession:
    sampler = RolloutSampler(model, compressor or RKV(**SMALL), num_slots, ENDS, tokenizer=TOKENIZER, **options)
    return RequestSession(sampler, LIMITS, LONGEST)


def alone(model: PreTrainedModel, request: Request, compressor: Compressor | None = None, **options: Any) -> Rollout:
    """What ``RolloutSampler.generate`` draws for a request."""
    ends = ENDS if request.end_token_ids is None else request.end_token_ids
    sampler = RolloutSampler(model, compressor or RKV(**SMALL), 2, ends, tokenizer=TOKENIZER, **options)
    return sampler.generate([list(request.prompt)], request.params, sequence_ids=request.sequence_ids)


def texts_of(rollout: Rollout) -> list[list[int]]:
    return [tokens[mask].tolist() for tokens, mask in zip(rollout.sequences, rollout.completion_mask, strict=True)]


def assert_alike(together: Rollout, one: Rollout) -> None:
    for name in ("sequences", "prompt_lengths", "completion_mask", "finished", "topk_ids", "support", "keys"):
        got, want = getattr(together, name), getattr(one, name)
        assert (got is None) == (want is None), name
        assert want is None or torch.equal(got, want), name
    for name in ("sampler_logprobs", "behavior_logprobs", "topk_logprobs"):
        got, want = getattr(together, name), getattr(one, name)
        assert (got is None) == (want is None), name
        if want is not None:
            torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert (together.evictions is None) == (one.evictions is None)
    if one.evictions is not None:
        assert torch.equal(together.evictions.death, one.evictions.death)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_unlike_requests_draw_together_what_each_draws_alone(model: PreTrainedModel, name: str) -> None:
    drawing = session(model, COMPRESSORS[name]())
    numbers = [drawing.submit(request) for request in UNLIKE]
    drawing.advance()
    for number, request in zip(numbers, UNLIKE, strict=True):
        completed = drawing.take_request(number)
        assert_alike(completed.rollout, alone(model, request, COMPRESSORS[name]()))
        assert len(completed.endings) == request.params.num_generations
    assert drawing.complete == []
    assert drawing.scheduler.free == [3, 2, 1, 0]


params = st.builds(
    SamplingParams, num_generations=st.integers(1, 3), max_completion_length=st.integers(1, 40),
    min_completion_length=st.integers(0, 1), temperature=st.sampled_from([0.0, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 7]), top_p=st.sampled_from([1.0, 0.8]), min_p=st.sampled_from([None, 0.05]),
    top_logprobs=st.integers(0, 5), stop_strings=st.sampled_from([(), ("a",), ("th", "q")]), seed=st.integers(0, 9),
)  # fmt: skip
requests = st.builds(
    Request, st.lists(st.integers(5, 40), min_size=1, max_size=LONGEST), params,
    end_token_ids=st.sampled_from([None, (), (9, 20)]),
)  # fmt: skip


@settings(max_examples=15, deadline=None)
@given(
    each=st.lists(requests, min_size=1, max_size=5), name=st.sampled_from(list(COMPRESSORS)),
    num_slots=st.integers(1, 4), pieces=st.sampled_from([5, 40]), steps=st.lists(st.integers(0, 20), max_size=4),
)  # fmt: skip
def test_whenever_they_come_and_however_few_slots_there_are(
    model: PreTrainedModel, each: list[Request], name: str, num_slots: int, pieces: int, steps: list[int]
) -> None:
    drawing = session(model, COMPRESSORS[name](), num_slots, max_prefill_tokens=pieces)
    numbers = list[int]()
    for index, request in enumerate(each):
        numbers.append(drawing.submit(request))
        drawing.advance(max_steps=steps[index] if index < len(steps) else 0)
    drawing.advance()
    for number, request in zip(numbers, each, strict=True):
        want = alone(model, request, COMPRESSORS[name](), max_prefill_tokens=pieces)
        assert_alike(drawing.take_request(number).rollout, want)


def test_generate_takes_parameters_of_each_prompt(model: PreTrainedModel) -> None:
    drawing = session(model)
    prompts, params = [request.prompt for request in UNLIKE], [request.params for request in UNLIKE]
    for _ in range(2):  # slots and numbers are used again
        first = 0
        for completed, prompt, each in zip(drawing.generate(prompts, params), prompts, params, strict=True):
            ids = range(first, first := first + each.num_generations)
            assert_alike(completed.rollout, alone(model, Request(prompt, each, ids)))
    same = SamplingParams(num_generations=2, seed=2, max_completion_length=9)
    want = RolloutSampler(model, RKV(**SMALL), 4, ENDS).generate([[5, 6], [5, 6]], same)
    texts = [row for completed in drawing.generate([[5, 6], [5, 6]], same) for row in texts_of(completed.rollout)]
    assert texts == texts_of(want)
    assert texts[:2] != texts[2:]
    with pytest.raises(UserError, match="params must be for 2 prompts, at least one, got 1"):
        drawing.generate([[5], [6]], [same])


def test_requests_without_a_seed_have_random_numbers_of_their_own(model: PreTrainedModel) -> None:
    drawing, params = session(model), SamplingParams(max_completion_length=30)
    numbers = [drawing.submit(Request([5, 6], params, end_token_ids=())) for _ in range(3)]
    drawing.advance()
    texts = [texts_of(drawing.take_request(number).rollout)[0] for number in numbers]
    assert len({tuple(text) for text in texts}) == 3


def test_what_ended_a_completion_is_told_apart(model: PreTrainedModel) -> None:
    drawing = session(model)
    free = Request([11, 12], SamplingParams(max_completion_length=40, seed=1), end_token_ids=())
    text = alone(model, free).sequences[0, 2:].tolist()
    at = next(index for index in range(5, 40) if text[index] not in text[:index])
    letter = TOKENIZER.decode([text[at]])
    cases = {
        "length": free,
        "end_token": replace(free, end_token_ids=(text[at],)),
        "stop_string": replace(free, params=replace(free.params, stop_strings=(letter,))),
        "canceled": free,
    }
    numbers = {ending: drawing.submit(request) for ending, request in cases.items()}
    drawing.advance(max_steps=3)
    drawing.cancel(numbers["canceled"])
    drawing.advance()
    for ending, number in numbers.items():
        completed = drawing.take_request(number)
        assert completed.endings == (ending,)
        length = {"length": 40, "canceled": 4}.get(ending, at + 1)
        assert completed.rollout.sequences[0, 2:].tolist() == text[:length]
        assert completed.rollout.finished.tolist() == [ending in ("end_token", "stop_string")]


def test_records_are_exact(model: PreTrainedModel) -> None:
    for completed, request in zip(session(model).generate([r.prompt for r in UNLIKE], LIMITS), UNLIKE, strict=True):
        rollout = completed.rollout
        assert len(rollout.evictions) > 0, request
        difference = replay_logprobs(model, rollout) - rollout.sampler_logprobs
        assert difference[rollout.completion_mask].abs().max() < 1e-4


# ---------------------------------------------------------------- cancel


@pytest.mark.parametrize("check_every", [1, 8])
@pytest.mark.parametrize("steps", [0, 1, 2, 7, 8, 9, 23, 30])
def test_a_cancel_at_any_step_loses_no_slot_and_changes_nobody(
    model: PreTrainedModel, steps: int, check_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CHECK_EVERY, {"cpu": check_every})
    drawing = session(model, num_slots=3)
    long = Request([5, 6, 7], SamplingParams(num_generations=4, seed=6, max_completion_length=30), end_token_ids=())
    others = [replace(long, prompt=[8 + i], sequence_ids=range(i, i + 4)) for i in range(2)]
    first, canceled, last = (drawing.submit(request) for request in (others[0], long, others[1]))
    drawing.advance(max_steps=steps)
    shown = drawing.drawn(canceled)
    begun = drawing.cancel(canceled)
    drawing.advance()
    for number, request in ((first, others[0]), (last, others[1])):
        assert_alike(drawing.take_request(number).rollout, alone(model, request))
    assert drawing.scheduler.free == [2, 1, 0]
    assert not drawing.scheduler.cached_prompts
    assert begun == bool(shown)
    if not begun:
        with pytest.raises(UserError, match="There is no request 1"):
            drawing.take_request(canceled)
        return
    whole, completed = alone(model, long), drawing.take_request(canceled)
    assert len(completed.rollout) == len(completed.endings) == len(shown)
    for row, ending in enumerate(completed.endings):
        text = completed.rollout.sequences[row, completed.rollout.completion_mask[row]].tolist()
        assert text == whole.sequences[row, 3 : 3 + len(text)].tolist()
        assert text[: len(shown[row])] == shown[row]
        assert (ending == "length") == (len(text) == 30)


def test_cancels_of_what_waits_or_is_gone(model: PreTrainedModel) -> None:
    drawing = session(model, num_slots=1)
    running, waiting = (drawing.submit(Request([5, i + 6], SamplingParams(max_completion_length=5))) for i in range(2))
    drawing.advance(max_steps=1)
    assert not drawing.cancel(waiting)
    drawing.advance()
    assert drawing.complete == [running]
    assert drawing.cancel(running)  # it is complete: nothing changes
    assert drawing.take_request(running).endings in {("length",), ("end_token",)}
    for number in (running, waiting, 9):
        with pytest.raises(UserError, match=f"There is no request {number}"):
            drawing.cancel(number)


# ---------------------------------------------------------------- tokens before the end, long prompts, weights


@pytest.mark.parametrize("check_every", [1, 8])
def test_tokens_are_known_before_the_end_and_none_is_taken_back(
    model: PreTrainedModel, check_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CHECK_EVERY, {"cpu": check_every})
    drawing = session(model)
    number = drawing.submit(replace(UNLIKE[5], params=replace(UNLIKE[5].params, num_generations=2)))
    seen: dict[int, list[int]] = {0: [], 1: []}
    grown = 0
    while drawing.num_unfinished:
        drawing.advance(max_steps=1)
        for sample, tokens in drawing.drawn(number).items():
            assert tokens[: len(seen[sample])] == seen[sample]
            grown += len(tokens) > len(seen[sample]) > 0
            seen[sample] = tokens
    rollout = drawing.take_request(number).rollout
    assert grown >= 4
    assert [rollout.sequences[row, rollout.completion_mask[row]].tolist() for row in (0, 1)] == [seen[0], seen[1]]


def test_nobody_waits_for_a_long_prompt(model: PreTrainedModel) -> None:
    drawing = session(model, max_prefill_tokens=4)
    quick = Request([5, 6], SamplingParams(max_completion_length=30, seed=1), end_token_ids=())
    long = Request(range(5, 37), SamplingParams(max_completion_length=5, num_generations=2, seed=1))
    numbers = [drawing.submit(request) for request in (quick, long, quick)]
    lengths = list[int]()
    while not drawing.drawn(numbers[1]):
        drawing.advance(max_steps=1)
        lengths.append(len(drawing.drawn(numbers[0])[0]))
        assert not drawing.drawn(numbers[2]) or drawing.drawn(numbers[1])  # it does not overtake
    assert lengths == list(range(2, 11))  # eight pieces, a step of the quick one between any two
    assert drawing.scheduler.prefill_peak_bytes > 0
    drawing.advance()
    for number, request in zip(numbers, (quick, long, quick), strict=True):
        assert_alike(drawing.take_request(number).rollout, alone(model, request, max_prefill_tokens=4))


@pytest.mark.parametrize("why", ["cancel", "weights"])
def test_a_long_prompt_that_is_given_up_gives_its_slot_back(why: str) -> None:
    model = tiny_model("llama", initializer_range=0.08, vocab_size=len(TOKENIZER), eos_token_id=None)
    drawing = session(model, max_prefill_tokens=4)
    long = Request(range(5, 37), SamplingParams(max_completion_length=5, seed=1))
    other = drawing.submit(Request([5], SamplingParams(max_completion_length=30), end_token_ids=()))
    drawing.advance(max_steps=1)
    number = drawing.submit(long)
    drawing.advance(max_steps=3)
    assert len(drawing.scheduler.free) == 2  # the long prompt has one that no sequence runs in
    if why == "cancel":
        assert not drawing.cancel(number)
        drawing.advance()
    else:
        model.lm_head.weight.data.mul_(1.5)
        drawing.advance(new_weights=True)
        assert_alike(drawing.take_request(number).rollout, alone(model, long, max_prefill_tokens=4))
    assert drawing.complete == [other]
    assert drawing.scheduler.free == [3, 2, 1, 0]


def test_each_token_has_the_version_of_its_weights(model: PreTrainedModel) -> None:
    drawing = session(model)
    number = drawing.submit(Request([5, 6], SamplingParams(max_completion_length=20), end_token_ids=()))
    drawing.advance(max_steps=3)
    drawing.advance(max_steps=3)
    drawing.advance(new_weights=True)
    rollout = drawing.take_request(number).rollout
    versions = rollout.policy_versions[rollout.completion_mask]
    assert versions.tolist() == [1] * 7 + [2] * 13


def test_prompts_of_a_plain_session_can_be_added(model: PreTrainedModel) -> None:
    limits = replace(LIMITS, num_generations=2, seed=4, top_logprobs=0)
    drawing = RequestSession(RolloutSampler(model, RKV(**SMALL), 3, ENDS), limits, LONGEST)
    numbers = drawing.add([[5, 6], [7, 8, 9]], [10, 11, 12, 13])
    drawing.advance()
    want = RolloutSampler(model, RKV(**SMALL), 3, ENDS).generate(
        [[5, 6], [7, 8, 9]], limits, sequence_ids=[10, 11, 12, 13]
    )
    assert_alike(drawing.take(numbers), want)
    with pytest.raises(UserError, match="sequence_ids must name 2 sequences, got 1"):
        drawing.add([[5]], [1])
    with pytest.raises(UserError, match="max_prompt_length=32"):
        drawing.add([[5], [5] * 33], [1, 2, 3, 4])
    assert not drawing.num_unfinished  # all or none


def test_pages_are_retrieved_for_each(model: PreTrainedModel) -> None:
    def retrieving() -> dict[str, Any]:
        return {"retriever": Quest(budget=16, page_size=4, num_dense_layers=0)}

    drawing = session(model, FullKV(), **retrieving())
    drawn = drawing.generate([r.prompt for r in UNLIKE], LIMITS)
    for index, (completed, request) in enumerate(zip(drawn, UNLIKE, strict=True)):
        want = alone(model, Request(request.prompt, LIMITS, (index,)), FullKV(), **retrieving())
        assert completed.rollout.sequences.tolist() == want.sequences.tolist()


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"params": SamplingParams(repetition_penalty=1.1)}, "repetition_penalty must be 1 for requests, got 1.1"),
        ({"params": SamplingParams(num_generations=2), "sequence_ids": (1,)}, "must name 2 completions, got 1"),
        ({"params": SamplingParams(), "end_token_ids": range(17)}, "end_token_ids must be at most 16 .*, got 17"),
        ({"params": SamplingParams(num_generations=65537)}, "num_generations must be at most 65536 .*, got 65537"),
    ],
)
def test_what_a_request_may_not_ask_for(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Request([5], **given)


@pytest.mark.parametrize(
    ("prompt", "given", "ends", "says"),
    [
        ([5] * 33, {}, None, r"33 tokens, .* max_prompt_length=32"),
        ([], {}, None, "empty"),
        ([10**6], {}, None, "vocabulary|token"),
        ([5] * 32, {"max_completion_length": 41}, None, "max_completion_length=41 are more than the 72 tokens"),
        ([5], {"max_completion_length": 72}, None, "prompt of 1 tokens .* more than the 72 tokens"),
        ([5], {"max_completion_length": 4, "top_logprobs": 6}, None, "top_logprobs must be at most the session's 5"),
        ([5], {}, (10**6,), "end_token_ids|vocabulary"),
    ],
)
def test_what_exceeds_the_session_is_refused(
    model: PreTrainedModel, prompt: list[int], given: dict[str, Any], ends: tuple[int, ...] | None, says: str
) -> None:
    drawing = session(model)
    with pytest.raises(UserError, match=says):
        drawing.submit(Request(prompt, SamplingParams(**({"max_completion_length": 40} | given)), None, ends))
    assert not drawing.num_unfinished
    fits = Request([5] * 32, SamplingParams(max_completion_length=40, top_logprobs=5), None, (len(TOKENIZER) - 1,) * 16)
    assert drawing.submit(fits) == 0


def test_a_prompt_needs_the_budget_of_layers_that_are_compressed() -> None:
    """Not of windowed ones, which a pyramid over all layers would count."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    windowed = Gemma3TextConfig(
        vocab_size=len(TOKENIZER), head_dim=8, sliding_window=7, num_hidden_layers=6, layer_types=kinds, **sizes
    )
    model = Gemma3ForCausalLM(windowed).eval()
    drawing = session(model, SnapKV(20, buffer=4, num_sinks=1, window=2, protect_prompt=True, budget_rule=Pyramid(10)))
    drawing.submit(Request(range(3, 15), SamplingParams(max_completion_length=40)))


def test_a_prompt_that_the_budget_cannot_hold_ends_nobody_else(model: PreTrainedModel) -> None:
    protecting = RKV(**SMALL, protect_prompt=True)
    drawing = session(model, protecting)
    first = drawing.submit(Request([5, 6, 7], SamplingParams(max_completion_length=40), end_token_ids=()))
    drawing.advance(max_steps=3)
    with pytest.raises(UserError, match=r"prompt has 11 tokens, which protect_prompt keeps beside window=4, .* is 14"):
        drawing.submit(Request(range(5, 16), SamplingParams(max_completion_length=40)))
    fits = [Request(range(5, 15), SamplingParams(max_completion_length=40, seed=1), end_token_ids=())]
    fits.append(Request(range(5, 16), SamplingParams(max_completion_length=9, seed=1), end_token_ids=()))  # no eviction
    numbers = [drawing.submit(request) for request in fits]
    drawing.advance()
    for number, request in zip(numbers, fits, strict=True):
        assert_alike(drawing.take_request(number).rollout, alone(model, request, protecting))
    assert drawing.take_request(first).endings == ("length",)


def test_prompts_may_be_tensors(model: PreTrainedModel) -> None:
    params = SamplingParams(max_completion_length=9, seed=1)
    drawing = session(model)
    number = drawing.submit(Request(torch.tensor([5, 6, 7]), params, end_token_ids=torch.tensor([9])))
    drawing.advance()
    assert_alike(drawing.take_request(number).rollout, alone(model, Request([5, 6, 7], params, None, (9,))))


@pytest.mark.parametrize(
    ("ends", "given", "says"),
    [
        (range(5, 22), {}, "at most 16 end tokens, the sampler 17"),
        (ENDS, {"repetition_penalty": 1.3}, "repetition_penalty must be 1"),
    ],
)
def test_sessions_that_requests_cannot_have(
    model: PreTrainedModel, ends: Any, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        RequestSession(RolloutSampler(model, FullKV(), 2, ends), replace(LIMITS, **given), LONGEST)


def test_routing_is_not_recorded(model: PreTrainedModel) -> None:
    sampler = RolloutSampler(model, FullKV(), 2)
    sampler.recorded = object()  # type: ignore[assignment]  # as of a mixture of experts
    with pytest.raises(UserError, match="record_routing=True"):
        RequestSession(sampler, LIMITS, LONGEST)


# ---------------------------------------------------------------- on a pretend GPU


def test_on_a_gpu_they_are_drawn_by_captured_steps(model: PreTrainedModel) -> None:
    with PretendGPU() as gpu:
        drawing = session(gpu.copy_of(model))
        numbers = [drawing.submit(request) for request in UNLIKE]
        drawing.advance()
        drawn = [drawing.take_request(number).rollout.to("cpu") for number in numbers]
    assert gpu.captures.refused == []
    assert drawing.engine.has_graphs
    for rollout, request in zip(drawn, UNLIKE, strict=True):
        assert_alike(rollout, alone(model, request))


def test_a_step_launches_two_more_than_a_plain_one(model: PreTrainedModel) -> None:
    launched = list[int]()
    for create in (RequestSession, RolloutSession):
        with PretendGPU() as gpu:
            sampler = RolloutSampler(gpu.copy_of(model), RKV(**SMALL), 4, ENDS, cuda_graphs=False)
            # the plain one truncates, and so logs what requests do
            engine = create(sampler, SamplingParams(max_completion_length=40, top_k=9), LONGEST).engine
            logits, places = torch.zeros(4, len(TOKENIZER), device="cuda"), torch.arange(4, device="cuda")
            at = engine.cache.seen[places]
            gpu.reset()
            engine.draw(logits, places, at)
            launched.append(sum(gpu.launches.values()))
    assert launched[0] - launched[1] == 2
