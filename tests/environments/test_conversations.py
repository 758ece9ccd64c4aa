"""Conversations with environments: everything stays exact, and what an environment does hurts no other sample."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from chatter import Async, Chatter, Slow, talking
from tiny_grpo import Recorder, Rows, fit, weights

from sparse_rl_lightning.budgets import LengthSchedule
from sparse_rl_lightning.callbacks import AcceptanceMonitor
from sparse_rl_lightning.compressors import FullKV, SnapKV
from sparse_rl_lightning.data.base import PromptDataModule
from sparse_rl_lightning.downsampling import MaxReward
from sparse_rl_lightning.environments import ToolCall, ToolEnvironment, TurnOptions
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.metrics.conversations import ROLES, roles_of
from sparse_rl_lightning.metrics.rollout import rollout_metrics
from sparse_rl_lightning.modules import ReplayGRPO, SparseGRPO
from sparse_rl_lightning.policies import LoadedPolicy
from sparse_rl_lightning.policies.tiny import CHAT_TEMPLATE
from sparse_rl_lightning.records import ScoredRollout
from sparse_rl_lightning.retrievers import Quest
from sparse_rl_lightning.rollout import replay_logprobs
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

WORD = "0123456789abcdef" + "fedcba9876543210" + "abc"
ROWS = [{"prompt": "0123456789abcdef"[i:] + "a", "answer": "x"} for i in range(6)]
ASKED = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]  # as chat messages
NINE, TOO_MANY = TurnOptions(max_observation_length=9), "needs 30 tokens, more than the budget of 20"
VOWELS = ["a", "e", "i", "o", "u", "."]


def ready(environment: Any = Chatter, tokenizer: Any = None, **options: Any) -> SparseGRPO:
    """A module with its policy, which a trainer would load: of this tokenizer, if one is given."""
    grpo = talking(environment, **options)
    if tokenizer is not None:
        grpo.policy_source = LoadedPolicy(tiny_model(vocab_size=103, initializer_range=0.1), tokenizer)
    grpo.configure_model()
    return grpo


def scored(environment: Any = Chatter, rows: Any = None, **options: Any) -> ScoredRollout:
    """A training rollout with rewards, without a trainer."""
    grpo = ready(environment, **options)
    own = grpo.generator.generate(rows or ROWS)
    grpo.score(own)
    return own


# -------------------------------------------------------------------- what was said


def test_tokens_are_what_was_said() -> None:
    """Turns drawn and answers given stand in the tokens in order, and only what was drawn is in the mask."""
    own = scored()
    tokenizer = talking().policy_source.load()[1]
    assert max(one.num_turns for one in own.conversations) == 3
    for row, one in enumerate(own.conversations):
        turns = own.rollout.turns[row]
        assert int(turns.max()) == len(one.messages)
        for number, message in enumerate(one.messages, 1):
            text = tokenizer.decode(own.rollout.sequences[row, turns == number], skip_special_tokens=True)
            assert text == message["content"]
            drawn = own.rollout.completion_mask[row, turns == number]
            assert bool((drawn == (message["role"] == "assistant")).all())
        assert own.completions[row] == "\n".join(m["content"] for m in one.messages if m["role"] == "assistant")


def test_replay_is_exact_and_given_tokens_have_no_part_in_loss_or_lengths() -> None:
    own, grpo = scored(), ready()
    rollout, drawn = own.rollout, own.rollout.completion_mask
    assert int(rollout.evictions.num_steps.min()) > 0
    replayed = replay_logprobs(grpo.policy, rollout, 1.0)
    assert ((replayed - rollout.sampler_logprobs)[drawn]).abs().max() < 2e-5
    assert not bool((rollout.keep & ~drawn).any())
    given = roles_of(rollout) == ROLES.index("given")
    assert bool(given.any())
    assert not bool((given & drawn).any())
    assert torch.equal(rollout.completion_lengths, drawn.sum(dim=1))


def test_rewards_are_summed_over_turns() -> None:
    own = scored()
    spoken = [text.count("a") / 10 for text in own.completions]
    torch.testing.assert_close(own.rollout.rewards, torch.tensor(spoken))
    assert list(own.reward_table) == ["environment"]


def test_functions_reward_conversations_too() -> None:
    def counts(conversations: list[list[dict[str, str]]], **_: Any) -> list[float]:
        return [float(sum(m["role"] == "environment" for m in messages)) for messages in conversations]

    own = scored(reward=counts, reward_weights=[0.5])
    expected = [(one.num_turns - 1) * 0.5 + one.reward for one in own.conversations]
    torch.testing.assert_close(own.rollout.rewards, torch.tensor(expected))


# -------------------------------------------------------------------- nothing depends on time


@pytest.mark.parametrize("environment", [Slow, Async], ids=["threads", "coroutines"])
def test_a_rollout_does_not_depend_on_how_long_answers_take(environment: Any) -> None:
    inline = scored(turns=TurnOptions(max_turns=4, max_turn_length=9, timeout=None))
    other = scored(environment)
    assert torch.equal(inline.rollout.sequences, other.rollout.sequences)
    assert torch.equal(inline.rollout.sampler_logprobs, other.rollout.sampler_logprobs)
    assert inline.conversations == other.conversations


def test_a_conversation_does_not_depend_on_its_neighbors_and_slots() -> None:
    all_at_once, two_slots = scored(), scored(num_slots=2)
    assert torch.equal(all_at_once.rollout.sequences, two_slots.rollout.sequences)
    assert torch.equal(all_at_once.rollout.sampler_logprobs, two_slots.rollout.sampler_logprobs)


def test_others_are_decoded_while_one_waits() -> None:
    """One environment that sleeps long does not make the others wait for it, turn by turn."""

    class OneSleeps(Chatter):
        def step(self, text: str) -> tuple[str | None, float | None]:
            if self.sleeps:
                time.sleep(0.5)
            told.append(self.sleeps)
            return super().step(text)

        def reset(self, row: dict[str, Any]) -> str | None:
            self.sleeps = row["prompt"] == ROWS[0]["prompt"]
            return super().reset(row)

    told: list[bool] = []
    scored(OneSleeps)
    first = told.index(True)
    assert told[:first].count(False) > len(ROWS) * 4 - 4  # second turns of others come before its first answer


def test_protected_answers_are_never_evicted() -> None:
    compressor = SnapKV(budget=24, buffer=4, num_sinks=1, window=3, protect_observations=2)
    own = scored(compressor=compressor, turns=TurnOptions(max_turns=4, max_turn_length=9, max_observation_length=8))
    evictions, turns = own.rollout.evictions, own.rollout.turns
    dead = (evictions.death < 2**31 - 1).any(dim=0).any(dim=1)
    assert bool(dead[(turns % 2 == 1)].any())
    assert not bool(dead[(turns == 2) | (turns == 4)].any())  # there are two


# -------------------------------------------------------------------- limits, and saying what is cut


def test_limits_end_conversations_and_are_counted() -> None:
    own = scored(turns=TurnOptions(max_turns=2, max_turn_length=3, max_observation_length=2))
    rollout = own.rollout
    assert {one.end for one in own.conversations} <= {"turns", "length"}
    assert all(one.num_turns <= 2 for one in own.conversations)
    assert any(one.cut_turns for one in own.conversations)
    assert any(one.cut_observations for one in own.conversations)
    assert not bool(rollout.finished.any())
    turns = rollout.turns
    for turn in (1, 2, 3):
        assert int((turns == turn).sum(dim=1).max()) <= (3 if turn % 2 else 2)


def test_without_room_for_an_answer_a_conversation_ends_and_its_last_turn_is_rewarded() -> None:
    own = scored(max_completion_length=14, turns=TurnOptions(max_turns=9))
    assert "length" in {one.end for one in own.conversations}
    longest = (own.rollout.lengths - own.rollout.prompt_lengths).max()
    assert int(longest) <= 14
    spoken = [text.count("a") / 10 for text in own.completions]
    torch.testing.assert_close(own.rollout.rewards, torch.tensor(spoken))  # the last turn's too
    cut = torch.tensor([one.end == "length" for one in own.conversations])
    assert not bool(own.rollout.finished[cut].any())


def test_an_answer_of_long_tokens_fits_by_its_tokens() -> None:
    """Of 70 characters, which are a few tokens, where there is room for fewer than 70."""

    class Long(Chatter):
        def step(self, text: str) -> tuple[str | None, float | None]:
            answer, reward = super().step(text)
            return None if answer is None else WORD * 2, reward

    grpo, tokenizer = talking(Long, max_completion_length=40), character_tokenizer("0123456789abcdef")
    tokenizer.add_tokens([WORD])
    policy = tiny_model(vocab_size=len(tokenizer), hidden_size=32, initializer_range=0.1, eos_token_id=1)
    grpo.policy_source = LoadedPolicy(policy, tokenizer)
    grpo.configure_model()
    conversations = grpo.generator.generate(ROWS).conversations
    assert {one.end for one in conversations} == {"environment"}
    assert not any(one.cut_observations for one in conversations)
    told = [message["content"] for one in conversations for message in one.messages if message["role"] == "environment"]
    assert set(told) == {WORD * 2}


# -------------------------------------------------------------------- failures


class Fails(Chatter):
    """Does what its row says, in its second turn."""

    how: str = ""

    def reset(self, row: dict[str, Any]) -> str | None:
        self.how = row.get("how", "")
        if self.how == "reset":
            raise OSError("no sandbox left")
        return super().reset(row)

    def step(self, text: str) -> Any:
        answer = super().step(text)
        if self.told.count("|") == 2:
            if self.how == "raises":
                raise ZeroDivisionError("by zero")
            if self.how == "exits":
                raise SystemExit(3)
            if self.how == "hangs":
                time.sleep(5)
            if self.how == "huge":
                return None, 10**400
            if self.how == "a message":
                return [{"role": "tool", "content": "x"}], 1.0
        return answer


class FailsLater(Fails):
    """The same as a coroutine."""

    async def step(self, text: str) -> Any:
        return Fails.step(self, text)


IMPATIENT = TurnOptions(max_turns=4, max_turn_length=9, timeout=0.5)


@pytest.fixture(scope="module")
def whole() -> ScoredRollout:
    """The rollout without a failure."""
    return scored(Fails, turns=IMPATIENT)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("environment", [Fails, FailsLater], ids=["thread", "coroutine"])
@pytest.mark.parametrize("how", ["reset", "raises", "exits", "hangs", "huge", "a message"])
def test_a_failure_ends_its_conversation_alone(how: str, environment: Any, whole: ScoredRollout) -> None:
    if environment is FailsLater and how == "hangs":
        pytest.skip("a coroutine that blocks its loop makes the others late: see test_calls.py")
    rows = [row | {"how": how if i == 2 else ""} for i, row in enumerate(ROWS)]
    words = "chat messages, but the prompt is text" if how == "a message" else "The environment failed"
    with pytest.warns(UserWarning, match=words):
        own = scored(environment, rows, turns=IMPATIENT)
    failed = torch.tensor([one.has_failed for one in own.conversations])
    assert failed[8:12].any()
    assert not failed[:8].any()
    assert not failed[12:].any()
    assert {one.end for one in own.conversations if one.has_failed} == {"timeout" if how == "hangs" else "failed"}
    assert bool(own.rollout.rewards[failed].isnan().all())
    assert bool((own.rollout.advantages[failed] == 0).all())
    others = [i for i in range(24) if not failed[i]]
    length = min(own.rollout.sequences.shape[1], whole.rollout.sequences.shape[1])
    same = own.rollout.sequences[others, :length] == whole.rollout.sequences[others, :length]
    assert bool(same.all())


class Broken(Chatter):
    def step(self, text: str) -> Any:
        raise KeyError("typo")


@pytest.mark.parametrize("options", [{}, {"num_slots": 6, "partial_rollout_steps": 3}], ids=["whole", "partial"])
def test_an_environment_that_always_fails_ends_training_and_no_validation(options: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"failed in all \d+ conversations.*typo"):
        fit(talking(Broken, **options), 2)
    with pytest.warns(UserWarning, match="The environment failed in 24 conv"):
        assert bool(scored(Broken).rollout.rewards.isnan().all())


def test_samples_of_a_row_must_have_one_prompt() -> None:
    class Moody(Chatter):
        count = 0

        def reset(self, row: dict[str, Any]) -> str:
            Moody.count += 1
            return f"{Moody.count}"

    with pytest.raises(UserError, match="different prompts"):
        scored(Moody, turns=TurnOptions(timeout=None))


def test_environments_are_closed_and_asked_for_a_last_reward() -> None:
    class Holds(Chatter):
        def cut(self) -> float:
            return 5.0

        async def close(self) -> None:
            closed.append(self)

    closed: list[Any] = []
    own = scored(Holds, turns=TurnOptions(max_turns=2))
    spoken = [text.count("a") / 10 for text in own.completions]
    extra = [5.0 if one.end in ("turns", "length") else 0.0 for one in own.conversations]
    assert any(extra)
    torch.testing.assert_close(own.rollout.rewards, torch.tensor(spoken) + torch.tensor(extra))
    end = time.monotonic() + 20
    while len(closed) < 24 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(set(map(id, closed))) == 24


def test_rows_stay_as_they_are() -> None:
    class Draws(Chatter):
        def reset(self, row: dict[str, Any]) -> str:
            return row["prompt"] + row["deck"].pop()

    rows = [row | {"deck": ["1", "2"]} for row in ROWS]
    own = scored(Draws, rows)
    assert all(row["deck"] == ["1", "2"] for row in rows)
    assert own.asked == rows
    assert own.rows[0]["prompt"] == rows[0]["prompt"] + "2"


def test_a_monitor_asks_about_rows_as_the_data_has_them() -> None:
    class Longer(Chatter):
        def reset(self, row: dict[str, Any]) -> str:
            prompts.append(row["prompt"])
            return row["prompt"] + "c"

    prompts: list[str] = []
    fit(talking(Longer), 2, [AcceptanceMonitor()])
    assert not any(prompt.endswith("cc") or prompt.endswith("ac") for prompt in prompts)


def test_failures_are_counted_before_samples_are_dropped() -> None:
    class Half(Chatter):
        def step(self, text: str) -> Any:
            if text.count("1") % 2:
                raise OSError("odd")
            return super().step(text)

    seen = Recorder()
    with pytest.warns(UserWarning, match="The environment failed"):
        fit(talking(Half, downsampling=MaxReward(num_samples=8)), 1, [seen])
    (own,) = seen.scored
    assert own.failures["turns/failed"] > sum(one.has_failed for one in own.conversations)
    assert [one.completion for one in own.conversations] == own.completions


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"retriever": Quest(budget=64), "compressor": FullKV()}, "environment does not work with retriever"),
        ({"environment": None}, "reward_funcs is empty"),
        ({"compressor": SnapKV(budget=14, protect_observations=1)}, "max_observation_length"),
        ({"compressor": SnapKV(budget=20, protect_observations=2), "turns": NINE}, TOO_MANY),
        ({"compressor": SnapKV(LengthSchedule([0, 99], [20, 40]), protect_observations=2), "turns": NINE}, TOO_MANY),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        talking(**options)


def test_limits_out_of_range_are_refused() -> None:
    with pytest.raises(UserError, match="max_turns must be at least 1"):
        TurnOptions(max_turns=0)


# -------------------------------------------------------------------- training


@pytest.mark.parametrize("kind", [None, ReplayGRPO], ids=["sparse", "replay"])
def test_a_policy_trains_on_conversations(kind: Any) -> None:
    seen, grpo = Recorder(), talking(lr=2.0, **({} if kind is None else {"kind": kind}))
    trainer = fit(grpo, 12, [seen], limit_val_batches=1, val_check_interval=6, check_val_every_n_epoch=None)
    rewards = [float(one.rollout.rewards.nanmean()) for one in seen.scored if one.rollout.rewards is not None]
    assert sum(rewards[-3:]) > sum(rewards[:3])
    metrics = trainer.callback_metrics
    assert {"turns/mean", "kv/evicted/prompt", "kv/evicted/given", "mismatch/kl_k3/later_turns"} <= metrics.keys()
    assert {"val/reward_dense", "val/reward_sparse"} <= metrics.keys()


def test_metrics_by_role_equal_a_count_by_hand() -> None:
    own = scored()
    rollout = own.rollout
    metrics, roles = rollout_metrics(own), roles_of(rollout)
    dead = rollout.evictions.death < 2**31 - 1  # (L, B, H, T)
    for role, name in enumerate(ROLES):
        share = dead.permute(1, 3, 0, 2)[roles == role].float()
        assert float(metrics[f"kv/evicted/{name}"]) == pytest.approx(float(share.mean()))
    assert float(metrics["turns/mean"]) == pytest.approx(sum(c.num_turns for c in own.conversations) / 24)


PARTIAL: dict[str, Any] = {"num_slots": 6, "partial_rollout_steps": 3, "lr": 0.5}
PARTIAL |= {"turns": TurnOptions(max_turns=4, max_turn_length=9, timeout=None)}


def test_conversations_of_partial_rollouts_begin_anew_after_a_resume(tmp_path: Path) -> None:
    """Under other limits too; with the row of the data, from which their environment makes the prompt once more."""
    options = PARTIAL | {"steps_per_generation": 2, "turns": replace(PARTIAL["turns"], max_prompt_length=20)}
    fit(talking(Questions, **options), 3, data=Bare(prompts_per_rollout=4)).save_checkpoint(tmp_path / "a.ckpt")
    left = torch.load(tmp_path / "a.ckpt", weights_only=True)["sparse_rl"]["partial"]["rows"]
    assert left
    assert not any("prompt" in row for row in left)
    ends = list[Any]()
    for length in (9, 9, 5):
        seen, turns = Recorder(), replace(options["turns"], max_turn_length=length)
        resumed = talking(Questions, **options | {"turns": turns})
        fit(resumed, 9, [seen], Bare(prompts_per_rollout=4), tmp_path / "a.ckpt")
        ends.append(weights(resumed))
        trained = [row["question"] for own in seen.scored for row in own.rows]
        assert set(trained) >= {row["question"] for row in left}
        for own in seen.scored:
            assert all(row["prompt"] == row["question"] + "b" for row in own.rows)
            for text, one in zip(own.completions, own.conversations, strict=True):
                turns_drawn = [message["content"] for message in one.messages if message["role"] == "assistant"]
                assert text == "\n".join(turns_drawn)
                assert max(map(len, turns_drawn)) <= length
    assert torch.equal(*ends[:2])


class Bare(PromptDataModule):
    """Rows whose prompts only their environment knows."""

    def train_rows(self) -> list[dict[str, Any]]:
        return [{"question": row["prompt"], "answer": row["answer"]} for row in Rows().train_rows()]

    def val_rows(self) -> list[dict[str, Any]]:
        return self.train_rows()[:4]


class Questions(Chatter):
    def reset(self, row: dict[str, Any]) -> str:
        return row["question"] + "b"


def test_data_needs_no_prompts_where_the_environment_gives_them() -> None:
    seen = Recorder()
    fit(talking(Questions), 2, [seen], data=Bare(prompts_per_rollout=4), limit_val_batches=1, val_check_interval=1)
    assert all(row["prompt"] == row["question"] + "b" for own in seen.scored for row in own.rows)


def test_partial_rollouts_ask_for_the_length_of_prompts_that_nobody_knows() -> None:
    """And say which option was too small."""
    with pytest.raises(UserError, match=r"set model\.rollout\.turns\.max_prompt_length"):
        fit(talking(Questions, **PARTIAL), 1, data=Bare(prompts_per_rollout=4))
    for most in (3, 18):
        turns = replace(PARTIAL["turns"], max_prompt_length=most)
        with pytest.raises(UserError, match=r"rollout\.turns\.max_prompt_length") if most == 3 else nullcontext():
            fit(talking(Questions, **PARTIAL | {"turns": turns}), 1, data=Bare(prompts_per_rollout=4))


# -------------------------------------------------------------------- chat


class Chats(Chatter):
    """Prompts and answers are chat messages."""

    def reset(self, row: dict[str, Any]) -> Any:
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, text: str) -> Any:
        observation, reward = super().step(text)
        return observation and [{"role": "tool", "name": "add", "content": observation}], reward


def test_a_chat_goes_through_the_template() -> None:
    """What a policy reads between two turns is what the template writes there."""
    tokenizer = character_tokenizer()
    ends = [tokenizer.convert_tokens_to_ids(one) for one in VOWELS]
    grpo = ready(Chats, tokenizer, end_tokens=VOWELS, max_completion_length=200)
    own = grpo.generator.generate(ROWS)
    assert {message["role"] for one in own.conversations for message in one.messages} == {"assistant", "tool"}
    for row, one in enumerate(own.conversations):
        for number, message in enumerate(one.messages, 1):
            if number % 2 == 0:
                ids = own.rollout.sequences[row, own.rollout.turns[row] == number]
                before = own.rollout.sequences[row, own.rollout.turns[row] == number - 1]
                assert int(before[-1]) in [*ends, tokenizer.eos_token_id] or len(before) == 9
                assert tokenizer.decode(ids) == f"\ntool: {message['content']}\nassistant: "


# -------------------------------------------------------------------- tools


class Tally:
    """As for TRL's environment_factory."""

    def reset(self, **row: Any) -> str:
        self.count = 0
        return f" {row['answer']}"

    def add(self, number: int) -> str:
        """Add to the count.

        Args:
            number: What to add.
        """
        self.count += number
        return str(self.count)

    async def wait(self) -> str:
        """Wait."""
        await asyncio.sleep(0.001)
        return "later"

    async def get_reward(self) -> float:
        return self.count / 4


