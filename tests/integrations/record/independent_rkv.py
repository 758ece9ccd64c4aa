"""R-KV by its paper (arXiv 2505.24133), as a program of its own: transformers alone, nothing of this library.

As in engines with paged memory all heads of a layer keep the same tokens. It reports what such an engine knows: which
positions every layer kept at every event.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

LAMBDA, OBSERVED, POOL, THRESHOLD = 0.1, 4, 3, 0.5


@dataclass
class Sampled:
    """One completion, and the positions that each event left in a layer."""

    prompt: list[int]
    completion: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    events: list[tuple[int, int, list[int]]] = field(default_factory=list)  # query, layer, kept positions


@torch.no_grad()
def sample(model: PreTrainedModel, prompt: list[int], budget: int, buffer: int, length: int, seed: int) -> Sampled:
    """Draw a completion from a cache that is cut to ``budget`` tokens whenever ``buffer`` more have been added."""
    generator = torch.Generator().manual_seed(seed)
    found, cache = Sampled(prompt), DynamicCache()
    layers = model.config.num_hidden_layers
    held = [list(range(len(prompt))) for _ in range(layers)]
    rows: list[list[Tensor]] = [[] for _ in range(layers)]  # attention of the latest queries, heads averaged
    ids, first = torch.tensor([prompt]), 0
    while True:
        positions = torch.arange(first, first + ids.shape[1])[None]
        mask = torch.zeros(1, 1, ids.shape[1], len(held[0]), dtype=model.dtype)
        if ids.shape[1] > 1:
            mask += torch.full((ids.shape[1], ids.shape[1]), torch.finfo(model.dtype).min).triu(1)
        out = model(
            input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, attention_mask=mask,
            output_attentions=True,
        )  # fmt: skip
        for layer, weights in enumerate(out.attentions):
            rows[layer] = (rows[layer] + list(weights[0].mean(0)))[-OBSERVED:]
        logprobs = out.logits[0, -1].float().log_softmax(-1)
        token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
        found.completion.append(token)
        found.logprobs.append(float(logprobs[token]))
        if len(found.completion) == length:
            return found
        query = len(prompt) + len(found.completion) - 1  # of the token just drawn, which is fed next
        for layer in range(layers):
            if len(held[layer]) >= budget + buffer:
                compress(cache, layer, held, rows, budget)
                found.events.append((query, layer, list(held[layer])))
            held[layer].append(query)
        ids, first = torch.tensor([[token]]), query


def compress(cache: DynamicCache, layer: int, held: list[list[int]], rows: list[list[Tensor]], budget: int) -> None:
    """Keep the ``budget`` tokens of a layer that are attended to and unlike others, the latest among them."""
    own, count = cache.layers[layer], len(held[layer])
    observed = torch.stack([F.pad(row, (0, count - len(row))) for row in rows[layer]])
    importance = F.max_pool1d(observed.mean(0)[None], POOL, 1, POOL // 2)[0]
    keys = F.normalize(own.keys[0].float(), dim=-1)
    alike = (keys @ keys.transpose(1, 2)).mean(0).fill_diagonal_(0)
    redundancy = alike.masked_fill(alike < THRESHOLD, 0).mean(0).softmax(0)
    score = LAMBDA * importance - (1 - LAMBDA) * redundancy
    score[-OBSERVED:] = torch.inf
    keep = score.topk(budget).indices.sort().values
    own.keys, own.values = own.keys[:, :, keep], own.values[:, :, keep]
    rows[layer] = [row[keep[keep < len(row)]] for row in rows[layer]]
    held[layer] = [held[layer][i] for i in keep.tolist()]
