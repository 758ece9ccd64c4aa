"""GPUs by name: memory and the speeds of their data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from sparse_rl_lightning.calibration import H200, Hardware
from sparse_rl_lightning.errors import UserError


@dataclass(frozen=True)
class Card:
    """A GPU; speeds are those of its data sheet, dense matrix products of bfloat16 with float32 sums."""

    name: str
    memory: float  # bytes
    bandwidth: float  # bytes per second
    flops: float  # floating-point operations per second

    @property
    def hardware(self) -> Hardware:
        """What is reached in practice: the shares of the data sheet that an H200 reaches, and its overheads.

        That of layers is launches, as long on any card; that of sequences is work, as much longer as products are.
        """
        sheet = CARDS["h200-141gb"]
        faster = self.flops / sheet.flops
        return replace(
            H200,
            bandwidth=self.bandwidth * H200.bandwidth / sheet.bandwidth,
            flops=faster * H200.flops,
            sequence_overhead=H200.sequence_overhead / faster,
        )


CARDS = {
    card.name: card
    for card in (  # compared with copies of NVIDIA's data sheets, since the sheets themselves were not at hand
        Card("rtx-4090-24gb", 24e9, 1.008e12, 165.2e12),  # waredb.com/processor/nvidia-geforce-rtx-4090
        Card("rtx-3090-24gb", 24e9, 0.936e12, 71e12),  # from NVIDIA's GA102 whitepaper, unverified
        # the 149.7e12 of an A40, by multiprocessors and clock (72 at 1,695 MHz for 84 at 1,740); AWS's A10G has 70e12
        Card("a10-24gb", 24e9, 0.6e12, 125e12),
        Card("l4-24gb", 24e9, 0.3e12, 121e12),  # a quarter of 485e12 with sparsity and 8 bits: store.sourcecode.com
        # from NVIDIA's RTX Blackwell whitepaper; copies list 838, four times as many, with sparsity and float16 sums
        Card("rtx-5090-32gb", 32e9, 1.792e12, 209.5e12),
        Card("l40s-48gb", 48e9, 0.864e12, 362e12),  # mullet.se, product 355414
        Card("h100-80gb", 80e9, 3.35e12, 989e12),  # SXM; archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html
        Card("a100-80gb", 80e9, 2.039e12, 312e12),  # SXM; glennklockwood.com/garden/processors/A100
        Card("h200-141gb", 141e9, 4.8e12, 989e12),  # SXM; ai-hpc.github.io, which lists 1,979 with sparsity
        # of an HGX board at 1,000 W; glennklockwood.com/garden/processors/B200. 180 of the 192 GB are for programs
        Card("b200-180gb", 180e9, 8e12, 2250e12),
    )
}
"""Cards by name; of those with the same memory the first stands for all."""


def card_of(name: str | None = None, memory: str | None = None) -> Card:
    """The card of a name, or the smallest known one with this much memory, of which only so much counts.

    Args:
        name: Name in :data:`CARDS`.
        memory: Memory such as ``24GB`` or ``22.5GiB``, default the card's own.

    Raises:
        ValueError: If there is no such card, or the memory is no number of bytes.
    """
    if name is not None and name not in CARDS:
        raise UserError(f"--card must be one of {', '.join(CARDS)}, got {name!r}. Or give --memory, such as 24GB.")
    if memory is None:
        return CARDS[name or "h100-80gb"]
    size = parse_memory(memory)
    if name is None:
        name = next((card.name for card in CARDS.values() if card.memory >= size), list(CARDS)[-1])
    return replace(CARDS[name], memory=size)


def parse_memory(text: str) -> float:
    """Bytes of a text.

    >>> parse_memory("24GB"), parse_memory("0.5GiB")
    (24000000000.0, 536870912.0)
    """
    match = re.fullmatch(r"(\d+\.?\d*) ?([MG])(i?)B", text.strip(), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise UserError(f"--memory must be a number with its unit, such as 24GB or 22.5GiB, got {text!r}.")
    return float(match[1]) * float((1024 if match[3] else 1000) ** ("MG".index(match[2].upper()) + 2))
