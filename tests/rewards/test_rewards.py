from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from chat_templates import PUBLISHED
from tiny_grpo import Recorder, Rows, fit, grouped, module, quiet

import exact_answers
from exact_answers.arithmetic import MAX_LENGTH, evaluate_expression
from exact_answers.expressions import MAX_DEPTH
from sparse_rl_lightning.advantages import group_advantages, informative_groups
from sparse_rl_lightning.compressors import FullKV
from sparse_rl_lightning.data.base import PromptDataModule
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.evaluation.evaluate import Scores, ValidationLog
from sparse_rl_lightning.metrics import rollout_metrics
from sparse_rl_lightning.modules import ReplayGRPO, SparseGRPO
from sparse_rl_lightning.policies import LoadedPolicy
from sparse_rl_lightning.records import Conversation, Rollout, ScoredRollout
from sparse_rl_lightning.rewards import (
    MathReward,
    arithmetic_reward,
    boxed_format_reward,
    boxed_math_reward,
    check_rewards,
    compute_rewards,
    counting,
    reward_name,
    worked_steps_reward,
)
from sparse_rl_lightning.rewards.base import weighted_rewards
from sparse_rl_lightning.rewards.scoring import GuardedReward, Rewards
from sparse_rl_lightning.testing import tiny_model


def length(prompts: Any, completions: Sequence[str], completion_ids: Any, **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def only_short(prompts: Any, completions: Sequence[str], completion_ids: Any, **_: Any) -> list[float | None]:
    return [1.0 if len(completion) < 3 else None for completion in completions]


def fails_on_x(prompts: Any, completions: Sequence[str], completion_ids: Any, **_: Any) -> list[float]:
    for completion in completions:
        if completion.count("x") == 1:
            raise KeyError(completion)
    return [0.0] * len(completions)


class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, completions: Sequence[str], bonus: Sequence[float], **_: Any) -> list[float]:
        return [self.factor * value for value in bonus]


def rewards_of(
    functions: list[Any], completions: list[str], weights: list[float] | None = None, **columns: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    n = len(completions)
    return compute_rewards(functions, weights, ["p"] * n, completions, [[0]] * n, columns)


def test_weighted_sum() -> None:
    total, table = rewards_of([length, Scaled(2.0)], ["a", "bbbb"], [0.5, -1.0], bonus=[3.0, 5.0])
    assert table.tolist() == [[1.0, 6.0], [4.0, 10.0]]
    assert total.tolist() == [0.5 - 6.0, 2.0 - 10.0]
    assert total.dtype == table.dtype == torch.float32
    assert rewards_of([length, Scaled(2.0)], ["a", "bbbb"], bonus=[3.0, 5.0])[0].tolist() == [7.0, 14.0]


def test_what_the_rounding_of_cancelled_terms_leaves_is_no_difference() -> None:
    """0.7 - 0.1 - 0.6 is -3e-8 in 32 bits, where the others' 0 - 0 - 0 is 0: such a group teaches nothing."""
    table = torch.tensor([[0.7, 0.1, 0.6], [0.0, 0.0, 0.0], [7.0, 1.0, 6.0], [1e-3, 0.0, 0.0]])
    rewards = weighted_rewards(table, [100.0, -100.0, -100.0])
    assert rewards.tolist() == [0.0, 0.0, 0.0, pytest.approx(0.1)]
    assert informative_groups(rewards, 2).tolist() == [False, True]
    small = weighted_rewards(torch.tensor([[1000.0, 1000.0, 0.001], [1e7, 1e7, 5.0]]), [1.0, -1.0, 1.0])
    assert small.tolist() == pytest.approx([0.001, 5.0])


def test_none_is_left_out_and_nothing_at_all_is_nan() -> None:
    total, table = rewards_of([length, only_short], ["a", "bbbb"], [1.0, 10.0])
    assert total.tolist() == [11.0, 4.0]
    assert [row.tolist() for row in table] == [[1.0, 1.0], pytest.approx([4.0, math.nan], nan_ok=True)]
    assert rewards_of([only_short], ["a", "bbbb"])[0].tolist() == pytest.approx([1.0, math.nan], nan_ok=True)


def test_reward_functions_see_every_column_by_name() -> None:
    seen: dict[str, Any] = {}

    def spy(**batch: Any) -> list[float]:
        seen.update(batch)
        return [0.0, 0.0]

    compute_rewards([spy], None, ["p", "q"], ["a", "b"], [[1], [2, 3]], {"answer": ("x", "y")})
    told = {"prompts": ["p", "q"], "completions": ["a", "b"], "completion_ids": [[1], [2, 3]], "answer": ["x", "y"]}
    assert seen == told


def test_names() -> None:
    assert [reward_name(length), reward_name(Scaled(1.0))] == ["length", "Scaled"]


def test_a_function_of_weight_0_is_logged_and_rewards_nobody() -> None:
    table = torch.tensor([[1.0, 5.0], [math.nan, 5.0]])
    assert weighted_rewards(table, [1.0, 0.0]).tolist() == pytest.approx([1.0, math.nan], nan_ok=True)
    assert weighted_rewards(table, [0.0, 0.0]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39, "high", [1.0], 10**400])
