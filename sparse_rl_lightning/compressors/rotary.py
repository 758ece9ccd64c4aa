"""Rotary positions as complex numbers: rotations of queries back, ahead, and to the mean of many positions.

Channels i and i + r/2 are real and imaginary part of one number (transformers' ``rotate_half``), which position p
multiplies by exp(i * p * inv_freq). Channels from r on are not rotated; most models have r = D.
"""

from __future__ import annotations

import torch
from torch import Tensor


def turn(vectors: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Multiply the pairs of the first r channels of vectors (..., D) by ``cosine + i sine``, (..., r / 2)."""
    width = 2 * cosine.shape[-1]
    real, imaginary = vectors[..., :width].chunk(2, dim=-1)
    turned = [(real * cosine).sub_(imaginary * sine), (imaginary * cosine).add_(real * sine)]
    return torch.cat([*turned, vectors[..., width:].expand(*turned[0].shape[:-1], -1)], dim=-1)


def angles(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """The angles (..., r / 2) of positions (...), in the type of ``inv_freq``."""
    return positions.to(inv_freq.dtype).unsqueeze(-1) * inv_freq


def rotate(vectors: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotate vectors (..., D) by their positions, which broadcast to (...); negative ones rotate back."""
    angle = angles(positions, inv_freq.to(vectors.dtype))
    return turn(vectors, angle.cos(), angle.sin())


def rotate_to_mean(vectors: Tensor, position: Tensor, offsets: Tensor, inv_freq: Tensor) -> Tensor:
    """The mean (..., D) of vectors rotated to ``position + offset`` over all offsets, at the cost of one rotation.

    Positions broadcast to (...), offsets are (O,). The mean is shorter than the vectors if the rotations disagree.
    """
    return turn(rotate(vectors, position, inv_freq), *mean_rotation(offsets, inv_freq.to(vectors.dtype)))


def mean_rotation(offsets: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """The means (r / 2) of cosine and sine over offsets (O,), to turn vectors by."""
    ahead = angles(offsets, inv_freq)
    return ahead.cos().mean(dim=0), ahead.sin().mean(dim=0)


def pair_lengths(vectors: Tensor) -> Tensor:
    """The length (..., D / 2) of each pair of channels, which no rotation changes."""
    real, imaginary = vectors.chunk(2, dim=-1)
    return torch.hypot(real, imaginary)
