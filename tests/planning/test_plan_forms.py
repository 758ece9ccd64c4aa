"""Bases of fewer bits, forms of checkpointing, windows and linear layers: what a plan counts is what there is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import family
from test_plan_memory import COMPLETION, INT8, LENGTH, LORA, NF4, job, live_pass, real
from transformers import AutoConfig

from sparse_rl_lightning.compressors import RKV, FullKV
from sparse_rl_lightning.downsampling import MaxVariance
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.learner.block import BlockPlan
from sparse_rl_lightning.learner.checkpointing import Checkpointing
from sparse_rl_lightning.learner.forward import Learner, LearnerOptions
from sparse_rl_lightning.ops.live_bytes import LiveBytes
from sparse_rl_lightning.planning import Job, best_knob, card_of, make_plan
from sparse_rl_lightning.planning.blueprint import Blueprint
from sparse_rl_lightning.planning.knobs import changes
from sparse_rl_lightning.planning.memory import MOST_PREFILLED, learner, prefill_bytes, slot_size
from sparse_rl_lightning.planning.plan import attention_flops, forward_flops, passes, rollout_seconds
from sparse_rl_lightning.policies.quantized import product_bytes
from sparse_rl_lightning.policies.support import TESTED
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout import RolloutOptions, RolloutSampler
from sparse_rl_lightning.rollout.engine.decoders.choice import decoder_bytes
from sparse_rl_lightning.testing import tiny_model

LAYERED = ("gemma3_text", "olmo3", "qwen3_5_text")
FORMS: tuple[Checkpointing, ...] = ("selective", True, "offload")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The configuration of a tiny model, without weights."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("qwen3", vocab_size=300, num_layers=3).config.save_pretrained(path)
    return str(path)


def layered(name: str, path: Path, **changed: Any) -> Job:
    """The job of a family whose layers are of two kinds."""
    family(name, **changed).config.save_pretrained(path)
    return job(str(path))


@pytest.mark.parametrize("adapters", [INT8, NF4], ids=["int8", "nf4"])
def test_a_matrix_is_made_for_products_and_none_is_copied(folder: str, adapters: Any) -> None:
    given = job(folder, blueprint=Blueprint(folder, "bfloat16", adapters))
    model = real(given)
    copies = make_plan(given, card_of()).of("copies of weights")
    assert copies == decoder_bytes(model.to("meta"), given.geometry, given.length, "native")
    whole = make_plan(replace(given, blueprint=Blueprint(folder, "bfloat16", LORA)), card_of())
    assert copies - whole.of("copies of weights") == 2 * product_bytes(model, torch.bfloat16) > 0
    assert make_plan(given, card_of()).of("weights") < whole.of("weights")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("adapters", [INT8, NF4], ids=["int8", "nf4"])
@pytest.mark.parametrize("how", [False, "selective", True])
def test_the_learner_over_a_quantized_base(folder: str, adapters: Any, how: Checkpointing) -> None:
    options = LearnerOptions(gradient_checkpointing=how)
    given = job(folder, blueprint=Blueprint(folder, "float32", adapters), learner=options)
    bookkeeping = 8 * given.micro_batch.rows * given.micro_batch.length
    assert learner(given).peak == pytest.approx(live_pass(real(given), given), abs=bookkeeping)


def test_packed_weights_are_read_and_whole_ones_written_and_read(folder: str) -> None:
    """So a rollout of few sequences takes longer, by the bytes of its weights."""
    card, seconds = card_of("rtx-4090-24gb"), {}
    for adapters in (LORA, INT8, NF4):
        given = job("Qwen/Qwen3-8B", blueprint=Blueprint("Qwen/Qwen3-8B", "bfloat16", adapters))
        seconds[adapters] = rollout_seconds(given, card, given.sequences)
    per_byte = (seconds[INT8] - seconds[LORA]) / 3
    assert (seconds[NF4] - seconds[LORA]) / per_byte == pytest.approx(2.5625)


def parts_pass(given: Job) -> int:
    """Bytes at the peak of a real pass over a micro-batch, in parts of one sequence."""
    shape = (given.block.micro_batch, given.length)
    inside = torch.arange(given.length).expand(shape) >= given.prompt
    rollout = Rollout(
        sequences=torch.ones(shape, dtype=torch.int64), prompt_lengths=torch.full(shape[:1], given.prompt),
        completion_mask=inside, finished=torch.ones(shape[0], dtype=torch.bool), sampler_logprobs=torch.zeros(shape),
    )  # fmt: skip
    model, own = real(given), Learner(given.learner)
    own.prepare(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveBytes() as live:
        own.dense(model, rollout)[0].sum().backward()
    return live.most


def test_what_selective_keeps_of_all_parts_is_counted(folder: str) -> None:
    """Of four sequences one at a time: attention's results and the gradients of all, for the rest one part's."""
    peaks: dict[Checkpointing, tuple[int, int]] = {}
    for how in (True, "selective"):
        given = job(
            folder, block=BlockPlan(2, 2, 1, 1, 1, packs=True),
            learner=LearnerOptions(micro_batch_tokens=LENGTH, gradient_checkpointing=how),
        )  # fmt: skip
        assert (given.parts, given.micro_batch.rows) == (4, 1)
        peaks[how] = learner(given).peak, parts_pass(given)
    for counted, lived in peaks.values():
        assert lived < counted < 1.1 * lived
    counted, lived = (peaks["selective"][i] - peaks[True][i] for i in (0, 1))
    assert 0 < lived < counted < 2 * lived


def test_the_hosts_memory_is_a_line_of_its_own(folder: str) -> None:
    """Inputs of three layers for two sequences of 40 tokens, and of both halves of a micro-batch split in two."""
    given = job(folder, learner=LearnerOptions(gradient_checkpointing="offload"))
    inputs = 3 * 2 * LENGTH * given.blueprint.config.hidden_size * 4
    plan = make_plan(given, card_of())
    assert plan.host == inputs
    assert "In the host's memory besides: 0.0 GB per GPU.\n" in plan.text
    assert plan.of("activations") < make_plan(replace(given, learner=LearnerOptions()), card_of()).of("activations")
    halves = replace(given, learner=replace(given.learner, micro_batch_tokens=LENGTH))
    assert halves.parts == 2
    assert make_plan(halves, card_of()).host == inputs
    assert "host's" not in make_plan(job(folder), card_of()).text


def test_selective_does_not_attend_again(folder: str) -> None:
    found = [passes(job(folder, learner=LearnerOptions(gradient_checkpointing=how))) for how in FORMS]
    assert found[1] == found[2] == 4
    assert found[1] - found[0] == pytest.approx(attention_flops(job(folder)) / forward_flops(job(folder)))


def test_the_record_of_evictions_is_that_of_a_real_rollout(folder: str) -> None:
    """All but the tokens that stay, at most 24 of 40 in each head, twice when a rollout ends."""
    given = job(folder)
    sampler = RolloutSampler(real(given).eval(), given.compressor)
    sampler.end_token_ids = []
    rollout = sampler.generate([[5] * given.prompt] * 2, replace(given.sampling, seed=0))
    own = rollout.evictions.positions.nbytes
    counted = make_plan(given, card_of()).parts["eviction record"]
    assert counted == (2 * counted[1], counted[1], 0)
    assert own <= counted[1] <= own * LENGTH / (LENGTH - 1 - 24)
    kept = make_plan(replace(given, keeps_evictions=True), card_of()).parts["eviction record"]
    assert kept[2] == kept[1]
    assert make_plan(replace(given, compressor=FullKV()), card_of()).of("record") == 0


def test_sequences_that_are_drawn_and_not_trained_on_count_in_the_rollout(folder: str) -> None:
    given = job(folder, rollout=RolloutOptions(oversampling=1.5, downsampling=MaxVariance(num_samples=6)))
    assert given.sequences == 3 * 6
    assert given.micro_batch == job(folder).micro_batch
    assert make_plan(given, card_of()).slots == 18


@pytest.mark.parametrize("name", LAYERED)
def test_layers_of_both_kinds_are_counted(name: str, tmp_path: Path) -> None:
    """The cache is that of the real sampler, rings and states included, and the learner's part that of a real pass."""
    given = layered(name, tmp_path)
    sampler = RolloutSampler(family(name), given.compressor, num_slots=3)
    sampler.generate([[5] * given.prompt] * 2, replace(given.sampling, seed=0))
    assert replace(given.geometry, device=torch.device("cpu")) == sampler.cache.geometry
    if sampler.cache.geometry.windows:
        with pytest.raises(UserError, match=rf"what sliding windows \(of '{name}'\) take in the learner"):
            make_plan(given, card_of())
        given = replace(given, sampling=replace(given.sampling, max_completion_length=2), prompt=5)
    bookkeeping = 8 * given.micro_batch.rows * given.micro_batch.length
    assert learner(given).peak == pytest.approx(live_pass(real(given), given), rel=0.01, abs=bookkeeping)
    plan = make_plan(given, card_of())
    assert plan.of("cache") > 0
    kind = "sliding windows" if sampler.cache.geometry.windows else "linear attention"
    assert f"No time is predicted. The cost model has no price for the {kind} of '{name}'" in plan.text