def test_a_reward_that_is_no_finite_number_names_function_and_sample(bad: Any) -> None:
    def broken(completions: list[str], **_: Any) -> list[Any]:
        return [0.0, bad]

    with pytest.raises(ValueError, match=r"broken returned .* on sample 1, completion 'bb'"):
        rewards_of([broken], ["aa", "bb"])


def test_a_raising_function_names_the_sample_with_its_text_made_harmless() -> None:
    hostile = "x\x1b[2J\u202e\ud800\n" + "y" * 500
    with pytest.raises(RuntimeError) as caught:
        rewards_of([length, fails_on_x], ["a", "xx", hostile, "b"])
    message = str(caught.value)
    assert "fails_on_x raised KeyError" in message
    assert "sample 2" in message
    assert r"x\x1b[2J\u202e\ud800\ny" in message
    assert message.isprintable()
    assert len(message) < 500
    assert isinstance(caught.value.__cause__, KeyError)


def test_functions_are_checked_before_anything_is_drawn() -> None:
    async def later(completions: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    check_rewards([boxed_math_reward], ["answer"])
    with pytest.raises(ValueError, match=r"boxed_math_reward.*missing a required argument: 'answer'.*gold"):
        check_rewards([boxed_math_reward], ["gold"])
    with pytest.raises(ValueError, match=r"later is async.*asyncio\.run"):
        check_rewards([later], [])


def test_a_missing_column_is_named() -> None:
    said = r"boxed_math_reward.*missing a required argument: 'answer'.*completion_ids, gold"
    with pytest.raises(ValueError, match=said):
        rewards_of([boxed_math_reward], ["a"], gold=["1"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], None, ["p"], ["a"], [[0]], {}), "at least one reward function"),
        (([length], None, ["p"], ["a", "b"], [[0]] * 2, {}), "prompts has 1 entries for 2"),
        (([length], None, ["p"], ["a"], [[0]], {"answer": []}), "answer has 0 entries for 1"),
        (([length], None, ["p"], ["a"], [[0]], {"completions": ["b"]}), "column named 'completions'"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_rewards(*arguments)


def test_boxed_math_reward() -> None:
    completions = [r"\boxed{1/2}", r"\boxed{2}", "0.5", r"\boxed{3}"]
    assert boxed_math_reward([], completions, [], answer=["0.5", "0.5", "0.5", ""], other=[]) == [1.0, 0.0, 0.0, None]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (r"thus $\boxed{5}$.", 1.0),
        ("thus \\[\\boxed{5}\\].\n", 1.0),
        (r"\boxed{5}", 1.0),
        (r"\boxed{5} as asked", 0.0),
        (r"\boxed{5} \boxed{5}", 0.0),
        (r"\boxed{\boxed{5}}", 0.0),
        (r"\boxed{} \boxed{5}", 0.0),
        (r"\boxed{}", 0.0),
        (r"\boxed{5", 0.0),
        ("\\boxed{1}" + "x" * 10_000 + "\\boxed{5}", 0.0),
        ("5", 0.0),
        ("", 0.0),
    ],
)
def test_boxed_format_reward(completion: str, reward: float) -> None:
    assert boxed_format_reward([], [completion], []) == [reward]


