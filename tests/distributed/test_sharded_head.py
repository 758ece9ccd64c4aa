"""A head that ZeRO-3 shards is called once, however many chunks of tokens a rank has; no other kind of head is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_logprobs import batch, tiny_model
from torch import nn

from sparse_rl_lightning.logprobs import logprobs_at, sequence_logprobs, token_logprobs

calls: list[int] = []


def gather(module: nn.Module, inputs: Any) -> None:
    calls.append(len(inputs[0]))


def sharded(head: nn.Module) -> None:
    """As ZeRO-3 leaves a module: weights with a number, hooks of DeepSpeed's."""
    calls.clear()
    for number, parameter in enumerate(head.parameters()):
        parameter.ds_id = number  # type: ignore[attr-defined]
    head.register_forward_pre_hook(gather)


@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 4, 512])
def test_one_call_and_the_same_numbers(chunk_size: int, in_float32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "__module__", "deepspeed.runtime.zero.parameter_offload")
    sequences, mask = batch()
    ids = sequences[:, :, None].repeat(1, 1, 2)
    found = []
    for shard in (False, True):
        model = tiny_model(tied=False)
        if shard:
            sharded(model.get_output_embeddings())
        options: dict[str, Any] = {"chunk_size": chunk_size, "head_in_float32": in_float32}
        logprobs, entropy = sequence_logprobs(model, sequences, mask, **options)
        (logprobs.sum() + entropy.sum()).backward()
        asked = logprobs_at(model, sequences, ids, mask, **options)
        found.append([logprobs, entropy, asked, *(p.grad for p in model.parameters())])
    assert all(torch.equal(plain, own) for plain, own in zip(*found, strict=True))
    assert calls == [int(mask.sum())] * 2


def test_a_head_with_hooks_of_its_own_is_refused() -> None:
    head = nn.Linear(4, 9)
    sharded(head)
    with pytest.raises(ValueError, match=r"output head is a Linear with hooks .* Use --trainer.strategy=sparse_rl_d"):
        token_logprobs(head, torch.zeros(3, 4), torch.zeros(3, dtype=torch.long))