def test_experts_are_counted_in_16_bits_and_refused_in_words_otherwise(tmp_path: Path) -> None:
    given = layered("qwen3_moe", tmp_path)
    with pytest.raises(UserError, match=r"pass over 'qwen3_moe' cannot be counted .* give the policy dtype: bfloat16"):
        make_plan(given, card_of())
    given = replace(given, blueprint=Blueprint(str(tmp_path), "bfloat16"))
    both = (replace(given, rollout=RolloutOptions(record_routing=on)) for on in (False, True))
    plain, recorded = (make_plan(each, card_of()) for each in both)
    layers, chosen = 2, 2
    tokens = given.sequences * given.length
    assert recorded.of("token buffers") - plain.of("token buffers") == layers * chosen * tokens
    assert recorded.of("cache") > plain.of("cache")
    assert "no price for the experts of 'qwen3_moe'" in plain.text


def test_windows_without_a_layer_to_evict_from_are_refused(tmp_path: Path) -> None:
    given = layered("mistral", tmp_path, sliding_window=8)
    with pytest.raises(UserError, match=r"sliding window in every layer.*no layer is left for RKV"):
        make_plan(given, card_of())
    assert slot_size(replace(given, compressor=FullKV())).pool > 0


def shrunk(given: Job) -> Any:
    """What helps this job most on a card that is a little too small."""
    plan = make_plan(given, card_of())
    return best_knob(make_plan(given, card_of(memory=f"{(plan.peak - 100) / 1e9:.9f}GB")))


