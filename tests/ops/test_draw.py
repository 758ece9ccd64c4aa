"""draw: tokens, probabilities and truncation against float64 by hand, transformers' rules, and long-run frequencies.

Its random numbers, which are keyed: SplitMix64 bit for bit, and good enough to sample tokens from.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import EMULATED, dtypes_for, kernel, on_each_device
from torch import Tensor
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from sparse_rl_lightning import ops
from sparse_rl_lightning.ops.draw import CHUNK, Drawn, RowParams, keyed_uniform
from sparse_rl_lightning.ops.keyed_random import hash_bits, hash_uniform
from sparse_rl_lightning.ops.library import NATIVE_DTYPES, REFERENCES

SIZES = [1, 2, 31, 32, 33, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]
KINDS = ["normal", "ties", "forbidden", "flat", "wide", "spike"]
NO_ENDS = torch.empty(0, dtype=torch.int64)
rules = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 0, 1, 5, 700, 10**6]),
        "top_p": st.sampled_from([1.0, 1.0, 0.01, 0.5, 0.95, 0.9999]),
        "min_p": st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
    }
)


@pytest.fixture(autouse=True, scope="module")
def emulated_types() -> Iterator[None]:
    """Of the kernels that are there: emulated ones take float16 too."""
    with pytest.MonkeyPatch.context() as patch:
        if EMULATED:
            patch.setitem(NATIVE_DTYPES, "cpu", set(dtypes_for("cpu")))
        yield


def rows(size: int, kind: str, seed: int, count: int = 6) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, size, generator=g) * {"flat": 0.01, "wide": 9.0}.get(kind, 2.0)
    if kind == "ties":
        logits = logits.round()
    if kind == "spike":
        logits[:, seed % size] += 40.0
    if kind == "forbidden":
        logits[torch.rand(logits.shape, generator=g) < 0.3] = -torch.inf
        logits[:, -1] = 0.0
    return logits


def keys_of(logits: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    count = len(logits)
    return torch.arange(count) * 7919 + seed, torch.arange(count) % 5


def kept_by_hand(row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The allowed tokens of one row, one after the other, in float64."""
    order = sorted((i for i in range(len(row)) if row[i] > -math.inf), key=lambda i: (-float(row[i]), i))
    if 0 < top_k < len(row):
        order = [i for i in order if row[i] >= row[order[min(top_k, len(order)) - 1]]]
    best = float(row[order[0]])
    weights = {i: math.exp((float(row[i]) - best) / temperature) for i in order}
    if top_p < 1:
        total, before, kept = sum(weights.values()), 0.0, []
        for i in order:
            if before >= top_p * total:
                break
            kept.append(i)
            before += weights[i]
        order = kept
    least = best + temperature * math.log(min_p) if min_p else -math.inf
    return sorted(i for i in order if float(row[i]) >= least)


def check(logits: Tensor, drawn: Drawn, keys: Tensor, steps: Tensor, temperature: float, **rule: Any) -> None:
    """The token stands where the uniform number falls, up to the rounding of single exponentials."""
    uniform = keyed_uniform(keys, steps)
    for b, row in enumerate(logits.double()):
        kept = kept_by_hand(row, temperature, **rule)
        weights = torch.tensor([math.exp((float(row[i]) - float(row.max())) / temperature) for i in kept]).double()
        ends = weights.cumsum(0) / weights.sum()
        token = int(drawn.tokens[b])
        at = kept.index(token)
        assert float(ends[at] - weights[at] / weights.sum()) - 1e-6 <= float(uniform[b]) <= float(ends[at]) + 1e-6
        policy = (row / temperature).log_softmax(0)
        assert float(drawn.logprobs[b]) == pytest.approx(float(policy[token]), abs=2e-6, rel=2e-6)
        if drawn.behavior is not None:
            behavior = float((weights[at] / weights.sum()).log())
            assert float(drawn.behavior[b]) == pytest.approx(behavior, abs=2e-6, rel=2e-6)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(SIZES), st.sampled_from(KINDS), rules, st.integers(0, 99))
def test_token_and_probabilities_are_those_by_hand(size: int, kind: str, rule: dict[str, Any], seed: int) -> None:
    logits = rows(size, kind, seed)
    keys, steps = keys_of(logits, seed)
    check(logits, ops.draw(logits, keys, steps, **rule), keys, steps, **rule)
    # and of the reference, which computes in float64
    check(logits, ops.draw(logits.double(), keys, steps, **rule), keys, steps, **rule)


