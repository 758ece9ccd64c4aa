"""The eviction record as a format: engines that know nothing of this library write it, and replay proves it."""

from __future__ import annotations

import copy
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from sparse_rl_lightning.cli.record import main
from sparse_rl_lightning.compressors import RKV, SnapKV, StreamingLLM
from sparse_rl_lightning.integrations.record import (
    Kept,
    Request,
    SampledRecord,
    check_record,
    read_record,
    record_bytes,
    record_from_bytes,
    record_of_kept,
    write_record,
)
from sparse_rl_lightning.integrations.record.format import ARRAYS
from sparse_rl_lightning.integrations.record.runs import ALL
from sparse_rl_lightning.records import NEVER, EvictionRecord, Rollout
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from tests.families import family
from tests.integrations.record.independent_rkv import sample
from tests.integrations.record.write_cases import CASES, FOLDER

STORIES = Path(os.environ.get("SPARSE_RL_STORIES", Path(__file__).parents[4] / "shared/models/stories260K"))
PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 30)]


def r_kv_record(model: PreTrainedModel, prompts: list[list[int]], length: int = 60) -> SampledRecord:
    """What the independent program says of its requests."""
    drawn = [sample(model, prompt, budget=16, buffer=8, length=length, seed=i) for i, prompt in enumerate(prompts)]
    events = [[Kept(query, kept, layer) for query, layer, kept in d.events] for d in drawn]
    requests = [Request(d.prompt, d.completion, d.logprobs, lost) for d, lost in zip(drawn, events, strict=True)]
    return record_of_kept(requests, model.config.num_hidden_layers, model.config.num_key_value_heads)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return family("llama", num_hidden_layers=3, attn_implementation="eager")


@pytest.fixture(scope="module")
def recorded(llama: PreTrainedModel) -> SampledRecord:
    return r_kv_record(llama, PROMPTS)


# ------------------------------------------------------------------ from outside


def test_an_independent_engine_is_replayed_exactly(llama: PreTrainedModel, recorded: SampledRecord) -> None:
    verdict = check_record(recorded, llama)
    assert verdict.agrees
    assert verdict.largest < 3e-5
    assert verdict.tokens == 180
    dense = replace(recorded, evictions=recorded.evictions[:0], num_runs=recorded.num_runs[:0], runs=recorded.runs[:0])
    assert check_record(dense, llama).largest > 0.05


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs the real small Llama")
def test_an_independent_engine_on_a_real_model() -> None:
    model = AutoModelForCausalLM.from_pretrained(STORIES, attn_implementation="eager").eval()
    found = r_kv_record(model, [[1, 403, 407, 261, 378], [1, 410]], length=100)
    verdict = check_record(found, model)
    assert verdict.agrees
    assert verdict.largest < 1e-4


def test_heads_that_share_are_written_once(recorded: SampledRecord) -> None:
    rows = recorded.evictions.tolist()
    assert {head for _, _, head, _ in rows} == {ALL}
    # every layer keeps its own tokens, so that no line is shared by all layers
    assert {layer for _, layer, _, _ in rows} == {0, 1, 2}
    own = RolloutSampler(family("llama"), StreamingLLM(budget=16, buffer=8, num_sinks=2), 4)
    shared = SampledRecord.of(own.generate(PROMPTS, SamplingParams(max_completion_length=60, seed=1)))
    events = {(request, query) for request, _, _, query in shared.evictions.tolist()}
    assert len(shared.evictions) == len(events) == len(shared.runs)  # one run of positions for all heads


@pytest.mark.parametrize(("moved", "finding"), [(1, "earlier"), (-1, "later")])
def test_the_first_token_and_what_would_explain_it(
    llama: PreTrainedModel, recorded: SampledRecord, moved: int, finding: str
) -> None:
    wrong = recorded.evictions.clone()
    of_second = wrong[:, 0] == 1
    wrong[of_second, 3] += moved
    verdict = check_record(replace(recorded, evictions=wrong), llama)
    first = int(recorded.evictions[of_second, 3].min())
    assert (verdict.request, verdict.agrees) == (1, False)
    # the query at q predicts the token at q + 1
    assert verdict.token in {first, first + 1}
    assert f"with every eviction one query {finding} in all layers" in verdict.text