@pytest.mark.parametrize(
    ("completion", "answer", "task", "reward"),
    [
        ("7+12=19;19+25=44;44+3=47#47", "47", "sum", 1.0),
        ("no work #47 \n", "47", "sum", 1.0),
        ("#46#47", "47", "sum", 1.0),
        ("#47#46", "47", "sum", 0.0),
        ("47", "47", "sum", 0.0),
        ("#047", "47", "sum", 0.0),
        ("#47 or 48", "47", "sum", 0.0),
        ("#", "47", "sum", 0.0),
        ("#٤٧", "47", "sum", 0.0),
        ("#(7+12)*3", "(7+12)*3", "countdown", 1.0),
        ("#3*(12+07)", "(7+12)*3", "countdown", 1.0),
        ("#12*7", "(7+12)*3+27", "countdown", 1.0),
        ("#57", "(7+12)*3", "countdown", 0.0),
        ("#7+12*3", "(7+12)*3", "countdown", 0.0),
        ("#12+12+3", "12+3+12", "countdown", 1.0),
        ("#12+12+3", "12+15", "countdown", 0.0),
        ("#7*12-12*7+3*19", "(7+12)*3", "countdown", 0.0),
        ("#__import__('os').getcwd()", "(7+12)*3", "countdown", 0.0),
        ("#9**9**9**9", "(7+12)*3", "countdown", 0.0),
        ("#" + "(" * 10_000, "(7+12)*3", "countdown", 0.0),
        ("#(7+12)*3", "(7+12)*3+0", "sum", 0.0),
    ],
)
def test_arithmetic_reward(completion: str, answer: str, task: str, reward: float) -> None:
    assert arithmetic_reward([], [completion], [], answer=[answer], task=[task], solution=[""]) == [reward]


def test_arithmetic_answers_may_be_numbers_or_missing() -> None:
    answers = [2, 2.5, None, math.nan, 2.0]
    for task in (None, ["sum"] * 5):
        paid = arithmetic_reward([], ["#2", "#2.5", "#2", "#nan", "#2"], [], answer=answers, task=task)
        assert paid == [1.0, 1.0, None, None, 1.0]
    assert arithmetic_reward([], ["#1+1", "#2"], [], answer=[2, None], task=["countdown"] * 2) == [0.0, None]


def test_arithmetic_reward_without_tasks_is_exact() -> None:
    assert arithmetic_reward([], ["#1+1", "#2"], [], answer=["2", "2"]) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("7", 7, [7]),
        ("1-2-3", -4, [1, 2, 3]),
        ("8/4/2", 1, [8, 4, 2]),
        ("1+2*3", 7, [1, 2, 3]),
        ("(1+2)*3", 9, [1, 2, 3]),
        ("2*(3-(4+5))", -12, [2, 3, 4, 5]),
        ("1/3+1/6", Fraction(1, 2), [1, 3, 1, 6]),
        ("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH, 1, [1]),
    ],
)
def test_expression(text: str, value: Fraction, numbers: list[int]) -> None:
    assert evaluate_expression(text) == (value, numbers)


