"""Settings of SparseGRPO that reach its samplers: what they do to training, validation and prediction."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_grpo import Recorder, Rows, fit, loaded, module, weights
from tiny_run import config, write

from sparse_rl_lightning.cache.compression import Compression
from sparse_rl_lightning.callbacks.base import RolloutCallback
from sparse_rl_lightning.cli import main
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.rollout import RolloutOptions
from sparse_rl_lightning.rollout.engine.memory import slot_bytes


def cut(decode: Any, tokens: list[int], stops: tuple[str, ...]) -> str:
    """A completion up to the token that completes its first stop string; a token may be several characters."""
    texts = [decode(tokens[: n + 1]) for n in range(len(tokens))]
    ended = (n + 1 for n, text in enumerate(texts) if any(stop in text for stop in stops))
    return str(decode(tokens[: next(ended, len(tokens))], skip_special_tokens=True))


@pytest.mark.parametrize("dense", [True, False])
def test_stop_strings_end_completions_in_training_and_evaluation(dense: bool) -> None:
    rows = Rows().train_rows()
    free, stopping = loaded().generator, loaded(stop_strings=["3", "fff"])
    own = {"sampling": stopping.generator.sampling, "val_sampling": stopping.val_sampling}
    for params in own:
        whole = free.generate(rows, replace(own[params], stop_strings=()), dense=dense)
        drawn = zip(whole.rollout.sequences, whole.rollout.completion_mask, strict=True)
        want = [cut(free.tokenizer.decode, tokens[mask].tolist(), ("3", "fff")) for tokens, mask in drawn]
        scored = stopping.generator.generate(rows, own[params], dense=dense)
        assert scored.completions == want
        assert scored.completions != whole.completions
        ended = [text.endswith(("3", "fff")) for text in scored.completions]
        assert all(finished for finished, by_text in zip(scored.rollout.finished, ended, strict=True) if by_text)
    predicted = [row["completion"] for row in stopping.predict_step(rows, 0)]
    assert predicted == stopping.generator.generate(rows, stopping.val_sampling).completions


def test_top_logprobs_are_there_for_callbacks_and_not_kept_for_the_loss() -> None:
    seen = []

    class Look(RolloutCallback):
        def on_rollout_scored(self, trainer: Any, module: Any, scored: Any) -> None:
            seen.append((scored.rollout.topk_ids.shape, scored.rollout.sequences.shape))

    grpo = module(top_logprobs=3)
    fit(grpo, 1, [Look()])
    assert seen == [((*seen[0][1], 3), seen[0][1])]
    assert grpo.block.rollout.topk_ids is None
    assert grpo.block.rollout.topk_logprobs is None


def memory_of(num_slots: int) -> int:
    """Bytes that so many slots of the tiny module take with its longest prompt."""
    grpo = loaded()
    compressor, length = grpo.generator.compressor, 17 + grpo.generator.sampling.max_completion_length
    geometry = CacheGeometry.of(grpo.policy)
    size = Compression(compressor, geometry.num_layers).cache_size(geometry, num_slots, 17, length)
    return slot_bytes(geometry, size, grpo.generator.sampling).of(num_slots)


def test_a_memory_limit_is_kept_told_once_and_changes_no_weight(caplog: pytest.LogCaptureFixture) -> None:
    limited, free = module(memory_limit=memory_of(8)), module()
    with caplog.at_level(logging.INFO):
        fit(limited, 3)
    assert limited.generator.sampler().cache.size.num_slots == 8
    told = [record.getMessage() for record in caplog.records if "Memory plan" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("Memory plan of the compressed cache: 8 slots of ")
    assert "as many as fit for 16 sequences" in told[0]
    fit(free, 3)
    assert free.generator.sampler().cache.size.num_slots == 16
    assert torch.equal(weights(limited), weights(free))


def test_a_memory_limit_below_one_slot_is_an_error_with_the_arithmetic() -> None:
    with pytest.raises(ValueError, match=r"Not even one slot fits: it takes [\d,]+ bytes, the limit is 1,000"):
        fit(module(memory_limit=1000))


@pytest.mark.parametrize("dense", [True, False])
def test_the_pool_has_the_type_that_was_asked_for_and_goes_when_it_should(dense: bool) -> None:
    grpo = loaded(kv_dtype="bfloat16", cuda_graphs=False)
    grpo.generator.generate(Rows().train_rows()[:2], dense=dense)
    assert grpo.generator.sampler(dense).cache.key_pool.dtype == torch.bfloat16
    assert not grpo.generator.sampler(dense).cuda_graphs
    small, large = loaded(keep_pool=False).generator, loaded().generator
    for each in (small, large):
        each.generate(Rows().train_rows()[:2], dense=dense)
    assert small.sampler(dense).cache is None
    assert large.sampler(dense).cache is not None


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kv_dtype": "int4"}, "kv_dtype must be one of float32"),
        ({"num_slots": 0}, "num_slots must be at least 1"),
        ({"end_tokens": ["nope"]}, r"end_tokens: \['nope'\] are not in the tokenizer's vocabulary"),
    ],
)
def test_what_the_sampler_refuses_is_refused_before_the_first_rollout(options: dict[str, Any], match: str) -> None:
    recorder = Recorder()
    with pytest.raises(ValueError, match=match):
        fit(module(compressor=FullKV(), **options), 1, [recorder])
    assert recorder.scored == []


@pytest.mark.parametrize("name", ["stop_strings", "end_tokens"])
def test_a_text_is_not_taken_for_a_list_of_letters(name: str) -> None:
    with pytest.raises(ValueError, match=r"write \['stop'\]"):
        module(**{name: "stop"})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory_limit": True}, "rollout.memory_limit is a number of bytes or a share, got True"),
        ({"kv_dtype": "int3"}, "kv_dtype must be one of float32, bfloat16, .*got 'int3'"),
    ],
)
def test_options_of_rollouts_are_refused_at_construction(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RolloutOptions(**options)


@pytest.mark.parametrize(
    ("given", "taken"), [("0.5", 0.5), ("500000000", 500_000_000), ("5e8", 500_000_000), ("null", None)]
)
def test_the_command_line_tells_shares_from_bytes(given: str, taken: Any, folder: Any) -> None:
    cli = main(
        [
            "fit",
            "--config",
            write(config(max_steps=1)),
            f"--model.rollout.memory_limit={given}",
            "--model.sampling.stop_strings=[x, yz]",
        ]
    )
    assert cli.model.generator.sampler().memory_limit == taken
    assert cli.model.generator.sampling.stop_strings == cli.model.val_sampling.stop_strings == ("x", "yz")
