"""Packing by tokens: bins and parts as promised, and a loss and gradient that do not depend on them."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from closeness import assert_same_sums
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_grpo import fit, loaded, module, weights
from torch import Tensor

from sparse_rl_lightning.data.base import PromptDataModule
from sparse_rl_lightning.evictions import NEVER, EvictionRecord
from sparse_rl_lightning.learner.block import BlockPlan, RolloutBlock
from sparse_rl_lightning.learner.forward import Learner
from sparse_rl_lightning.learner.loss import Denominators, GRPOLoss
from sparse_rl_lightning.learner.packing import in_parts, pack, pack_prompts, split, split_prompts, token_counts
from sparse_rl_lightning.losses import Denominator, LossType
from sparse_rl_lightning.modules import LearnerOptions
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.replay.shared_prompts import SharedPrompts
from sparse_rl_lightning.testing import tiny_model

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=24)


@given(LENGTHS, st.integers(1, 8))
def test_bins_share_all_sequences_evenly(lengths: list[int], num_bins: int) -> None:
    bins = pack(lengths, num_bins)
    assert len(bins) == num_bins
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in members) for members in bins]
    assert max(loads) - min(loads) <= max(lengths)
    assert len(lengths) < num_bins or min(len(members) for members in bins) >= 1


def test_bins_by_hand() -> None:
    assert pack([5, 9, 5, 4, 1], 2) == [[1, 3], [0, 2, 4]]  # 9 | 5 | 5 more to the second | 4 to the first | 1
    assert pack([3, 3, 3], 3) == [[0], [1], [2]]
    assert pack([7], 3) == [[0], [], []]


@given(LENGTHS, st.integers(1, 200))
def test_parts_fit_with_their_padding(lengths: list[int], max_tokens: int) -> None:
    parts = split(lengths, max_tokens)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or len(part) * max(lengths[index] for index in part) <= max_tokens
    for one, following in pairwise(parts):  # no part could have taken the next one's first
        assert (len(one) + 1) * lengths[one[0]] > max_tokens
        assert min(lengths[index] for index in one) >= lengths[following[0]]


# ---------------------------------------------------------------- a rollout


def rollout(lengths: list[int], prompt: int = 2, seed: int = 0) -> Rollout:
    """Random sequences of ``prompt`` + length tokens with everything that a loss reads."""
    generator = torch.Generator().manual_seed(seed)
    count, width = len(lengths), prompt + max(lengths) + 1  # one column of padding for all
    index = torch.arange(width)
    mask = (index >= prompt) & (index < prompt + torch.tensor(lengths)[:, None])

    def numbers() -> Tensor:
        return torch.randn(count, width, generator=generator, dtype=torch.float64).where(mask, 0.0)

    dead = (index < (prompt + torch.tensor(lengths))[:, None] - 1) & (torch.rand(2, 3, count, width) < 0.5)
    death = torch.where(dead, prompt + torch.tensor(lengths)[:, None], NEVER).transpose(1, 2).to(torch.int32)
    old = -numbers().abs()
    return Rollout(
        sequences=torch.randint(1, 20, (count, width), generator=generator),
        prompt_lengths=torch.full((count,), prompt), completion_mask=mask,
        finished=torch.ones(count, dtype=torch.bool), sampler_logprobs=old, old_logprobs=old, ref_logprobs=old - 0.1,
        advantages=torch.randn(count, generator=generator, dtype=torch.float64),
        keep=mask & (torch.rand(count, width, generator=generator) < 0.8), weights=numbers().exp(),
        evictions=EvictionRecord.from_dense(death),
    )  # fmt: skip


def test_trimming_takes_away_common_padding_only() -> None:
    whole = rollout([3, 5, 1])
    part = whole[torch.tensor([0, 2])].trimmed()
    assert token_counts(whole) == [5, 7, 3]
    assert {name: tuple(value.shape) for name, value in part.state().items() if isinstance(value, Tensor)} == {
        "prompt_lengths": (2,), "finished": (2,), "advantages": (2,),
        **dict.fromkeys(
            ["sequences", "completion_mask", "sampler_logprobs", "old_logprobs", "ref_logprobs", "keep", "weights"],
            (2, 5),
        ),
    }  # fmt: skip
    assert torch.equal(part.evictions.death, whole.evictions.death[:, [0, 2], :, :5])
    assert (part.evictions.death < NEVER).any()
    assert torch.equal(part.sequences, whole.sequences[[0, 2], :5])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=6, max_size=6),
    st.permutations(range(6)),
    st.sampled_from(["grpo", "dapo", "dr_grpo", "cispo"]),
    st.sampled_from(["all", "kept_tokens", "kept"]),
    st.sampled_from([[6], [2, 2, 2], [1, 5], [1, 1, 1, 1, 1, 1], [3, 2, 1]]),
)
def test_loss_and_gradient_are_those_of_any_packing_split_and_order(
    lengths: list[int], order: list[int], loss_type: LossType, denominator: Denominator, sizes: list[int]
) -> None:
    whole = rollout(lengths)
    objective = GRPOLoss(loss_type, epsilon_high=5.0, denominator=denominator, beta=0.1)
    items = objective.denominators(whole, 9)

    def total(parts: list[list[int]]) -> tuple[Tensor, Tensor]:
        logprobs = (whole.old_logprobs + 0.3 * whole.weights.log().sin()).requires_grad_()  # type: ignore[union-attr,operator]
        loss = torch.zeros((), dtype=torch.float64)
        for rows in parts:
            part = whole[torch.tensor(rows)].trimmed()
            loss = loss + objective(part, logprobs[torch.tensor(rows), : part.sequences.shape[1]], items).loss
        loss.backward()
        assert logprobs.grad is not None
        return loss.detach(), logprobs.grad

    expected = total([list(range(6))])
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    torch.testing.assert_close(total([order[end - n : end] for n, end in zip(sizes, ends, strict=True)]), expected)
    torch.testing.assert_close(total(pack(lengths, 3)), expected)
    assert expected[1].count_nonzero() > 0


@pytest.mark.parametrize("accumulate", [1, 2, 4, 8])
def test_a_packed_block_serves_the_same_sequences_per_optimizer_step(accumulate: int) -> None:
    whole = rollout([1 + i * 7 % 11 for i in range(16)])
    whole.rewards = torch.arange(16.0)  # names the sequences
    windows: tuple[list[Rollout], list[Rollout]] = ([], [])

    def block(packs: bool) -> RolloutBlock:
        def count(window: Rollout) -> Denominators:
            windows[packs].append(window)
            return Denominators()

        return RolloutBlock(BlockPlan(4, 4, 4, 2, accumulate, packs), whole, index=0, seed=1, count=count)

    blocks = [block(packs) for packs in (False, True)]
    spread = []
    for _ in range(8 // accumulate):
        steps = [[block.next() for _ in range(accumulate)] for block in blocks]
        plain, packed = ([part.rewards.tolist() for part, _ in step] for step in steps)
        assert sorted(chain(*plain)) == sorted(chain(*packed))
        assert min(len(part) for part in packed) >= 1
        spread.append([max(sum(token_counts(part)) for part, _ in step) for step in steps])
    assert len(windows[0]) == len(windows[1]) == 8 // accumulate
    assert all(torch.equal(one.rewards, other.rewards) for one, other in zip(*windows, strict=True))  # type: ignore[arg-type]
    assert all(packed <= plain for plain, packed in spread)
    assert accumulate == 1 or any(packed < plain for plain, packed in spread)


# ---------------------------------------------------------------- a model


def test_an_overfull_bin_is_split_without_a_trace() -> None:
    torch.manual_seed(0)
    whole = rollout([3, 9, 1, 6, 2])
    factors = torch.randn(whole.sequences.shape, dtype=torch.float64)
    rows: list[tuple[int, ...]] = []
    results = []
    for tokens in (None, 1000, 24, 20, 1):
        model = tiny_model(vocab_size=20, hidden_size=16, initializer_range=0.3).double()
        model.model.layers[0].register_forward_pre_hook(lambda _module, inputs: rows.append(inputs[0].shape[:2]))
        rows.clear()
        logprobs, entropy = Learner(LearnerOptions(tokens, head_chunk_size=4), 0.9).logprobs(model, whole)
        if tokens is not None:
            assert all(count * width <= max(tokens, 11) for count, width in rows) or tokens == 1000
            assert len(rows) == {1000: 1, 24: 2, 20: 3, 1: 5}[tokens]
        (factors * (logprobs + entropy)).sum().backward()
        results.append([logprobs, entropy, *(parameter.grad for parameter in model.parameters())])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=1e-9, rtol=1e-9)
    with torch.no_grad():
        found = in_parts(lambda part: (part.old_logprobs, part.keep.double()), whole, split(token_counts(whole), 12))  # type: ignore[union-attr,return-value]
    torch.testing.assert_close(found, (whole.old_logprobs, whole.keep.double()))  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["dense", "replayed", "acceptance"])
def test_a_single_part_has_no_padding_of_the_whole_rollout(name: str) -> None:
    model, shapes = tiny_model(vocab_size=20, num_layers=2, num_heads=3, num_kv_heads=3, hidden_size=12).double(), []
    model.model.layers[0].register_forward_pre_hook(lambda _module, inputs: shapes.append(inputs[0].shape[:2]))
    whole = rollout([3, 9, 1])
    whole.topk_ids = torch.arange(4).expand(*whole.sequences.shape, 4)
    whole.topk_logprobs = torch.full(whole.topk_ids.shape, -3.0, dtype=torch.float64)
    part = whole[torch.tensor([0, 2])]
    padded, narrow = (getattr(Learner(LearnerOptions(tokens)), name)(model, part) for tokens in (None, 10))
    assert shapes == [(2, 12), (2, 5)]
    torch.testing.assert_close(narrow, padded, atol=1e-12, rtol=0)
    assert all(one.any() for one in narrow)


class Rows(PromptDataModule):
    """Prompts of very different lengths."""

    def train_rows(self) -> list[dict[str, Any]]:
        return [{"prompt": "abcdef01"[: 1 + i % 8] * (1 + i % 3)} for i in range(8)]

    val_rows = train_rows


def trained(micro_batch_tokens: int | None, steps_per_generation: int, accumulate: int, shares: bool = False) -> Tensor:
    sizes = {"steps_per_generation": steps_per_generation, "micro_batch_tokens": micro_batch_tokens}
    grpo = module(**sizes, share_prompts=shares)
    assert grpo.plan(4).packs == (micro_batch_tokens is not None)
    fit(grpo, 2, data=Rows(prompts_per_rollout=4), accumulate_grad_batches=accumulate)
    return weights(grpo)


def test_training_does_not_depend_on_packing() -> None:
    expected, initial = trained(None, 8, 4), weights(loaded())
    assert (expected - initial).abs().max() > 1e-3
    for tokens, steps, accumulate in ((10_000, 8, 4), (30, 8, 4), (30, 2, 1)):
        assert_same_sums(trained(tokens, steps, accumulate), expected, size=initial)


@pytest.mark.parametrize(("steps", "accumulate"), [(8, 8), (8, 4), (4, 1)])
def test_training_does_not_depend_on_who_reads_the_prompts(steps: int, accumulate: int) -> None:
    """With steps on parts of a rollout too, which are rescored before."""
    expected = trained(None, steps, accumulate)
    for tokens in (None, 30):
        shared = trained(tokens, steps, accumulate, shares=True)
        assert_same_sums(shared, expected, size=weights(loaded()))


def test_samples_of_a_prompt_come_together_within_their_optimizer_step() -> None:
    sizes = {"prompts": 6, "num_generations": 4, "steps_per_generation": 8, "num_iterations": 1, "accumulate": 4}
    whole = Rollout(
        sequences=torch.zeros(24, 9, dtype=torch.long), prompt_lengths=torch.full((24,), 5),
        completion_mask=torch.arange(9).expand(24, 9) >= 5, finished=torch.ones(24, dtype=torch.bool),
        sampler_logprobs=torch.zeros(24, 9),
    )  # fmt: skip
    for packs in (False, True):
        plain, sharing = (BlockPlan(**sizes, packs=packs, shares=shares) for shares in (False, True))
        order = plain.order(0, 0, torch.device("cpu"))
        for rows in order.split(12):
            parts = sharing.arranged(rows, whole[rows])
            assert len(parts) == 4
            assert sorted(torch.cat(parts).tolist()) == sorted(rows.tolist())
            prompts = [set((part // 4).tolist()) for part in parts]
            alone = plain.arranged(rows, whole[rows]) if packs else rows.split(3)
            apart = [set((part // 4).tolist()) for part in alone]
            assert sum(map(len, prompts)) < sum(map(len, apart))
        later = [torch.cat(list(plan.later(0, 0, torch.device("cpu")))) for plan in (plain, sharing)]
        assert sorted(later[0].tolist()) == sorted(later[1].tolist())


@given(st.lists(st.integers(0, 5), min_size=1, max_size=24), st.integers(1, 8), st.data())
def test_bins_of_prompts(prompts: list[int], num_bins: int, data: st.DataObject) -> None:
    prompts, num_bins = sorted(prompts), min(num_bins, len(prompts))
    lengths = data.draw(st.lists(st.integers(5, 50), min_size=len(prompts), max_size=len(prompts)))
    bins = pack_prompts(prompts, lengths, [4] * len(prompts), num_bins)
    assert len(bins) == num_bins
    assert all(bins)
    assert sorted(index for members in bins for index in members) == list(range(len(prompts)))


def of_prompts(prompts: list[list[int]], completions: list[int]) -> Rollout:
    """Sequences of these prompts and as many tokens more."""
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    lengths = prompt_lengths + torch.tensor(completions)
    sequences = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        sequences[row, : len(prompt)] = torch.tensor(prompt)
        sequences[row, len(prompt) : lengths[row]] = 9
    at = torch.arange(sequences.shape[1])
    mask = (at >= prompt_lengths[:, None]) & (at < lengths[:, None])
    return Rollout(sequences, prompt_lengths, mask, torch.ones(len(prompts), dtype=torch.bool), torch.zeros(mask.shape))


def test_parts_of_prompts_by_hand() -> None:
    """Prompts count once, and completions as the longest of their part."""
    whole = of_prompts([[1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2]], [2, 4, 1, 3])
    assert split_prompts(whole, 10) == [[1], [0, 2], [3]]
    assert split_prompts(whole, 11) == [[1, 0], [2], [3]]  # 3 + 2 x 4
    assert split_prompts(whole, 12) == [[1, 0], [2, 3]]  # 2 x 3 + 2 x (5 - 2)
    assert split_prompts(whole, 29) == [[1, 0, 2, 3]]
    assert split_prompts(whole, 1) == [[1], [0], [2], [3]]
    assert split_prompts(of_prompts([[1] * 6] * 8, [14, 14, 200, *[14] * 5]), 310) == [[2], [0, 1, 3, 4, 5, 6, 7]]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([[1], [1, 2], [2, 2], [3] * 9]), st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(1, 150),
)
def test_parts_of_prompts_fit_as_attention_unfolds_them(given: list[tuple[list[int], int]], most: int) -> None:
    prompts, completions = zip(*sorted(given, key=lambda one: one[0]), strict=True)
    whole = of_prompts(list(prompts), list(completions))
    parts = split_prompts(whole, most)
    assert sorted(chain(*parts)) == list(range(len(prompts)))
    for part in parts:
        row = SharedPrompts.of(whole[torch.tensor(part)])
        asked = len(row.leaders) * row.longest + len(part) * (row.places.shape[1] - row.first)
        assert len(part) == 1 or asked <= most


PLAN = BlockPlan(prompts=6, num_generations=2, steps_per_generation=6, num_iterations=2, accumulate=3)


def recorded_rollout() -> Rollout:
    """Twelve sequences of different lengths; the number of a sequence is its first token."""
    mask = torch.arange(1, 10) < torch.randint(2, 10, (12, 1))
    return Rollout(
        sequences=torch.cat([torch.arange(12)[:, None], torch.randint(3, 20, (12, 9))], dim=1),
        prompt_lengths=torch.ones(12, dtype=torch.long),
        completion_mask=torch.cat([torch.zeros(12, 1, dtype=torch.bool), mask], dim=1),
        finished=torch.rand(12) < 0.7,
        sampler_logprobs=torch.zeros(12, 10),
        keep=torch.cat([torch.zeros(12, 1, dtype=torch.bool), mask & (torch.rand(12, 1) < 0.6)], dim=1),
    )


DAPO: dict[str, Any] = {"loss_type": "dapo"}


def objective(**options: Any) -> GRPOLoss:
    return GRPOLoss(**{"denominator": "kept", "beta": 0.1, **options})


def expected(options: dict[str, Any], window: Rollout) -> tuple[int, int]:
    """Items of policy and penalty, counted sequence by sequence."""
    mask = window.completion_mask & (window.finished[:, None] | ("mask_truncated_completions" not in options))
    kept = mask & window.keep
    by_policy, by_penalty = kept, kept if options.get("kl_on") == "kept" else mask
    tokens = options.get("loss_type") == "dapo"
    return tuple(sum(int(row.sum()) if tokens else int(row.any()) for row in each) for each in (by_policy, by_penalty))


@pytest.mark.parametrize("options", [{}, DAPO, DAPO | {"kl_on": "kept"}, DAPO | {"mask_truncated_completions": True}])
def test_items_are_those_of_the_whole_step_and_counted_once(options: dict[str, Any]) -> None:
    data, windows = recorded_rollout(), []

    def count(window: Rollout) -> Denominators:
        windows.append(window)
        return objective(**options).denominators(window, 9)

    block = RolloutBlock(PLAN, data, index=3, seed=0, count=count)
    served = [block.next() for _ in range(PLAN.micro_batches)]
    assert block.is_spent
    assert len(windows) == PLAN.optimizer_steps
    for step in range(PLAN.optimizer_steps):
        parts = served[step * PLAN.accumulate : (step + 1) * PLAN.accumulate]
        numbers = torch.cat([part.sequences[:, 0] for part, _ in parts])
        for _, items in parts:
            assert (int(items.policy), int(items.penalty)) == expected(options, data[numbers])
    for first in (0, PLAN.steps_per_generation):
        one_pass = torch.cat([part.sequences[:, 0] for part, _ in served[first : first + PLAN.steps_per_generation]])
        assert sorted(one_pass.tolist()) == list(range(12))


def test_no_micro_batch_is_wider_than_its_longest_sequence() -> None:
    """Without packing too: with lengths of a quarter of the longest, half of the learner's tokens were padding."""
    block = RolloutBlock(PLAN, recorded_rollout(), 3, 0, lambda window: objective().denominators(window, 9))
    widths = [(part.sequences.shape[1], int(part.lengths.max())) for part, _ in (block.next() for _ in range(6))]
    assert all(width == longest for width, longest in widths)
    assert len(set(widths)) > 1


