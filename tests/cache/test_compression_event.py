"""A compression event keeps what every layer, head and slot would keep alone, to the last entry, and moves no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import sparse_rl_lightning.compressors as c
from sparse_rl_lightning import ops
from sparse_rl_lightning.budgets import Adaptive, BudgetRule, LengthSchedule, Pyramid
from sparse_rl_lightning.cache import states
from sparse_rl_lightning.cache.compression import Compression
from sparse_rl_lightning.cache.slots import CacheSize, SlotCache
from sparse_rl_lightning.compressors import RKV, Compressor, SnapKV
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.records import NEVER, LayerState

SIZES: dict[str, Any] = {"budget": 20, "buffer": 6, "num_sinks": 2, "window": 4}
LAYERS, HEADS, GROUP, DIM, SLOTS, STEPS = 3, 2, 3, 16, 6, 44


def statistics() -> Any:
    g = torch.Generator().manual_seed(5)
    mean = torch.randn(LAYERS, HEADS * GROUP, DIM, generator=g)
    filters = torch.randn(LAYERS, HEADS, DIM, generator=g)
    return c.QueryStatistics(mean, torch.rand(LAYERS, HEADS * GROUP, DIM // 2, generator=g) + 2, filters)


class ByLayer(Compressor):
    """A user's method that looks at the number of its layer, in Python."""

    num_queries = 0
    needs_layer_index = True

    def score(self, layer: LayerState) -> Tensor:
        sign = -1.0 if layer.layer_index % 2 else 1.0
        return sign * layer.values.float().masked_fill(~layer.valid.unsqueeze(-1), 0.0).square().sum(dim=-1)


class Undeclared(ByLayer):
    """The same without saying so."""

    needs_layer_index = False


class LargestValue(SnapKV):
    """A user's method that is derived from one of the library's and scores otherwise."""

    def score(self, layer: LayerState) -> Tensor:
        return layer.values.amax(dim=-1)


class FirstMore(BudgetRule):
    """A user's rule by which two layers are alike."""

    def layer_budgets(self, budget: int, num_layers: int, minimum: int) -> list[int]:
        return [budget + 2, *[budget - 1] * (num_layers - 1)]


COMPRESSORS: dict[str, Compressor] = {
    "rkv": RKV(**SIZES),
    "rkv, mean of the group": RKV(**SIZES, group_reduction="mean", pooling="avg", similarity_threshold=0.1),
    "snapkv": SnapKV(**SIZES),
    "snapkv, original": SnapKV(**SIZES, variant="original", kernel_size=5),
    "snapkv, mean": SnapKV(**SIZES, group_reduction="mean", pooling="none"),
    "streaming": c.StreamingLLM(**SIZES),
    "random": c.RandomEviction(**SIZES),
    "random attention": c.RandomAttention(**SIZES),
    "vase": c.VaSE(**SIZES),
    "snapkv, largest": SnapKV(**SIZES, aggregation="max_clamped"),
    "oldest turns": c.OldestTurns(**SIZES, protect_prompt=False),
    "knorm": c.KNorm(**SIZES),
    "keydiff": c.KeyDiff(**SIZES),
    "tova": c.TOVA(**SIZES),
    "h2o": c.H2O(**SIZES),
    "h2o, by age": c.H2O(**SIZES, age_normalized=True),
    "h2o, by value": c.H2O(**SIZES, age_normalized=True, value_weighted=True),
    "cur": c.CUR(**SIZES, local_window=4),
    "lagkv": c.LagKV(**SIZES, lag_size=5),
    "expected attention": c.ExpectedAttention(**SIZES, query_window=8, num_future=16),
    "qfilters": c.QFilters(**SIZES, statistics=statistics()),
    "triattention": c.TriAttention(**SIZES, statistics=statistics()),
    "combined": c.Combined([SnapKV(**SIZES), c.KNorm(**SIZES), c.H2O(**SIZES)], [2, 1, 1]),
    "combined over heads": c.Combined([SnapKV(**SIZES), c.RandomEviction(**SIZES)], across_heads="max"),
    "smoothed": c.Smoothed(SnapKV(**SIZES)),
    "by layer": ByLayer(**SIZES),
    "by layer, some of them alike": ByLayer(**SIZES, budget_rule=FirstMore()),
    "derived": LargestValue(**SIZES),
    "protected": SnapKV(**SIZES, protect_prompt=True, protect_token_ids=[3]),
    "protected, rkv": RKV(**SIZES, protect_token_ids=[3, 4]),
    "schedule": RKV(LengthSchedule([0, 26, 38], [14, 20, 16]), buffer=6, num_sinks=2, window=4),
    "pyramid": SnapKV(**SIZES, budget_rule=Pyramid(beta=2)),
    "pyramid, rkv": RKV(**SIZES, budget_rule=Pyramid(beta=3)),
    "adaptive": SnapKV(**SIZES, budget_rule=Adaptive()),
    "adaptive pyramid, rkv": RKV(**SIZES, budget_rule=Adaptive(layers=Pyramid(beta=2))),
    "adaptive, h2o": c.H2O(**SIZES, budget_rule=Adaptive(floor=8)),
    "adaptive, tova": c.TOVA(**SIZES, budget_rule=Adaptive()),
    "adaptive schedule": SnapKV(
        LengthSchedule([0, 30], [14, 20]), buffer=6, num_sinks=2, window=4, budget_rule=Adaptive()
    ),
}


