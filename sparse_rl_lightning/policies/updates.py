"""WeightUpdates: new weights for a model that samples, none of which is written before all are there and fit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies.pretrained import check_finite

UPDATE_SECONDS = 600.0  # after which a trainer that says nothing is given up


class WeightUpdates:
    """The updates of a model's weights: each comes in buckets, is kept in the host's memory, and is checked whole.

    Args:
        model: Model to update in place.
        remedy: What to change where weights do not fit.
    """

    def __init__(self, model: PreTrainedModel, remedy: str) -> None:
        self.model, self.remedy = model, remedy
        self._new: dict[str, Tensor] | None = None  # of the update that is coming, by name
        self._timer: asyncio.TimerHandle | None = None  # of its end, if nothing more comes

    def take(self, sent: Iterable[tuple[str, Tensor]], is_first: bool) -> None:
        """Keep these weights; the first bucket of an update forgets one that was not completed.

        Raises:
            ValueError: If the model has no such weight, or one of another shape, or no update has begun; what has come
                of the update is forgotten.
        """
        if is_first:
            self._new = {}
        new, weights = self._taken(), self.model.state_dict()
        for name, tensor in sent:
            weight = weights.get(name)
            if weight is None or weight.shape != tensor.shape:
                has = "no weight of this name" if weight is None else f"{tuple(weight.shape)}"
                raise UserError(
                    f"The weight {name!r} was sent with shape {tuple(tensor.shape)}, and the server's model has {has}: "
                    f"{self.remedy}."
                )
            new[name] = tensor.to(weight.dtype)
        self._new = new

    def drop(self) -> None:
        """Forget an update."""
        self._new = None

    def keep(self) -> None:
        """Do not forget an update while it goes on, however long that takes."""
        if self._timer is not None:
            self._timer.cancel()

    def drop_later(self) -> None:
        """Forget an update that is not continued for ``UPDATE_SECONDS`` of the running event loop."""
        self.keep()
        self._timer = asyncio.get_running_loop().call_later(UPDATE_SECONDS, self.drop)

    def _taken(self) -> dict[str, Tensor]:
        """What has come of the update, which is not kept here any more."""
        new, self._new = self._new, None
        if new is None:
            raise UserError("No update of the weights has begun, or it was given up: send all from the beginning on.")
        return new

    def whole(self) -> dict[str, Tensor]:
        """The weights of the update, which is over; none is kept here.

        Raises:
            ValueError: If one is missing, or not finite, or no update has begun.
        """
        weights, new = self.model.state_dict(), self._taken()
        sent = {weights[name].data_ptr() for name in new}  # of tied weights one is enough
        if missing := [name for name, weight in weights.items() if weight.data_ptr() not in sent]:
            raise UserError(
                f"The update left out {len(missing)} weights of the server's model, the first is "
                f"{missing[0]!r}: it would draw with old and new ones."
            )
        check_finite(new.items(), "The update", "Nothing was written.")
        return new

    def write(self, new: dict[str, Tensor]) -> None:
        """Copy the weights of a whole update into the model."""
        weights = self.model.state_dict()
        for name, tensor in new.items():
            weights[name].copy_(tensor)
