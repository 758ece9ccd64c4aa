"""CompressedCache: transformers chooses the tokens, the sampler's engine evicts."""

from __future__ import annotations

import copy
import functools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rollouts import PROMPTS, SMALL, small_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, pipeline

from sparse_rl_lightning.budgets import Adaptive
from sparse_rl_lightning.compressors import H2O, RKV, Compressor, FullKV, RandomEviction, SnapKV, StreamingLLM
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.integrations.transformers import CompressedCache, cache, compressed_generation
from sparse_rl_lightning.integrations.transformers.cache import KEYWORD
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.replay.logprobs import replay_logprobs
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.teacher_forcing import forced_rollout
from sparse_rl_lightning.testing import character_tokenizer
from tests.families import FAMILIES, family

LENGTH = 44
COMPRESSORS = [
    FullKV(), RKV(**SMALL), SnapKV(**SMALL, protect_prompt=False), H2O(**SMALL), RandomEviction(**SMALL),
    SnapKV(**SMALL, budget_rule=Adaptive()),
]  # fmt: skip
each_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)


@pytest.fixture(autouse=True)
def _growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for longer sequences is needed several times in every test."""
    monkeypatch.setattr(cache, "FIRST_ROOM", 7)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_of_every_family_are_the_samplers(name: str) -> None:
    model = family(name)
    assert generated(model, CompressedCache(RKV(**SMALL), model)) == sampled(model, RKV(**SMALL))


@each_compressor
def test_greedy_tokens_under_every_kind_of_state_are_the_samplers(compressor: Compressor) -> None:
    model = small_model()
    own = CompressedCache(compressor, model, seed=3)
    assert generated(model, own) == sampled(model, compressor)
    want = rollout_of(model, compressor)
    assert torch.equal(own.evictions.death, want.evictions.death)


def test_without_eviction_the_tokens_are_those_of_transformers() -> None:
    model = small_model()
    assert generated(model, CompressedCache(FullKV(), model)) == generated(model, DynamicCache())
    beams = {"num_beams": 3, "max_new_tokens": 20}
    assert generated(model, CompressedCache(FullKV(), model), **beams) == generated(model, DynamicCache(), **beams)


def test_logits_are_those_of_replay() -> None:
    model = small_model()
    own = CompressedCache(SnapKV(**SMALL), model)
    out = call(model, own, do_sample=True, output_logits=True, return_dict_in_generate=True)
    rollout = as_rollout(model, out.sequences, SnapKV(**SMALL))
    drawn = torch.stack(out.logits, dim=1).log_softmax(-1)
    got = drawn.gather(-1, out.sequences[:, -LENGTH:, None]).squeeze(-1)
    rollout.evictions = own.evictions
    replayed = replay_logprobs(model, rollout)
    assert (got - replayed[rollout.completion_mask].view_as(got)).abs().max() < 2e-5
    assert bool((rollout.evictions.num_dead > 0).all())


def test_a_beam_has_the_evictions_of_its_own_text() -> None:
    model, compressor = small_model(), SnapKV(**SMALL)
    out = call(
        model, CompressedCache(compressor, model), num_beams=4, num_return_sequences=4, length_penalty=0.0,
        output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    forced = as_rollout(model, out.sequences, compressor)
    assert torch.allclose(forced.sampler_logprobs.sum(dim=1), out.sequences_scores, atol=2e-4)
    assert len({tuple(row.tolist()) for row in out.sequences}) == len(out.sequences)


def test_memory_stays_within_the_budget() -> None:
    model = small_model(max_position_embeddings=2048)
    own = CompressedCache(SnapKV(**SMALL), model)
    call(model, own, max_new_tokens=20)
    before = own.nbytes
    own.reset()
    call(model, own, max_new_tokens=1000)
    assert own.nbytes == before
    assert own.lengths.max() <= SMALL["budget"] + SMALL["buffer"]


def test_memory_of_prompts_stored_whole_does_not_grow_with_the_text() -> None:
    model = small_model(max_position_embeddings=2048)
    own = CompressedCache(SnapKV(**SMALL, compress_prompt=False), model)
    for length in (20, 500):
        own.reset()
        call(model, own, max_new_tokens=length)
        assert own.lengths.max() <= max(map(len, PROMPTS)) + SMALL["buffer"]
        entries = max(map(len, PROMPTS)) + SMALL["buffer"]
        assert own.nbytes == len(PROMPTS) * entries * 2 * 2 * 2 * 16 * 4  # layers, heads, both, float32


def test_samples_of_a_prompt_and_a_cache_used_again() -> None:
    model = small_model()
    own = CompressedCache(SnapKV(**SMALL), model)
    torch.manual_seed(0)
    first = call(model, own, do_sample=True, num_return_sequences=3)
    assert len(first) == 3 * len(PROMPTS) == len({tuple(row.tolist()) for row in first})
    own.reset()
    torch.manual_seed(0)
    assert torch.equal(call(model, own, do_sample=True, num_return_sequences=3), first)


# -------------------------------------------------------------------- the model around it


def test_other_calls_reach_the_model_as_before() -> None:
    model, untouched = small_model(), small_model()
    ids = torch.tensor([PROMPTS[1]])
    CompressedCache(RKV(**SMALL), model)
    CompressedCache(RKV(**SMALL), model)
    assert torch.equal(model(ids).logits, untouched(ids).logits)
    assert generated(model, DynamicCache()) == generated(untouched, DynamicCache())
    assert sampled(model, RKV(**SMALL)) == sampled(untouched, RKV(**SMALL))  # whose engine refuses replaced forwards


def test_a_copy_of_the_model_answers_with_its_own_weights() -> None:
    model = small_model()
    CompressedCache(RKV(**SMALL), model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.1)
    assert generated(other, CompressedCache(RKV(**SMALL), other)) == sampled(other, RKV(**SMALL))
    assert generated(other, DynamicCache()) != generated(model, DynamicCache())
    for one, another in ((model, other), (other, model)):
        with pytest.raises(UserError, match="belongs to the model that it was made with"):
            generated(one, CompressedCache(RKV(**SMALL), another))


def test_a_copy_within_the_context_generates_with_its_own_weights() -> None:
    model = small_model()
    with compressed_generation(model, RKV(**SMALL)):
        other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.1)
    assert generated(other, None) == sampled(other, RKV(**SMALL)) != sampled(model, RKV(**SMALL))
    assert generated(model, None) == generated(model, DynamicCache())


def test_stop_strings_of_generate_end_rows() -> None:
    tokenizer = character_tokenizer("0123456789+= abcdefghij")
    model = small_model(vocab_size=len(tokenizer))
    ids = torch.tensor([PROMPTS[0]])
    options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    text = tokenizer.decode(model.generate(ids, **options, **{KEYWORD: CompressedCache(FullKV(), model)})[0, 3:])
    options |= {"stop_strings": [text[9:11]], "tokenizer": tokenizer}
    want = model.generate(ids, **options, **{KEYWORD: DynamicCache()})
    assert torch.equal(model.generate(ids, **options, **{KEYWORD: CompressedCache(FullKV(), model)}), want)
    assert want.shape[1] < 3 + 30


def test_a_tuple_is_returned_where_one_is_asked_for() -> None:
    model, ids = small_model(), torch.tensor([PROMPTS[1]])
    logits, cached = model(ids, return_dict=False, **{KEYWORD: CompressedCache(FullKV(), model)})
    torch.testing.assert_close(logits, model(ids, return_dict=False)[0][:, -1:], atol=1e-5, rtol=1e-5)
    assert isinstance(cached, CompressedCache)


def test_what_is_wrapped_around_it_later_is_refused_as_ever() -> None:
    model = small_model()
    CompressedCache(RKV(**SMALL), model)
    own = model.forward
    model.forward = functools.update_wrapper(functools.partial(lambda *given, **named: own(*given, **named)), own)
    with pytest.raises(UserError, match="has been replaced"):
        sampled(model, RKV(**SMALL))


def test_an_error_of_a_compressor_arrives_after_memory_has_grown() -> None:
    class Failing(SnapKV):
        def score(self, layer: Any) -> Tensor:
            if int(layer.positions[layer.valid].max()) > 60:
                raise RuntimeError("my own error")
            return super().score(layer)

    model = small_model()
    with pytest.raises(RuntimeError, match="my own error"):
        call(model, CompressedCache(Failing(**SMALL), model))


def test_adapters_count() -> None:
    peft = pytest.importorskip("peft", reason="peft is an extra")
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(small_model(), adapter)
    compressor = RKV(**SMALL)
    with_adapters = generated(model, CompressedCache(compressor, model))
    assert with_adapters == sampled(model.get_base_model(), compressor)
    assert with_adapters != sampled(small_model(), compressor)


def test_a_context_compresses_what_other_tools_generate() -> None:
    model, tokenizer = small_model(), character_tokenizer("0123456789+= abcdefghij")
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    text, options = "12+34=", {"max_new_tokens": 40, "do_sample": False, "return_full_text": False}
    full = generator(text, **options)[0]["generated_text"]
    with compressed_generation(model, SnapKV(**SMALL)):
        some = generator(text, **options)[0]["generated_text"]
        kept = generated(model, DynamicCache())
    assert some != full == generator(text, **options)[0]["generated_text"]
    assert kept == generated(model, DynamicCache())
    ids = tokenizer(text)["input_ids"]
    sampler = RolloutSampler(model, SnapKV(**SMALL))
    rollout = sampler.generate([ids], SamplingParams(max_completion_length=40, temperature=0))
    own = rollout.sequences[0][rollout.completion_mask[0]]
    assert some == tokenizer.decode(own, skip_special_tokens=True)


def test_a_context_takes_the_place_of_the_models_own_kind_of_cache() -> None:
    model = small_model()
    model.generation_config.cache_implementation = "static"
    with compressed_generation(model, RKV(**SMALL)):
        assert generated(model, None) == sampled(model, RKV(**SMALL))
    assert model.generation_config.cache_implementation == "static"


def test_the_older_name_of_the_argument_is_taken_too() -> None:
    model = small_model()
    want = generated(model, CompressedCache(RKV(**SMALL), model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        found = generated(model, None, past_key_values=CompressedCache(RKV(**SMALL), model))
        with compressed_generation(model, RandomEviction(**SMALL)):
            kept = generated(model, None, past_key_values=CompressedCache(RKV(**SMALL), model))
    assert found == kept == want


# -------------------------------------------------------------------- what is refused


def test_what_cannot_be_is_refused() -> None:
    model = small_model()
    ids = torch.tensor([PROMPTS[1], PROMPTS[1]])
    own = CompressedCache(RKV(**SMALL), model)
    with pytest.raises(UserError, match="is empty"):
        _ = own.nbytes
    with pytest.raises(UserError, match="padded on the left"):
        model(ids, attention_mask=(torch.arange(17) < 9).long().expand(2, -1), **{KEYWORD: own})
    with pytest.raises(UserError, match="output_attentions"):
        model(ids, **{KEYWORD: own}, output_attentions=True)
    with pytest.raises(UserError, match="needs input_ids"):
        model(inputs_embeds=torch.zeros(2, 3, 64), **{KEYWORD: own})
    with pytest.raises(UserError, match="leave out position_ids"):
        model(ids, position_ids=torch.arange(17)[None] * 3, **{KEYWORD: own})
    with pytest.raises(UserError, match="a slot for each of 2 rows"):
        model(ids, **{KEYWORD: CompressedCache(RKV(**SMALL), model, num_slots=1)})
    with pytest.raises(UserError, match="logits_to_keep=1, got 0"):
        model(ids, logits_to_keep=0, **{KEYWORD: own})
    mask = (torch.arange(17) >= torch.tensor([[0], [4]])).long()
    model(ids, attention_mask=mask, logits_to_keep=1, **{KEYWORD: own})
    for wrong in (ids, ids[:1, :1]):
        with pytest.raises(UserError, match="one token for each of its 2 rows"):
            model(wrong, **{KEYWORD: own})
    later, token = torch.nn.functional.pad(mask, (0, 1), value=1), ids[:, :1]
    hides = later * (torch.arange(18) != 9)
    for unlike in (hides, later * 0 + 1, later[:, 1:], later[:, :1], torch.nn.functional.pad(mask, (0, 1))):
        with pytest.raises(UserError, match="shows a row its own tokens later on, all of them"):
            model(token, attention_mask=unlike, **{KEYWORD: own})
    with pytest.raises(UserError, match="leave out position_ids"):
        model(token, attention_mask=later, position_ids=torch.tensor([[17], [17]]), **{KEYWORD: own})
    model(token, attention_mask=later, position_ids=torch.tensor([[17], [13]]), **{KEYWORD: own})
    with pytest.raises(UserError, match="needs use_cache=True, in generate or in the model's generation_config"):
        call(model, CompressedCache(RKV(**SMALL), model), use_cache=False)
    with pytest.raises(UserError, match="belongs to the model"):
        small_model()(ids[:, :1], **{KEYWORD: own})
    with pytest.raises(UserError, match="take tokens back"):
        own.crop(-1)
    with pytest.raises(UserError, match="causal language model of transformers"):
        CompressedCache(RKV(**SMALL), torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_the_end_of_the_context_is_an_error() -> None:
    model = small_model(max_position_embeddings=64)
    with pytest.raises(UserError, match="context of 64 tokens"):
        call(model, CompressedCache(StreamingLLM(budget=12, buffer=5), model), max_new_tokens=100)


# -------------------------------------------------------------------- helpers


def call(model: PreTrainedModel, past: Any, **options: Any) -> Any:
    """Generate from the prompts, padded on the left."""
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    options = {"max_new_tokens": LENGTH, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    given = {} if past is None else {KEYWORD: past}
    return model.generate(ids, attention_mask=mask, **given, **options)


def generated(model: PreTrainedModel, past: Any, **options: Any) -> list[list[int]]:
    out: Tensor = call(model, past, **options)
    return out[:, max(map(len, PROMPTS)) :].tolist()


def rollout_of(model: PreTrainedModel, compressor: Compressor) -> Rollout:
    params = SamplingParams(max_completion_length=LENGTH, temperature=0, seed=3)
    return RolloutSampler(model, compressor, end_token_ids=[]).generate(PROMPTS, params)


def sampled(model: PreTrainedModel, compressor: Compressor) -> list[list[int]]:
    rollout = rollout_of(model, compressor)
    rows = zip(rollout.sequences, rollout.prompt_lengths, strict=True)
    return [row[length : length + LENGTH].tolist() for row, length in rows]


def as_rollout(model: PreTrainedModel, sequences: Tensor, compressor: Compressor) -> Rollout:
    """Generated rows as a rollout under a compressor, their padding taken off."""
    rollout = rollout_of(model, compressor)
    per_prompt, width = len(sequences) // len(PROMPTS), max(map(len, PROMPTS))
    texts = torch.zeros(len(sequences), rollout.sequences.shape[1], dtype=torch.int64)
    index = torch.arange(len(sequences)) // per_prompt
    for row, (own, which) in enumerate(zip(sequences, index.tolist(), strict=True)):
        tokens = own[width - len(PROMPTS[which]) :]
        texts[row, : len(tokens)] = tokens
    whole = rollout[index]
    whole.sequences = texts
    return forced_rollout(model, whole, compressor)


TEXTS = [
    "Once upon a time, there was a little girl named Lily. She loved to",
    "One day, a boy named Tim went to the park with his mom. They saw a big",
    "The cat",
]
TASK = """
task: story
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{prompt}}}}"
generation_kwargs: {{until: ["THE END"], max_gen_toks: {tokens}, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
TOKENS = 120


def test_answers_under_a_budget_are_the_samplers(models_dir: Path, tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="needs the EleutherAI harness: pip install lm-eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder = models_dir / "stories260K"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": text}) for text in TEXTS))
    (tmp_path / "story.yaml").write_text(TASK.format(rows=rows, tokens=TOKENS))
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=len(TEXTS), device="cpu")

    def answers() -> list[str]:
        tasks = TaskManager(include_path=str(tmp_path))
        found = lm_eval.simple_evaluate(harness, tasks=["story"], task_manager=tasks, bootstrap_iters=0)
        samples = sorted(found["samples"]["story"], key=lambda one: one["doc_id"])
        return [one["resps"][0][0] for one in samples]

    full = answers()
    compressor = SnapKV(budget=32, buffer=8, window=8)
    with compressed_generation(model, compressor):
        some = answers()
    params = SamplingParams(max_completion_length=TOKENS, temperature=0)
    rollout = RolloutSampler(model, compressor).generate([tokenizer(text)["input_ids"] for text in TEXTS], params)
    own = [row[mask] for row, mask in zip(rollout.sequences, rollout.completion_mask, strict=True)]
    assert some == [tokenizer.decode(ids, skip_special_tokens=True) for ids in own]
    assert some != full == answers()