@on_each_device
@settings(deadline=None, max_examples=30)
@given(
    size=st.sampled_from(SIZES), kind=st.sampled_from(KINDS[:3]), rule=rules, dtype=st.integers(0, 2),
    top=st.sampled_from((4, 40, 90)),
)  # fmt: skip
def test_kernel_equals_reference(device: str, size: int, kind: str, rule: dict[str, Any], dtype: int, top: int) -> None:
    """Every type, with everything that can be asked for at once; more most likely tokens than there are chunks, too."""
    types = dtypes_for(device)
    logits = rows(size, kind, size).to(types[dtype % len(types)])
    keys, steps = keys_of(logits)
    other = rows(size, "normal", size + 1).to(logits.dtype)
    options = {**rule, "end_ids": torch.tensor([0, size // 2]), "min_length": 3, "top_logprobs": min(size, top)}
    if size <= 2:
        options["end_ids"] = NO_ENDS
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    for from_other in (False, True):
        source = other if from_other else None
        own = ops.draw(
            logits.to(device), keys.to(device), steps.to(device), **moved,
            drawn_from=None if source is None else source.to(device),
        )  # fmt: skip
        want = ops.draw(logits.double(), keys, steps, **options, drawn_from=None if source is None else source.double())
        same = own.tokens.cpu() == want.tokens
        assert same.float().mean() > 0.8  # a number may fall on the edge between two tokens
        for name in ("logprobs", "behavior"):
            mine, theirs = getattr(own, name).cpu().double()[same], getattr(want, name)[same]
            torch.testing.assert_close(mine, theirs, atol=5e-6, rtol=5e-6)
        assert torch.equal(own.topk_ids.cpu(), want.topk_ids)
        torch.testing.assert_close(own.topk_logprobs.cpu().double(), want.topk_logprobs, atol=5e-6, rtol=5e-6)


@pytest.mark.skipif(EMULATED, reason="a thread takes turns with 255 others")
def test_frequencies_are_the_probabilities_of_rare_tokens_too() -> None:
    """Of 300,000 draws; tokens of probability 4e-5 stand at the beginning, in the middle and at the end."""
    size, count = 2 * CHUNK + 100, 300_000
    row = torch.full((size,), -30.0)
    rare = [0, CHUNK - 1, CHUNK, size - 1]
    row[rare], row[5], row[CHUNK + 7] = math.log(4e-5), math.log(0.6), math.log(0.4 - 16e-5)
    counts = torch.zeros(size, dtype=torch.int64)
    for start in range(0, count, 50_000):
        keys = torch.arange(start, start + 50_000)
        tokens = ops.draw(row.expand(50_000, -1).contiguous(), keys, torch.full_like(keys, 3)).tokens
        counts += torch.bincount(tokens, minlength=size)
    expected = row.double().softmax(0) * count
    seen = expected > 10
    assert int(seen.sum()) == 6
    chi_square = float(((counts[seen] - expected[seen]) ** 2 / expected[seen]).sum())
    assert chi_square < 20.5  # 5 degrees of freedom, one in a thousand
    assert int(counts[~seen].sum()) == 0


def test_a_very_rare_token_gets_its_share_of_the_numbers() -> None:
    """Of 2**53 numbers, not of the 2**24 that float32 knows: the end of a token's interval is found by bisection."""
    uniform = keyed_uniform(torch.arange(100_000), torch.tensor(0))
    assert float(uniform.min()) > 0
    assert float(uniform.max()) < 1
    assert len(uniform.unique()) == 100_000
    assert bool((uniform * 2.0**53 == (uniform * 2.0**53).floor()).all())
    assert bool(((uniform * 2.0**24).frac() != 0).all())


@on_each_device
def test_a_row_does_not_depend_on_its_batch(device: str) -> None:
    logits = rows(3 * CHUNK + 5, "normal", 3, count=40).to(device)
    keys, steps = (t.to(device) for t in keys_of(logits.cpu()))
    for rule in ({}, {"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}):
        whole = ops.draw(logits, keys, steps, **rule)
        order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).to(device)
        mixed = ops.draw(logits[order], keys[order], steps[order], **rule)
        one = ops.draw(logits[7:8].contiguous(), keys[7:8], steps[7:8], **rule)
        assert torch.equal(mixed.tokens, whole.tokens[order])
        assert torch.equal(mixed.logprobs, whole.logprobs[order])
        assert torch.equal(one.tokens, whole.tokens[7:8])
        assert torch.equal(one.logprobs, whole.logprobs[7:8])


@on_each_device
@settings(deadline=None, max_examples=25)
@given(
    size=st.sampled_from(SIZES), kind=st.sampled_from(["normal", "ties", "forbidden"]), seed=st.integers(0, 99),
    dtype=st.integers(0, 3),
)  # fmt: skip
def test_rows_with_their_numbers_are_drawn_as_alone(device: str, size: int, kind: str, seed: int, dtype: int) -> None:
    """Unlike requests together, bit for bit; some forbid tokens, of which each has its own, and some are greedy."""
    types = [*dtypes_for(device), torch.float64]  # the last is the reference's
    dice = random.Random(seed)
    logits = rows(size, kind, seed).to(types[dtype % len(types)]).to(device)
    keys, steps = (t.to(device) for t in keys_of(logits.cpu(), seed))
    numbers = [
        [dice.choice([0.0, 0.7, 1.0, 1.5]), dice.choice([0, 1, 7]), dice.choice([1.0, 0.6]), dice.choice([0.0, 0.2]),
         dice.choice([0, 3]), dice.randrange(1 + min(size, 4))] for _ in range(6)
    ]  # fmt: skip
    ends = [[dice.randrange(size - 1) if size > 1 else -1, -1] for _ in range(6)]
    params = RowParams(torch.tensor(numbers, dtype=torch.float64, device=device), torch.tensor(ends, device=device))
    together = ops.draw(logits, keys, steps, top_logprobs=min(size, 4), with_support=True, rows=params)
    for row, (temperature, top_k, top_p, min_p, min_length, num_top) in enumerate(numbers):
        at = slice(row, row + 1)
        alone = ops.draw(
            logits[at].contiguous(), keys[at], steps[at], temperature=temperature, top_k=int(top_k), top_p=top_p,
            min_p=min_p, end_ids=params.ends[row, : 1 if size > 1 else 0], min_length=int(min_length),
            top_logprobs=int(num_top), with_support=True,
        )  # fmt: skip
        for name, tensor in alone._asdict().items():
            if tensor is not None:
                shared = getattr(together, name)[at]
                assert torch.equal(shared[:, : int(num_top)] if "topk" in name else shared, tensor), name
        assert (together.topk_logprobs[row, int(num_top) :] == -torch.inf).all()


@on_each_device
@settings(deadline=None, max_examples=30)
@given(
    size=st.sampled_from(SIZES), kind=st.sampled_from(["normal", "flat", "ties", "spike", "forbidden"]), rule=rules,
    seed=st.integers(0, 99),
)  # fmt: skip
def test_the_support_is_what_the_rules_leave_by_hand(
    device: str, size: int, kind: str, rule: dict[str, Any], seed: int
) -> None:
    """Its number of tokens, of which the most likely come first; 0 where no rule is set."""
    logits = rows(size, kind, seed)
    on_device = [t.to(device) for t in (logits, *keys_of(logits, seed))]
    drawn = ops.draw(*on_device, **rule, top_logprobs=min(size, 8), with_support=True)
    truncates = 0 < rule["top_k"] < size or rule["top_p"] < 1 or rule["min_p"] > 0
    for row, count, most_likely in zip(logits.double(), drawn.support.tolist(), drawn.topk_ids.tolist(), strict=True):
        left = kept_by_hand(row, **rule)
        assert (
            abs(count - len(left)) <= (rule["top_p"] < 1) if truncates else count == 0
        )  # by rounding, one more or less
        if truncates:
            assert set(most_likely[: count - 1]) <= set(left)
    greedy = ops.draw(*on_device, temperature=0.0, with_support=True)
    assert greedy.support.tolist() == [1] * len(logits)


@on_each_device
def test_sums_do_not_depend_on_how_a_row_is_aligned(device: str) -> None:
    """With an odd vocabulary neighboring rows are aligned differently; logits so far apart that float64 rounds."""
    size, ones = 2 * CHUNK + 3, torch.ones(1, dtype=torch.int64, device=device)
    row = rows(size, "wide", 4, count=1)[0].to(device)
    for dtype in dtypes_for(device):
        seen = set()
        for shift in range(4):
            place = torch.empty(size + shift, dtype=dtype, device=device)[shift:].copy_(row)
            chunks = torch.empty(1, 1, 3, 2, dtype=torch.float64, device=device)
            token, logprob = torch.empty_like(ones), torch.empty(1, device=device)
            kernel("draw")(
                place[None], None, ones, ones, ones[:0], 0, 0.4, 0, 1.0, 0.0, token, logprob, None, None, None, chunks
            )
            seen.add(str(chunks.tolist()))
        assert len(seen) == 1


@on_each_device
@pytest.mark.parametrize("top_p", [0.5, 0.75])
def test_of_equal_tokens_as_many_stay_as_reach_top_p_and_no_more(device: str, top_p: float) -> None:
    step = torch.ones(1, dtype=torch.int64, device=device)
    for dtype in dtypes_for(device):
        for size in (20, 28, 5 * CHUNK, 19 * CHUNK + 12):
            drawn = ops.draw(torch.full((1, size), -3.0, dtype=dtype, device=device), step, step, top_p=top_p)
            assert 1 / float(drawn.behavior.exp()) == pytest.approx(top_p * size, rel=1e-6)
            assert int(drawn.tokens) < top_p * size


@on_each_device
def test_greedy_takes_the_first_of_the_best_and_obeys_forbidden_ends(device: str) -> None:
    logits = torch.zeros(3, CHUNK + 9, device=device)
    logits[0, [4, CHUNK + 2]] = 2.0
    logits[1, CHUNK + 2] = 2.0
    logits[2, 1] = 2.0
    steps = torch.tensor([0, 0, 5], device=device)
    ends = torch.tensor([1, CHUNK + 2], device=device)
    drawn = ops.draw(logits, steps, steps, temperature=0.0, end_ids=ends, min_length=5)
    assert drawn.tokens.tolist() == [4, 0, 1]
    assert drawn.behavior is None
    assert drawn.logprobs.tolist() == pytest.approx(logits.log_softmax(-1)[[0, 1, 2], drawn.tokens].tolist(), abs=1e-6)


@on_each_device
@pytest.mark.parametrize("rule", [{}, {"top_p": 0.5}, {"top_k": 3}, {"temperature": 0.0}, {"min_length": 9}])
def test_broken_rows_are_told_by_nan_and_leave_the_others(device: str, rule: dict[str, Any]) -> None:
    logits = rows(CHUNK + 40, "normal", 1).to(device)
    keys, steps = (t.to(device) for t in keys_of(logits.cpu()))
    want = ops.draw(logits, keys, steps, top_logprobs=2, **rule)
    broken = logits.clone()
    broken[0, CHUNK + 3], broken[2, 0], broken[4] = torch.nan, torch.inf, -torch.inf
    drawn = ops.draw(broken, keys, steps, top_logprobs=2, **rule)
    assert drawn.logprobs.isnan().tolist() == [True, False, True, False, True, False]
    for name, tensor in drawn._asdict().items():
        if tensor is not None:
            assert torch.equal(tensor[[1, 3, 5]], getattr(want, name)[[1, 3, 5]])
    assert drawn.tokens[[0, 2, 4]].tolist() == [0, 0, 0]


@pytest.mark.skipif(EMULATED, reason="a thread takes turns with 255 others")
@pytest.mark.parametrize(("rule", "warper"), [
    ({"top_k": 7}, TopKLogitsWarper(7)),
    ({"top_p": 0.8}, TopPLogitsWarper(0.8)),
    ({"min_p": 0.1}, MinPLogitsWarper(0.1)),
])  # fmt: skip
def test_what_may_be_drawn_is_what_transformers_leaves(rule: dict[str, Any], warper: Any) -> None:
    logits = rows(60, "normal", 5, count=1)
    allowed = set((warper(None, logits) > -torch.inf).nonzero()[:, 1].tolist())
    keys = torch.arange(20_000)
    drawn = ops.draw(logits.expand(20_000, -1).contiguous(), keys, torch.zeros_like(keys), **rule)
    assert set(drawn.tokens.tolist()) == allowed


@pytest.mark.skipif(EMULATED, reason="the reference alone")
def test_reference_draws_nothing_from_no_rows() -> None:
    drawn = ops.draw(torch.zeros(0, 8, dtype=torch.float64), NO_ENDS, NO_ENDS)
    assert drawn.tokens.shape == (0,)
    assert "draw" in REFERENCES


# ---------------------------------------------------------------- keyed random numbers


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