def test_a_wrong_layer_is_named(llama: PreTrainedModel, recorded: SampledRecord) -> None:
    wrong = recorded.evictions.clone()
    wrong[(wrong[:, 0] == 2) & (wrong[:, 1] == 1), 3] += 1
    verdict = check_record(replace(recorded, evictions=wrong), llama)
    assert verdict.request == 2
    assert "with every eviction one query earlier in layer 1 of the record." in verdict.text
    four = family("llama", num_hidden_layers=4, attn_implementation="eager")
    drawn = r_kv_record(four, PROMPTS[2:])
    moved = drawn.evictions.clone()
    moved[moved[:, 1] >= 2, 3] += 1
    assert "in layer 2 of the record and all behind it" in check_record(replace(drawn, evictions=moved), four).text


def test_what_nothing_explains_is_said(llama: PreTrainedModel, recorded: SampledRecord) -> None:
    drawn = recorded.logprobs.clone()
    at = int(recorded.lengths[0]) - 3
    drawn[at] -= 0.5
    verdict = check_record(replace(recorded, logprobs=drawn), llama)
    assert (verdict.request, verdict.token) == (0, at)
    assert verdict.finding == "No change that was tried explains it."
    broken = copy.deepcopy(llama)
    broken.model.norm.weight.data[0] = math.nan
    assert not check_record(recorded, broken).agrees, "NaN is no agreement"


# ------------------------------------------------------------------ our rollouts


@pytest.mark.parametrize("compressor", [RKV, SnapKV, StreamingLLM])
def test_a_rollout_comes_back_as_it_was(compressor: Any) -> None:
    model = family("qwen3")
    sampler = RolloutSampler(model, compressor(budget=14, buffer=6, num_sinks=1, window=4), 4)
    rollout = sampler.generate(PROMPTS, SamplingParams(num_generations=2, max_completion_length=50, temperature=0.7))
    record = SampledRecord.of(rollout, temperature=0.7)
    back = record.rollout()
    torch.testing.assert_close(back.evictions.death, rollout.evictions.death, rtol=0, atol=0)
    for name in ("sequences", "prompt_lengths", "completion_mask", "finished", "sampler_logprobs"):
        torch.testing.assert_close(getattr(back, name), getattr(rollout, name), rtol=0, atol=0)
    assert check_record(record, model).largest < 1e-5
    assert record.difference(SampledRecord.of(back, temperature=0.7)) == ""


def test_a_layer_with_a_window_is_not_in_the_record() -> None:
    model = family("gemma3_text")
    sampler = RolloutSampler(model, SnapKV(budget=14, buffer=6, num_sinks=1, window=4), 4)
    record = SampledRecord.of(sampler.generate(PROMPTS, SamplingParams(max_completion_length=40)))
    assert record.num_layers == 2
    assert check_record(record, model).largest < 1e-5


# ------------------------------------------------------------------ what it means


def test_kept_positions_are_evictions_by_brute_force() -> None:
    generator = torch.Generator().manual_seed(4)
    layers, heads, length = 2, 3, 40
    seen = torch.ones(layers, heads, length, length, dtype=torch.bool).tril()
    events = []
    for query in (11, 20, 33):
        layer, head = (int(torch.randint(-1, n, (), generator=generator)) for n in (layers, heads))
        of_layer, of_head = (slice(None) if n < 0 else slice(n, n + 1) for n in (layer, head))
        own = seen[of_layer, of_head]
        alive = own[:, :, query - 1, :query].all(0).all(0)  # what every head of the event still has
        kept = [k for k in range(query) if alive[k] and float(torch.rand((), generator=generator)) < 0.6]
        events.append(Kept(query, kept, layer, head))
        gone = torch.ones(length, dtype=torch.bool)
        gone[kept] = False
        gone[query:] = False
        own[:, :, query:, gone] = False
    request = Request(list(range(10)), list(range(30)), [-1.0] * 30, events)
    record = record_of_kept([request], layers, heads)
    evictions = record.rollout().evictions
    death = evictions.death[:, 0]
    query, key = torch.arange(length)[:, None], torch.arange(length)
    torch.testing.assert_close((key <= query) & (query < death[:, :, None]), seen)


