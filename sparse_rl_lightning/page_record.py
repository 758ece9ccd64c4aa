"""PageRecord: which pages every query of a rollout read, for tests and short runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PageRecord:
    """The pages that retrieval chose: enough to attend exactly as the sampler did.

    It takes ``bytes per page number x budget / page_size`` per query, layer and KV head, which can be as much as the
    cache itself. Letters: B sequences, L layers that retrieve, T tokens, H KV heads, K most pages read.
    """

    pages: Tensor  # (B, L, T, H, K) int16 or int32, ascending, -1 behind the last; all -1: that query read everything
    page_size: int
    num_dense_layers: int  # layers before the first of L

    @classmethod
    def cat(cls, records: Sequence[PageRecord]) -> Self:
        """All sequences of the records in the order given; shorter ones are padded with queries that read everything.

        Raises:
            ValueError: If there are no records, or they differ in pages or layers.
        """
        kinds = {(r.page_size, r.num_dense_layers, r.pages.shape[1], *r.pages.shape[3:]) for r in records}
        if len(kinds) != 1:
            raise ValueError(f"Records to join must have the same pages and layers, got {sorted(kinds) or 'none'}.")
        longest = max(record.pages.shape[2] for record in records)
        pages = [F.pad(r.pages, (0, 0, 0, 0, 0, longest - r.pages.shape[2]), value=-1) for r in records]
        return cls(torch.cat(pages), records[0].page_size, records[0].num_dense_layers)

    def __len__(self) -> int:
        return self.pages.shape[0]

    def __getitem__(self, index: Tensor | slice) -> Self:
        return replace(self, pages=self.pages[index])

    def kept(self, layer: int, num_pages: int) -> Tensor:
        """The pages that were read in one layer as (B, H, T, P) bool; False for queries that read everything."""
        pages = self.pages[:, layer - self.num_dense_layers].transpose(1, 2).long()  # (B, H, T, K)
        kept = torch.zeros(*pages.shape[:3], num_pages + 1, dtype=torch.bool, device=pages.device)
        return kept.scatter_(-1, pages.where(pages >= 0, num_pages), True)[..., :num_pages]

    @property
    def nbytes(self) -> int:
        """Bytes of the record."""
        return self.pages.nbytes

    def state(self) -> dict[str, Any]:
        """A dictionary of tensors and integers, the arguments of the constructor."""
        return {f.name: getattr(self, f.name) for f in fields(self)}
