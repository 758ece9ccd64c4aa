"""ExpertLog: which experts read each token of a mixture of experts, prompts included, recorded while it is fed."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.cache.slots import SlotCache
from sparse_rl_lightning.cache.storage import SlotStorage
from sparse_rl_lightning.ops.transfers import upload
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.policies.routing import Routers, recording
from sparse_rl_lightning.rollout.engine.decoders.base import Decoder
from sparse_rl_lightning.rollout.engine.engine import Engine, EngineKey
from sparse_rl_lightning.rollout.engine.mixed_layers import FullPass, MixedPass


class ExpertLog(SlotStorage):
    """The choices (S + 1, T, L, K) of all slots, which follow a prompt to its samples; the last row is for padding."""

    purpose = "logs of experts"

    def __init__(self, choices: Tensor) -> None:
        self.choices = choices

    @property
    def tensors(self) -> list[Tensor]:
        """The choices."""
        return [self.choices]

    def fork(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy the choices of slots (B,) to others."""
        self.choices[destinations] = self.choices[sources]

    def save(self, slot: int, length: int) -> dict[str, Tensor]:
        """Copy the choices of the tokens fed to a slot."""
        return {"routing": self.choices[slot, :length].clone()}

    def restore(self, slot: int, content: dict[str, Tensor]) -> None:
        """Write back what :meth:`save` returned."""
        self.choices[slot, : len(content["routing"])] = content["routing"]


class RecordingEngine(Engine):
    """Engine that records the experts of every pass; arguments as for ``Engine``."""

    def __init__(
        self,
        model: PreTrainedModel,
        key: EngineKey,
        cache: SlotCache | None = None,
        decoder: Decoder | None = None,
        shares_memory_with: Engine | None = None,
    ) -> None:
        super().__init__(model, key, cache, decoder, shares_memory_with)
        self.routers, size = Routers(model), key.size
        log = self.cache.storage(ExpertLog)  # engines on the same cache share it
        if log is None:
            choices = self.routers.shape.empty(size.num_slots + 1, size.max_length, device=key.geometry.device)
            log = ExpertLog(choices)
            self.cache.storages.append(log)
        self.choices = self.logs.fed["routing"] = log.choices

    def take_weights(self, model: PreTrainedModel, geometry: CacheGeometry) -> None:
        """Continue with the model's current weights, and its routers."""
        super().take_weights(model, geometry)
        self.routers = Routers(model)

    def run(self, ids: Tensor, positions: Tensor, attend: FullPass | MixedPass) -> Tensor:
        """Run a pass, and record the experts of its tokens."""
        with recording(self.routers) as chosen:
            hidden = super().run(ids, positions, attend)
        full = attend.full if isinstance(attend, MixedPass) else attend
        self.choices[self._slots(full, len(ids)), positions] = chosen()
        return hidden

    def _slots(self, full: FullPass, count: int) -> Tensor:
        """The slot of each row (R,) of a pass, the last row of the log for padding."""
        if full.mode == "step":
            return full.places
        owners = [slot for slot, start, stop in full.pieces for _ in range(start, stop)]
        (uploaded,) = upload([owners + [len(self.choices) - 1] * (count - len(owners))], self.choices.device)
        return uploaded
