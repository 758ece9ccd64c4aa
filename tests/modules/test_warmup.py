"""Warm-up on transcripts: what the policy is given has no loss."""

from __future__ import annotations

import pytest
import torch

from sparse_rl_lightning.data import ArithmeticTasks
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.modules import SupervisedWarmup
from sparse_rl_lightning.policies import TinyPolicy

GIVEN = r"(?<=\?)[^;]*;"
ROWS = ArithmeticTasks("calculator", num_terms=4, num_train=6, num_val=2).train_rows()


def warmup(given: str | None) -> SupervisedWarmup:
    module = SupervisedWarmup(TinyPolicy(alphabet="0123456789+-*?;#!", hidden_size=32), given=given)
    module.configure_model()
    return module


@pytest.mark.parametrize("given", [None, GIVEN, "zzz"])
def test_the_loss_is_that_of_the_tokens_the_policy_writes(given: str | None) -> None:
    module, total, count = warmup(given), 0.0, 0
    tokenizer = module.tokenizer
    for row in ROWS:
        turn, written = True, []  # by hand: a turn lasts until ?, an answer until ;
        for character in row["solution"]:
            written.append(turn or given != GIVEN)
            turn = {"?": False, ";": True}.get(character, turn)
        ids = torch.tensor([tokenizer(row["prompt"] + row["solution"])["input_ids"] + [tokenizer.eos_token_id]])
        logprobs = module.policy(ids).logits.double().log_softmax(-1)[0]
        start = len(row["prompt"])
        for place, scored in enumerate([*written, True], start):
            total -= float(logprobs[place - 1, ids[0, place]].detach()) * scored
            count += scored
    assert float(module._loss(ROWS)[0].detach()) == pytest.approx(total / count, rel=1e-5)


def test_what_is_given_is_tokenized_as_in_a_rollout() -> None:
    ids, targets = warmup(GIVEN)._encode(ROWS[:1])
    tokenizer = warmup(GIVEN).tokenizer
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == ROWS[0]["prompt"] + ROWS[0]["solution"]
    written = tokenizer.decode(targets[0][targets[0] >= 0], skip_special_tokens=True)
    assert written.split("?") == [turn.rpartition(";")[2] for turn in ROWS[0]["solution"].split("?")]


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(UserError, match=r"given='\(' is not a regular expression"):
        warmup("(")
