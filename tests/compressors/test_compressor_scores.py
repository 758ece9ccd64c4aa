"""The formula of every method, written out in loops and float64, and numbers that kvpress gave."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from published import DIM, KVPRESS, prompt, update_of, whole_prompt
from torch import Tensor

from sparse_rl_lightning.compressors import (
    CUR,
    H2O,
    TOVA,
    Compressor,
    ExpectedAttention,
    KeyDiff,
    KNorm,
    LagKV,
    OldestTurns,
    QFilters,
    QueryStatistics,
    SnapKV,
    TriAttention,
    VaSE,
)
from sparse_rl_lightning.compressors.attention import recent_attention
from sparse_rl_lightning.compressors.entries import fresh_draws
from sparse_rl_lightning.records import LayerState
from sparse_rl_lightning.testing.layers import fill_free_memory, random_layer

SIZES: dict[str, Any] = {"budget": 10, "buffer": 4, "num_sinks": 2, "window": 3}
HEADS = [(s, h) for s in range(3) for h in range(2)]


def layer_of(seed: int = 0, **options: Any) -> LayerState:
    layer = random_layer(seed, dtype=torch.float64, **options)
    return replace(layer, inv_freq=layer.inv_freq.double(), scale=0.3, attention_scaling=1.2)


def close(actual: Tensor, expected: Tensor | list[float], atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=atol)


def rows(layer: LayerState) -> Iterator[tuple[int, int, int]]:
    """Slot, head, live entries."""
    return ((s, h, int(layer.lengths[s, h])) for s, h in HEADS)


def softmax(logits: list[float]) -> list[float]:
    weights = [math.exp(x - max(logits)) for x in logits]
    return [w / sum(weights) for w in weights]


def dot(a: Tensor, b: Tensor) -> float:
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("compressor", "scored"),
    [
        (KNorm(12), slice(None)),
        (KeyDiff(12), slice(None)),
        (LagKV(12, buffer=4, num_sinks=2, lag_size=4), slice(2, 10)),  # it gives sinks and tail 1
        (CUR(12, local_window=4), slice(None)),
        (TOVA(12), slice(0, 13)),  # the last token is pinned by a large score
        (SnapKV(12, window=4, kernel_size=5, pooling="avg", group_reduction="mean", variant="original"), slice(0, 10)),
        (H2O(12, age_normalized=True), slice(None)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_scores_are_those_of_kvpress(compressor: Compressor, scored: slice) -> None:
    (keys, values, queries, attention), name = prompt(), type(compressor).__name__
    layer = whole_prompt(keys, values, queries, compressor.num_queries)
    if name == "H2O":
        layer = replace(layer, state={"mass": torch.zeros(layer.valid.shape, dtype=torch.float64)})
        compressor.update_state(update_of(layer, attention.unflatten(1, (2, 2)).sum(dim=2)))
    factor = {"SnapKV": 4, "H2O": 2}.get(name, 1)  # kvpress takes means over the queries, over the group
    scores = compressor.score(layer)[0, :, scored].double() / factor
    torch.testing.assert_close(scores, KVPRESS[name][:, scored], rtol=2e-5, atol=0)


def test_knorm() -> None:
    layer = layer_of()
    scores = KNorm(**SIZES).score(layer)
    for s, h, n in rows(layer):
        close(scores[s, h, :n], [-math.sqrt(dot(k, k)) for k in layer.keys[s, h, :n]])


def test_keydiff() -> None:
    layer = layer_of()
    scores = KeyDiff(**SIZES).score(layer)
    for s, h, n in rows(layer):
        unit = [k / math.sqrt(dot(k, k)) for k in layer.keys[s, h, :n]]
        mean = sum(unit[1:], start=unit[0]) / n
        close(scores[s, h, :n], [-dot(k, mean) / math.sqrt(dot(mean, mean)) for k in unit])


@pytest.mark.parametrize("leverage", ["product", "mean", "key", "value"])
@pytest.mark.parametrize("width", [5, 0])
def test_cur(leverage: Any, width: int) -> None:
    layer = layer_of()
    scores = CUR(**SIZES, leverage=leverage, local_window=width).score(layer)
    for s, h, n in rows(layer):
        shares = []
        for tensor in (layer.keys, layer.values):
            squares = [dot(x, x) for x in tensor[s, h, :n]]
            own = [squares[i // width * width : (i // width + 1) * width] if width else [1.0] for i in range(n)]
            shares.append([square / sum(window) for square, window in zip(squares, own, strict=True)])
        combine = {
            "product": lambda k, v: k * v, "mean": lambda k, v: (k + v) / 2, "key": lambda k, v: k,
            "value": lambda k, v: v,
        }[leverage]  # fmt: skip
        raw = [combine(k, v) for k, v in zip(*shares, strict=True)]
        close(scores[s, h, :n], [r / sum(raw) for r in raw])


def difference(entry: Tensor, following: Tensor) -> float:
    low, high = following.min(dim=0).values, following.max(dim=0).values
    scaled = [float((x - a) / (b - a)) if b > a else 0.0 for x, a, b in zip(entry, low, high, strict=True)]
    return float(torch.tensor(scaled, dtype=torch.float64).std())


@pytest.mark.parametrize(("lag", "lengths"), [(3, None), (2, [[14, 5], [13, 7], [6, 14]]), (6, None)])
def test_lagkv(lag: int, lengths: list[list[int]] | None) -> None:
    layer = layer_of(lengths=lengths)
    scores = LagKV(**SIZES, lag_size=lag).score(layer)
    num_ranked = 0
    for s, h, n in rows(layer):
        num_chunks = max(n - 2, 0) // lag
        for chunk in range(num_chunks - 1):
            first = 2 + chunk * lag
            totals = [0.0] * lag
            for tensor in (layer.keys[s, h], layer.values[s, h]):
                following = tensor[first + lag : first + 2 * lag]
                spreads = [difference(tensor[first + i], following) for i in range(lag)]
                totals = [a + b for a, b in zip(totals, softmax(spreads), strict=True)]
            ranks = [sum(other < own for other in totals) / lag for own in totals]
            close(scores[s, h, first : first + lag].double(), ranks, atol=1e-6)
            num_ranked += lag
        tail = range(2 + max(num_chunks - 1, 0) * lag, n)
        assert (scores[s, h, tail] >= 1).all()
        assert (scores[s, h, tail].diff() > 0).all()
    assert num_ranked > 0


def test_lagkv_takes_no_notice_of_channels_that_are_constant_afterwards() -> None:
    keys, values, queries, _ = prompt()
    keys[:, :, 6:10, :12], values[:, :, 6:10, 3] = 1.0, -2.0
    keys[:, :, 2, :12] = 50.0  # would stand out
    scores = LagKV(12, buffer=4, num_sinks=2, lag_size=4).score(whole_prompt(keys, values, queries, 0))
    for head in range(2):
        totals = [0.0] * 4
        for tensor in (keys[0, head], values[0, head]):
            shares = softmax([difference(tensor[2 + i], tensor[6:10]) for i in range(4)])
            totals = [a + b for a, b in zip(totals, shares, strict=True)]
        assert scores[0, head, 2:6].tolist() == [sum(other < own for other in totals) / 4 for own in totals]


def test_lagkv_keeps_the_most_recent_where_it_cannot_score() -> None:
    layer = random_layer(lengths=[[3, 3], [7, 6], [5, 7]])
    kept = LagKV(budget=10, buffer=4, num_sinks=2, window=1, lag_size=3).select(layer, layer_budget=5)
    assert kept[1].int().tolist() == [[1, 1, 0, 0, 1, 1, 1] + [0] * 7, [1, 1, 0, 1, 1, 1] + [0] * 8]


def test_tova_finds_tokens_by_their_positions() -> None:
    layer = layer_of(num_queries=1)
    scores = TOVA(**SIZES).score(layer)
    shared = alone = 0
    for s in range(3):
        paid: dict[int, list[float]] = {}
        for h in range(2):
            n = int(layer.lengths[s, h])
            heads = [softmax([0.3 * dot(q[0], k) for k in layer.keys[s, h, :n]]) for q in layer.queries[s, 2 * h :][:2]]
            for i, at in enumerate(layer.positions[s, h, :n].tolist()):
                paid.setdefault(at, []).append((heads[0][i] + heads[1][i]) / 2)
        for h in range(2):
            n = int(layer.lengths[s, h])
            held = [paid[at] for at in layer.positions[s, h, :n].tolist()]
            close(scores[s, h, :n], [sum(p) / len(p) for p in held])
            shared += sum(len(p) == 2 for p in held)
            alone += sum(len(p) == 1 for p in held)
    assert shared > 10
    assert alone > 5


def importance_of_each_query(layer: LayerState, s: int, h: int, n: int, window: int, variant: str) -> list[list[float]]:
    """What each query of each head of the group pays to the entries before the window."""
    paid = []
    for q in (2 * h, 2 * h + 1):
        for query, at in zip(layer.queries[s, q], layer.query_positions[s].tolist(), strict=True):
            if at >= 0:
                attended = n - window if variant == "decode" else n
                seen = [i for i in range(attended) if layer.positions[s, h, i] <= at]
                shares = softmax([0.3 * dot(query, layer.keys[s, h, i]) for i in seen])
                paid.append([shares[seen.index(i)] if i in seen else 0.0 for i in range(n - window)])
    return paid


def average_of_neighbors(row: list[float], size: int) -> list[float]:
    return [sum(row[max(i - size // 2, 0) : i + size // 2 + 1]) / size for i in range(len(row))]


@pytest.mark.parametrize("variant", ["decode", "original"])
@pytest.mark.parametrize(("pooling", "size"), [("avg", 3), ("max", 5), ("none", 7)])
def test_snapkv_defends_what_one_query_needs(variant: Any, pooling: Any, size: int) -> None:
    layer = layer_of(lengths=[[3, 3], [14, 10], [12, 14]])
    method = SnapKV(**SIZES, aggregation="max_clamped", variant=variant, pooling=pooling, kernel_size=size)
    scores = method.score(layer)
    assert not method.scores_natively
    raised = 0
    for s, h, n in rows(layer):
        largest = [0.0] * (n - 3)
        for paid in importance_of_each_query(layer, s, h, n, 3, variant):
            pooled = {
                "avg": average_of_neighbors(paid, size), "none": paid,
                "max": [max(paid[max(i - size // 2, 0) : i + size // 2 + 1]) for i in range(n - 3)],
            }[pooling]  # fmt: skip
            shares = [share * sum(paid) / sum(pooled) for share in pooled]
            largest = [max(pair) for pair in zip(largest, shares, strict=True)]
        mean = sum(largest) / max(n - 3, 1)
        norms = [math.sqrt(dot(v, v)) for v in layer.values[s, h, : n - 3]]
        wanted = [max(share, mean) * norm for share, norm in zip(largest, norms, strict=True)]
        close(scores[s, h, :n], [*wanted, 0.0, 0.0, 0.0])
        raised += sum(share < mean for share in largest)
    assert raised > 10


@pytest.mark.parametrize(("num_large", "size", "num_sinks"), [(None, 3, 2), (5, 1, 1), (0, 5, 0)])
def test_vase(num_large: int | None, size: int, num_sinks: int) -> None:
    layer = layer_of(lengths=[[3, 3], [14, 10], [12, 14]])
    method = VaSE(**{**SIZES, "num_sinks": num_sinks}, num_large=num_large, kernel_size=size)
    scores, uniform = method.score(layer), fresh_draws(layer).double()
    num_drawn = 0
    for s, h, n in rows(layer):
        ranges = [float(v.max() - v.min()) for v in layer.values[s, h, :n]]
        sinks = [i for i in range(n - 3) if layer.positions[s, h, i] < num_sinks]
        others = sorted(set(range(n - 3)) - {*sinks}, key=lambda i: -ranges[i])
        large = {*sinks, *others[: max((10 // 4 if num_large is None else num_large) - len(sinks), 0)]}
        paid = importance_of_each_query(layer, s, h, n, 3, "decode")
        pooled = [average_of_neighbors(row, size) for row in paid]
        for i in range(n - 3):
            if i in large:
                close(scores[s, h, i], ranges[i])
            else:
                weight = sum(row[i] for row in pooled) / len(pooled)
                wanted = math.log1p(-float(uniform[s, h, i])) / weight
                torch.testing.assert_close(float(scores[s, h, i]), wanted, rtol=1e-6, atol=0)
                num_drawn += 1
    assert num_drawn > 15
    published = VaSE(512)
    assert (published.buffer, published.window, published.num_sinks, published.kernel_size) == (64, 64, 4, 5)
    assert published.num_queries == 64


def rotation(position: float, inv_freq: Tensor) -> Tensor:
    """(D, D) matrix that transformers' rotate_half amounts to."""
    half = len(inv_freq)
    matrix = torch.zeros(2 * half, 2 * half, dtype=torch.float64)
    for i, frequency in enumerate(inv_freq.tolist()):
        c, s = math.cos(position * frequency), math.sin(position * frequency)
        matrix[i, i], matrix[i, i + half], matrix[i + half, i], matrix[i + half, i + half] = c, -s, s, c
    return matrix


