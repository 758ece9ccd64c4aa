"""Eviction records of completions, as they travel: inside an answer, or by a name where they are large."""

from __future__ import annotations

import base64
import uuid
from typing import Any

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.integrations.record.files import record_bytes
from sparse_rl_lightning.integrations.record.format import SampledRecord
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.replay.logprobs import drawn_by_several

INLINE_BYTES = 2**18
"""Bytes of a record up to which it is in the answer."""
KEPT_BYTES = 2**28
"""Bytes of records that wait to be fetched, above which the oldest are forgotten."""


class Records:
    """Records that wait to be fetched, by name."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        """The record of this name, None if there is none or it has been forgotten."""
        return self._kept.get(name)

    def answer(self, rollout: Rollout | None, row: int, temperature: float) -> dict[str, Any]:
        """The fields of a completion that hold its record, or say why there is none."""
        try:
            if rollout is None:
                raise UserError("Nothing was drawn.")
            if drawn_by_several(alone := rollout[row : row + 1]).any():
                raise UserError("The weights changed while this was drawn, and a record is of one version of them.")
            content = record_bytes(SampledRecord.of(alone, temperature or 1.0))
        except UserError as error:
            return {"eviction_record": None, "eviction_record_error": str(error)}
        inline = len(content) <= INLINE_BYTES
        where = {"data": base64.b64encode(content).decode()} if inline else {"id": self._keep(content)}
        return {"eviction_record": {"bytes": len(content), **where}}

    def _keep(self, content: bytes) -> str:
        name = uuid.uuid4().hex
        self._kept[name] = content
        while sum(map(len, self._kept.values())) > KEPT_BYTES and len(self._kept) > 1:
            del self._kept[next(iter(self._kept))]
        return name