@pytest.mark.parametrize(
    "text",
    [
        *["", "+", "1+", "-1", "1 +1", "(1", "1)", "()", "1(2)", "2**3", "1//2", "1/0", "1/(2-2)", "a", "1e3", "1.5"],
        *["²", "٤", "1+" * (MAX_LENGTH // 2) + "1", "(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1)],
    ],
)
def test_no_expression(text: str) -> None:
    assert evaluate_expression(text) is None


@pytest.mark.parametrize(
    ("completion", "share"),
    [
        ("7+12=19;19+25=44;44+3=47#47", 1.0),
        ("7+12=19;19+25=44;44+3=47", 1.0),  # the answer is another function's business
        ("7+12=19;19+25=45;45+3=48#48", 1 / 3),
        ("7+12=18;19+25=44;44+3=47#47", 0.0),  # a lucky answer
        ("7+12=19;7+12=19;7+12=19#47", 1 / 3),
        # a step too many costs, right or not, with or without an answer
        ("7+12=19;19+25=44;44+3=47;44+3=47#47", 3 / 4),
        ("7+12=19;19+25=44;44+3=47;47+7=54", 3 / 4),
        ("7+12=19;19+25=44;44+3=47;47+7=54;54+12=66;", 3 / 6),  # and every further one costs more
        ("7+12=19;19+25=44;44+3=47;", 3 / 4),
        ("7+12=19;19+25=44;44+3=47#47;47+3=50;50+1=51#47", 3 / 6),  # nor does it help to answer before
        ("7+12=19;19+25=44;44+3=47#47#1+1=2#2+2=4#47", 3 / 6),
        ("7+12=19;19+25=44;44+3=47#", 1.0),
        ("7+12=19;19+25=44#44+3=47#47", 2 / 3),
        ("", 0.0),
        ("#47", 0.0),
    ],
)
def test_worked_steps_are_paid_up_to_the_first_other_one(completion: str, share: float) -> None:
    solution = ["7+12=19;19+25=44;44+3=47#47"]
    assert worked_steps_reward(["07+12+25+03="], [completion], [[]], solution=solution) == [pytest.approx(share)]
    assert worked_steps_reward(["a"], [completion], [[]], solution=[None]) == [None], "a row without steps"


@pytest.mark.parametrize(
    "wrong", [{"timeout": math.nan}, {"timeout": 0.0}, {"timeout": 1e10}, {"timeout": 1e39}, {"num_workers": 0}]
)
def test_the_checkers_refusals_are_for_users(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="num_workers must be at least 1 and timeout above 0 seconds, got"):
        exact_answers.MathChecker(**wrong)
    with pytest.raises(UserError, match=next(iter(wrong))):
        MathReward(**wrong)


@pytest.mark.parametrize(
    ("completion", "paid", "is_formatted"),
    [
        (r"\boxed{6}", 6, True), (r"<think>\boxed{5}</think>\boxed{6}", 6, True), (r"\boxed{5}</think>", None, False),
        (r"\boxed{6}<think>maybe</think> ", 6, False), (r"\boxed{6}<think>\boxed{5}", 6, False),
        (r"<think>\boxed{5}", None, False), (r"<think>a</think>\boxed{6}<think>\boxed{5}</think>.", 6, False),
    ],
)  # fmt: skip
def test_boxes_in_thoughts_are_not_paid_unless_asked_for(completion: str, paid: int | None, is_formatted: bool) -> None:
    assert boxed_format_reward([], [completion], []) == [float(is_formatted)]
    for gold in (5, 6):
        assert boxed_math_reward([], [completion], [], answer=[gold]) == [float(paid == gold)]
    anywhere = MathReward(boxes_in_thoughts=True)
    assert anywhere([], [completion], [], answer=[5 if "5" in completion.rpartition("boxed")[2] else 6]) == [1.0]


def test_a_gold_that_cannot_be_checked_pays_nobody() -> None:
    for function in (MathReward(), boxed_math_reward):
        rewards = function([], [r"\boxed{5}", r"\boxed{5}", r"\boxed{}", r"\boxed{5}"], [], answer=["5", "6", "", "}{"])
        assert rewards == [1.0, 0.0, None, None]


def test_golds_may_be_numbers_of_a_file() -> None:
    for function in (MathReward(), boxed_math_reward):
        boxes = [r"\boxed{5}", r"\boxed{0}", r"\boxed{0.5}", r"\boxed{6}", r"\boxed{5}"]
        assert function([], boxes, [], answer=[5, 0, 0.5, 5, None]) == [1.0, 1.0, 1.0, 0.0, None]
        assert function([], [r"\boxed{nan}"] * 2, [], answer=[math.nan, 5]) == [None, 0.0]


def test_a_row_may_bring_its_tolerance() -> None:
    assert MathReward()([], [r"\boxed{41.8001}"] * 2, [], answer=["41.8"] * 2, tolerance=[1e-4, 0.0]) == [1.0, 0.0]


@pytest.mark.parametrize("bad", ["a bit", math.inf, -1.0, [0.1]], ids=str)
def test_a_tolerance_may_be_the_text_of_a_file_and_is_a_number(bad: Any) -> None:
    boxes, answers = [r"\boxed{41.8001}", r"\boxed{2\pi}", r"\boxed{2\pi}"], ["41.8", r"\pi\cdot2", r"2\pi"]
    for missing in ("", " ", math.nan, None):
        assert MathReward()([], boxes, [], answer=answers, tolerance=["0.0001", "0.01", missing]) == [1.0, 1.0, 1.0]
    with pytest.raises(UserError, match="tolerance must be"):
        MathReward()([], boxes[:1], [], answer=answers[:1], tolerance=[bad])


def test_a_sum_that_float32_does_not_hold_is_refused() -> None:
    with pytest.raises(UserError, match="weighted sum of rewards is beyond float32's range"):
        rewards_of([Scaled(1e38)], ["a"], [10.0], bonus=[1.0])


def test_counters_reach_the_metrics() -> None:
    reward = MathReward()
    GuardedReward(boxed_math_reward).take_counters()  # of other tests
    mask = torch.tensor([[False, True]] * 2)
    rollout = Rollout(torch.ones(2, 2, dtype=torch.long), torch.ones(2), mask, mask[:, 1], torch.zeros(2, 2))
    scored = ScoredRollout(rollout, [{"prompt": "p", "answer": "5"}], [r"\boxed{5}", "x"], {}, 0)
    total = Rewards([reward, boxed_math_reward], [1.0, 0.5])(scored)
    assert total.tolist() == [1.5, 0.0]
    metrics = rollout_metrics(scored)
    assert metrics["rewards/MathReward/no_box"] == 1
    assert metrics["rewards/boxed_math_reward/checks"] == 2
    assert set(reward.take_counters().values()) == {0}


def test_any_function_may_count() -> None:
    @counting(lambda: {"seen": 3})
    def counted(**_: object) -> list[float]:
        return []

    assert GuardedReward(counted).take_counters() == {"seen": 3}


TAG = "<|endoftext|>"
THINKS = "{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}<|im_start|><think>"


class Chats(PromptDataModule):
    more: dict[str, Any] = {}  # noqa: RUF012

    def train_rows(self) -> list[dict[str, Any]]:
        return [{"prompt": [{"role": "user", "content": str(n)}], "answer": "1"} | self.more for n in range(4)]


def seen(reward_of: Any = None, more: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """What a reward function gets in one step; the tokenizer has few tokens, so that tags are drawn."""
    found: dict[str, Any] = {}

    def reward(completions: list[str], completion_ids: Any, prompt_texts: list[str], **_: Any) -> list[float]:
        found.update(texts=completions, ids=completion_ids, prompts=prompt_texts)
        return [float(len(text)) for text in completions]

    tokenizer = PUBLISHED["qwen2.5"].tokenizer()
    tokenizer.chat_template = THINKS
    model = tiny_model(vocab_size=len(tokenizer), hidden_size=32, eos_token_id=tokenizer.eos_token_id)
    sizes = {"num_generations": 4, "max_completion_length": 64}
    module = SparseGRPO(LoadedPolicy(model, tokenizer), FullKV(), reward_of or reward, **grouped(**sizes, **options))
    data = Chats(prompts_per_rollout=4)
    data.more = more or {}
    quiet(1, limit_val_batches=0).fit(module, datamodule=data)
    return found | {"tokenizer": tokenizer}


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_reach_rewards_if_asked_for(skip: bool) -> None:
    found = seen(skip_special_tokens=skip)
    tag, end = found["tokenizer"].convert_tokens_to_ids([TAG, "<|im_end|>"])
    drawn = sum(tag in ids for ids in found["ids"])
    assert drawn > 0
    assert sum(TAG in text for text in found["texts"]) == (0 if skip else drawn)
    ended = [ids[-1] == end for ids in found["ids"]]
    assert not any(text.endswith("<|im_end|>") for text in found["texts"])
    if not skip:
        for text, ids, is_ended in zip(found["texts"], found["ids"], ended, strict=True):
            assert text == found["tokenizer"].decode(ids[: len(ids) - is_ended])


def test_a_function_that_names_them_gets_the_prompts_as_rendered() -> None:
    prompts = seen()["prompts"]
    assert len(prompts) == 16
    assert set(prompts) == {f"<|im_start|>{n}<|im_end|><|im_start|><think>" for n in range(4)}


def test_others_get_nothing_new() -> None:
    def plain(completions: list[str], **more: Any) -> list[float]:
        assert "prompt_texts" not in more
        return [float(len(text)) for text in completions]

    seen(plain)
    check_rewards([lambda prompts, completions, completion_ids, answer: []], ["answer"])
    Rewards(lambda prompt_texts, **_: []).check([{"prompt": "1"}])


def test_a_column_of_that_name_is_the_data_s() -> None:
    def own(prompt_texts: list[str], **_: Any) -> list[float]:
        assert set(prompt_texts) == {"mine"}
        return [0.0] * len(prompt_texts)

    seen(own, {"prompt_texts": "mine"})


def scored(texts: str, ends: list[str] | None = None) -> ScoredRollout:
    """One prompt, a completion per letter; conversations that ended like this."""
    count = len(texts)
    sequences = torch.zeros(count, 2, dtype=torch.int64)
    mask = torch.tensor([[False, True]] * count)
    rollout = Rollout(sequences, torch.ones(count, dtype=torch.int64), mask, mask[:, 1], torch.zeros(count, 2))
    talks = None if ends is None else [Conversation(end=end, reward=1.0, error="E raised 1") for end in ends]
    return ScoredRollout(rollout, [{"prompt": "p", "answer": "1"}], list(texts), {}, 0, conversations=talks)


def pays(completions: list[str], **_: Any) -> list[float | None]:
    """1 for a, 0 for anything else."""
    return [float(text == "a") for text in completions]


FAILS: dict[str, Any] = {
    "an error": lambda: 1 / 0,
    "NaN of numpy": lambda: np.float32("nan"),
    "NaN of a tensor": lambda: torch.tensor(float("nan")),
    "a whole number beyond floats": lambda: 10**400,
    "a text": lambda: "1.0",
}


def punishes(fault: Any) -> Any:
    """-1 for everything but x, on which it fails."""

    def penalty(completions: list[str], **_: Any) -> list[Any]:
        return [fault() if text == "x" else -1.0 for text in completions]

    return penalty


@pytest.mark.parametrize("timeout", [None, 60.0], ids=["in this process", "in its own"])
@pytest.mark.parametrize("fault", FAILS.values(), ids=FAILS)
def test_breaking_a_penalty_takes_the_sample_out(fault: Any, timeout: float | None) -> None:
    """An a is worth 1 - 1 = 0, b 0 - 1 = -1, x was worth 0 (or NaN, and the run over); its group is a and b."""
    rewards = Rewards([pays, punishes(fault)], timeout=timeout, warn=lambda text: None)
    one = scored("abx")
    try:
        found = rewards(one)
    finally:
        rewards.close()
    assert found[:2].tolist() == [0.0, -1.0]
    assert found[2].isnan()
    assert one.reward_failures == {"pays": 0, "penalty": 1}
    advantages = group_advantages(found, 3)
    half = math.sqrt(0.5)  # the deviation of 0 and -1, Bessel-corrected; each is 0.5 from the mean
    assert torch.allclose(advantages, torch.tensor([0.5 / half, -0.5 / half, 0.0]), atol=1e-5)


def test_none_still_means_that_it_does_not_apply() -> None:
    rewards = Rewards([pays, punishes(lambda: None)], warn=pytest.fail)
    one = scored("abx")
    assert rewards(one).tolist() == [0.0, -1.0, 0.0]
    assert not one.failed
    rewards.settle()


def test_a_function_without_weight_takes_nothing_out() -> None:
    told: list[str] = []
    rewards = Rewards([pays, punishes(lambda: math.nan)], [1.0, 0.0], warn=told.append)
    assert rewards(scored("ax")).tolist() == [1.0, 0.0]
    assert "its weight is 0" in told[0]
    rewards.settle()


# ---------------------------------------------------------------- when a run ends


def test_a_run_ends_at_the_share_that_is_set() -> None:
    for limit, ends in ((1.0, False), (0.5, True), (0.6, False)):
        rewards = Rewards([punishes(lambda: 1 / 0)], warn=lambda text: None, failure_limit=limit)
        rewards(scored("axax"))
        if ends:
            with pytest.raises(RuntimeError, match=r"penalty raised ZeroDivisionError.* 2 of 4 samples failed"):
                rewards.settle()
        else:
            rewards.settle()
        assert rewards.failures.judged == 0


def test_what_was_returned_ends_it_as_an_error_of_the_user() -> None:
    rewards = Rewards([punishes(lambda: math.nan)], warn=lambda text: None)
    rewards(scored("xx"))
    with pytest.raises(ValueError, match=r"penalty returned nan, not a finite number .* on sample 0, completion 'x'"):
        rewards.settle()


def test_functions_that_fail_on_different_samples_add_up() -> None:
    def other(completions: list[str], **_: Any) -> list[float]:
        return [math.nan if text == "a" else 1.0 for text in completions]

    rewards = Rewards([punishes(lambda: math.nan), other], warn=lambda text: None)
    assert rewards(scored("ax")).isnan().all()
    with pytest.raises(ValueError, match="2 of 2 samples failed"):
        rewards.settle()


def test_conversations_that_fail_are_left_out_and_end_no_validation() -> None:
    """A training rollout in which all fail ends the run elsewhere, in ``check_not_all_failed``."""
    for ends in (["timeout", "timeout"], ["failed", "timeout"], ["failed", ""]):
        rewards = Rewards([pays], environment=True, warn=lambda text: None, failure_limit=0.5)
        one = scored("ab", ends)
        assert rewards(one).isnan().tolist() == [bool(end) for end in ends]
        assert one.failed["environment"].tolist() == [bool(end) for end in ends]
        rewards.settle()


# ---------------------------------------------------------------- runs


def picky(completions: list[str], **_: Any) -> list[float]:
    """NaN for completions that begin with a, the share of a otherwise."""
    return [math.nan if text.startswith("a") else text.count("a") / 10 for text in completions]


@pytest.mark.parametrize(("kind", "scale"), [(SparseGRPO, "group"), (ReplayGRPO, "batch")])
def test_nan_costs_the_sample_and_not_the_run(kind: Any, scale: str) -> None:
    recorder = Recorder()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        grpo = module(picky, scale_rewards=scale, kind=kind)
        trainer = fit(grpo, 3, [recorder])
    assert trainer.global_step == 3
    assert any("They are left out: no baseline counts them" in str(one.message) for one in said)
    one = next(s for s in recorder.scored if any(text.startswith("a") for text in s.completions))
    failed = torch.tensor([text.startswith("a") for text in one.completions])
    assert one.rollout.rewards is not None
    assert one.rollout.advantages is not None
    assert torch.equal(one.rollout.rewards.isnan(), failed)
    assert float(one.rollout.advantages[failed].abs().sum()) == 0
    assert float(trainer.callback_metrics["rewards/picky/failed"]) == recorder.scored[-1].reward_failures["picky"]


def test_a_run_in_which_nothing_fails_enters_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rewards, "_without_failed", pytest.fail)
    monkeypatch.setattr(Rewards, "_warn_of_failure", pytest.fail)
    fit(module(), 2)


def validate(reward: Any) -> dict[str, float]:
    """Validation on four rows, a batch each, whose answers are 0 to 3."""
    (found,) = quiet().validate(module(reward), datamodule=Rows(val_batch_size=1), verbose=False)
    return dict(found)


def test_one_validation_row_that_fails_ends_no_run() -> None:
    """It was "fails on every sample" of its batch; what cannot be judged is wrong."""

    def fails_on_the_first(answer: list[str], **_: Any) -> list[float]:
        return [math.nan if gold == "0" else 1.0 for gold in answer]

    found = validate(fails_on_the_first)
    assert found["val/pass@1_dense"] == 0.75
    assert found["val/reward_dense"] == 1.0


def test_a_function_that_fails_on_a_whole_validation_ends_it() -> None:
    def never(answer: list[str], **_: Any) -> list[float]:
        raise KeyError("no judge")

    with pytest.raises(RuntimeError, match=r"KeyError\('no judge'\) .* 8 of 8 samples failed"):
        validate(never)


def test_an_accuracy_counts_what_cannot_be_judged_as_wrong_and_a_reward_leaves_it_out() -> None:
    def scores(values: list[float]) -> Scores:
        one = scored("abc")
        one.reward_table = {"f": torch.tensor(values)}
        one.failed = {"f": torch.tensor([False, False, True])}
        return Scores.of(one, torch.tensor(values))

    assert scores([1.0, 0.0, math.nan]).mean == pytest.approx(1 / 3)
    assert scores([1.0, 0.5, math.nan]).mean == 0.75
    logged: dict[str, float] = {}
    log = ValidationLog(lambda name, value, **_: logged.update({name: float(value)}))
    log.batch(scores([math.nan] * 3), torch.ones(1, dtype=torch.bool), "{}", by_benchmark=False)
    assert logged["pass@1"] == 0.0
