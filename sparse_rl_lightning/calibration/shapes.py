"""What the cost of a decode step depends on: model sizes and machine speed."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.files import output_file, whole_file, write_whole
from sparse_rl_lightning.policies.windows import LINEAR, layer_windows

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names under which configurations have their number of experts."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with gated MLPs (Llama, Qwen2, Qwen3); biases and norms are left out."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    weight_bytes: float = 2  # bytes of one weight
    kv_bytes: int = 2  # bytes of one number in the cache

    @classmethod
    def of(cls, model: Any, weight_bytes: float = 2, kv_bytes: int = 2) -> Self:
        """Read the sizes from a transformers configuration or a model, or look them up in :data:`SHAPES` by name.

        Args:
            model: Configuration, model with one, or name such as ``qwen3-1.7b``.
            weight_bytes: Bytes of one weight.
            kv_bytes: Bytes of one number in the cache.

        Raises:
            ValueError: If there is no shape of this name, or the model has other layers than those of full attention.
        """
        if isinstance(model, str):
            if model not in SHAPES:
                raise UserError(f"model must be one of {', '.join(SHAPES)}, or a configuration, got {model!r}.")
            return cls(*SHAPES[model], weight_bytes, kv_bytes)
        config = getattr(model, "config", model)
        features = {
            "linear attention": LINEAR in (getattr(config, "layer_types", None) or ()),
            "sliding windows": bool(layer_windows(config)),
            "experts": any(getattr(config, name, 0) for name in EXPERTS),
        }
        if any(features.values()):
            raise UserError(
                f"The cost model has no price for the {' and '.join(name for name, has in features.items() if has)} of "
                f"{config.model_type!r}: measure instead (`sparse-rl calibrate` does without `machine`)."
            )
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            config.num_hidden_layers, config.hidden_size, heads, kv_heads, head_dim, config.intermediate_size,
            config.vocab_size, weight_bytes, kv_bytes,
        )  # fmt: skip

    @property
    def weights_read(self) -> int:
        """The number of weights that a decode step multiplies by: all layers and the head, not the embedding table."""
        attention = 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp) + self.vocab_size * self.hidden_size

    @property
    def kv_bytes_per_token(self) -> int:
        """The bytes of the keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_bytes


@dataclass(frozen=True)
class Hardware:
    """Best speeds of a machine, and what a decode step takes beside them."""

    bandwidth: float  # bytes per second from memory
    flops: float  # floating-point operations per second of a matrix product
    step_overhead: float = 0.0  # seconds per decode step for anything else
    layer_overhead: float = 0.0  # seconds per decode step and layer: launches, kernels that wait for memory
    sequence_overhead: float = (
        0.0  # seconds per decode step, layer and sequence: work that bytes and products leave out
    )
    kv_share: float = 1.0  # of the bandwidth, or of flops where they take longer, that attention reaches

    def __post_init__(self) -> None:
        for name in ("bandwidth", "flops"):
            check_number(name, getattr(self, name), above=0, owner="Hardware")
        for name in ("step_overhead", "layer_overhead", "sequence_overhead"):
            check_number(name, getattr(self, name), least=0, owner="Hardware")
        check_number("kv_share", self.kv_share, above=0, most=1, owner="Hardware")

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a file that :meth:`save` or ``sparse-rl calibrate --hardware`` wrote.

        Raises:
            ValueError: If there is no such file, or a number is missing.
        """
        file = Path(path).expanduser()
        if not file.is_file():
            remedy = f"`sparse-rl calibrate --hardware {shlex.quote(str(path))}` measures one."
            raise UserError(f"there is no file {str(path)!r}. {remedy}")
        try:
            content = json.loads(whole_file(file, 2**24))
            return cls(**{f.name: content.get(f.name, f.default) for f in fields(cls)})
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            names = ", ".join(f.name for f in fields(cls))
            raise UserError(f"{path}: expected a JSON object with the numbers {names}. {error}") from error

    def save(self, path: str | Path, **notes: str) -> None:
        """Write a JSON file, with notes on the origin of the numbers."""
        write_whole(output_file(path, "path"), json.dumps({**asdict(self), **notes}, indent=2) + "\n")


H200 = Hardware(4.3e12, 790e12, layer_overhead=48.3e-6, sequence_overhead=0.101e-6, kv_share=0.894)
"""An H200 in bfloat16: what copies of 8.6 GB and products reach (its data sheet lists 4.8e12 and 989e12), and overheads
fitted to the decode steps in ``benchmarks/results`` (``tests/calibration/test_measured_steps.py``)."""

SHAPES: dict[str, tuple[int, int, int, int, int, int, int]] = {
    # layers, hidden, heads, KV heads, head dimension, intermediate, vocabulary: from the models' config.json
    "qwen2.5-0.5b": (24, 896, 14, 2, 64, 4864, 151936),
    "qwen2.5-1.5b": (28, 1536, 12, 2, 128, 8960, 151936),
    "qwen2.5-3b": (36, 2048, 16, 2, 128, 11008, 151936),
    "qwen2.5-7b": (28, 3584, 28, 4, 128, 18944, 152064),
    "qwen2.5-14b": (48, 5120, 40, 8, 128, 13824, 152064),
    "llama-3.2-1b": (16, 2048, 32, 8, 64, 8192, 128256),
    "llama-3.2-3b": (28, 3072, 24, 8, 128, 8192, 128256),
    "llama-3.1-8b": (32, 4096, 32, 8, 128, 14336, 128256),
    "qwen3-0.6b": (28, 1024, 16, 8, 128, 3072, 151936),
    "qwen3-1.7b": (28, 2048, 16, 8, 128, 6144, 151936),
    "qwen3-4b": (36, 2560, 32, 8, 128, 9728, 151936),
    "qwen3-8b": (36, 4096, 32, 8, 128, 12288, 151936),
    "qwen3-14b": (40, 5120, 40, 8, 128, 17408, 151936),
}
"""Shapes by name, arguments of :class:`ModelShape`."""

TIED = {
    "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "llama-3.2-1b", "llama-3.2-3b",
    "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b",
}  # fmt: skip
"""Models whose output head is their table of embeddings."""
