"""Log-probabilities of prompts, for teachers and evaluations: those of the model with a full cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from sparse_rl_lightning.logprobs import hidden_states
from sparse_rl_lightning.output_head import LogitScaling, output_head

CHUNK = 512  # tokens whose logits exist at the same time


@dataclass(frozen=True)
class TokenScore:
    """How likely a token of a prompt was, after those before it."""

    token: int
    logprob: float
    rank: int  # 1 for the most likely token
    top: list[tuple[int, float]]  # the most likely ones, in order


@torch.no_grad()
def prompt_scores(model: PreTrainedModel, prompt: Sequence[int], temperature: float, count: int) -> list[TokenScore]:
    """The score of every token of a prompt but the first.

    Args:
        model: Model, in evaluation mode.
        prompt: Token ids.
        temperature: Divisor of the logits.
        count: Number of most likely tokens to name at each.
    """
    ids = torch.tensor([prompt], device=model.device)
    states, targets = hidden_states(model, ids)[0, :-1], ids[0, 1:]
    scaling, head, scores = LogitScaling.of(model.config), output_head(model), list[TokenScore]()
    for rows, tokens in zip(torch.split(states, CHUNK), torch.split(targets, CHUNK), strict=True):
        logprobs = torch.log_softmax(scaling(head(rows)).float() / temperature, dim=-1)
        drawn = logprobs.gather(-1, tokens[:, None])
        ranks, top = (logprobs > drawn).sum(-1) + 1, logprobs.topk(count)
        columns = (t.tolist() for t in (tokens, drawn[:, 0], ranks, top.indices, top.values))
        scores += [
            TokenScore(t, p, rank, list(zip(i, v, strict=True))) for t, p, rank, i, v in zip(*columns, strict=True)
        ]
    return scores