class Letters(ToolEnvironment):
    """The policy calls by letters, since it was never trained to write JSON."""

    def __init__(self) -> None:
        super().__init__(Tally)
        self.tools = []  # the template would not describe them

    def parse(self, text: str) -> list[ToolCall]:
        calls = {0: ToolCall("add", {"number": 1}), 1: ToolCall("wait", {}), 2: ToolCall("absent", {})}
        return [calls[ord(letter) % 6] for letter in text[:3] if ord(letter) % 6 in calls]


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_tools_are_called_and_answer(timeout: float | None) -> None:
    turns = TurnOptions(max_turns=20, max_turn_length=9, timeout=timeout)
    grpo = ready(Letters, character_tokenizer(), end_tokens=VOWELS, max_completion_length=200, turns=turns)
    own = grpo.generator.generate(ASKED)
    assert own.rows[0]["prompt"][-1]["content"] == ROWS[0]["prompt"] + " x"
    told = {message["content"] for one in own.conversations for message in one.messages if message["role"] == "tool"}
    assert {"1", "later", "{'error': 'Tool absent not found.'}"} <= told
    for one in own.conversations:
        assert one.end in ("environment", "turns", "length")
        answers = [message["content"] for message in one.messages if message["role"] == "tool"]
        counts = [int(answer) for answer in answers if answer.isdigit()]
        if one.end == "environment" and counts:
            assert one.reward == counts[-1] / 4
    assert max(one.reward for one in own.conversations) > 0


