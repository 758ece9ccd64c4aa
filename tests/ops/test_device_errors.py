"""What CUDA kernels could not do reaches the user: the word they write is read with every look at the device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from sparse_rl_lightning.compressors import SnapKV
from sparse_rl_lightning.ops.pools import FAULTS, OPS, fault
from sparse_rl_lightning.rollout import Progress, RolloutSampler, SamplingParams
from sparse_rl_lightning.testing import tiny_model

SMALL = {"budget": 12, "buffer": 5, "num_sinks": 2, "window": 4}


def word_of(op: str, kind: int, slot: int) -> int:
    """The word that a kernel writes for the fault FAULTS[kind - 1] of an op."""
    return OPS.index(op) + 1 | kind << 4 | slot << 8


def test_every_word_names_its_op_its_slot_and_what_was_wrong() -> None:
    for op in OPS:
        for kind, text in enumerate(FAULTS, start=1):
            for slot in (0, 7, 2**23 - 1):
                assert 0 < word_of(op, kind, slot) < 2**31
                assert fault(word_of(op, kind, slot)).startswith(f"{op} left out slot {slot}: {text}")


def test_kernels_number_ops_and_faults_as_they_are_read() -> None:
    source = (Path(__file__).parents[2] / "cuda_ext" / "include" / "heads.h").read_text(encoding="utf-8")
    (ops,) = re.findall(r"enum class Op : int32_t \{(.*?)\};", source, re.S)
    assert tuple(re.split(r",\s*", ops.strip().replace(" = 1", ""))) == OPS
    (faults,) = re.findall(r"enum class Fault : int32_t \{(.*?)\};", source, re.S)
    assert len(faults.split(",")) == len(FAULTS)
    assert " = 1," in ops
    assert " = 1," in faults
    assert len(OPS) < 16  # four bits
    assert len(FAULTS) < 16


def test_a_rollout_ends_with_the_fault_and_the_sampler_goes_on() -> None:
    sampler = RolloutSampler(tiny_model(initializer_range=0.2), SnapKV(**SMALL))
    prompts, params = [[3, 4, 5], [6, 7]], SamplingParams(max_completion_length=40, seed=1)
    want = sampler.generate(prompts, params)

    def as_a_kernel_would(progress: Progress) -> None:
        if progress.step == 20:
            assert sampler.cache is not None
            sampler.cache.pools.errors.fill_(word_of("append", 3, 1))  # type: ignore[union-attr]

    with pytest.raises(RuntimeError, match=r"append left out slot 1: the slot is full"):
        sampler.generate(prompts, params, progress=as_a_kernel_would)
    again = sampler.generate(prompts, params)
    assert torch.equal(again.sequences, want.sequences)
