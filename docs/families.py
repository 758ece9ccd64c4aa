"""The table of models: which decoder runs them, and what their keys and values take.

Layers, heads and sizes are those of the checkpoints' published ``config.json``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common.tables import Table
from sparse_rl_lightning.policies.geometry import LinearSizes
from sparse_rl_lightning.rollout.engine.decoders.choice import choose_decoder

SLOT = 640  # tokens: budget 512 and buffer 128
LENGTHS = (4096, 16384)


@dataclass(frozen=True)
class Checkpoint:
    """A well-known checkpoint of a family."""

    model_type: str
    name: str
    layers: int  # with keys and values
    kv_heads: int
    head_dim: int
    linear: LinearSizes | None = None
    windowed: int = 0  # layers with a window, not among ``layers``
    window: int = 0  # tokens

    @property
    def entry_bytes(self) -> int:
        """Bytes of a token's keys and values in a layer, in bfloat16."""
        return 2 * self.kv_heads * self.head_dim * torch.bfloat16.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's states in linear layers, whatever its length."""
        return 0 if self.linear is None else self.linear.nbytes

    def bytes_of(self, length: int, slot: int | None = None) -> int:
        """Bytes of a sequence of this length in a full cache, or in a slot of so many tokens; windows in either."""
        entries = self.layers * (slot or length) + self.windowed * min(length, self.window)
        return entries * self.entry_bytes

    def saved(self, length: int) -> float:
        """The share that a slot saves of what a sequence of this many tokens takes, windows and states included."""
        return 1 - (self.state_bytes + self.bytes_of(length, SLOT)) / (self.state_bytes + self.bytes_of(length))

    @property
    def decoder(self) -> str:
        """The decoder of the family."""
        config = AutoConfig.for_model(self.model_type, num_hidden_layers=1, pad_token_id=0)
        with torch.device("meta"):
            return choose_decoder(AutoModelForCausalLM.from_config(config))


def delta_networks(layers: int) -> LinearSizes:
    """The states of linear layers that these checkpoints have alike: 16 heads of keys, 32 of values, 128 channels."""
    return LinearSizes(layers, (2 * 16 * 128 + 32 * 128, 4), (32, 128, 128), torch.bfloat16)


CHECKPOINTS = (
    Checkpoint("qwen2", "Qwen2.5-7B", 28, 4, 128),
    Checkpoint("qwen3", "Qwen3-8B", 36, 8, 128),
    Checkpoint("llama", "Llama-3.1-8B", 32, 8, 128),
    Checkpoint("mistral", "Mistral-7B-v0.3", 32, 8, 128),
    Checkpoint("gemma", "Gemma-7B", 28, 16, 256),
    Checkpoint("gemma3_text", "Gemma-3-1B", 4, 1, 256, windowed=22, window=512),
    Checkpoint("glm4", "GLM-4-9B-0414", 40, 2, 128),
    Checkpoint("granite", "Granite-3.1-8B", 40, 8, 128),
    Checkpoint("ministral3", "Ministral-3-8B", 34, 8, 128),
    Checkpoint("olmo2", "OLMo-2-7B", 32, 32, 128),
    Checkpoint("olmo3", "Olmo-3-7B", 8, 32, 128, windowed=24, window=4096),
    Checkpoint("phi3", "Phi-4-mini", 32, 8, 128),
    Checkpoint("smollm3", "SmolLM3-3B", 36, 4, 128),
    Checkpoint("qwen3_moe", "Qwen3-30B-A3B", 48, 4, 128),
    Checkpoint("mixtral", "Mixtral-8x7B", 32, 8, 128),
    Checkpoint("olmoe", "OLMoE-1B-7B", 16, 16, 128),
    Checkpoint("glm4_moe", "GLM-4.5-Air", 46, 8, 128),
    Checkpoint("gpt_oss", "gpt-oss-20b", 12, 8, 64, windowed=12, window=128),
    Checkpoint("qwen3_5_text", "Qwen3.5-9B", 8, 4, 256, delta_networks(24)),
    Checkpoint("qwen3_5_moe_text", "Qwen3.5-35B-A3B", 10, 2, 256, delta_networks(30)),
    Checkpoint("qwen3_next", "Qwen3-Next-80B-A3B", 12, 2, 256, delta_networks(36)),
)


def models_table() -> str:
    """Families by checkpoint, with the memory of a sequence and of a slot."""
    head = (
        "`model_type`", "checkpoint", "decoder", "windows", "KV per token, KiB",
        *(f"full cache of {length:,} tokens, MiB" for length in LENGTHS),
        f"slot of {SLOT} tokens, MiB", "linear states, MiB", *(f"saved at {length:,}" for length in LENGTHS),
    )  # fmt: skip
    rows: list[tuple[str, ...]] = []
    for family in CHECKPOINTS:
        windows = f"{family.windowed} layers of {family.window:,}" if family.windowed else ""
        sizes = *(family.bytes_of(length) for length in LENGTHS), family.bytes_of(LENGTHS[-1], SLOT)
        states = f"{family.state_bytes / 2**20:,.1f}" if family.state_bytes else ""
        rows.append((
            family.model_type, family.name, family.decoder, windows,
            f"{family.layers * family.entry_bytes / 1024:,.0f}", *(f"{size / 2**20:,.0f}" for size in sizes), states,
            *(f"{family.saved(length):.0%}".replace("%", " %") for length in LENGTHS),
        ))  # fmt: skip
    note = (
        "In bfloat16, recurrent states in float32. KV per token is of the layers of full attention. Layers with a "
        "window hold its tokens, and linear layers their states, with or without a compressor: what a slot saves "
        "counts both on either side."
    )
    return Table("", head, note, rows).untitled
