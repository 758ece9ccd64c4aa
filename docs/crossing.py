"""From which length on bounded slots are predicted to draw faster than a full cache: the tables of ``when.md``."""

from __future__ import annotations

from functools import cache

from benchmarks.common.tables import Table
from sparse_rl_lightning.calibration import CostModel, ModelShape, Work
from sparse_rl_lightning.calibration.shapes import TIED
from sparse_rl_lightning.compressors import FullKV, SnapKV
from sparse_rl_lightning.planning import card_of

MODELS = {"qwen3-1.7b": "Qwen3-1.7B", "qwen3-4b": "Qwen3-4B", "qwen3-8b": "Qwen3-8B", "qwen2.5-7b": "Qwen2.5-7B"}
CARDS = {"rtx-4090-24gb": "24 GB", "h100-80gb": "80 GB", "h200-141gb": "141 GB"}
PROMPT, MOST = 256, 512  # tokens; sequences of a rollout on one card
USABLE = 0.9  # share of a card for weights and cache
LONGEST, STEP = 65_536, 128
BUFFER = 128
LENGTHS = {"2k": 2048, "8k": 8192, "16k": 16384, "32k": 32768}  # of completions
AT_ONCE = 8192


def crossing_table(budget: int) -> str:
    """Sequences at once, speeds and the length from which they double, for models and cards."""
    header = (
        "model", "KV a token", "card", "at once: full cache", "slots", *(f"speed at {name}" for name in LENGTHS),
        "2x from",
    )  # fmt: skip
    rows = [row(model, card, budget) for model in MODELS for card in CARDS]
    return Table("", header, rows=[cells for cells in rows if cells]).untitled


def row(model: str, card: str, budget: int) -> tuple[str, ...]:
    """One model on one card; empty where its weights leave no room."""
    shape = ModelShape.of(model)
    if room(model, card) < shape.kv_bytes_per_token * LONGEST:
        return ()
    return (
        MODELS[model], f"{shape.kv_bytes_per_token / 1024:.0f} KiB", CARDS[card],
        str(dense_batch(model, card, AT_ONCE)), str(sparse_batch(model, card, budget, AT_ONCE)),
        *(f"{speed(model, card, budget, length):.2f}" for length in LENGTHS.values()), start(model, card, budget),
    )  # fmt: skip


def start(model: str, card: str, budget: int) -> str:
    """The shortest completions at which slots are twice as fast."""
    lengths = range(STEP, LONGEST + 1, STEP)
    return next((f"{n:,}" for n in lengths if speed(model, card, budget, n) >= 2), "–")


@cache
def speed(model: str, card: str, budget: int, length: int) -> float:
    """Tokens per second with slots over those with a full cache, each with as many sequences as it holds."""
    costs = CostModel(ModelShape.of(model), card_of(card).hardware)
    sparse, full = sparse_batch(model, card, budget, length), dense_batch(model, card, length)
    return costs.speedup(SnapKV(budget, buffer=BUFFER), Work(sparse, PROMPT, length), Work(full, PROMPT, length))


def room(model: str, card: str) -> float:
    """Bytes for the cache: what the weights in 16 bits leave of a card that does nothing else."""
    shape = ModelShape.of(model)
    embeddings = 0 if model in TIED else shape.vocab_size * shape.hidden_size  # beside the head
    return USABLE * card_of(card).memory - 2 * (shape.weights_read + embeddings)


def sparse_batch(model: str, card: str, budget: int, length: int) -> int:
    """The number of slots, whose memory is there from the beginning."""
    costs = CostModel(ModelShape.of(model), card_of(card).hardware)
    return costs.best_batch(SnapKV(budget, buffer=BUFFER), room(model, card), PROMPT, length, MOST)


def dense_batch(model: str, card: str, length: int) -> int:
    """The sequences of a paged full cache: at any time they are half done on average, and none is ever put off."""
    costs = CostModel(ModelShape.of(model), card_of(card).hardware)
    return costs.best_batch(FullKV(), room(model, card), PROMPT, length // 2, MOST)