def test_events_of_one_query_evict_what_any_of_them_leaves_out() -> None:
    events = [Kept(5, [0, 1, 2, 3]), Kept(5, [0, 1, 4], layer=1), Kept(3, [0, 1, 2])]
    evictions = record_of_kept([Request([1, 2, 3], [4, 5, 6], [-1.0] * 3, events)], 2, 1).rollout().evictions
    assert evictions.death[:, 0, 0].tolist() == [[NEVER] * 4 + [5, NEVER], [NEVER] * 2 + [5, 5, 5, NEVER]]


def drawn(death: Tensor) -> Rollout:
    """A rollout with these deaths (L, B, H, T), whose sequences are of T tokens."""
    batch, length = death.shape[1], death.shape[-1]
    own = torch.arange(length).expand(batch, -1) > 0
    return Rollout(
        sequences=torch.ones(batch, length, dtype=torch.int64), prompt_lengths=torch.ones(batch, dtype=torch.int64),
        completion_mask=own, finished=torch.zeros(batch, dtype=torch.bool), sampler_logprobs=-own.float(),
        evictions=EvictionRecord.from_dense(death),
    )  # fmt: skip


def some_deaths(shape: tuple[int, int, int, int], queries: int, seed: int = 0) -> Tensor:
    """Deaths (L, B, H, T) at few queries, some of them shared by the heads of a layer, some by all."""
    layers, batch, heads, length = shape
    generator = torch.Generator().manual_seed(seed)
    death = torch.full(shape, NEVER, dtype=torch.int32)
    for query in torch.linspace(1, length, queries, dtype=torch.int32).tolist():
        kind = int(torch.randint(3, (), generator=generator))
        of = [(layers, batch, heads), (layers, batch, 1), (1, batch, 1)][kind]
        dies = torch.rand(*of, query, generator=generator) < 0.3
        death[..., :query] = torch.where(dies & (death[..., :query] == NEVER), query, death[..., :query])
    return death


@pytest.mark.parametrize("shape", [(1, 1, 1, 9), (3, 2, 2, 40), (2, 3, 4, 25), (2, 1, 1, 30), (1, 2, 3, 30)])
def test_what_heads_share_is_written_once_by_brute_force(shape: tuple[int, int, int, int]) -> None:
    death = some_deaths(shape, queries=8)
    record = SampledRecord.of(drawn(death))
    layers, batch, heads, _ = shape
    expected: list[tuple[list[int], list[int]]] = []
    for request, query in ((i, q) for i in range(batch) for q in death[:, i].unique().tolist() if q != NEVER):
        gone = [[(death[i, request, h] == query).nonzero()[:, 0].tolist() for h in range(heads)] for i in range(layers)]
        if all(one == gone[0][0] for layer in gone for one in layer):
            cells = [(ALL, ALL, gone[0][0])]
        else:
            cells = []
            for i, layer in enumerate(gone):
                is_shared = all(one == layer[0] for one in layer)
                cells += [(i, ALL, layer[0])] if is_shared else [(i, h, one) for h, one in enumerate(layer)]
        expected += [([request, i, h, query], positions) for i, h, positions in cells if positions]
    runs = record.runs.split(record.num_runs.tolist())
    assert [row for row, _ in expected] == record.evictions.tolist()
    stored = [[p for first, past in one.tolist() for p in range(first, past)] for one in runs]
    assert [positions for _, positions in expected] == stored
    assert all((one[1:, 0] > one[:-1, 1]).all() for one in runs)  # adjacent tokens are of one run
    back = record.rollout().evictions
    assert torch.equal(back.death, death)