@pytest.mark.parametrize("covariance", ["full", "diagonal", "none"])
@pytest.mark.parametrize(("value_norm", "epsilon", "num_sinks"), [(True, 0.02, 2), (False, 0.0, 0)])
def test_expected_attention(covariance: Any, value_norm: bool, epsilon: float, num_sinks: int) -> None:
    layer = layer_of(num_queries=7, num_sinks=num_sinks, lengths=[[8, 6], [14, 9], [12, 14]])
    sizes = {**SIZES, "num_sinks": num_sinks}
    compressor = ExpectedAttention(
        **sizes, query_window=7, num_future=5, covariance=covariance, value_norm=value_norm, epsilon=epsilon
    )
    scores = compressor.score(layer)
    for s, h, n in rows(layer):
        seen = int(layer.positions[s].max()) + 1
        ahead = sum(rotation(seen + i, layer.inv_freq) for i in range(5)) / 5
        free = [i for i in range(n) if layer.positions[s, h, i] >= num_sinks]
        shares = []
        for q in (2 * h, 2 * h + 1):
            pairs = zip(layer.queries[s, q], layer.query_positions[s].tolist(), strict=True)
            still = torch.stack([rotation(-at, layer.inv_freq) @ query for query, at in pairs if at >= num_sinks])
            mean, spread = ahead @ still.mean(dim=0), ahead @ still.T.cov(correction=0) @ ahead.T
            if covariance != "full":
                spread = torch.diag(spread.diagonal()) * (covariance == "diagonal")
            keys = layer.keys[s, h]
            shares.append(softmax([0.3 * dot(mean, keys[i]) + 0.045 * dot(keys[i], spread @ keys[i]) for i in free]))
        for place, i in enumerate(free):
            share = (shares[0][place] + shares[1][place]) / 2
            norm = math.sqrt(dot(layer.values[s, h, i], layer.values[s, h, i]))
            close(scores[s, h, i], (share + epsilon) * norm if value_norm else share)


