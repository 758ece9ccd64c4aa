"""Scores and kept sets equal those of kvpress 0.5.5, where it has the method; skipped where it is not installed.

kvpress pins transformers below what this library needs, but its scores work with any: install it without its
dependencies, and those it imports (``pip install --no-deps kvpress==0.5.5 fire termcolor cachetools peft accelerate``).
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from published import DIM, prompt, update_of, whole_prompt
from torch import Tensor

from sparse_rl_lightning.budgets import Adaptive, Pyramid
from sparse_rl_lightning.calibration import gather_statistics
from sparse_rl_lightning.compressors import (
    CUR,
    H2O,
    TOVA,
    Compressor,
    ExpectedAttention,
    KeyDiff,
    KNorm,
    LagKV,
    QFilters,
    SnapKV,
    StreamingLLM,
)
from sparse_rl_lightning.compressors.rotary import rotate
from sparse_rl_lightning.records import LayerState
from sparse_rl_lightning.testing import tiny_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    kvpress = pytest.importorskip("kvpress", reason="an outside check; see this file's first lines")

LENGTH, KEPT = 60, 24
RATIO = 1 - KEPT / LENGTH - 1e-9  # kvpress rounds down what it keeps
MODULE = SimpleNamespace(
    config=SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2), head_dim=DIM, layer_idx=0
)
SIZES: dict[str, Any] = {"buffer": LENGTH - KEPT, "num_sinks": 0, "window": 1}

# our compressor, kvpress's, and the entries whose scores it does not fill with a constant so that they stay
METHODS: dict[str, tuple[Compressor, Any, slice]] = {
    "knorm": (KNorm(KEPT, **SIZES), kvpress.KnormPress(RATIO), slice(None)),
    "keydiff": (KeyDiff(KEPT, **SIZES), kvpress.KeyDiffPress(RATIO), slice(None)),
    "cur": (CUR(KEPT, **SIZES), kvpress.CURPress(RATIO, num_sinks=0), slice(None)),
    "cur, one window": (
        CUR(KEPT, **SIZES, local_window=0, leverage="mean"),
        kvpress.CURPress(RATIO, num_sinks=0, use_local_approximation=False, leverage_type="kv_avg"),
        slice(None),
    ),
    "lagkv": (
        LagKV(KEPT, buffer=36, num_sinks=4, window=1, lag_size=8),
        kvpress.LagKVPress(RATIO, n_sink=4, lag_size=8),
        slice(4, 52),
    ),
    "tova": (TOVA(KEPT, **SIZES), kvpress.TOVAPress(RATIO), slice(0, 59)),
    "snapkv": (
        SnapKV(
            KEPT, buffer=36, num_sinks=0, window=8, kernel_size=5, pooling="avg", group_reduction="mean",
            variant="original",
        ),
        kvpress.SnapKVPress(RATIO, window_size=8, kernel_size=5),
        slice(0, 52),
    ),
    "h2o": (H2O(KEPT, **SIZES, age_normalized=True), kvpress.ObservedAttentionPress(RATIO), slice(None)),
    "streaming": (
        StreamingLLM(KEPT, buffer=36, num_sinks=4, window=1), kvpress.StreamingLLMPress(RATIO, n_sink=4), slice(0, 0)
    ),
}  # fmt: skip
UNITS = {"snapkv": 8, "h2o": 2}  # kvpress takes means over the queries, over the group


def draw(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = (3, 2, LENGTH, DIM), (3, 2, LENGTH, DIM), (3, 4, LENGTH, DIM)
    return prompt(*(torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes))


def both(name: str, seed: int) -> tuple[Compressor, LayerState, Tensor, Tensor]:
    """Our compressor and layer, our scores, kvpress's."""
    compressor, press, _ = METHODS[name]
    keys, values, queries, attention = draw(seed)
    layer = whole_prompt(keys, values, queries, compressor.num_queries)
    if compressor.state_fields:
        layer = replace(layer, state={"mass": torch.zeros(layer.valid.shape, dtype=torch.float64)})
        compressor.update_state(update_of(layer, attention.unflatten(1, (2, 2)).sum(dim=2)))
    theirs = press.score(MODULE, torch.zeros(3, LENGTH, 64), keys, values, attention, {})
    return compressor, layer, compressor.score(layer).double() / UNITS.get(name, 1), theirs


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", range(3))
def test_scores_are_equal(name: str, seed: int) -> None:
    _, _, ours, theirs = both(name, seed)
    scored = METHODS[name][2]
    torch.testing.assert_close(ours[..., scored], theirs[..., scored], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "lagkv"])
def test_kept_sets_are_equal(name: str) -> None:
    """Where kvpress keeps the newest token too, which is always kept here."""
    compared = 0
    for seed in range(8):
        compressor, layer, _, theirs = both(name, seed)
        kept = torch.zeros_like(layer.valid).scatter(-1, theirs.topk(KEPT, dim=-1).indices, True)
        tied = (theirs == theirs.topk(KEPT, dim=-1).values[..., -1:]).sum(dim=-1) > 1  # it breaks ties as it comes
        if name == "streaming":
            tied &= False  # everything it keeps has the same score
        rows = kept[..., -1] & ~tied
        compared += int(rows.sum())
        assert torch.equal(compressor.select(layer)[rows], kept[rows])
    assert compared >= 4


