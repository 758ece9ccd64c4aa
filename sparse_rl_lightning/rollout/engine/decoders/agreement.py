"""Agreement: a model's own forward pass against the rollout's, once before the first rollout.

Configurations do not show everything that a layer does. So a short text runs through both: through the model with its
own attention, and through the decoder in two pieces, the second of which sees the first in a cache. The experts of both
are those that the first chose: between two that nearly tie, rounding would decide.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.cache.linear_states import LinearStates, Recur, recur_pieces, recur_rows
from sparse_rl_lightning.compressors.rotary import rotate
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.append import QKTransform
from sparse_rl_lightning.ops.attention import causal_attention
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.policies.modes import exact_angles, rounds_products
from sparse_rl_lightning.policies.routing import Routers, recording, replayed_routing
from sparse_rl_lightning.policies.support import refusal
from sparse_rl_lightning.policies.windows import layer_windows
from sparse_rl_lightning.rollout.engine.decoders.base import ROW_MULTIPLE, Decoder

EXACT, ROUNDED = 1e-3, 0.1
"""Mean difference of log-probabilities over their deviation: in float32 and float64, and with rounded products."""


class _UncompressedAttention:
    """Attention over everything that was fed so far, which keeps keys, values and the order of the layers."""

    def __init__(self, geometry: CacheGeometry, windows: tuple[int, ...]) -> None:
        self.geometry, self.windows = geometry, windows  # the model's, which a short cache need not know
        self.layers: list[int] = []
        self.entries: dict[int, tuple[Tensor, Tensor]] = {}
        if geometry.linear is not None:
            states = LinearStates.allocate(geometry.linear, 1, geometry.device)
            self.recur: Recur = partial(recur_pieces, states, [(0, ROW_MULTIPLE)])

    def __call__(
        self, layer: int, projected: Tensor, transform: QKTransform, hidden: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        query, key, value = transform.split(projected, self.geometry.num_kv_heads)
        if layer in self.entries:
            key, value = (torch.cat(both) for both in zip(self.entries[layer], (key, value), strict=True))
        self.entries[layer] = key, value
        self.layers.append(layer)
        windows = self.windows
        return causal_attention(query, key, value, self.geometry.scale, windows[layer] if windows else 0, sinks)


@torch.no_grad()
def check_agreement(model: PreTrainedModel, decoder: Decoder, geometry: CacheGeometry) -> None:
    """Refuse a model whose log-probabilities differ between its own forward pass and the decoder's.

    Raises:
        ValueError: If they do, or attention is not called once per layer in their order; the error has the difference.
    """
    size, device = 2 * ROW_MULTIPLE, geometry.device
    vocabulary = int(model.config.vocab_size)
    ids = torch.arange(1, size + 1, device=device) * 7919 % vocabulary  # a prime: tokens from everywhere
    positions = torch.arange(size, device=device)
    with exact_angles(model):
        expected, experts = _model_logprobs(model, ids[None])
    attend = _UncompressedAttention(geometry, layer_windows(model.config))
    decoder.reach(size)
    hidden = []
    for piece in positions.chunk(2):
        with nullcontext() if experts is None else replayed_routing(model, experts[:, piece]):
            hidden.append(decoder(ids[piece], piece, attend))
    layers = list(range(geometry.depth))
    if attend.layers != 2 * layers:
        called = ", ".join(map(str, attend.layers[: len(attend.layers) // 2])) or "no"
        raise UserError(refusal(model, f"its forward pass called attention in the layers {called}, not in {layers}"))
    ours = decoder.logits(torch.cat(hidden)).float().log_softmax(-1)
    apart = (ours - expected).abs()
    is_rounded = geometry.dtype.itemsize == 2 or (geometry.dtype == torch.float32 and rounds_products(device))
    limit = ROUNDED if is_rounded else EXACT
    if not float(apart.mean()) <= limit * float(expected.std()):
        raise UserError(
            refusal(
                model,
                f"on a text of {size} tokens the log-probabilities of the rollout differ from those of its own forward "
                f"pass by {float(apart.mean()):.2g} in the mean and {float(apart.max()):.2g} at most, so its "
                "layers do something that rollouts do not reproduce",
            )
        )


def _model_logprobs(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities (T, V) of the model's own pass over (1, T), and its experts (1, T, L, K) if those are known."""
    with suppress(UserError, KeyError):  # no routers, or such as cannot be recorded
        with recording(Routers(model)) as recorded:
            logits = model(input_ids=ids, use_cache=False).logits
        return logits[0].float().log_softmax(-1), recorded()[None]
    return model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1), None


class _IsolatedRows:
    """Attention of rows that each see themselves alone, which keeps the keys (R, H, D) of every layer."""

    def __init__(self, geometry: CacheGeometry, positions: Tensor) -> None:
        self.geometry, self.keys = geometry, dict[int, Tensor]()
        if geometry.linear is not None:
            states = LinearStates.allocate(geometry.linear, len(positions), geometry.device)
            self.recur: Recur = partial(recur_rows, states, positions)

    def __call__(
        self, layer: int, projected: Tensor, transform: QKTransform, hidden: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        g = self.geometry
        _, key, value = transform.split(projected, g.num_kv_heads)
        self.keys[layer] = key.float()
        return value.repeat_interleave(g.num_heads // g.num_kv_heads, dim=1)


@torch.no_grad()
def layers_turned_otherwise(decoder: Decoder, geometry: CacheGeometry) -> list[int]:
    """The layers of full attention whose keys are not rotated by halves with the model's frequencies.

    They may be rotated not at all, or in other pairs.

    Rows that each attend to themselves alone differ in nothing but their rotation.
    """
    positions = torch.arange(ROW_MULTIPLE, device=geometry.device)
    decoder.reach(ROW_MULTIPLE)
    isolated = _IsolatedRows(geometry, positions)
    decoder(torch.ones_like(positions), positions, isolated)
    deviating = []
    for layer in geometry.full_layers:
        keys = isolated.keys[layer]
        turned = rotate(keys[:1], positions[:, None], geometry.inv_freq.float())
        if float((turned - keys).norm()) > 0.05 * float((keys - keys[:1]).norm().clamp(min=1e-3 * keys.norm())):
            deviating.append(layer)
    return deviating
