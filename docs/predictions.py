"""What memory the shipped recipes should take on H200s: predictions, no measurement.

On one GPU weights, gradients and AdamW's two moments are float32; under DeepSpeed the weights are bfloat16, with
float32 master weights in the optimizer. Keys and values are bfloat16. Activations of the learner, logits, buffers of
communication and what the allocator loses are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.tables import Table
from sparse_rl_lightning import compressors, retrievers
from sparse_rl_lightning.budgets import schedules
from sparse_rl_lightning.cache.compression import Trigger
from sparse_rl_lightning.cache.slots import CacheSize
from sparse_rl_lightning.calibration import ModelShape
from sparse_rl_lightning.cli.yaml_files import read_file
from sparse_rl_lightning.compressors import Compressor, FullKV
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.retrieval.cache import with_pages
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.rollout import SamplingParams
from sparse_rl_lightning.rollout.engine.memory import slot_bytes

CONFIGS = Path(__file__).parents[1] / "configs"
RECIPES = {  # configuration: shape by name, whether the head is the table of embeddings
    "llama-3.2-1b-instruct": ("llama-3.2-1b", True),
    "qwen2.5-1.5b": ("qwen2.5-1.5b", True),
    "qwen2.5-3b": ("qwen2.5-3b", True),
    "qwen2.5-7b": ("qwen2.5-7b", False),
    "sparrow/qwen3-1.7b": ("qwen3-1.7b", True),
    "sparrow/qwen3-4b": ("qwen3-4b", True),
    "sparrow/qwen3-8b": ("qwen3-8b", False),
    "sparrow/qwen3-14b": ("qwen3-14b", False),
}
PROMPT = 256  # tokens, taken for all
MEMORY = 141e9  # bytes of an H200
SMALLER = 80e9  # of an A100 or H100
FILLED = 0.85  # more than this share leaves no room for the learner's activations
ZERO = ((2, 2), (2, 4), (2, 8), (3, 2), (3, 4), (3, 8))  # stages and numbers of ranks that are tabulated
MODULES = (compressors, retrievers, schedules)


@dataclass(frozen=True)
class Recipe:
    """A configuration with what it says of a rollout."""

    name: str
    shape: ModelShape
    parameters: int
    settings: dict[str, Any]  # of the model
    trainer: dict[str, Any]
    num_sequences: int

    @classmethod
    def of(cls, name: str) -> Recipe:
        """Read a shipped configuration."""
        config = read_file(CONFIGS / f"{name}.yaml")
        shape_name, tied = RECIPES[name]
        shape, own = ModelShape.of(shape_name), config["model"]["init_args"]
        settings = own | own["sampling"] | own.get("rollout", {}) | own.get("loss", {})
        parameters = shape.weights_read + (0 if tied else shape.vocab_size * shape.hidden_size)
        prompts = config["data"]["init_args"]["prompts_per_rollout"]
        return cls(name, shape, parameters, settings, config["trainer"], prompts * settings["num_generations"])

    @cached_property
    def compressor(self) -> Compressor:
        """What evicts, ``FullKV`` where nothing does."""
        found = built(self.settings["compressor"])
        assert isinstance(found, Compressor)
        return found

    @cached_property
    def retriever(self) -> Retriever | None:
        """What chooses pages, if anything does."""
        given = self.settings.get("retriever")
        return None if given is None else built(given)

    # ---------------------------------------------------------------- memory per GPU, in bytes

    @property
    def sharding(self) -> tuple[int, int]:
        """ZeRO's stage, 0 without sharding, and the number of ranks."""
        strategy = self.trainer.get("strategy", "auto")
        return int(strategy.rpartition("_")[2]) if "deepspeed" in strategy else 0, self.trainer["devices"]

    def states(self, stage: int, ranks: int) -> float:
        """Weights, gradients and AdamW's moments of one rank.

        Without sharding all are float32. Under DeepSpeed weights (2 bytes per parameter) and gradients (2) are
        bfloat16; the optimizer has float32 weights (4), two moments (8) and, in its step, float32 gradients (4).
        Stage 2 shares all but the bfloat16 weights, stage 3 these too.
        """
        if stage == 0:
            return 16 * self.parameters
        return self.parameters * (20 / ranks if stage == 3 else 2 + 18 / ranks)

    def total(self, stage: int, ranks: int) -> float:
        """All that is counted, of one rank."""
        cache = self.cache(self.compressor, self.retriever)
        return self.states(stage, ranks) + self.reference + self.copy(stage) + cache

    @property
    def reference(self) -> int:
        """The reference policy of the KL penalty, whole and float32 on every rank."""
        return 4 * self.parameters if self.settings.get("beta") else 0

    def copy(self, stage: int) -> int:
        """The sampler's bfloat16 copy of the weights: autocast's, stage 3's shadow; stage 2 reads live weights."""
        return {0: 2 * self.shape.weights_read, 3: 2 * self.parameters}.get(stage, 0)

    def cache(self, compressor: Compressor, retriever: Retriever | None = None) -> int:
        """All slots with everything that stands in them."""
        s, length = self.shape, PROMPT + self.settings["max_completion_length"]
        geometry = CacheGeometry(
            s.num_layers, s.num_heads, s.num_kv_heads, s.head_dim, 1.0, torch.empty(0), 1.0,
            torch.bfloat16, torch.bfloat16, torch.device("cpu"),
        )  # fmt: skip
        capacities = Trigger(compressor, s.num_layers).capacities(PROMPT, length)
        size = CacheSize.of(compressor, geometry, self.num_slots, capacities, length)
        if retriever is not None:
            size = with_pages(size, retriever)
        params = SamplingParams(max_completion_length=self.settings["max_completion_length"])
        return slot_bytes(geometry, size, params).of(self.num_slots)

    @property
    def num_slots(self) -> int:
        """Sequences decoded at the same time."""
        return min(self.settings["num_slots"] or self.num_sequences, self.num_sequences)


