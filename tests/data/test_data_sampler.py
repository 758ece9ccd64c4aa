from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from tiny_grpo import module, quiet
from torchdata.stateful_dataloader import StatefulDataLoader

from exact_answers.arithmetic import evaluate_expression
from sparse_rl_lightning.cli.yaml_files import read_file
from sparse_rl_lightning.data import ArithmeticTasks, PromptDataModule, RepeatedBlockSampler, Row
from sparse_rl_lightning.data.arithmetic import is_validation_question
from sparse_rl_lightning.policies.tiny import ARITHMETIC_ALPHABET
from sparse_rl_lightning.rewards import arithmetic_reward
from sparse_rl_lightning.testing import character_tokenizer

Batches = list[tuple[str, ...]]


class Letters(PromptDataModule):
    """Seven prompts a to g; blocks of two leave one out of every epoch."""

    def __init__(self, count: int = 7, num_val: int = 0, **arguments: Any) -> None:
        super().__init__(**({"prompts_per_rollout": 2, "seed": 3} | arguments))
        self.count, self.num_val = count, num_val

    def train_rows(self) -> list[Row]:
        return [{"prompt": letter, "answer": letter.upper()} for letter in "abcdefghijklmnop"[: self.count]]

    def val_rows(self) -> list[Row]:
        return [{"prompt": letter, "answer": letter} for letter in "zyxwv"[: self.num_val]]


class Recorder(LightningModule):
    """Trains two batches per rollout and remembers every batch it was given."""

    steps_per_rollout = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Linear(1, 1)
        self.seen: Batches = []

    def training_step(self, batch: list[Row], batch_idx: int) -> torch.Tensor:
        self.seen.append(tuple(row["prompt"] for row in batch))
        return self.weight(torch.ones(1)).sum()

    def validation_step(self, batch: list[Row], batch_idx: int) -> None:
        assert len(batch) <= 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(max_steps: int, callbacks: list[Callback] | None = None, **arguments: Any) -> Trainer:
    return quiet(max_steps, max_epochs=-1, callbacks=callbacks, enable_checkpointing=bool(callbacks), **arguments)


def fit(steps: int, data: Letters | None = None, resume: Path | None = None, **arguments: Any) -> Batches:
    module = Recorder()
    trainer(steps, **arguments).fit(module, datamodule=data or Letters(), ckpt_path=resume)
    return module.seen


def sampler(count: int = 7, **arguments: Any) -> RepeatedBlockSampler:
    return RepeatedBlockSampler(range(count), **({"block_size": 2, "repeats": 3} | arguments))


def test_each_block_is_yielded_so_often_in_succession() -> None:
    indices = list(sampler())
    assert len(indices) == len(sampler()) == 3 * 3 * 2
    blocks = [tuple(indices[i : i + 2]) for i in range(0, 18, 2)]
    assert all(len(set(blocks[first : first + 3])) == 1 for first in (0, 3, 6))
    assert Counter(indices).most_common() == [(index, 3) for index in dict.fromkeys(indices)]
    assert len(set(indices)) == 6


