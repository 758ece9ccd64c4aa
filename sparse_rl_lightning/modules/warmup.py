"""SupervisedWarmup: teach a policy the task's format before reinforcement learning."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from sparse_rl_lightning.distributed.ranks import DealtRows
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.modules.base import PolicyModule
from sparse_rl_lightning.modules.optimizers import default_optimizer
from sparse_rl_lightning.policies.source import PolicySource
from sparse_rl_lightning.records import Rows
from sparse_rl_lightning.rollout.observations import encode_behind
from sparse_rl_lightning.rollout.prompts import check_tokens, default_end_token_ids, encode_prompt, long_prompts
from sparse_rl_lightning.text import compiled


class SupervisedWarmup(PolicyModule):
    """Cross-entropy on worked solutions, one token mean per optimizer step; the prompt has no loss.

    Micro-batches that Lightning accumulates, and ranks, count by their tokens, as one large batch would. (Not so under
    DeepSpeed, which keeps the accumulated gradient to itself: there each micro-batch is a mean of its own.)

    The logits of a whole batch exist at once, with a vocabulary of 152k about 2 MB per token: for long solutions lower
    ``data.prompts_per_rollout`` and raise ``trainer.accumulate_grad_batches``, which changes no gradient.

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
        ValueError: If ``given`` is not a regular expression.
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
        self._tokens = 0.0  # of the optimizer step so far, on all ranks
        self._dealt = DealtRows()
        self.given = None if given is None else compiled(given, "given")

    def admit(self, rows: Rows, where: Callable[[int], str], is_training: bool) -> Rows:
        """The rows of a data set, checked before the first step; ``where`` names a row's place in its file."""
        prompts = [row.get("prompt", "") for row in rows]
        long_prompts(self.tokenizer, prompts, None, self.chat_template_kwargs, where)
        for index, row in enumerate(rows):
            text = row.get(self.solution_column)
            if not isinstance(text, str):
                raise UserError(
                    f"{where(index)}: solution_column={self.solution_column!r} must hold text, got {text!r:.80}. Its "
                    f"columns are: {', '.join(map(repr, row))}."
                )
        return rows

    def on_policy_loaded(self) -> None:
        """Find the token that ends a solution: the tokenizer's, or the model's; rollouts end at either.

        Raises:
            ValueError: If there is none.
        """
        ends = default_end_token_ids(self.policy, self.tokenizer)
        if not ends:
            raise UserError(
                "SupervisedWarmup: neither the tokenizer nor the model's generation_config names a token that ends a "
                "solution. Set the tokenizer's eos_token."
            )
        self._end = self.tokenizer.eos_token_id if self.tokenizer.eos_token_id in ends else ends[0]

    def training_step(self, batch: list[dict[str, Any]], batch_idx: int) -> Tensor:
        """Mean negative log-likelihood of the batch's solution tokens, with its weight in the optimizer step."""
        with self._products:
            loss, _, count = self._loss(batch)
        self.log("loss", loss.detach(), prog_bar=True, batch_size=len(batch))
        return loss * self._weight(count)

    def _weight(self, count: int) -> float:
        """The factor of the mean over ``count`` tokens, by which the gradient stays the token mean of the step so far.

        What was accumulated before is scaled down to its share of the tokens.
        """
        accumulate = self.trainer.accumulate_grad_batches
        if (accumulate == 1 and self._world_size == 1) or isinstance(self.trainer.strategy, DeepSpeedStrategy):
            return 1.0
        whole = float(count)
        if self._world_size > 1:
            tokens = torch.tensor(whole, dtype=torch.float64, device=self.device)
            whole = float(self.trainer.strategy.reduce(tokens, reduce_op="sum"))
        before, self._tokens = self._tokens, self._tokens + whole
        if before:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(before / self._tokens)
        return count * accumulate * self._world_size / self._tokens  # trainer and strategy divide by both

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Begin the next step's mean."""
        self._tokens = 0.0

    def on_train_start(self) -> None:
        """Begin the first step's mean; warn where there is none."""
        super().on_train_start()
        self._tokens = 0.0
        if self.trainer.accumulate_grad_batches > 1 and isinstance(self.trainer.strategy, DeepSpeedStrategy):
            rank_zero_warn(
                "SupervisedWarmup: under DeepSpeed every accumulated micro-batch weighs the same, whatever its tokens. "
                "Set trainer.accumulate_grad_batches to 1 and data.prompts_per_rollout higher, or use another strategy."
            )

    def on_validation_epoch_start(self) -> None:
        """Count every held-out row once, whichever ranks have it."""
        self._dealt = DealtRows(self._trainer, self._world_size)

    def validation_step(self, batch: list[dict[str, Any]], batch_idx: int) -> None:
        """Log the same loss, and the token accuracy, on held-out rows."""
        _, counts = self._dealt.next(len(batch))
        loss, accuracy, count = self._loss(batch, counts)  # a token mean over all batches
        metrics = {"val_loss": loss.nan_to_num(), "val_token_accuracy": accuracy.nan_to_num()}  # NaN without a token
        weight = count * self._world_size  # Lightning divides the sum of the weights by it, in whole numbers
        self.log_dict(metrics, prog_bar=True, batch_size=weight, sync_dist=True)

    def _loss(self, rows: list[dict[str, Any]], counts: Tensor | None = None) -> tuple[Tensor, Tensor, int]:
        """Mean loss and accuracy over the tokens to learn, and their number; all rows count, or those of a mask."""
        ids, targets = self._encode(rows)
        if counts is not None:
            targets[~counts.to(targets.device)] = -100
        logits = self.policy(ids, use_cache=False).logits[:, :-1].float()
        wanted = targets[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100)
        scored = wanted != -100
        return loss, (logits.argmax(-1) == wanted)[scored].float().mean(), int(scored.sum())

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
            for text, is_observation in _pieces(row[self.solution_column], self.given):
                tokens = encode_behind(tokenizer, text)
                whole += tokens
                wanted += [-100] * len(tokens) if is_observation else tokens
            check_tokens(
                [max(whole, default=0)], int(self.policy.config.vocab_size), f"the row with {row['prompt']!r:.40}"
            )
            ids.append(torch.tensor([*whole, self._end]))
            targets.append(torch.tensor([*wanted, self._end]))
        pad = torch.nn.utils.rnn.pad_sequence
        padded = pad(ids, batch_first=True, padding_value=tokenizer.pad_token_id or 0)
        return padded.to(self.device), pad(targets, batch_first=True, padding_value=-100).to(self.device)


def _pieces(text: str, pattern: re.Pattern[str] | None) -> Iterator[tuple[str, bool]]:
    """The text in pieces, each with whether it matches, so that the policy does not write it."""
    end = 0
    for match in pattern.finditer(text) if pattern else ():
        yield text[end : match.start()], False
        yield match[0], True
        end = match.end()
    yield text[end:], False
