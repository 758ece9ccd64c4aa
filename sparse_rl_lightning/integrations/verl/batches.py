"""What came back in a batch of verl: the rollout with its evictions."""

from __future__ import annotations

from typing import Any

import torch

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.integrations.record import SampledRecord, record_from_bytes

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
            f"Samples of this batch have no {FIELD!r}: they were drawn without record: true, by another rollout, "
            "with a retriever, or over several requests."
        )
    record = SampledRecord.cat([record_from_bytes(content) for content in contents])
    responses = batch.batch["responses"].cpu()
    # verl's rejection clears the response_mask
    is_response = batch.batch["attention_mask"][:, -responses.shape[1] :].bool()
    if not torch.equal(record.completion_tokens, responses[is_response.cpu()].int()):
        raise UserError("The records of this batch are not of its responses: only samples of one turn can be replayed.")
    return record