def test_no_two_passes_have_one_order() -> None:
    orders = torch.cat([PLAN.order(index, 0, torch.device("cpu")).view(2, 12) for index in range(3)])
    assert len({tuple(order) for order in orders.tolist()}) == 6


@pytest.mark.parametrize("packs", [False, True])
def test_a_block_taken_up_inside_a_step_counts_the_whole_step(packs: bool) -> None:
    data, items, plan = recorded_rollout(), objective(loss_type="dapo").denominators, replace(PLAN, packs=packs)
    block = RolloutBlock(plan, data, index=3, seed=0, count=items)
    served = [block.next() for _ in range(plan.micro_batches)]
    for cursor in range(plan.micro_batches):
        again = RolloutBlock.from_state(plan, {"rollout": data.state(), "index": 3, "cursor": cursor}, 0, items)
        part, counts = again.next()
        assert torch.equal(part.sequences, served[cursor][0].sequences)
        assert counts == served[cursor][1]


def test_what_every_micro_batch_divides_by_itself_is_not_counted() -> None:
    assert objective(loss_type="bnpo").denominators(recorded_rollout()) == Denominators()
    for loss_type in ("grpo", "dapo"):
        assert objective(loss_type=loss_type).denominators(recorded_rollout()).sequences == len(recorded_rollout())
    assert Denominators().summed(torch.neg) == Denominators()
    assert objective(beta=0.0).denominators(recorded_rollout()).penalty is None
