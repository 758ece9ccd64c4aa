"""Keyed random numbers: SplitMix64 bit for bit, and good enough to sample tokens from."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparse_rl_lightning.ops.keyed_random import hash_bits, hash_uniform

MASK = 2**64 - 1
INT64 = st.integers(-(2**63), 2**63 - 1)


def splitmix_chain(*keys: int) -> int:
    """The hash in unbounded Python integers."""
    z = 0
    for key in keys:
        z = (z + (key + 1) * 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        z ^= z >> 31
    return z


def test_first_outputs_of_seed_zero_are_the_published_ones() -> None:
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert [bits & MASK for bits in hash_bits(torch.arange(4)).tolist()] == published
    torch.testing.assert_close(hash_uniform(0).item(), published[0] / 2**64, rtol=0, atol=2.0**-24)


@settings(max_examples=60, deadline=None)
@given(st.lists(INT64, min_size=1, max_size=4))
def test_bits_and_uniforms_equal_python_integers(keys: list[int]) -> None:
    expected = splitmix_chain(*keys)
    tensors = [torch.tensor([key]) for key in keys]
    assert hash_bits(*tensors).item() & MASK == expected
    assert hash_bits(*keys).item() & MASK == expected
    exact = ((expected >> 17) + 0.5) / 2**47  # 48 bits, exact in Python's float64
    assert hash_uniform(*tensors).item() == min(torch.tensor(exact).item(), 1 - 2.0**-24)


def test_same_number_in_any_batch_shape_and_integer_type() -> None:
    sequences, steps, tokens = torch.arange(7) * 10**12, torch.arange(7), torch.arange(33)
    together = hash_uniform(sequences[:, None], steps[:, None], tokens)
    assert together.shape == (7, 33)
    assert together.dtype == torch.float32
    for row in range(7):
        alone = hash_uniform(sequences[row], steps[row], tokens.to(torch.int32))
        assert torch.equal(together[row], alone)
    some = torch.tensor([30, 2, 2])
    assert torch.equal(together[:, some].t(), hash_uniform(sequences, steps, some[:, None]))


def test_keys_are_left_alone_and_their_order_matters() -> None:
    key = torch.arange(5)
    hash_uniform(key, key)
    assert torch.equal(key, torch.arange(5))
    assert not torch.equal(hash_uniform(key, 7), hash_uniform(7, key))
    assert hash_bits(torch.arange(1000)[:, None], torch.arange(1000)).unique().numel() == 10**6


def key_with_bits(bits: int) -> int:
    """The single key whose hash is ``bits``: the chain run backwards."""
    z = bits
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 0x9E3779B97F4A7C15)):
        z ^= (z >> shift) ^ (z >> 2 * shift)
        z = z * pow(factor, -1, 2**64) & MASK
    key = (z - 1) & MASK
    return key - 2**64 if key >> 63 else key


@pytest.mark.parametrize(
    ("bits", "uniform"),
    [(0, 2.0**-48), (2**17, 1.5 * 2.0**-47), (MASK, 1 - 2.0**-24), (MASK - 2**40 + 1, 1 - 2.0**-24), (2**63, 0.5)],
)
def test_never_zero_or_one_at_the_ends_of_the_range(bits: int, uniform: float) -> None:
    key = key_with_bits(bits)
    assert hash_bits(key).item() & MASK == bits
    assert hash_uniform(key).item() == uniform


def streams(kind: str) -> Tensor:
    """2**18 numbers whose keys are consecutive in one place or the other."""
    n, key = 2**18, torch.arange(2**18)
    return {
        "token": lambda: hash_uniform(123, 45, key),
        "sequence": lambda: hash_uniform(key, 0, 0),
        "step": lambda: hash_uniform(9, key, 1),
        "grid": lambda: hash_uniform(torch.arange(512)[:, None], torch.arange(n // 512)).flatten(),
        "high bits": lambda: hash_uniform(key << 45, 3),
    }[kind]()


@pytest.mark.parametrize("kind", ["token", "sequence", "step", "grid", "high bits"])
def test_uniform_and_uncorrelated(kind: str) -> None:
    u = streams(kind).double()
    n = u.numel()
    counts = torch.histc(u, bins=256, min=0.0, max=1.0)
    chi2 = ((counts - n / 256) ** 2 / (n / 256)).sum().item()
    assert abs(chi2 - 255) < 5 * math.sqrt(2 * 255)
    for lag in (1, 2, 512):
        r = torch.corrcoef(torch.stack([u[:-lag], u[lag:]]))[0, 1].item()
        assert abs(r) < 5 / math.sqrt(n)
    pairs = torch.histc(torch.floor(u[:-1] * 16) * 16 + torch.floor(u[1:] * 16), bins=256, min=0, max=256)
    chi2_pairs = ((pairs - n / 256) ** 2 / (n / 256)).sum().item()
    assert abs(chi2_pairs - 255) < 6 * math.sqrt(2 * 255)


def test_small_numbers_are_as_frequent_as_they_should_be() -> None:
    u = hash_uniform(torch.arange(2**11)[:, None], torch.arange(2**11))
    for threshold in (2.0**-10, 2.0**-16):
        expected = u.numel() * threshold
        assert abs((u < threshold).sum().item() - expected) < 5 * math.sqrt(expected)
    assert u[u < 2.0**-16].unique().numel() == (u < 2.0**-16).sum()


def test_gumbel_argmax_draws_from_the_softmax() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01])
    exponentials = -torch.log1p(-hash_uniform(torch.arange(2**17)[:, None], 5, torch.arange(5)))
    drawn = (probabilities / exponentials).argmax(dim=-1).bincount(minlength=5) / 2**17
    tolerance = 5 * (probabilities * (1 - probabilities) / 2**17).sqrt()
    assert bool(((drawn - probabilities).abs() < tolerance).all())