def geometry(dtype: torch.dtype, kv_dtype: torch.dtype) -> CacheGeometry:
    inv_freq = 10000.0 ** -(torch.arange(0, DIM, 2) / DIM)
    return CacheGeometry(
        LAYERS, HEADS * GROUP, HEADS, DIM, DIM**-0.5, inv_freq, 1.0, dtype, kv_dtype, torch.device("cpu")
    )


class Slots:
    """A cache in which every slot is fed random tokens, as a rollout does."""

    def __init__(self, compressor: Compressor, dtype: torch.dtype, kv_dtype: torch.dtype, seed: int) -> None:
        self.g, self.geometry = torch.Generator().manual_seed(seed), geometry(dtype, kv_dtype)
        self.compression = Compression(compressor, LAYERS)
        self.trigger = self.compression.trigger
        capacities = self.trigger.capacities(12, 200)
        size = CacheSize.of(compressor, self.geometry, SLOTS, capacities, 200, 200)
        self.cache: SlotCache = size.allocate(self.geometry)
        # of different lengths, so that they are due at different steps; some come together
        self.fed = [5, 9, 5, 7, 9, 5]
        self.evicted = [(0,) * LAYERS] * SLOTS
        self.room = [self.trigger.room(0, (0,) * LAYERS) for _ in range(SLOTS)]
        cache = self.cache
        cache.tokens.copy_(torch.randint(200, cache.tokens.shape, generator=self.g))
        cache.prompt_lengths[:-1] = torch.tensor(self.fed)
        for keys in (cache.sequence_keys, cache.prompt_keys):
            keys.copy_(torch.randint(-(2**62), 2**62, keys.shape, generator=self.g))
        for slot in range(SLOTS):
            for _ in range(self.fed[slot]):
                self.feed([slot])
        self.room = [self.trigger.room(0, (0,) * LAYERS) - fed for fed in self.fed]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g).to(self.geometry.query_dtype)

    def feed(self, slots: list[int]) -> None:
        """Append a random token to these slots, and write numbers for it if the compressor has any."""
        cache, chosen, n = self.cache, torch.tensor(slots), len(slots)
        for layer, pools in enumerate(cache.layers):
            projected = torch.cat([self.normal(n, h, DIM) for h in (HEADS * GROUP, HEADS, HEADS)], dim=1)
            ops.append(pools, chosen, cache.seen[:-1], projected, cache.queries[layer])
            newest = pools.offsets[chosen] + pools.lengths[chosen] - 1
            cache.state_pool[newest] = torch.rand(n, HEADS, cache.state_pool.shape[1], generator=self.g)
        cache.seen[chosen] += 1
        cache.record_held(chosen)
        cache.head_state[:, chosen] = torch.rand(cache.head_state[:, chosen].shape, generator=self.g)

    def step(self) -> list[int]:
        """Feed every slot a token; returns the slots that are due, with their room afterwards set."""
        self.feed(list(range(SLOTS)))
        due = []
        for slot in range(SLOTS):
            self.fed[slot] += 1
            self.room[slot] -= 1
            if self.room[slot] == 0:
                due.append(slot)
                self.evicted[slot] = self.trigger.evicted(self.fed[slot], self.evicted[slot])
                self.room[slot] = self.trigger.room(self.fed[slot], self.evicted[slot])
        return due

    def due(self) -> list[int]:
        """Feed until some slots are due."""
        while not (due := self.step()):
            pass
        return due

    def compress(self, due: list[int]) -> None:
        self.compression.compress(self.cache, due, [self.fed[s] for s in due], [self.room[s] for s in due])

    def rows(self, layer: int, slot: int, head: int) -> Tensor:
        """The pool rows of a head's live entries."""
        start = int(self.cache.pools.offsets[layer, slot, head])
        return torch.arange(start, start + int(self.cache.lengths[layer, slot, head]))

    def content(self, layer: int, slot: int, head: int) -> list[Tensor]:
        """Positions, keys, values and numbers of a head's entries."""
        rows, cache = self.rows(layer, slot, head), self.cache
        pools = [cache.pools.positions, cache.pools.keys, cache.pools.values, cache.state_pool]
        return [pool[rows].clone() for pool in pools]

    def scored(self, layer: int, slot: int, head: int) -> list[Tensor]:
        """The content with what a compression event writes: its scores, where a compressor keeps them."""
        content, compressor = self.content(layer, slot, head), self.compression.compressor
        if compressor.score_field:
            scores = compressor.score(self.state(layer, slot))[0, head, : len(content[0])]
            content[3][:, compressor.state_fields.index(compressor.score_field)] = scores
        return content

    def state(self, layer: int, slot: int) -> LayerState:
        """One layer of one slot, as a compressor sees it: every entry copied by itself."""
        cache, size = self.cache, self.cache.size
        heads = [self.content(layer, slot, head) for head in range(HEADS)]
        width = max(len(head[0]) for head in heads)

        def padded(part: int) -> Tensor:
            out = torch.zeros(1, HEADS, width, *heads[0][part].shape[1:], dtype=heads[0][part].dtype)
            for head, own in enumerate(heads):
                out[0, head, : len(own[part])] = own[part]
            return out

        positions, lengths = padded(0).long(), cache.lengths[layer, slot][None]
        valid = torch.arange(width) < lengths.unsqueeze(-1)
        seen, count = int(cache.seen[slot]), size.num_queries
        newest = {position % count: position for position in range(max(0, seen - count), seen)} if count else {}
        names = dict(zip(size.state_fields, padded(3).unbind(-1), strict=True))
        kind = self.geometry.query_dtype
        return LayerState(
            padded(1).to(kind), padded(2).to(kind), valid, positions, lengths, cache.tokens[slot][positions],
            cache.prompt_lengths[slot][None], cache.queries[layer, slot][None],
            torch.tensor([[newest.get(place, -1) for place in range(count)]], dtype=torch.int64),
            cache.sequence_keys[slot][None], cache.prompt_keys[slot][None], layer, self.geometry.scale,
            self.geometry.inv_freq, self.geometry.attention_scaling, names, {},
        )  # fmt: skip

    def chosen(self, slot: int) -> Iterator[tuple[int, int, Tensor]]:
        """Layer, head and indices of the entries that stay, each layer of the slot asked by itself."""
        compressor = self.compression.compressor
        for layer, budget in enumerate(self.trigger.budgets(self.fed[slot])):
            keep = compressor.select(self.state(layer, slot), budget)[0]
            for head in range(HEADS):
                yield layer, head, keep[head].nonzero().flatten()


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Bit by bit."""
    return all(torch.equal(a.float(), b.float()) for a, b in zip(one, other, strict=True))


def deaths(cache: SlotCache) -> Tensor:
    """The death steps (L, S, H, T) of all slots."""
    return torch.stack([cache.deaths.of_slot(slot) for slot in range(SLOTS)], dim=1)


def run_events(compressor: Compressor, dtype: torch.dtype, kv_dtype: torch.dtype, seed: int) -> int:
    """Feed and compress, each event against slots and layers by themselves; returns how often heads were cut."""
    slots, cuts = Slots(compressor, dtype, kv_dtype, seed), 0
    cache = slots.cache
    for _ in range(STEPS):
        due = slots.step()
        if not due:
            continue
        want, death = {}, deaths(cache)
        for slot in due:
            for layer, head, kept in slots.chosen(slot):
                own = slots.scored(layer, slot, head)
                want[layer, slot, head] = [part[kept] for part in own]
                gone = torch.ones(len(own[0]), dtype=torch.bool).index_fill_(0, kept, False)
                death[layer, slot, head, own[0][gone].long()] = slots.fed[slot]
                cuts += bool(gone.any())
        for layer in range(LAYERS):
            for slot in set(range(SLOTS)) - set(due):
                for head in range(HEADS):
                    want[layer, slot, head] = slots.content(layer, slot, head)
        slots.compress(due)
        for (layer, slot, head), entries in want.items():
            assert same(slots.content(layer, slot, head), entries), (layer, slot, head)
        assert torch.equal(deaths(cache), death)
        for slot in due:
            assert cache.held[slot, slots.fed[slot] - 1] == cache.lengths[:, slot].sum()
    assert (deaths(cache) != NEVER).any()
    return cuts


@pytest.mark.thinned(3)
@pytest.mark.filterwarnings("ignore:.*shrinks with length:UserWarning")
@pytest.mark.parametrize("name", COMPRESSORS)
def test_an_event_keeps_what_each_layer_and_slot_keeps_alone(name: str) -> None:
    assert run_events(COMPRESSORS[name], torch.float32, torch.float32, seed=1) >= 50


@pytest.mark.thinned(3)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["rkv", "tova", "h2o, by value", "keydiff", "knorm", "random", "cur", "adaptive"])
def test_types_of_the_cache(name: str, kv_dtype: torch.dtype) -> None:
    dtype = torch.bfloat16 if kv_dtype == torch.float8_e4m3fn else kv_dtype
    assert run_events(COMPRESSORS[name], dtype, kv_dtype, seed=2) >= 50


@pytest.mark.thinned(3)
@pytest.mark.parametrize("nbytes", [1, 1500, 6000])
@pytest.mark.parametrize("name", ["protected", "lagkv", "pyramid", "adaptive", "schedule", "h2o, by age", "cur"])
def test_blocks_of_any_size(name: str, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(states.BLOCK_BYTES, "cpu", nbytes)
    assert run_events(COMPRESSORS[name], torch.float32, torch.float32, seed=6) >= 50


@pytest.mark.parametrize("method", [RKV(**SIZES, protect_prompt=True), SnapKV(**SIZES, budget_rule=Adaptive())])
def test_ops_score_where_tokens_are_protected_or_heads_differ(
    method: Compressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SnapKV, "score", None)  # whoever asks fails
    slots = Slots(method, torch.float32, torch.float32, seed=3)
    slots.compress(slots.due())
    assert (slots.cache.deaths.death != NEVER).any()


@pytest.mark.parametrize(
    ("method", "one_by_one"),
    [
        (LargestValue(**SIZES), False),
        (ByLayer(**SIZES), True),
        (c.Combined([LargestValue(**SIZES), c.KNorm(**SIZES)]), False),
        (c.Combined([LargestValue(**SIZES), ByLayer(**SIZES)]), True),
        (c.Combined([c.Combined([LargestValue(**SIZES), c.RandomEviction(**SIZES)])]), True),
    ],
    ids=str,
)
def test_layers_are_scored_together_unless_their_index_is_asked_for(
    method: Compressor, one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, proper = list[int](), type(method).score

    def score(self: Compressor, layer: LayerState) -> Tensor:
        if self is method:
            rows.append(len(layer.keys))
        return proper(self, layer)

    slots = Slots(method, torch.float32, torch.float32, seed=3)
    monkeypatch.setattr(type(method), "score", score)
    for _ in range(2):
        due = slots.due()
        rows.clear()
        slots.compress(due)
        assert rows == ([len(due)] * LAYERS if one_by_one else [LAYERS * len(due)])


MIXTURE = c.Combined([c.RandomEviction(**SIZES), Undeclared(**SIZES)])  # which is shown one layer at a time


@pytest.mark.parametrize("method", [Undeclared(**SIZES), MIXTURE], ids=str)
def test_an_index_that_is_read_undeclared_ends_with_the_class(method: Compressor) -> None:
    slots = Slots(method, torch.float32, torch.float32, seed=3)
    due = slots.due()
    with pytest.raises(ValueError, match=r"^Undeclared.score reads .*: write needs_layer_index = True in class Undecl"):
        slots.compress(due)


@pytest.mark.parametrize("name", ["rkv", "keydiff", "cur", "combined", "by layer"])
def test_scores_that_are_nan_name_their_layer(name: str) -> None:
    slots = Slots(COMPRESSORS[name], torch.float32, torch.float32, seed=4)
    due = slots.due()
    rows = slots.rows(2, due[0], 1)[5]
    slots.cache.key_pool[rows] = slots.cache.pools.values[rows] = torch.nan
    before = slots.cache.lengths.clone()
    with pytest.raises(ValueError, match=r"score returned NaN for live entries of layer 2. Their keys are NaN"):
        slots.compress(due)
    assert torch.equal(slots.cache.lengths, before)  # nothing has moved


class Greedy(Adaptive):
    """A user's rule that gives away more than there is."""

    def head_budgets(self, scores: Tensor, candidates: Tensor, layer_budget: int | Tensor, minimum: int) -> Tensor:
        budgets = super().head_budgets(scores, candidates, layer_budget, minimum)
        return budgets + (torch.arange(HEADS) == 0)


@pytest.mark.parametrize(
    ("method", "match"),
    [
        (SnapKV(**SIZES, protect_token_ids=list(range(200))), "26 entries of a head in layer 0 must stay"),
        (SnapKV(**SIZES, budget_rule=Greedy()), r"Greedy\(.*\) gives the heads of layer 0 41 entries, more than"),
    ],
)
def test_what_cannot_be_kept_is_refused(method: Compressor, match: str) -> None:
    slots = Slots(method, torch.float32, torch.float32, seed=5)
    due = slots.due()
    with pytest.raises(ValueError, match=match):
        slots.compress(due)
