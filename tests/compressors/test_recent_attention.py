"""``recent_attention`` against float64 loops over heads, queries and entries."""

from __future__ import annotations

import math

import pytest
import torch

from sparse_rl_lightning.compressors.attention import recent_attention
from sparse_rl_lightning.testing.layers import fill_free_memory, random_layer


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
