"""What came back in a batch of verl: the rollout with its evictions, and its log-probabilities under them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.integrations.record import SampledRecord, record_from_bytes
from sparse_rl_lightning.replay import replay_logprobs

FIELD = "eviction_record"
"""The name in verl's extra fields, and in a batch's ``non_tensor_batch``: the content of a record's file, or None."""


def record_of_batch(batch: Any) -> SampledRecord:
    """The record of all samples of a batch, in its order; ``.rollout()`` makes it a rollout.

    Args:
        batch: verl's ``DataProto``, from an agent loop of one turn.

    Raises:
        ValueError: If a sample has no record, or one that is not of the sample's tokens.
    """
    contents = batch.non_tensor_batch.get(FIELD, [None])
    if any(content is None for content in contents):
        raise UserError(
            f"Samples of this batch have no {FIELD!r}: they were drawn by another rollout, with a retriever, or over "
            "several requests."
        )
    record = SampledRecord.cat([record_from_bytes(content) for content in contents])
    rollout, mask = record.rollout(), batch.batch["response_mask"].bool()
    tokens = batch.batch["responses"][mask]
    if not torch.equal(rollout.sequences[rollout.completion_mask], tokens.cpu()):
        raise UserError("The records of this batch are not of its responses: only samples of one turn can be replayed.")
    return record


def replayed_logprobs(model: PreTrainedModel, batch: Any) -> Tensor:
    """The log-probabilities (B, R) of the responses under the sampler's evictions, with gradient; 0 where none are.

    Args:
        model: Model, on any device.
        batch: Batch as in :func:`record_of_batch`, all in one forward pass.

    Raises:
        ValueError: As :func:`record_of_batch`.
    """
    record = record_of_batch(batch)
    rollout = record.rollout().to(model.device)
    replayed = replay_logprobs(model, rollout, record.temperature)
    mask = batch.batch["response_mask"].bool().to(model.device)
    return replayed.new_zeros(mask.shape).masked_scatter(mask, replayed[rollout.completion_mask])