@pytest.mark.parametrize(("budget", "window", "protects"), [(10, 3, True), (7, 5, False), (7, 1, False), (12, 2, True)])
def test_oldest_turns(budget: int, window: int, protects: bool) -> None:
    """Whole turns leave until the rest fits, then single tokens of those that reach into the window."""
    method = OldestTurns(budget=budget, buffer=4, num_sinks=1, window=window, protect_prompt=protects)
    fewer = 0
    for seed in range(16):
        layer = layer_of(seed, num_sinks=1, window=window, lengths=[[3, 3], [14, 14], [13, 14]])
        kept = method.select(layer)
        for s, h, n in rows(layer):
            positions, turns = layer.positions[s, h].tolist(), layer.turns[s, h].tolist()
            at_least = layer.prompt_lengths[s] if protects else 1
            left, first = list(range(n)), turns[n - window] if n > window else 0
            order = [i for i in range(n - window) if positions[i] >= at_least]
            while len(left) > budget:
                oldest = turns[order[0]]
                gone = [i for i in order if turns[i] == oldest] if oldest < first else order[:1]
                order, left = order[len(gone) :], [i for i in left if i not in gone]
            assert kept[s, h].nonzero().flatten().tolist() == left
            fewer += len(left) < min(n, budget)
    assert fewer > 3