def test_a_class_of_trl_is_an_environment() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}" + CHAT_TEMPLATE
    grpo = ready(Tally, tokenizer)
    own = grpo.generator.generate(ASKED)
    assert {(one.end, one.num_turns, one.reward) for one in own.conversations} == {("environment", 1, 0.0)}
    start = f"add wait user: {ROWS[0]['prompt']} x\nassistant: "
    assert tokenizer.decode(own.rollout.sequences[0]).startswith(start)
    tokenizer.chat_template = CHAT_TEMPLATE
    with pytest.raises(UserError, match="does not describe tools"):
        grpo.generator.generate(ASKED)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        Their sum.
    """
    return a + b


def test_tools_count_for_the_length_of_prompts() -> None:
    """What is planned for a prompt, in partial rollouts and evaluations too, is what an environment makes of it."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% if tools %}{{ tools }}{% endif %}" + str(tokenizer.chat_template)
    rows = [{"prompt": [{"role": "user", "content": f"{n} + 1"}]} for n in range(3)]
    grpo = ready(partial(ToolEnvironment, tools=[add]), tokenizer)
    encoded = grpo.generator.encode(rows)
    assert encoded == grpo.generator.conversations().begin(rows, 2).prompts
    assert "Add two numbers" in tokenizer.decode(encoded[0])