def test_fewer_bits_help_where_weights_are_what_is_large(tmp_path: Path) -> None:
    """Adapters, one short sequence, one slot: nothing else is left to save."""
    tiny_model("qwen3", vocab_size=300, num_layers=3, hidden_size=512).config.save_pretrained(tmp_path)
    given = job(
        str(tmp_path), blueprint=Blueprint(str(tmp_path), "bfloat16", LORA), block=BlockPlan(1, 2, 2, 1, 1),
        rollout=RolloutOptions(num_slots=1, keep_pool=False), precision="bf16-mixed",
        learner=LearnerOptions(head_chunk_size=128, gradient_checkpointing="offload"),
    )  # fmt: skip
    assert [change.setting for change in changes(given)] == [
        "model.policy.init_args.quantization=int8", "model.policy.init_args.quantization=nf4"
    ]  # fmt: skip
    best = shrunk(given)
    assert best[0].setting == "model.policy.init_args.quantization=int8"


def test_budgets_are_halved_as_far_as_256(folder: str) -> None:
    for budget, halves in ((2048, [1024, 512, 256]), (511, [])):
        given = job(folder, compressor=RKV(budget=budget, buffer=8))
        settings = [change.setting for change in changes(given)]
        assert [int(name.rpartition("=")[2]) for name in settings if "budget" in name] == halves


def test_the_mildest_form_of_checkpointing_that_fits_is_named(folder: str) -> None:
    base = job(
        folder, rollout=RolloutOptions(num_slots=1, keep_pool=False), block=BlockPlan(1, 2, 2, 1, 1), prompt=400,
        learner=LearnerOptions(head_chunk_size=128), sampling=replace(job(folder).sampling, max_completion_length=24),
        compressor=RKV(budget=16, buffer=8),
    )  # fmt: skip
    jobs = {how: replace(base, learner=replace(base.learner, gradient_checkpointing=how)) for how in (False, *FORMS)}
    peaks = {how: learner(given).peak for how, given in jobs.items()}
    assert peaks[False] > peaks["selective"] > peaks[True] > peaks["offload"]
    assert COMPLETION == base.sampling.max_completion_length
    for how, form in zip((False, *FORMS), FORMS, strict=False):
        best = shrunk(jobs[how])
        assert best[0].setting == f"model.learner.gradient_checkpointing={str(form).lower()}"


@pytest.mark.parametrize("name", TESTED)
def test_prompts_are_counted_for_every_family_as_its_configuration_is(name: str, tmp_path: Path) -> None:
    """What is staged of a prompt in chunks is all of its tokens in all layers, but for those that windows forget."""
    config = AutoConfig.for_model(name)
    config.save_pretrained(tmp_path)
    given = replace(job(str(tmp_path)), prompt=MOST_PREFILLED)
    g = given.geometry
    longer = replace(given, prompt=MOST_PREFILLED + 1)
    staged = sum(min(longer.prompt, window or longer.prompt) for window in g.windows or (0,) * g.num_layers)
    more = 2 * g.num_kv_heads * g.head_dim * g.dtype.itemsize * (staged - MOST_PREFILLED)
    assert prefill_bytes(longer) - prefill_bytes(given) == more > 0