def test_lagkv_keeps_as_many_of_every_rank() -> None:
    """Chunks have equal ranks, which kvpress cuts as they come: both keep all of the higher ranks, some of the last."""
    compressor, layer, _, theirs = both("lagkv", 0)
    limit = theirs.topk(KEPT, dim=-1).values[..., -1:]
    kept = compressor.select(layer)
    assert kept[theirs > limit].all()
    assert not kept[theirs < limit].any()


@pytest.mark.parametrize("floor", [5, 10])
def test_adaptive_budgets_are_equal(floor: int) -> None:
    """Without sinks and window: Ada-KV knows none."""
    rule, press = Adaptive(floor), kvpress.AdaKVPress(kvpress.KnormPress(RATIO), alpha_safeguard=floor / KEPT + 1e-9)
    keys, values, _, _ = draw(0)
    keys[:, 1] *= 0.8
    module = SimpleNamespace(**vars(MODULE) | {"config": SimpleNamespace(_attn_implementation="sdpa")})
    press.compress(module, None, keys, values, None, {})
    pruned = torch.zeros(3, 2, LENGTH, dtype=torch.bool)
    pruned[module.masked_key_indices] = True
    scores = KNorm(KEPT, **SIZES).score(whole_prompt(keys, values, keys, 0))
    budgets = rule.head_budgets(scores, torch.ones_like(pruned), KEPT, 0)
    assert torch.equal(budgets.long(), (~pruned).sum(dim=-1))
    assert not torch.equal(budgets[:, 0], budgets[:, 1])


@pytest.mark.parametrize(("budget", "num_layers", "beta"), [(640, 28, 20), (512, 4, 20), (64, 36, 2)])
def test_pyramids_are_equal(budget: int, num_layers: int, beta: int) -> None:
    press = kvpress.PyramidKVPress(1 - 1 / 64, window_size=2, beta=beta)
    config = SimpleNamespace(num_hidden_layers=num_layers)
    theirs = [
        press.get_layer_budget(SimpleNamespace(config=config, layer_idx=layer), budget * 64)
        for layer in range(num_layers)
    ]
    assert Pyramid(beta).layer_budgets(budget, num_layers, 2) == theirs


# ---------------------------------------------------------------- methods that need a real attention module


def attention_layer(architecture: str) -> tuple[Any, Tensor, Tensor, Tensor, LayerState]:
    """A module, its input, its rotated keys and values, and the layer as a compressor with 40 queries sees it."""
    model = tiny_model(architecture, initializer_range=0.2)
    module, rotary = model.model.layers[1].self_attn, model.model.rotary_emb
    module.rotary_emb = rotary
    hidden = torch.randn(3, LENGTH, 64, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).expand(3, LENGTH)
    with torch.no_grad():
        shape = (3, LENGTH, -1, DIM)
        keys, values = (proj(hidden).view(shape).transpose(1, 2) for proj in (module.k_proj, module.v_proj))
        queries = kvpress.utils.get_prerope_query_states(module, hidden)
        keys = module.k_norm(keys) if hasattr(module, "k_norm") else keys
    keys, queries = (rotate(t, positions[:, None], rotary.inv_freq) for t in (keys, queries))
    layer = replace(whole_prompt(keys, values, queries, LENGTH - 4), inv_freq=rotary.inv_freq, layer=1)
    return module, hidden, keys, values, layer


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"use_covariance": False}, {"use_vnorm": False, "epsilon": 0.1}])
def test_expected_attention_of_a_whole_prompt_is_equal(architecture: str, options: dict[str, Any]) -> None:
    module, hidden, keys, values, layer = attention_layer(architecture)
    press = kvpress.ExpectedAttentionPress(RATIO, n_future_positions=50, n_sink=4, **options)
    with torch.no_grad():
        theirs = press.score(module, hidden, keys, values, None, {})
    ours = ExpectedAttention(
        KEPT, buffer=36, num_sinks=4, window=1, query_window=LENGTH - 4, num_future=50,
        covariance="full" if options.get("use_covariance", True) else "none",
        value_norm=options.get("use_vnorm", True), epsilon=options.get("epsilon", 0.0),
    ).score(layer)  # fmt: skip
    torch.testing.assert_close(ours[..., 4:], theirs[..., 4:], rtol=1e-3, atol=1e-6)


def test_qfilters_are_those_of_kvpress_with_the_other_sign() -> None:
    _, hidden, keys, values, layer = attention_layer("llama")
    statistics = gather_statistics(tiny_model("llama"), torch.arange(3, 43)[None], torch.tensor([40]))
    press = kvpress.QFilterPress(RATIO)
    press.q_filters = -statistics.filters
    theirs = press.score(SimpleNamespace(layer_idx=1), hidden, keys, values, None, {})
    torch.testing.assert_close(QFilters(KEPT, statistics, **SIZES).score(layer), theirs)
