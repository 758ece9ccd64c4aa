"""Teach the network of LearnedScore which tokens the full cache will attend to, on a policy's own texts.

From the shell, with the texts that ``sparse-rl statistics`` reads::

    sparse-rl statistics runs/warmup/policy predictions.jsonl learned_score.safetensors --method LearnedScore

What an entry is worth at a place of a text is the largest attention that a query head of its group pays it in the next
``horizon`` tokens. A network that foresees a score from a token's own states is KVzap's idea (arXiv 2601.07891, for
that of a repeated text). Fitted is the logarithm, less its mean over the entries of a head at a place: which of them
stay depends on nothing else.

Letters: B sequences, T tokens, H KV heads, Hq query heads, D head size, E hidden size, P places.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.calibration.watched import Seen, watch
from sparse_rl_lightning.compressors.learned_score import ScoreNetwork
from sparse_rl_lightning.errors import UserError, check_number
from sparse_rl_lightning.ops.keyed_random import seed_of
from sparse_rl_lightning.policies.geometry import CacheGeometry, model_sizes
from sparse_rl_lightning.policies.support import check_full_layers
from sparse_rl_lightning.replay.hooks import attention_inputs

LEAST = 1e-6
"""Attention below which entries are worth the same."""
HORIZON = 32
"""Tokens in whose attention an entry is judged, unless told otherwise."""


def future_attention(seen: Seen, lengths: Tensor, horizon: int) -> tuple[Tensor, Tensor]:
    """What every entry will be worth at some places, and which of these numbers mean something.

    Place p is behind the first (p + 1) * horizon tokens.

    Args:
        seen: A layer's attention.
        lengths: Tokens (B,) of each sequence; what follows is padding.
        horizon: Queries that look back at a place.

    Returns:
        The largest attention (B, H, P, T) of the queries from the place on, 0 where there is none; and a mask
        (B, P, T) of entries before the place of sequences that reach beyond it.
    """
    length, device = seen.query.shape[2], seen.query.device
    groups = torch.unflatten(seen.query, 1, (seen.key.shape[1], -1))  # (B, H, Hq / H, T, D)
    keys = seen.key[:, :, None].transpose(-1, -2)
    index, lengths = torch.arange(length, device=device), lengths.to(device)
    found, shown = [], []
    for place in range(horizon, length, horizon):
        rows = index[place : place + horizon]
        logits = (groups[..., rows, :] @ keys[..., : rows[-1] + 1]).float() * seen.scale
        logits = logits.masked_fill(index[: rows[-1] + 1] > rows[:, None], -torch.inf)
        total = logits.logsumexp(dim=-1, keepdim=True)
        if seen.sinks is not None:
            total = torch.logaddexp(total, seen.sinks.float().view(*groups.shape[1:3], 1, 1))
        padding = (rows >= lengths[:, None])[:, None, None, :, None]
        attention = (logits - total).exp()[..., :place].masked_fill(padding, 0)
        found.append(F.pad(attention.amax(dim=(2, 3)), (0, length - place)))
        shown.append((index < place) & (lengths > place)[:, None])
    return torch.stack(found, dim=2), torch.stack(shown, dim=1)


@dataclass
class Lesson:
    """What a network learns from the attention of some sequences.

    Args:
        network: The network, whose gradients are added to.
        geometry: Of the policy, for sequences of this length.
        lengths: Tokens (B,) of each sequence.
        horizon: As of :func:`imitate_attention`.
    """

    network: ScoreNetwork
    geometry: CacheGeometry
    lengths: Tensor
    horizon: int
    error: float = 0.0  # sum of squares that is left
    total: float = 0.0  # and of what there is to learn
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))

    def catch(self, hidden: Tensor) -> None:
        """Keep the input of the attention that runs next."""
        self.hidden = hidden

    def see(self, seen: Seen) -> None:
        """Add the gradient of a layer that is evicted from."""
        if self.geometry.window_of(seen.layer):
            return
        attention, shown = future_attention(seen, self.lengths, self.horizon)
        target = centered(attention.clamp(min=LEAST).log(), shown)
        with torch.enable_grad():
            worth = self.network(seen.layer, seen.key.float(), seen.value.float(), self.hidden.float())
            index = torch.arange(worth.shape[-1], device=worth.device)
            places = self.horizon * (1 + torch.arange(shown.shape[1], device=worth.device))
            age = torch.log1p((places[:, None] - 1 - index).clamp(min=0).float())
            predicted = worth[:, :, None] - self.network.recency[seen.layer][:, None, None] * age
            error = (centered(predicted, shown) - target).square().sum()
            (error / shown.sum().clamp(min=1)).backward()  # type: ignore[no-untyped-call]
        self.error += float(error.detach())
        self.total += float(target.square().sum())


def centered(numbers: Tensor, shown: Tensor) -> Tensor:
    """Numbers (B, H, P, T) less their mean over the entries that count (B, P, T) at each place; 0 elsewhere."""
    counts = shown[:, None]
    mean = (numbers * counts).sum(dim=-1, keepdim=True) / counts.sum(dim=-1, keepdim=True).clamp(min=1)
    return (numbers - mean) * counts


def imitate_attention(
    model: PreTrainedModel, sequences: Tensor, lengths: Tensor, *, width: int = 16, horizon: int = HORIZON,
    epochs: int = 4, batch_size: int = 4, learning_rate: float = 1e-2, seed: int | None = None,
) -> tuple[ScoreNetwork, float]:  # fmt: skip
    """A network for :class:`~sparse_rl_lightning.compressors.LearnedScore` that foresees the full cache's attention.

    Args:
        model: The policy, which stays as it is.
        sequences: Token ids (B, T), right-padded.
        lengths: Tokens (B,) of each sequence.
        width: Hidden units of the network.
        horizon: Tokens that an entry is kept for, in whose attention it is judged: about as many as the buffer.
        epochs: Passes over the sequences.
        batch_size: Sequences per forward pass, and per step of Adam.
        learning_rate: Of the first step; it falls linearly to 0.
        seed: Of the network's start, null for that of ``seed_everything``.

    Returns:
        The network, and the share of the variance of log attention within heads and places that it explained in the
        last epoch.

    Raises:
        ValueError: If rollouts do not support the model or windows leave nothing to evict from, no sequence is longer
            than ``horizon``, or an argument is out of range.
    """
    for name, value in {"width": width, "horizon": horizon, "epochs": epochs, "batch_size": batch_size}.items():
        check_number(name, value, least=1, owner="imitate_attention")
    check_number("learning_rate", learning_rate, above=0, owner="imitate_attention")
    longest = int(max(lengths.tolist(), default=0))
    if longest <= horizon:
        raise UserError(
            f"The longest text has {longest} tokens, and what LearnedScore learns from begins behind {horizon}: give "
            "longer texts, or imitate_attention a smaller horizon."
        )
    check_full_layers(model, longest, "LearnedScore")
    geometry = CacheGeometry.of(model, longest=longest)
    network = ScoreNetwork(model_sizes(model, geometry), width, seed_of(seed)).to(geometry.device)
    optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate)
    parts = torch.split((lengths > horizon).nonzero().flatten().cpu(), batch_size)
    fall = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=epochs * len(parts))
    explained = 0.0
    for _ in range(epochs):
        error = total = 0.0
        for rows in parts:
            lesson = Lesson(network, geometry, lengths[rows], horizon)
            ids = sequences[rows, : int(lengths[rows].max())].to(geometry.device)
            with attention_inputs(model, lesson.catch):
                watch(model, ids, lesson.see)
            optimizer.step()
            optimizer.zero_grad()
            fall.step()
            error, total = error + lesson.error, total + lesson.total
        explained = 1 - error / total if total else 0.0
    return network, explained