def statistics_of(layer: LayerState, seed: int = 0) -> QueryStatistics:
    g = torch.Generator().manual_seed(seed)
    mean = torch.randn(2, 4, DIM, generator=g, dtype=torch.float64)
    lengths = torch.randn(2, 4, DIM // 2, generator=g, dtype=torch.float64).abs() + 1
    return QueryStatistics(mean, lengths, torch.randn(2, 2, DIM, generator=g, dtype=torch.float64))


def test_qfilters_project() -> None:
    layer = layer_of()
    statistics = statistics_of(layer)
    scores = QFilters(**SIZES, statistics=statistics).score(layer)
    for s, h, n in rows(layer):
        close(scores[s, h, :n], [dot(statistics.filters[1, h], key) for key in layer.keys[s, h, :n]])


@pytest.mark.parametrize("reduction", ["max", "mean"])
def test_triattention_is_the_published_series(reduction: Any) -> None:
    """Amplitudes and phases of keys that are turned back, as in the authors' code; ours never turns a key."""
    layer = layer_of()
    statistics = statistics_of(layer)
    compressor = TriAttention(**SIZES, statistics=statistics, max_offset=9, group_reduction=reduction)
    scores, factor = compressor.score(layer), layer.attention_scaling**2
    for s, h, n in rows(layer):
        seen = int(layer.positions[s].max()) + 1
        heads = []
        for q in (2 * h, 2 * h + 1):
            mean = torch.complex(*statistics.mean[1, q].chunk(2))
            own = []
            for i in range(n):
                at = int(layer.positions[s, h, i])
                still = rotation(-at, layer.inv_freq) @ layer.keys[s, h, i] / layer.attention_scaling
                key = torch.complex(*still.chunk(2))
                phase, amplitude = (mean * key.conj()).angle(), mean.abs() * key.abs()
                waves = [
                    (amplitude * torch.cos((seen - at + offset) * layer.inv_freq + phase)).sum() * factor
                    for offset in (1, 2, 4, 8)
                ]
                beyond = ((statistics.lengths[1, q] - mean.abs()) * key.abs()).sum() * factor
                own.append(sum(waves) / 4 + beyond)
            column = torch.stack(own)
            heads.append((column - column.mean()) / column.std(correction=0))
        both = torch.stack(heads)
        close(scores[s, h, :n], both.amax(dim=0) if reduction == "max" else both.mean(dim=0), atol=1e-10)


@pytest.mark.parametrize("age_normalized", [False, True])
@pytest.mark.parametrize("value_weighted", [False, True])
def test_h2o_adds_up_over_a_decode_with_evictions(age_normalized: bool, value_weighted: bool) -> None:
    """A slot of 14 entries, 3 prompt tokens and 26 steps, against a table of who attended to whom."""
    g = torch.Generator().manual_seed(0)
    compressor = H2O(**SIZES, age_normalized=age_normalized, value_weighted=value_weighted)
    keys, values = torch.randn(2, 29, DIM, generator=g, dtype=torch.float64)
    held: list[int] = []
    mass = torch.zeros(1, 1, 14)
    table = torch.zeros(29, dtype=torch.float64)
    num_compressions = 0
    for step in range(29):
        held.append(step)
        shares = torch.zeros(14)
        shares[: len(held)] = torch.rand(len(held), generator=g).softmax(dim=0)
        table[held] += shares[: len(held)].double()
        layer = one_slot(keys, values, held, mass)
        compressor.update_state(update_of(layer, shares.view(1, 1, 1, 14)))
        if len(held) == 14:
            expected = table[held].clone()
            if age_normalized:
                expected /= torch.tensor([step - at + 1 for at in held])
            if value_weighted:
                expected *= values[held].norm(dim=-1)
            close(compressor.score(layer)[0, 0].double(), expected, atol=1e-5)
            kept = compressor.select(layer)[0, 0]
            mass = torch.zeros(1, 1, 14)
            mass[0, 0, : int(kept.sum())] = layer.state["mass"][0, 0, kept]
            held = [at for at, stays in zip(held, kept.tolist(), strict=True) if stays]
            num_compressions += 1
    assert num_compressions == 4
    assert held[:2] == [0, 1]


def one_slot(keys: Tensor, values: Tensor, held: list[int], mass: Tensor) -> LayerState:
    dense = torch.full((2, 1, 1, 14, DIM), torch.nan, dtype=torch.float64)
    dense[0, 0, 0, : len(held)], dense[1, 0, 0, : len(held)] = keys[held], values[held]
    positions = torch.full((1, 1, 14), -1)
    positions[0, 0, : len(held)] = torch.tensor(held)
    layer = whole_prompt(dense[0], dense[1], torch.zeros(1, 1, 14, DIM), 0)
    valid = positions >= 0
    return replace(layer, positions=positions, valid=valid, lengths=valid.sum(dim=-1), state={"mass": mass})


def test_running_sums_need_update_state() -> None:
    with pytest.raises(NotImplementedError, match="KNorm has state_fields, so it needs update_state"):
        KNorm(20).update_state(update_of(layer_of(), torch.zeros(1, 2, 1, 14)))


@pytest.mark.parametrize("garbage", [0.0, math.nan, 1e30])
@pytest.mark.parametrize("num_queries", [1, 5])
def test_it_is_the_softmax_over_what_each_query_sees(num_queries: int, garbage: float) -> None:
    layer = fill_free_memory(random_layer(num_queries=num_queries), garbage)
    found = recent_attention(layer)
    slots, heads, entries = layer.valid.shape
    assert found.shape == (slots, heads, layer.group_size, num_queries, entries)
    absent = 0
    for s in range(slots):
        for head in range(heads * layer.group_size):
            h, g = divmod(head, layer.group_size)
            for a in range(num_queries):
                at = int(layer.query_positions[s, a])
                seen = [n for n in range(entries) if layer.valid[s, h, n] and int(layer.positions[s, h, n]) <= at]
                want = torch.zeros(entries, dtype=torch.float64)
                query = layer.queries[s, head, a].double()
                logits = [float(query @ layer.keys[s, h, n].double()) * layer.scale for n in seen]
                total = sum(map(math.exp, logits))
                for n, logit in zip(seen, logits, strict=True):
                    want[n] = math.exp(logit) / total
                absent += at < 0
                torch.testing.assert_close(found[s, h, g, a].double(), want, atol=1e-6, rtol=1e-5)
    assert absent or num_queries == 1, "every place of the ring was taken"


def test_it_is_at_least_in_float32() -> None:
    assert recent_attention(random_layer(dtype=torch.bfloat16)).dtype == torch.float32
    assert recent_attention(random_layer(dtype=torch.float64)).dtype == torch.float64