def test_order_depends_on_seed_and_epoch_only() -> None:
    first, second = sampler(20), sampler(20)
    epochs = [list(first) for _ in range(3)]
    assert epochs == [list(second) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert list(sampler(20, seed=1)) not in epochs  # seed 1, epoch 0 is not seed 0, epoch 1
    assert epochs[2] == sampler(20).epoch_indices(2)
    assert sorted(set(sampler(20, seed=20261127123456))) == sorted(set(sampler(20, seed=2**63 - 1)))  # a date is a seed


def test_set_epoch_chooses_where_the_stream_begins_and_never_cuts_a_block() -> None:
    expected = sampler(20).epoch_indices(2)
    fresh = sampler(20)
    iterator = iter(fresh)  # Lightning makes the iterator first and tells the epoch afterwards
    fresh.set_epoch(2)
    head = [next(iterator) for _ in range(5)]
    fresh.set_epoch(7)
    assert head + list(fresh) == expected
    assert list(fresh) == sampler(20).epoch_indices(3)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_ranks_share_out_whole_prompts(num_replicas: int) -> None:
    ranks = [sampler(20, num_replicas=num_replicas, rank=rank) for rank in range(num_replicas)]
    parts = [list(rank) for rank in ranks]
    assert {len(part) for part in parts} == {20 // (2 * num_replicas) * 2 * 3}
    assert sum(len(set(part)) for part in parts) == len(set().union(*parts))
    together = sampler(20, block_size=2 * num_replicas).epoch_indices(0)
    for step in range(len(parts[0]) // 2):  # the same global block as on one rank
        whole = together[2 * num_replicas * step : 2 * num_replicas * (step + 1)]
        for rank, part in zip(ranks, parts, strict=True):
            for rank.position in (2 * step + 1, 2 * step + 2):
                assert part[2 * step : 2 * step + 2] == [whole[place] for place in rank.places]


def test_ranks_get_prompts_of_like_lengths() -> None:
    """Of any block the longest prompts are shared out: no rank's sum is off by more than one prompt's excess."""
    lengths = torch.randint(1, 1000, (48,)).tolist()
    arguments: dict[str, Any] = {"block_size": 4, "num_replicas": 3, "lengths": lengths}
    parts = [RepeatedBlockSampler(range(48), rank=rank, **arguments).epoch_indices(0) for rank in range(3)]
    shuffled = [sampler(48, block_size=4, num_replicas=3, rank=rank).epoch_indices(0) for rank in range(3)]
    for start in range(0, 16, 4):
        block = [[lengths[index] for index in part[start : start + 4]] for part in parts]
        assert all(own == sorted(own, reverse=True) for own in block)
        assert max(map(sum, block)) - min(map(sum, block)) <= max(map(max, block)) - min(map(min, block))
    sums = (by_block(indices, lengths) for indices in (parts, shuffled))
    spread, without = (sum(max(block) - min(block) for block in blocks) for blocks in sums)
    assert spread < without / 2


def by_block(parts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    return [[sum(lengths[index] for index in part[s : s + 4]) for part in parts] for s in range(0, 16, 4)]


@pytest.mark.parametrize(("position", "ranks"), [(0, 1), (12, 1), (14, 1), (12, 4), (18, 4), (18, 3)])
def test_other_ranks_go_on_with_whole_new_blocks(position: int, ranks: int) -> None:
    """Saved by two ranks, blocks of 2 three times over: 12 positions are two blocks of 4 prompts together."""
    saved = sampler(40, num_replicas=2)
    saved.position = position
    other = sampler(40, num_replicas=ranks)
    other.load_state_dict(saved.state_dict())
    used = {i for r in range(2) for i in sampler(40, num_replicas=2, rank=r).epoch_indices(0)[: -(-position // 6) * 6]}
    rest = {i for r in range(ranks) for i in sampler(40, num_replicas=ranks, rank=r).epoch_indices(0)[other.position :]}
    assert other.position % 6 == 0
    assert not used & rest


@pytest.mark.parametrize("repeats", [1, 2, 5])
def test_other_repetitions_go_on_with_the_next_block(repeats: int) -> None:
    saved, other = sampler(40), sampler(40, repeats=repeats)
    saved.position = 12  # two blocks of 2, three times over
    other.load_state_dict(saved.state_dict())
    assert other.epoch_indices(0)[other.position :][: 2 * repeats] == saved.epoch_indices(0)[12:14] * repeats


def test_a_place_in_other_data_is_refused() -> None:
    state = sampler(20).state_dict()
    with pytest.raises(ValueError, match="number of prompts was 20 and is 21, steps per rollout was 3 and is 4"):
        sampler(21, repeats=4).load_state_dict(state)
    with pytest.raises(ValueError, match="number of prompts was 20 and is 21"):
        sampler(21, num_replicas=2).load_state_dict(state)


def loader() -> StatefulDataLoader[list[int]]:
    order = RepeatedBlockSampler(range(7), block_size=2, repeats=3, seed=5)
    return StatefulDataLoader(list(range(7)), batch_size=2, sampler=order, collate_fn=list)


@pytest.mark.parametrize("stop", range(1, 18))
def test_loader_state_resumes_with_the_next_batch(stop: int) -> None:
    whole = loader()
    expected = [batch for _ in range(2) for batch in whole]
    assert len(expected) == 18
    interrupted = loader()
    iterator = iter(interrupted)
    seen = []
    while len(seen) < stop:
        try:
            seen.append(next(iterator))
        except StopIteration:
            iterator = iter(interrupted)
    state = interrupted.state_dict()
    resumed = loader()
    resumed.load_state_dict(state)
    while len(seen) < 18:
        seen += list(resumed)
    assert seen == expected


def test_data_module_without_a_trainer() -> None:
    batches = list(Letters().train_dataloader())
    assert len(batches) == 3
    assert all(row["answer"] == row["prompt"].upper() for batch in batches for row in batch)
    assert Letters().val_dataloader() == []


def test_validation_rows_come_in_order_and_are_limited() -> None:
    def prompts(data: Letters) -> list[list[str]]:
        return [[row["prompt"] for row in batch] for batch in data.val_dataloader()]

    assert prompts(Letters(num_val=5, val_batch_size=2)) == [["z", "y"], ["x", "w"], ["v"]]
    assert prompts(Letters(num_val=5, val_batch_size=2, max_val_prompts=3)) == [["z", "y"], ["x"]]


@pytest.mark.parametrize(("count", "message"), [(0, "no rows"), (1, "do not fill one block")])
def test_too_few_prompts(count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(1, Letters(count=count))


@pytest.mark.parametrize(("num_val", "accumulate"), [(0, 1), (2, 2)])
def test_a_killed_run_goes_on_with_the_very_next_batch(tmp_path: Path, num_val: int, accumulate: int) -> None:
    """Six batches per epoch: the checkpoints fall into blocks, between them, and on the end of an epoch."""
    arguments = {"accumulate_grad_batches": accumulate}
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = fit(16 // accumulate, Letters(num_val=num_val, val_batch_size=2), callbacks=[save], **arguments)
    assert len(whole) == 16
    assert len({letter for batch in whole[:6] for letter in batch}) == 6
    assert all(whole[batch] == whole[batch + 1] for batch in range(0, 16, 2))  # two per rollout, as the module says
    for step in range(1, 14 // accumulate):
        checkpoint = tmp_path / f"step={step}.ckpt"
        rest = fit(16 // accumulate, Letters(num_val=num_val, val_batch_size=2), resume=checkpoint, **arguments)
        assert whole[: step * accumulate] + rest == whole, f"resumed after optimizer step {step}"


@pytest.mark.parametrize("steps", [1, 4, 6, 9])
@pytest.mark.parametrize("when", ["at the end of the epoch", "after fit"])
def test_a_finished_run_can_be_prolonged(tmp_path: Path, steps: int, when: str) -> None:
    """Stopping by max_steps counts as the end of an epoch for Lightning, but not for the prompts."""
    whole = fit(14)
    first = Recorder()
    save = ModelCheckpoint(tmp_path, filename="last") if when == "at the end of the epoch" else None
    run = trainer(steps, callbacks=[save] if save else None)
    run.fit(first, datamodule=Letters())
    if save is None:
        run.save_checkpoint(tmp_path / "last.ckpt")
    assert first.seen + fit(14, resume=tmp_path / "last.ckpt") == whole


def test_limited_epochs_do_not_cut_blocks() -> None:
    assert fit(12, limit_train_batches=5) == fit(12)


TASKS = ["sum", "product", "modulo", "reduction", "countdown", "calculator", "calculator_restated"]
SCRATCHPADS = ["sum", "product", "modulo", "countdown"]  # every step restates an equation


def rows(tasks: str | list[str] = "sum", **arguments: Any) -> list[Row]:
    return ArithmeticTasks(tasks, **({"num_train": 200, "num_val": 100} | arguments)).train_rows()


def warmup_alphabet(config: str) -> str:
    """That of the policy which a configuration warms up."""
    values = read_file(Path(__file__).resolve().parents[2] / "configs" / f"{config}.yaml")
    alphabet: str = values["model"]["init_args"]["policy"].get("init_args", {}).get("alphabet", ARITHMETIC_ALPHABET)
    return alphabet


def reward(row: Row, completion: str) -> float | None:
    columns = {name: [value] for name, value in row.items() if name != "prompt"}
    return arithmetic_reward([row["prompt"]], [completion], [[]], **columns)[0]


@pytest.mark.parametrize("task", TASKS)
def test_questions_look_as_documented(task: str) -> None:
    pattern = {
        "sum": r"\d\d(\+\d\d){3}=",
        "product": r"\d\d(\*\d\d){3}=",
        "modulo": r"\(\d\d(\+\d\d){3}\)%\d\d=",
        "reduction": r"\(\d\d(\+\d\d){3}\)=",
        "countdown": r"\d\d(,\d\d){3}>\d+=",
    }.get(task, r"\d\d([-+*]\d\d){3};")
    for row in rows(task):
        assert re.fullmatch(pattern, row["prompt"])
        assert set(row) == {"prompt", "answer", "solution", "task"}
        assert row["task"] == task


@pytest.mark.parametrize("task", TASKS)
def test_answer_by_independent_arithmetic(task: str) -> None:
    for row in rows(task, num_terms=3):
        question = row["prompt"].removesuffix("=")
        if task == "countdown":
            numbers, _, target = question.partition(">")
            value = evaluate_expression(row["answer"])
            assert value[0] == int(target)
            assert sorted(value[1]) == sorted(int(number) for number in numbers.split(","))
        else:
            python = re.sub(r"0*(\d+)", r"\1", question).rstrip(";")
            if task.startswith("calculator"):  # as a pocket calculator does, from left to right
                python = re.sub(r"^(\d+[-+*]\d+)", r"(\1)", python)
            assert row["answer"] == str(eval(python))


@pytest.mark.parametrize("task", SCRATCHPADS)
def test_every_step_of_the_scratchpad_is_true_and_follows(task: str) -> None:
    for row in rows(task):
        work, _, answer = row["solution"].partition("#")
        steps = [step.split("=") for step in work.split(";")]
        assert answer == row["answer"]
        assert len(steps) == (4 if task == "modulo" else 3)
        for (left, right), following in zip(steps, [*steps[1:], None], strict=True):
            assert str(eval(left)) == right
            assert following is None or re.match(rf"{right}[-+*%]", following[0])


def test_every_step_of_a_reduction_says_all_that_is_needed_to_go_on() -> None:
    for row in rows("reduction"):
        work, _, answer = row["solution"].partition("#")
        question = [int(term) for term in row["prompt"].strip("()=").split("+")]
        terms = [question, *([int(term) for term in step.split("+")] for step in work.split(";"))]
        assert terms[-1] == [int(answer)]
        assert len(terms) == 4
        for before, after in itertools.pairwise(terms):
            assert after == [before[0] + before[1], *before[2:]]


def test_every_answer_that_restates_is_a_question_with_the_same_answer() -> None:
    for row in rows("calculator_restated", num_terms=6):
        questions = [row["prompt"], *re.findall(r"\?([^;]*;)", row["solution"])]
        assert questions[-1] == f"{row['answer']};"
        for before, after in itertools.pairwise(questions):
            first = re.match(r"(\d+[-+*]\d+)(.*)", before)
            call = re.sub(r"0*([0-9]+)", r"\1", first[1])
            assert after == f"{eval(call)}{first[2]}"


@pytest.mark.parametrize(("num_terms", "digits"), [(8, 2), (30, 1), (12, 3)])
def test_every_turn_of_a_calculation_follows_from_the_last_answer_and_the_prompt(num_terms: int, digits: int) -> None:
    grown = 0
    for row in rows("calculator", num_terms=num_terms, digits=digits):
        steps = [step.split("?") for step in row["solution"].partition("#")[0].split(";")]
        assert steps.pop() == [""]  # the last answer, too, ends with ;
        first = row["prompt"][:digits]
        operands = re.findall(r"[-+*]\d+", row["prompt"])
        assert [call for call, _ in steps] == [
            left + operand for left, operand in zip([first, *(result for _, result in steps)], operands, strict=False)
        ]
        for call, result in steps:
            assert int(result) == eval(re.sub(r"0*(\d+)", r"\1", call))
            assert 0 <= int(result) < 10 ** (digits + 2)
        grown += int(steps[-1][1]) >= 10**digits
        assert row["answer"] == steps[-1][1]
    assert grown > 100  # of 200: numbers do get large


def test_a_question_worked_out_by_hand() -> None:
    solution = "64+88=152;152+54=206;206+47=253#253"
    assert rows()[0] == {"prompt": "64+88+54+47=", "answer": "253", "solution": solution, "task": "sum"}


@pytest.mark.parametrize("task", TASKS)
def test_reward_of_the_solution_and_of_a_wrong_one(task: str) -> None:
    data = rows(task)
    assert {reward(row, row["solution"]) for row in data} == {1.0}
    assert {reward(row, row["solution"] + "1") for row in data} == {0.0}
    assert {reward(row, row["solution"].replace("#", "")) for row in data} == {0.0}


@pytest.mark.parametrize("task", TASKS)
def test_characters_lie_in_the_alphabet(task: str) -> None:
    alphabet = warmup_alphabet("warmup_tools" if task.startswith("calculator") else "warmup")
    text = "".join(row["prompt"] + row["solution"] for row in rows(task))
    assert set(text) <= set(alphabet)
    assert len(set(alphabet)) == len(alphabet)
    tokenizer = character_tokenizer(alphabet)
    assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_question_leaks_under_any_seed(seed: int) -> None:
    # two terms of two digits: a space so small that independent draws would collide by the hundred
    train = {row["prompt"] for row in rows(num_terms=2, num_train=5000, seed=seed)}
    for other in range(3):
        validation = ArithmeticTasks(num_terms=2, num_val=500, seed=other).val_rows()
        assert train.isdisjoint(row["prompt"] for row in validation)
        assert len({row["prompt"] for row in validation}) == 500
    assert len(train) == 5000


def test_split_is_fixed_for_all_time() -> None:
    questions = [f"{a:02d}+{b:02d}=" for a in range(100) for b in range(100)]
    chosen = [question for question in questions if is_validation_question(question)]
    assert chosen[:4] == ["00+00=", "00+06=", "00+14=", "00+19="]
    assert len(chosen) == pytest.approx(10_000 / 8, rel=0.1)


def test_seeds() -> None:
    assert rows(seed=1) == rows(seed=1)
    one, two = ({row["prompt"] for row in rows(seed=seed)} for seed in (1, 2))
    assert len(one & two) < 5
    assert ArithmeticTasks(seed=1).val_rows() == ArithmeticTasks(seed=1, num_train=7).val_rows()


def test_a_modulus_is_at_least_two() -> None:
    moduli = {
        int(row["prompt"].rpartition("%")[2][:-1]) for row in rows("modulo", num_terms=2, digits=1, num_train=400)
    }
    assert moduli == set(range(2, 10))


def test_tasks_take_turns() -> None:
    assert Counter(row["task"] for row in rows(TASKS, num_train=280)) == dict.fromkeys(TASKS, 40)


@pytest.mark.parametrize("digits", [1, 3])
def test_digits_and_terms(digits: int) -> None:
    numbers = [re.findall(r"\d+", row["prompt"]) for row in rows(digits=digits, num_terms=5)]
    assert {len(number) for question in numbers for number in question} == {digits}
    assert {len(question) for question in numbers} == {5}


@pytest.mark.parametrize("command", ["validate", "test"])
def test_nothing_to_evaluate_on_is_an_error(command: str) -> None:
    """Asked for by name, silence would look like success; in training there need be none."""
    with pytest.raises(ValueError, match=r"ArithmeticTasks has no validation rows.*data\.num_val"):
        getattr(quiet(), command)(module(), datamodule=ArithmeticTasks(num_train=20, num_val=0))