def test_evictions_in_any_order_and_pieces_mean_the_same() -> None:
    death = some_deaths((3, 2, 2, 40), queries=8)
    record = SampledRecord.of(drawn(death))
    order = torch.randperm(int((death != NEVER).sum()), generator=torch.Generator().manual_seed(1))
    layer, request, head, position = (death != NEVER).nonzero()[order].int().unbind(1)
    query = death[layer, request, head, position]
    pieces = replace(
        record, evictions=torch.stack([request, layer, head, query], 1), num_runs=torch.ones_like(query),
        runs=torch.stack([position, position + 1], 1),
    )  # fmt: skip
    assert pieces.difference(record) == record.difference(pieces) == ""
    assert torch.equal(pieces.rollout().evictions.death, death)  # type: ignore[union-attr]


def test_a_position_that_just_fits_int16_is_written() -> None:
    death = torch.full((1, 1, 1, 32_770), NEVER, dtype=torch.int32)
    death[..., 32_767] = 32_768
    rollout = drawn(death)
    assert rollout.evictions.positions.dtype == torch.int16
    record = SampledRecord.of(rollout)
    assert record.runs.tolist() == [[32_767, 32_768]]
    assert torch.equal(record.rollout().evictions.death, death)  # type: ignore[union-attr]


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_many_evictions_are_written_and_read_by_as_many_operations_as_few() -> None:
    counts = []
    for queries in (5, 40):
        rollout = drawn(some_deaths((2, 1, 2, 600), queries))
        with Operations() as written:
            record = SampledRecord.of(rollout)
        with Operations() as read:
            record.rollout()
        counts.append((written.count, read.count))
        assert len(record.evictions) >= queries
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", [*CASES, "twice", "future"])
def test_conformance_cases_are_what_their_files_say(name: str) -> None:
    case = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    stored = FOLDER / f"{name}.safetensors"
    if "refused" in case:
        with pytest.raises(ValueError, match=case["refused"]):
            read_record(stored).rollout()
        return
    requests = [Request(**{**r, "events": [Kept(**event) for event in r["events"]]}) for r in case["requests"]]
    record = record_of_kept(requests, case["num_layers"], case["num_heads"], case["temperature"])
    assert record.difference(read_record(stored)) == ""
    found = {tuple(row): runs.tolist() for row, runs in zip(
        record.evictions.tolist(), record.runs.split(record.num_runs.tolist()), strict=True)}  # fmt: skip
    assert found == {tuple(e["eviction"]): e["runs"] for e in case["evictions"]}


# ------------------------------------------------------------------ wrong input


SMALL = record_of_kept([Request([1, 2, 3], [4, 5], [-1.0, -0.5], [Kept(3, [0, 2])])], 2, 2)


def changed(name: str, index: Any, value: Any) -> dict[str, Tensor]:
    array = getattr(SMALL, name).clone()
    array[index] = value
    return {name: array}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"num_layers": 4096, "num_heads": 4096, "lengths": torch.tensor([5], dtype=torch.int32) * 10**6,
          "tokens": torch.zeros(5 * 10**6, dtype=torch.int32), "logprobs": torch.zeros(5 * 10**6)},
         "are more than a record may describe"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"tokens": SMALL.tokens.long()}, "tokens must be torch.int32 of shape"),
        ({"tokens": SMALL.tokens[:-1]}, r"sum\(lengths\) = 5"),
        (changed("tokens", 0, -1), "tokens must not be negative"),
        (changed("prompt_lengths", 0, 6), "prompt_lengths must be"),
        (changed("finished", 0, 2), "finished must be 0 or 1"),
        (changed("logprobs", 4, float("nan")), "logprobs must be finite"),
        (changed("logprobs", 4, 0.5), "not above 0"),
        (changed("evictions", (0, 0), 1), "every request must be from 0 to 0"),
        (changed("evictions", (0, 1), 2), "every layer must be from -1 to 1"),
        (changed("evictions", (0, 2), -2), "every head must be from -1 to 1"),
        (changed("evictions", (0, 3), 6), "larger than the length"),
        (changed("num_runs", 0, 2), r"sum\(num_runs\) = 2"),
        (changed("num_runs", 0, 0), "at least 1"),
        (changed("runs", (0, 1), 4), "a token has always seen itself"),
        (changed("runs", (0, 0), -1), "a run must begin at 0"),
        ({"runs": SMALL.runs.flatten()}, r"runs must be torch.int32 of shape \(n, 2\)"),
        ({"lengths": SMALL.lengths[:0]}, "a number for every request, at least one"),
    ],
)  # fmt: skip
def test_what_cannot_have_happened_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(SMALL, **change)


