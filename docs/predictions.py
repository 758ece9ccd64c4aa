"""What the shipped recipes should take on H200s, by the cost model and the memory plan: predictions, no measurement.

On one GPU weights, gradients and AdamW's two moments are float32; under DeepSpeed the weights are bfloat16, with
float32 master weights in the optimiser. Keys and values are bfloat16. Activations of the learner, logits, buffers of
communication and what the allocator loses are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sparse_rl_lightning import compressors, retrievers
from sparse_rl_lightning.budgets import PublishedSchedule, schedules
from sparse_rl_lightning.calibration import H200, CostModel, ModelShape, Pages, Work
from sparse_rl_lightning.calibration.cost import Method
from sparse_rl_lightning.cli.yaml_files import read_file
from sparse_rl_lightning.compressors import Compressor, FullKV
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.rollout import SamplingParams
from sparse_rl_lightning.rollout.cache.memory import slot_bytes
from sparse_rl_lightning.rollout.cache.slots import CacheSize
from sparse_rl_lightning.rollout.cache.trigger import Trigger

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
SPARROW = {"qwen3-1.7b": 2.21, "qwen3-4b": 2.41, "qwen3-8b": 2.06, "qwen3-14b": 1.49}  # its own speed-ups on 4 H200


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
        shape, settings = ModelShape.of(shape_name), config["model"]["init_args"]
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

    @property
    def method(self) -> Method:
        """As the cost model sees it."""
        return self.compressor if self.retriever is None else Pages.of(self.retriever)

    # ---------------------------------------------------------------- memory per GPU, in bytes

    @property
    def sharding(self) -> tuple[int, int]:
        """ZeRO's stage, 0 without sharding, and the number of ranks."""
        strategy = self.trainer.get("strategy", "auto")
        return int(strategy.rpartition("_")[2]) if "deepspeed" in strategy else 0, self.trainer["devices"]

    def states(self, stage: int, ranks: int) -> float:
        """Weights, gradients and AdamW's moments of one rank.

        Without sharding all are float32. Under DeepSpeed weights (2 bytes per parameter) and gradients (2) are
        bfloat16; the optimiser has float32 weights (4), two moments (8) and, in its step, float32 gradients (4).
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
        size = CacheSize.of(compressor, geometry, self.num_slots, capacities, length, retriever)
        params = SamplingParams(max_completion_length=self.settings["max_completion_length"])
        return slot_bytes(geometry, size, params).of(self.num_slots)

    # ---------------------------------------------------------------- time, in seconds

    @property
    def num_slots(self) -> int:
        """Sequences decoded at the same time."""
        return min(self.settings["num_slots"] or self.num_sequences, self.num_sequences)

    def rollout(self, method: Method, share: float = 1.0) -> float:
        """A rollout whose completions all have this share of the greatest length, slots full all the time."""
        length = round(share * self.settings["max_completion_length"])
        step = CostModel(self.shape, H200).step_seconds(method, Work(self.num_slots, PROMPT, length))
        return self.num_sequences / self.num_slots * length * step

    def learner(self, share: float = 1.0) -> float:
        """Matrix products of rescoring, the reference policy's pass and the update."""
        passes = 2 + (2 if self.reference else 0) + 6
        passes += 2 if (self.settings.get("learner") or {}).get("gradient_checkpointing") else 0
        tokens = self.num_sequences * (PROMPT + share * self.settings["max_completion_length"])
        return passes * self.shape.weights_read * tokens / H200.flops

    @property
    def num_rollouts(self) -> int:
        """Rollouts of the whole run."""
        steps = self.settings["steps_per_generation"] // self.trainer["accumulate_grad_batches"]
        return self.trainer["max_steps"] // steps


def built(given: dict[str, Any]) -> Any:
    """An object of a configuration, with those inside it."""
    arguments = {
        name: built(value) if isinstance(value, dict) and "class_path" in value else value
        for name, value in given.get("init_args", {}).items()
    }
    kind = next(getattr(module, given["class_path"]) for module in MODULES if hasattr(module, given["class_path"]))
    return kind(**arguments)


def recipe_tables() -> str:
    """Memory and time of all recipes, as Markdown."""
    recipes = [Recipe.of(name) for name in RECIPES]
    memory = (
        "configuration", "GPUs", "parameters", "weights, gradients, AdamW", "reference", "copy", "slots",
        "their cache", "with a full cache", "in all", "of 141 GB", "with `beta: 0`", "of 80 GB",
    )  # fmt: skip
    zero = ("configuration", "one GPU", *(f"stage {stage}, {ranks} ranks" for stage, ranks in ZERO), "least")
    time = (
        "configuration", "decode step", "with a full cache", "rollout", "with a full cache", "learner", "rollouts",
        "whole run", "at a quarter of the length",
    )  # fmt: skip
    lines = ["### Memory per GPU of the shipped files, in GB", "", *table(memory, [memory_row(r) for r in recipes])]
    lines += ["", "### Memory per GPU under DeepSpeed, in GB", "", *table(zero, [zero_row(r) for r in recipes])]
    return "\n".join([*lines, "", "### Time, at least", "", *table(time, [time_row(r) for r in recipes])])


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]


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


def time_row(recipe: Recipe) -> tuple[str, ...]:
    """Steps in milliseconds, rollouts and updates in minutes, runs in hours."""
    length, model = recipe.settings["max_completion_length"], CostModel(recipe.shape, H200)
    work, methods = Work(recipe.num_slots, PROMPT, length), (recipe.method, FullKV())
    steps = [f"{1e3 * model.step_seconds(method, work):.1f} ms" for method in methods]
    rollouts = [f"{recipe.rollout(method) / 60:.1f} min" for method in methods]
    blocks = [recipe.rollout(recipe.method, share) + recipe.learner(share) for share in (1, 0.25)]
    runs = [f"{recipe.num_rollouts * block / 3600:.0f} h" for block in blocks]
    learner = f"{recipe.learner() / 60:.1f} min"
    return (f"`{recipe.name}.yaml`", *steps, *rollouts, learner, str(recipe.num_rollouts), *runs)


def speedup_table() -> str:
    """The cost model's speed-up of Sparrow's decoding beside what the paper measured, as Markdown."""
    rows = []
    for name, found in SPARROW.items():
        sparrow = Pages(PublishedSchedule(f"{name}-0.86"), reserved=48, dense_layers=2)
        predicted = CostModel(ModelShape.of(name), H200).speedup(sparrow, Work(batch=60, prompt=512, length=12_000))
        rows.append(
            (name.replace("qwen", "Qwen").replace("b", "B"), f"{predicted:.2f}", f"{found}", f"{predicted / found:.2f}")
        )
    return "\n".join(table(("model", "predicted", "measured", "ratio"), rows))
