"""Statistics of a model's queries for calibrated methods, gathered from its own text and kept in a file."""

from __future__ import annotations

from functools import cached_property, partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparse_rl_lightning.compressors.rotary import pair_lengths, rotate
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import output_file, write_files
from sparse_rl_lightning.records import LayerState

COMMAND = "sparse-rl statistics POLICY TEXTS.jsonl"
"""The command that writes the file."""


class QueryMoments:
    """Sums over the queries of one layer; sums of several batches add up to the layer's statistics.

    Queries (B, Hq, T, D) are those before the rotary positions (B, T) are applied; ``mask`` (B, T), bool, says which
    count.
    """

    def __init__(self, queries: Tensor, positions: Tensor, mask: Tensor, inv_freq: Tensor) -> None:
        shown = mask[:, None, :, None]
        still = queries.to(torch.float64).masked_fill(~shown, 0.0)  # sums over very many numbers
        turned = rotate(still, positions[:, None], inv_freq)
        self.count = mask.sum()
        self.mean = still.sum(dim=(0, 2))  # (Hq, D), like the next three not yet divided by the count
        self.lengths = pair_lengths(still).sum(dim=(0, 2))  # (Hq, D / 2)
        self.turned_mean = turned.sum(dim=(0, 2))  # (Hq, D)
        self.turned_square = torch.einsum("bhti,bhtj->hij", turned, turned)  # (Hq, D, D)

    def add(self, moments: QueryMoments) -> QueryMoments:
        """Add the queries of another batch."""
        for name, total in vars(self).items():
            total += getattr(moments, name)
        return self

    def main_directions(self, num_kv_heads: int) -> Tensor:
        """Main direction of the rotated queries of each KV head (H, D), the filters of Q-Filters (arXiv 2503.02812).

        For each query head this is the first right singular vector of its queries, of length 1 and oriented so that the
        queries lie on its positive side; then the mean over the heads of a group.
        """
        main = torch.linalg.eigh(self.turned_square).eigenvectors[..., -1]  # eigenvalues come in ascending order
        side = (main * self.turned_mean).sum(dim=-1, keepdim=True)
        oriented = main * torch.where(side < 0, -1.0, 1.0)
        directions: Tensor = oriented.view(num_kv_heads, -1, main.shape[-1]).mean(dim=1)
        return directions


class QueryStatistics:
    """Statistics of a model's queries for calibrated compressors; ``sparse-rl statistics`` writes them to a file.

    Args:
        mean: Mean query (L, Hq, D) before the rotary positions are applied.
        lengths: Mean length (L, Hq, D / 2) of its pairs of channels.
        filters: Main direction (L, H, D) of the rotated queries of each KV head.
    """

    def __init__(self, mean: Tensor, lengths: Tensor, filters: Tensor) -> None:
        assert mean.dim() == lengths.dim() == filters.dim() == 3, (mean.shape, lengths.shape, filters.shape)
        self.mean = mean
        self.lengths = lengths
        self.filters = filters

    @cached_property
    def _copies(self) -> dict[torch.device, list[Tensor]]:
        """By device: a layer's numbers are looked up without a copy; they change no fingerprint."""
        return {}

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "lengths": self.lengths, "filters": self.filters}

    @classmethod
    def of_layers(cls, moments: list[QueryMoments], num_kv_heads: int) -> QueryStatistics:
        """Statistics from the sums of each layer."""
        return cls(
            mean=torch.stack([m.mean / m.count for m in moments]).float(),
            lengths=torch.stack([m.lengths / m.count for m in moments]).float(),
            filters=torch.stack([m.main_directions(num_kv_heads) for m in moments]).float(),
        )

    @classmethod
    def load(cls, path: str | Path, owner: str) -> QueryStatistics:
        """Read a file that :meth:`save` wrote, for the class ``owner``; the error has the command that writes one."""
        advice = f"Make it with: {COMMAND} {path}"
        if not Path(path).expanduser().is_file():
            raise UserError(f"{owner}: there is no file statistics={str(path)!r}. {advice}")
        try:
            tensors = load_file(Path(path).expanduser())
            if not all(tensor.is_floating_point() for tensor in tensors.values()):
                raise TypeError("they are means")
            return cls(**tensors)
        except (SafetensorError, TypeError) as error:
            raise UserError(f"{owner}: statistics={str(path)!r} does not hold query statistics. {advice}") from error

    def save(self, path: str | Path) -> None:
        """Write a safetensors file."""
        tensors = {name: tensor.contiguous().cpu() for name, tensor in self._tensors.items()}
        write_files({output_file(path, "path"): partial(save_file, tensors)})

    def layer(self, layer: LayerState, owner: str) -> tuple[Tensor, Tensor, Tensor]:
        """Mean (Hq, D), lengths (Hq, D / 2) and filters (H, D) of one layer, as float32 on its device."""
        num_layers, num_heads, dim = self.mean.shape
        _, num_kv_heads, _, key_dim = layer.keys.shape
        sizes = (num_heads, self.filters.shape[1], dim)
        wanted = (layer.queries.shape[1], num_kv_heads, key_dim)
        if sizes != wanted or layer.layer_index >= num_layers:
            raise UserError(
                f"{owner}: the statistics are of a model with {num_layers} layers of (query heads, KV heads, head "
                f"size) = {sizes}, but layer {layer.layer_index} of this one has {wanted}. Make them for this model "
                f"with: {COMMAND} STATISTICS.safetensors"
            )
        device = layer.keys.device
        if device not in self._copies:
            self._copies[device] = [tensor.to(device) for tensor in self._tensors.values()]
        mean, lengths, filters = (tensor[layer.layer_index] for tensor in self._copies[device])
        return mean, lengths, filters

    def __repr__(self) -> str:
        return f"QueryStatistics(layers={self.mean.shape[0]})"


def resolve_statistics(statistics: str | QueryStatistics, owner: str) -> QueryStatistics:
    """The statistics themselves, read from the file if a path is given."""
    return statistics if isinstance(statistics, QueryStatistics) else QueryStatistics.load(statistics, owner)
