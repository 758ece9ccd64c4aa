"""Random prompts for compressors with running state: in blocks, in slots with garbage after them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.records import StateUpdate
from sparse_rl_lightning.testing.layers import GROUP_SIZE, HEAD_DIM, NUM_HEADS

HIDDEN_SIZE = 64
"""The hidden size of ``tiny_model()``."""


class RandomPrompts:
    """Three prompts of equal length in one layer of ``tiny_model()``'s sizes.

    Args:
        compressor: Compressor whose running numbers are updated.
        seed: Seed of all numbers.
    """

    LENGTH: ClassVar[int] = 9
    FREE: ClassVar[int] = 2  # free entries after the prompt

    def __init__(self, compressor: Compressor, seed: int = 0) -> None:
        normal = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        heads, width = (3, NUM_HEADS), self.LENGTH + self.FREE
        unseen = torch.ones(self.LENGTH, width, dtype=torch.bool).triu(1)
        attention = normal(*heads, GROUP_SIZE, self.LENGTH, width).masked_fill(unseen, -torch.inf).softmax(dim=-1)
        self.compressor = compressor
        self.given: dict[str, Tensor] = {
            "keys": normal(*heads, self.LENGTH, HEAD_DIM),
            "values": normal(*heads, self.LENGTH, HEAD_DIM),
            "positions": torch.arange(self.LENGTH).expand(3, -1).contiguous(),
            "prompt_lengths": torch.full((3,), self.LENGTH),
            "mass": attention.sum(dim=2),
            "hidden_states": normal(3, self.LENGTH, HIDDEN_SIZE),
            "output_norms": normal(3, NUM_HEADS * GROUP_SIZE, self.LENGTH).abs(),
        }

    def read(self, cuts: Sequence[int], slots: Sequence[int] = (0, 1, 2)) -> dict[str, Tensor]:
        """All running numbers after the prompts in ``slots`` were read in blocks of ``cuts`` tokens.

        Returns:
            ``update.state['name']`` (S, H, T) and ``update.head_state['name']`` (S, H, C).
        """
        c, chosen, shape = self.compressor, list(slots), (len(slots), NUM_HEADS)
        width = self.LENGTH + self.FREE
        state = {name: torch.full((*shape, width), torch.nan, dtype=torch.float32) for name in c.state_fields}
        by_head = {
            name: torch.zeros(*shape, count, dtype=torch.float32)
            for name, count in c.head_state_fields(HEAD_DIM).items()
        }
        stop = 0
        for count in cuts:
            start, stop = stop, stop + count
            for numbers in state.values():
                numbers[:, :, start:stop] = 0.0
            c.update_state(self._update(chosen, slice(start, stop), state, by_head))
        own = {f"update.state[{name!r}]": numbers[:, :, :stop] for name, numbers in state.items()}
        return own | {f"update.head_state[{name!r}]": numbers for name, numbers in by_head.items()}

    def _update(
        self, slots: list[int], block: slice, state: dict[str, Tensor], by_head: dict[str, Tensor]
    ) -> StateUpdate:
        c = self.compressor
        given = {name: tensor if len(slots) == 3 else tensor[slots] for name, tensor in self.given.items()}
        offered: dict[str, tuple[bool, Any]] = {
            "mass": (c.needs_attention, given["mass"][:, :, block]),
            "hidden_states": (c.needs_hidden_states, given["hidden_states"][:, block]),
            "output_norms": (c.needs_output_norms, given["output_norms"][:, :, block]),
        }
        return StateUpdate(
            state=state, head_state=by_head, lengths=torch.full((len(slots), NUM_HEADS), block.stop, dtype=torch.int32),
            positions=given["positions"][:, block], keys=given["keys"][:, :, block],
            values=given["values"][:, :, block], prompt_lengths=given["prompt_lengths"], layer_index=1,
            asked={name: tensor for name, (wanted, tensor) in offered.items() if wanted},
        )  # fmt: skip