def test_a_token_that_dies_twice_is_refused() -> None:
    twice = replace(
        SMALL, evictions=torch.tensor([[0, -1, -1, 3], [0, 1, 0, 4]], dtype=torch.int32),
        num_runs=torch.tensor([1, 1], dtype=torch.int32), runs=torch.tensor([[1, 2], [0, 2]], dtype=torch.int32),
    )  # fmt: skip
    with pytest.raises(ValueError, match="request 0, layer 1, head 0, query 4 evicts a token that was evicted before"):
        twice.rollout()


def test_more_evictions_than_tokens_are_refused_before_they_are_listed() -> None:
    many = replace(
        SMALL, num_layers=256, num_heads=64, lengths=torch.tensor([100], dtype=torch.int32),
        tokens=torch.zeros(100, dtype=torch.int32), logprobs=torch.zeros(100),
        evictions=torch.tensor([[0, -1, -1, 50]] * 3, dtype=torch.int32),
        num_runs=torch.ones(3, dtype=torch.int32), runs=torch.tensor([[0, 50]] * 3, dtype=torch.int32),
    )  # fmt: skip
    with pytest.raises(ValueError, match="request 0 evicts more tokens than it has"):
        many.rollout()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"evictions": None}, "has no record of its evictions"),
        ({"turns": torch.zeros(2, 9, dtype=torch.int32)}, "no place for tokens that were given between turns"),
        ({"routing": torch.zeros(2, 9, 1, 2, dtype=torch.int16)}, "no place for the experts .* record_routing=False"),
        ({"policy_versions": torch.tensor([[1] * 9, [1] * 5 + [2] * 4])}, r"Sequences \[1\] were drawn by several"),
    ],
)
def test_what_a_record_has_no_place_for_is_refused(change: dict[str, Any], says: str) -> None:
    rollout = drawn(some_deaths((1, 2, 1, 9), queries=2))
    assert len(SampledRecord.of(replace(rollout, policy_versions=torch.tensor([[1] * 9, [2] * 9])))) == 2
    with pytest.raises(ValueError, match=says):
        SampledRecord.of(replace(rollout, **change))


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([Kept(3, [0, 3])], "keeps position 3; it can keep those from 0 to 2"),
        ([Kept(0, [])], "must be between 1 and the request's 5 tokens"),
        ([Kept(3, [0]), Kept(4, [1])], "keeps position 1, which was evicted before"),
        ([Kept(3, [0], layer=2)], r"layer must be from -1 \(all\) to 1"),
        ([Kept(3, [0], head=-2)], r"head must be from -1 \(all\) to 1"),
    ],
)
def test_events_that_cannot_be_are_refused(events: list[Kept], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        record_of_kept([Request([1, 2, 3], [4, 5], [-1.0, -0.5], events)], 2, 2)


def test_files_are_trusted_with_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_record(SMALL, path)
    assert SMALL.difference(read_record(path)) == ""
    arrays, header = load_file(path), {"format": "eviction-record", "version": "1"}
    numbers = {"num_layers": 2, "num_heads": 2, "temperature": 1.0}

    def refused(says: str, given: dict[str, Tensor], meta: dict[str, str]) -> None:
        save_file(given, tmp_path / "b.safetensors", meta)
        with pytest.raises(ValueError, match=says):
            read_record(tmp_path / "b.safetensors")

    good = header | {"numbers": json.dumps(numbers)}
    refused("version='2'", arrays, good | {"version": "2"})
    refused("format=None", arrays, {"numbers": "{}"})
    refused("is not JSON", arrays, header)
    refused("is not JSON", arrays, header | {"numbers": "[" * 100_000})
    refused("must be an object of num_layers, num_heads, temperature", arrays, header | {"numbers": "[]"})
    text, many = (header | {"numbers": json.dumps(numbers | {"num_layers": given})} for given in ("2", 10**30))
    refused("num_layers must be a number of type int, got '2'", arrays, text)
    refused("num_layers must be at least 1 and at most 4096", arrays, many)
    refused("must hold the arrays", {name: arrays[name] for name in list(ARRAYS)[1:]}, good)
    refused("must hold the arrays", arrays | {"more": arrays["runs"].clone()}, good)
    save_file(arrays | {"x_blocks": arrays["runs"].clone()}, path, good)
    assert SMALL.difference(read_record(path)) == ""
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        read_record(path)
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        read_record(tmp_path / "none.safetensors")


def test_a_home_is_found_behind_its_sign(
    recorded: SampledRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_record(recorded, "~/a.safetensors")
    assert recorded.difference(read_record("~/a.safetensors")) == ""


def test_bytes_say_what_the_file_says_and_records_are_joined(recorded: SampledRecord, tmp_path: Path) -> None:
    sent = record_bytes(recorded)
    write_record(recorded, tmp_path / "a.safetensors")
    for content in (sent, (tmp_path / "a.safetensors").read_bytes()):  # its header's texts are in any order
        assert recorded.difference(record_from_bytes(content)) == ""
    with pytest.raises(ValueError, match="the bytes cannot be read as safetensors"):
        record_from_bytes(sent[:-1])
    rollout = recorded.rollout()
    single = [SampledRecord.of(rollout[i : i + 1]) for i in range(len(rollout))]
    assert recorded.difference(SampledRecord.cat(single)) == ""
    assert recorded.difference(SampledRecord.cat(single[::-1])) != ""
    for wrong in ([], [recorded, SMALL], [recorded, replace(recorded, temperature=0.5)]):
        with pytest.raises(ValueError, match="can be joined"):
            SampledRecord.cat(wrong)


def test_a_record_of_another_model_is_refused(recorded: SampledRecord) -> None:
    with pytest.raises(ValueError, match=r"3 layers and 2 KV heads, and .* has 2 layers"):
        check_record(recorded, family("llama"))
    small = family("llama", num_hidden_layers=3, vocab_size=int(recorded.tokens.max()))
    with pytest.raises(ValueError, match="has the token"):
        check_record(recorded, small)


def test_the_command(
    llama: PreTrainedModel, recorded: SampledRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama.save_pretrained(tmp_path / "model")
    write_record(recorded, tmp_path / "a.safetensors")  # nobody needs a tokenizer
    main(["check", str(tmp_path / "a.safetensors"), "--model", str(tmp_path / "model"), "--device", "cpu"])
    assert "explains its log-probabilities: 180 tokens" in capsys.readouterr().out
    late = recorded.evictions + torch.tensor([0, 0, 0, 1], dtype=torch.int32)
    write_record(replace(recorded, evictions=late), tmp_path / "b.safetensors")
    said = r"does not explain .* request 0 from token .* one query earlier in all layers"
    with pytest.raises(ValueError, match=said):
        main(["check", str(tmp_path / "b.safetensors"), "--model", str(tmp_path / "model"), "--device", "cpu"])
    main(["compare", str(tmp_path / "a.safetensors"), str(tmp_path / "a.safetensors")])
    assert "say the same" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"request 0, layer 0, head 0, position \d+ was evicted at query \d+ in one"):
        main(["compare", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")])


@pytest.mark.parametrize("tolerance", ["0", "-1", "nan"])
def test_a_tolerance_that_means_nothing_is_refused(recorded: SampledRecord, tmp_path: Path, tolerance: str) -> None:
    write_record(recorded, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="tolerance must be"):
        main(["check", str(tmp_path / "a.safetensors"), "--model", "nowhere", "--tolerance", tolerance])


def test_only_the_command_and_the_server_import_it() -> None:
    from tests.project.test_layers import IMPORTS

    ours = "sparse_rl_lightning.integrations"
    users = {module for module, found in IMPORTS.items() if any(one.target.startswith(ours) for one in found)}
    outside = {module for module in users if ".integrations" not in module}
    assert outside == {"sparse_rl_lightning.cli.record", "sparse_rl_lightning.serve.records"}
    assert all(one.lazy for one in IMPORTS["sparse_rl_lightning.cli.record"] if one.target.startswith(ours))
