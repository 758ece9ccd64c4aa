"""Does a record explain its log-probabilities? Replay it, and where it does not, find what would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.integrations.record.format import SampledRecord
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.policies.modes import eval_mode
from sparse_rl_lightning.records import NEVER, EvictionRecord, Rollout
from sparse_rl_lightning.replay import replay_logprobs


@dataclass(frozen=True)
class Verdict:
    """The result of replaying a record."""

    tokens: int  # number of tokens drawn
    largest: float  # largest difference of a log-probability in nats, replayed and recorded
    mean: float  # mean of the differences' sizes
    request: int | None = None  # the first request that disagrees
    token: int | None = None  # its first token that does, counted from the beginning of the prompt
    finding: str = ""  # the change of the record that would explain the request, in words; empty if none is known

    @property
    def agrees(self) -> bool:
        """Whether all log-probabilities are those of the replay."""
        return self.request is None

    @property
    def text(self) -> str:
        """The verdict in a few words."""
        summary = f"{self.tokens:,} tokens, differences of {self.mean:.2g} in the mean and {self.largest:.2g} at most"
        if self.agrees:
            return f"The record explains its log-probabilities: {summary}."
        where = f"request {self.request} from token {self.token} on"
        return f"The record does not explain its log-probabilities ({summary}): {where}. {self.finding}".rstrip()


@torch.no_grad()
def check_record(
    record: SampledRecord, model: PreTrainedModel, tolerance: float = 1e-3, micro_batch: int = 4
) -> Verdict:
    """Replay a record with the weights that drew it, and compare the log-probabilities.

    Where they differ, the first request that does is replayed under changed records: nothing evicted, or every eviction
    one query earlier or later, in one layer, from one layer on, and in all of them. What explains it is the finding.

    Args:
        record: Record.
        model: Model with the weights that drew it.
        tolerance: Largest difference in nats that is rounding.
        micro_batch: Requests per forward pass.

    Raises:
        ValueError: If the record is not of such a model, or the model cannot be replayed.
    """
    check_number("micro_batch", micro_batch, least=1, whole=True)
    geometry = CacheGeometry.of(model, longest=int(record.lengths.max()))
    sizes = (record.num_layers, record.num_heads), (geometry.num_layers, geometry.num_kv_heads)
    if sizes[0] != sizes[1]:
        raise UserError(
            f"The record has {sizes[0][0]} layers and {sizes[0][1]} KV heads, and {type(model).__name__} has "
            f"{sizes[1][0]} layers of full attention and {sizes[1][1]} KV heads: it is of another model."
        )
    vocabulary = model.config.get_text_config().vocab_size
    if int(record.tokens.max()) >= vocabulary:
        raise UserError(f"The record has the token {int(record.tokens.max())}, and the model {vocabulary} tokens.")
    rollout = record.rollout()

    def differences(sequences: Rollout) -> Tensor:
        replayed = replay_logprobs(model, sequences.to(model.device), record.temperature).cpu()
        return torch.where(sequences.completion_mask, (replayed - sequences.sampler_logprobs).abs(), 0)

    with eval_mode(model):
        errors = torch.cat([differences(rows) for rows in rollout.parts(-(-len(rollout) // micro_batch))])
        count = int(rollout.completion_mask.sum())
        verdict = Verdict(count, float(errors.max()), float(errors.sum()) / max(count, 1))
        wrong = (~(errors <= tolerance)).nonzero()  # NaN agrees with nothing
        if not len(wrong):
            return verdict
        request, token = wrong[0].tolist()
        changes = _changes(rollout[request : request + 1])
        explanation = next((words for words, changed in changes if float(differences(changed).max()) <= tolerance), "")
    finding = f"It would with {explanation}." if explanation else "No change that was tried explains it."
    return replace(verdict, request=request, token=token, finding=finding)


def _changes(rollout: Rollout) -> Iterator[tuple[str, Rollout]]:
    """One sequence under other records, each with words for what was changed."""
    assert rollout.evictions is not None
    death = rollout.evictions.death
    layers, birth = len(death), torch.arange(1, death.shape[-1] + 1, dtype=torch.int32)
    variants = {
        "nothing evicted": torch.full_like(death, NEVER),
        "every eviction one query later": death + (death != NEVER).int(),
        "every eviction one query earlier": torch.where(death == NEVER, death, torch.maximum(death - 1, birth)),
    }
    spans = [("in all layers", slice(None))]
    spans += [(f"in layer {i} of the record", slice(i, i + 1)) for i in range(layers)]
    spans += [(f"in layer {i} of the record and all behind it", slice(i, None)) for i in range(1, layers - 1)]
    for where, span in spans:
        for what, variant in variants.items():
            changed = death.clone()
            changed[span] = variant[span]
            if not torch.equal(changed, death):
                yield f"{what} {where}", replace(rollout, evictions=EvictionRecord.from_dense(changed))
