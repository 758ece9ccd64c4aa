"""The table of models: which decoder runs them, and what their keys and values take.

Layers, heads and sizes are those of the checkpoints' published ``config.json``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common.tables import Table
from docs.quoted import measured
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.rollout.engine.decoders.choice import choose_way

SLOT = 640  # tokens: budget 512 and buffer 128
LENGTHS = (4096, 16384)


@dataclass(frozen=True)
class Checkpoint:
    """A well-known checkpoint of a family."""

    model_type: str
    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    windowed: int = 0  # layers with a window, not among ``layers``
    window: int = 0  # tokens

    @property
    def geometry(self) -> CacheGeometry:
        """The cache's, in bfloat16."""
        windows = (0,) * self.layers + (self.window,) * self.windowed if self.windowed else ()
        return CacheGeometry(
            self.layers, self.heads, self.kv_heads, self.head_dim, 1.0, torch.zeros(0), 1.0, torch.bfloat16,
            torch.bfloat16, torch.device("cpu"), windows,
        )  # fmt: skip

    def bytes_of(self, length: int, slot: int | None = None) -> int:
        """Bytes of a sequence of this length in a full cache, or in a slot of so many tokens; windows in either."""
        g = self.geometry
        entries = g.full_entries(length) - (0 if slot is None else g.num_layers * (length - slot))
        return entries * self.kv_heads * g.bytes_per_entry

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in the layers that hold every token."""
        return self.layers * self.kv_heads * self.geometry.bytes_per_entry

    @property
    def way(self) -> str:
        """The decoder of the family."""
        config = AutoConfig.for_model(self.model_type, num_hidden_layers=1, pad_token_id=0)
        with torch.device("meta"):
            return choose_way(AutoModelForCausalLM.from_config(config))


CHECKPOINTS = (
    Checkpoint("qwen2", "Qwen2.5-7B", 28, 28, 4, 128),
    Checkpoint("qwen3", "Qwen3-8B", 36, 32, 8, 128),
    Checkpoint("llama", "Llama-3.1-8B", 32, 32, 8, 128),
    Checkpoint("mistral", "Mistral-7B-v0.3", 32, 32, 8, 128),
    Checkpoint("gemma", "Gemma-7B", 28, 16, 16, 256),
    Checkpoint("gemma3_text", "Gemma-3-1B", 4, 4, 1, 256, 22, 512),
    Checkpoint("glm4", "GLM-4-9B-0414", 40, 32, 2, 128),
    Checkpoint("granite", "Granite-3.1-8B", 40, 32, 8, 128),
    Checkpoint("ministral3", "Ministral-3-8B", 34, 32, 8, 128),
    Checkpoint("olmo2", "OLMo-2-7B", 32, 32, 32, 128),
    Checkpoint("olmo3", "Olmo-3-7B", 8, 32, 32, 128, 24, 4096),
    Checkpoint("phi3", "Phi-4-mini", 32, 24, 8, 128),
    Checkpoint("smollm3", "SmolLM3-3B", 36, 16, 4, 128),
    Checkpoint("qwen3_moe", "Qwen3-30B-A3B", 48, 32, 4, 128),
    Checkpoint("mixtral", "Mixtral-8x7B", 32, 32, 8, 128),
    Checkpoint("olmoe", "OLMoE-1B-7B", 16, 16, 16, 128),
    Checkpoint("glm4_moe", "GLM-4.5-Air", 46, 96, 8, 128),
)


def models_table() -> str:
    """Families by checkpoint, with the memory of a sequence and of a slot."""
    lengths = (f"full cache of {length:,} tokens, MiB" for length in LENGTHS)
    head = (
        "`model_type`", "checkpoint", "decoder", "windows", "KV per token, KiB", *lengths,
        f"slot of {SLOT} tokens, MiB", f"saved at {LENGTHS[-1]:,}",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = []
    for one in CHECKPOINTS:
        longest = LENGTHS[-1]
        sizes = (*(one.bytes_of(length) for length in LENGTHS), one.bytes_of(longest, SLOT))
        saved = f"{1 - one.bytes_of(longest, SLOT) / one.bytes_of(longest):.0%}".replace("%", " %")
        windows = f"{one.windowed} layers of {one.window:,}" if one.windowed else ""
        row = one.model_type, one.name, one.way, windows, f"{one.bytes_per_token / 1024:,.0f}"
        rows.append((*row, *(f"{size / 2**20:,.0f}" for size in sizes), saved))
    shares = " and ".join(f"{1 - SLOT / length:.0%} at {length:,} tokens" for length in LENGTHS)
    note = (
        f"In bfloat16. The slot saves {shares.replace('%', ' %')} in the layers of full attention, of which the KV per "
        "token is; layers with a window hold its tokens with or without a compressor, and both columns count them."
    )
    return Table("", head, note, rows).untitled


def decoders_table() -> str:
    """A decode step by both decoders."""
    rows = measured("../benchmarks/results/decoders-cpu.md", "Decoders")
    return Table("", tuple(rows[0]), rows=[tuple(row.values()) for row in rows]).untitled
