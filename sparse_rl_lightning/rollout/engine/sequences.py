"""What a rollout produces: each sequence copied out of its slot when it ends, and all of them as one Rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sparse_rl_lightning.records import NEVER, EvictionRecord, KVUsage, PageRecord, Rollout
from sparse_rl_lightning.rollout.cache.slots import SlotCache
from sparse_rl_lightning.rollout.engine.logs import Tracks


@dataclass(frozen=True)
class Ended:
    """One sequence that has ended, out of its slot. Index t of a tensor speaks of token t."""

    prompt_length: int
    finished: bool  # by an end token or a stop string
    tokens: Tensor  # (T,)
    logprobs: Tensor  # (T,)
    behavior: Tensor | None  # (T,)
    topk_ids: Tensor  # (T, K)
    topk_logprobs: Tensor  # (T, K)
    versions: Tensor | None  # (T,) int32
    evictions: dict[str, Any] | None  # state of the EvictionRecord of this one sequence; None under retrieval
    stored: Tensor  # ()
    stored_integral: Tensor  # ()
    read_integral: Tensor | None = None  # (), under retrieval
    pages: dict[str, Any] | None = None  # state of the PageRecord of this one sequence

    @classmethod
    def copy(cls, cache: SlotCache, tracks: Tracks, slot: int, prompt_length: int, end: int, finished: bool) -> Ended:
        """Copy out a sequence whose last token has index ``end``, before its slot is given away.

        What the slot went through after its end (the host looks only now and then) is left behind.
        """
        return cls(
            prompt_length,
            finished,
            tokens=cache.tokens[slot, : end + 1].clone(),
            logprobs=_completion(tracks.logprobs[slot, : end + 1], prompt_length),
            behavior=None if tracks.behavior is None else _completion(tracks.behavior[slot, : end + 1], prompt_length),
            topk_ids=_completion(tracks.topk_ids[slot, : end + 1], prompt_length),
            topk_logprobs=_completion(tracks.topk_logprobs[slot, : end + 1], prompt_length),
            versions=None if tracks.versions is None else _completion(tracks.versions[slot, : end + 1], prompt_length),
            evictions=_evictions(cache, slot, end),
            stored=tracks.held[slot, end - 1].clone(),  # the last token drawn was never fed
            # the step that feeds token t reads what was held before, and t itself
            stored_integral=(tracks.held[slot, prompt_length - 1 : end - 1] + 1).sum(),
            read_integral=None if tracks.read is None else tracks.read[slot, prompt_length:end].sum(),
            pages=_pages(cache, slot, prompt_length, end),
        )


def assemble(ended: Sequence[Ended], peak_bytes: int, full_peak_bytes: int, prefill_peak_bytes: int) -> Rollout:
    """These sequences as one typed object, in the order given."""
    device = ended[0].tokens.device
    lengths = torch.tensor([len(e.tokens) for e in ended], device=device)
    prompt_lengths = torch.tensor([e.prompt_length for e in ended], device=device)
    index = torch.arange(int(lengths.max()), device=device)
    fed, prompt = (lengths - 1).float(), prompt_lengths.float()
    read = [e.read_integral for e in ended if e.read_integral is not None]
    evictions = [EvictionRecord(**e.evictions) for e in ended if e.evictions is not None]
    pages = [PageRecord(**e.pages) for e in ended if e.pages is not None]
    usage = KVUsage(
        stored=torch.stack([e.stored for e in ended]),
        full=fed,
        stored_integral=torch.stack([e.stored_integral for e in ended]),
        full_integral=(fed * (fed + 1) - prompt * (prompt + 1)) / 2,  # prompt + 1, ..., fed entries read
        peak_bytes=peak_bytes,
        full_peak_bytes=full_peak_bytes,
        prefill_peak_bytes=prefill_peak_bytes,
        read_integral=torch.stack(read) if read else None,
    )
    return Rollout(
        sequences=_pad([e.tokens for e in ended]),
        prompt_lengths=prompt_lengths,
        completion_mask=(index >= prompt_lengths[:, None]) & (index < lengths[:, None]),
        finished=torch.tensor([e.finished for e in ended], device=device),
        sampler_logprobs=_pad([e.logprobs for e in ended]),
        behavior_logprobs=_pad_optional([e.behavior for e in ended]),
        topk_ids=_pad([e.topk_ids for e in ended]) if ended[0].topk_ids.numel() else None,
        topk_logprobs=_pad([e.topk_logprobs for e in ended]) if ended[0].topk_ids.numel() else None,
        policy_versions=_pad_optional([e.versions for e in ended]),
        evictions=EvictionRecord.cat(evictions) if evictions else None,
        pages=PageRecord.cat(pages) if pages else None,
        kv=usage,
    )


def _evictions(cache: SlotCache, slot: int, end: int) -> dict[str, Any] | None:
    if cache.pages is not None:
        return None  # deaths alone do not say what was seen
    death = cache.death[:, slot : slot + 1, :, : end + 1]
    return EvictionRecord.from_dense(torch.where(death <= end, death, NEVER)).state()


def _pages(cache: SlotCache, slot: int, prompt_length: int, end: int) -> dict[str, Any] | None:
    record = None if cache.pages is None else cache.pages.record_of(slot, prompt_length, end)
    return None if record is None else record.state()


def _completion(row: Tensor, prompt_length: int) -> Tensor:
    """A copy with zeros for the prompt."""
    row = row.clone()
    row[:prompt_length] = 0
    return row


def _pad(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True)


def _pad_optional(rows: Sequence[Tensor | None]) -> Tensor | None:
    present = [row for row in rows if row is not None]
    return _pad(present) if present else None
