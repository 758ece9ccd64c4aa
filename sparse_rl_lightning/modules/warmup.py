"""SupervisedWarmup: teach a policy the task's format before reinforcement learning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.modules.base import PolicyModule, default_optimizer
from sparse_rl_lightning.policies.source import PolicySource
from sparse_rl_lightning.rollout.prompts import encode_prompt
from sparse_rl_lightning.text import compiled, matches


class SupervisedWarmup(PolicyModule):
    """Cross-entropy on worked solutions, one token mean per batch; the prompt has no loss.

    It logs ``loss``, ``val_loss`` and ``val_token_accuracy`` (share of solution tokens predicted right).

    Args:
        policy: Hugging Face folder or hub name, or a source of models.
        solution_column: Column of the data rows with the text to learn.
        optimizer: Function from the parameters to the optimizer.
        lr_scheduler: Function from the optimizer to the learning-rate schedule.
        disable_dropout: Set every dropout of the policy to zero.
        chat_template_kwargs: Arguments of the tokenizer's chat template.
        given: Regular expression of what the policy does not write itself, such as the answers of a tool in a
            transcript; it has no loss, and is tokenized apart, as in a rollout.

    Raises:
        ValueError: If ``given`` is no regular expression.
    """

    def __init__(
        self,
        policy: str | PolicySource,
        solution_column: str = "solution",
        optimizer: OptimizerCallable = default_optimizer,
        lr_scheduler: LRSchedulerCallable | None = None,
        disable_dropout: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
        given: str | None = None,
    ) -> None:
        super().__init__(policy, optimizer, lr_scheduler, disable_dropout)
        self.solution_column = solution_column
        self.chat_template_kwargs = chat_template_kwargs
        self.given = None if given is None else compiled(given, "given")

    def training_step(self, batch: list[dict[str, Any]], batch_idx: int) -> Tensor:
        """Mean negative log-likelihood of the batch's solution tokens."""
        loss, _ = self._loss(batch)
        self.log("loss", loss.detach(), prog_bar=True, batch_size=len(batch))
        return loss

    def validation_step(self, batch: list[dict[str, Any]], batch_idx: int) -> None:
        """Log the same loss, and the token accuracy, on held-out rows."""
        loss, accuracy = self._loss(batch)
        self.log_dict({"val_loss": loss, "val_token_accuracy": accuracy}, prog_bar=True, batch_size=len(batch))

    def _loss(self, rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        ids, targets = self._encode(rows)
        logits = self.policy(ids, use_cache=False).logits[:, :-1].float()
        wanted = targets[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100)
        scored = wanted != -100
        return loss, (logits.argmax(-1) == wanted)[scored].float().mean()

    def _encode(self, rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        """Token ids (B, T) right-padded, and targets (B, T) with -100 for all that has no loss."""
        tokenizer = self.tokenizer
        ids, targets = [], []
        for row in rows:
            if self.solution_column not in row:
                raise UserError(
                    f"solution_column={self.solution_column!r} is not among the columns of the data: {sorted(row)}."
                )
            prompt = encode_prompt(tokenizer, row["prompt"], self.chat_template_kwargs)
            whole, wanted = list(prompt), [-100] * len(prompt)
            for text, is_given in _parts(row[self.solution_column], self.given):
                part = tokenizer(text, add_special_tokens=False)["input_ids"]
                whole += part
                wanted += [-100] * len(part) if is_given else part
            ids.append(torch.tensor([*whole, tokenizer.eos_token_id]))
            targets.append(torch.tensor([*wanted, tokenizer.eos_token_id]))
        pad = torch.nn.utils.rnn.pad_sequence
        padded = pad(ids, batch_first=True, padding_value=tokenizer.pad_token_id or 0)
        return padded.to(self.device), pad(targets, batch_first=True, padding_value=-100).to(self.device)


def _parts(text: str, given: re.Pattern[str] | None) -> Iterator[tuple[str, bool]]:
    """The text in pieces, each with whether the policy is given it."""
    end = 0
    for found in matches(given, text, "given", "a solution") if given else ():
        yield text[end : found.start()], False
        yield found[0], True
        end = found.end()
    yield text[end:], False
