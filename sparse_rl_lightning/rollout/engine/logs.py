"""Tracks: what a rollout writes down about the sequence in each slot, on the device and without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_rl_lightning.rollout.engine.sampling import SamplingParams

UNLIMITED = torch.iinfo(torch.int64).max


class Tracks:
    """Per-slot logs of a run; index t speaks of token t. The last row belongs to rows that only pad a batch.

    Args:
        num_slots: S.
        length: Tokens of the longest sequence, and those that may be drawn past its end before the host looks.
        params: Says what is wanted.
        device: Where they live.
        versioned: Note which version of the policy drew each token.
        retrieves: Note how much each step reads.
    """

    def __init__(
        self,
        num_slots: int,
        length: int,
        params: SamplingParams,
        device: torch.device,
        versioned: bool = False,
        retrieves: bool = False,
    ) -> None:
        # float32 is spelt out: under precision=bf16-true Lightning makes bfloat16 the default
        shape = (num_slots + 1, length)
        self.logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
        self.behavior = torch.zeros_like(self.logprobs) if params.truncates else None
        self.held = torch.zeros_like(self.logprobs)  # entries after the step that fed token t, mean over heads
        self.read = torch.zeros_like(self.logprobs) if retrieves else None  # entries read by the step that fed token t
        self.versions = torch.zeros(shape, dtype=torch.int32, device=device) if versioned else None
        self.version = torch.zeros((), dtype=torch.int32, device=device)  # of the policy that draws now
        top = (*shape, params.top_logprobs)
        self.topk_ids = torch.zeros(top, dtype=torch.int64, device=device)
        self.topk_logprobs = torch.zeros(top, dtype=torch.float32, device=device)
        self.ends = torch.full((num_slots + 1,), UNLIMITED, dtype=torch.int64, device=device)  # index of the last token
        self.broken = self.ends.clone()  # index of the first token that was drawn from logits that are no numbers
        self.finished = torch.zeros(num_slots + 1, dtype=torch.bool, device=device)  # by an end token

    def begin(self, slot: int, last: int) -> None:
        """Start a sequence whose length ends it at token ``last``."""
        self.ends[slot] = last
        self.broken[slot] = UNLIMITED
        self.finished[slot] = False

    def note_broken(self, slots: Tensor, at: Tensor, is_broken: Tensor) -> None:
        """Tokens at ``at`` (n,) were drawn, some of them from logits that are NaN or infinite."""
        self.broken[slots] = torch.where(is_broken, torch.minimum(self.broken[slots], at), self.broken[slots])

    def look(self) -> tuple[list[int], list[bool], list[int]]:
        """Ends, finished and broken of every slot, in one wait for the device."""
        ends, finished, broken = torch.stack([self.ends, self.finished.to(torch.int64), self.broken]).tolist()
        return ends, [bool(one) for one in finished], broken

    def note_end(self, slots: Tensor, at: Tensor, is_end: Tensor) -> None:
        """Tokens at ``at`` (n,) were drawn, some of them end tokens; the first end counts."""
        before = self.ends[slots]
        ends_now = is_end & (at <= before)
        self.ends[slots] = torch.where(ends_now, at, before)
        self.finished[slots] |= ends_now