def built(given: dict[str, Any]) -> Any:
    """An object of a configuration, with those inside it."""
    arguments = {
        name: built(value) if isinstance(value, dict) and "class_path" in value else value
        for name, value in given.get("init_args", {}).items()
    }
    kind = next(getattr(module, given["class_path"]) for module in MODULES if hasattr(module, given["class_path"]))
    return kind(**arguments)


def recipe_tables() -> str:
    """Memory of all recipes, as Markdown."""
    recipes = [Recipe.of(name) for name in RECIPES]
    memory = (
        "configuration", "GPUs", "parameters", "weights, gradients, AdamW", "reference", "copy", "slots",
        "their cache", "with a full cache", "in all", "of 141 GB", "with `beta: 0`", "of 80 GB",
    )  # fmt: skip
    zero = ("configuration", "one GPU", *(f"stage {stage}, {ranks} ranks" for stage, ranks in ZERO), "least")
    tables = {
        "Memory per GPU of the shipped files, in GB": Table("", memory, rows=[memory_row(r) for r in recipes]),
        "Memory per GPU under DeepSpeed, in GB": Table("", zero, rows=[zero_row(r) for r in recipes]),
    }
    return "\n\n".join(f"### {title}\n\n{table.untitled}" for title, table in tables.items())


def memory_row(recipe: Recipe) -> tuple[str, ...]:
    """Gigabytes (1e9 bytes)."""
    cache, full = recipe.cache(recipe.compressor, recipe.retriever), recipe.cache(FullKV())
    stage, ranks = recipe.sharding
    total = recipe.total(stage, ranks)
    least = total - recipe.reference
    parts = [f"{part / 1e9:.1f}" for part in (recipe.states(stage, ranks), recipe.reference, recipe.copy(stage))]
    devices = f"{ranks}, stage {stage}" if stage else str(ranks)
    return (
        f"`{recipe.name}.yaml`", devices, f"{recipe.parameters / 1e9:.2f} B", *parts, str(recipe.num_slots),
        f"{cache / 1e9:.1f}", f"{full / 1e9:.1f}", f"{total / 1e9:.0f}", f"{total / MEMORY:.0%}{verdict(total)}",
        f"{least / 1e9:.0f}", f"{least / SMALLER:.0%}{verdict(least, SMALLER)}",
    )  # fmt: skip


def verdict(total: float, memory: float = MEMORY) -> str:
    """What is said of a sum that is too large."""
    return "" if total <= FILLED * memory else ", does not fit with activations"


def zero_row(recipe: Recipe) -> tuple[str, ...]:
    """Gigabytes for the same slots per GPU; what does not fit stands in parentheses."""
    totals = {sharding: recipe.total(*sharding) for sharding in ((0, 1), *ZERO)}
    cells = [f"({t / 1e9:.0f})" if verdict(t) else f"{t / 1e9:.0f}" for t in totals.values()]
    fitting = [sharding for sharding, total in totals.items() if not verdict(total)]
    stage, ranks = min(fitting, key=lambda sharding: (sharding[1], sharding[0]))
    return (f"`{recipe.name}.yaml`", *cells, f"stage {stage}, {ranks} ranks" if stage else "one GPU")
