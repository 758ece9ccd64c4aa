"""A prompt read once for all of its samples: their tokens in one row, in which every prompt stands once.

Products and norms see a prompt once, forward and backward. Attention unfolds keys and values to the sequences again:
prompts attend among themselves, completions to their prompt and themselves, under each sequence's own deaths. So the
result is that of separate sequences but for rounding.

Letters: B sequences, T tokens, N tokens of the row, U prompts, P tokens of the longest prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.logprobs import hidden_states, sequence_logprobs
from sparse_rl_lightning.policies.support import linear_modules
from sparse_rl_lightning.policies.windows import deaths_by_layer, deaths_by_window
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.replay.death_attention import death_attention
from sparse_rl_lightning.replay.hooks import attention_implementation, plain_attention, register
from sparse_rl_lightning.replay.logprobs import replayable

SHARED = "sparse_rl_shared_prompts"


@dataclass(frozen=True)
class SharedPrompts:
    """Where the tokens of sequences stand in a row, and where the row's outputs are among those of its attention.

    Its queries are those of prompts (U x P) and, behind them, those of completions (B x (T - first)).
    """

    rows: Tensor  # (N,) the sequence that each token of the row is taken from
    positions: Tensor  # (N,) where it stands there
    places: Tensor  # (B, T) place in the row of every token, of padding 0; T is that of the longest sequence
    ends: Tensor  # (B,) number of tokens of every sequence
    leaders: Tensor  # (U,) the first sequence of each prompt
    outputs: Tensor  # (N,) number of the row's token among the queries
    longest: int  # P
    first: int  # number of tokens of the shortest prompt, that of the first query of completions
    deaths: Sequence[Tensor | None] | Tensor | None = None  # (B, H, T) of each layer, None for none

    @classmethod
    def of(cls, rollout: Rollout) -> Self:
        """The row of a rollout; sequences with the same prompt share it."""
        ids, prompt_lengths, ends = rollout.sequences, rollout.prompt_lengths[:, None], rollout.lengths
        first, longest, width = (int(n) for n in torch.stack([*prompt_lengths.aminmax(), ends.max()]).tolist())
        count, ids = len(ids), ids[:, :width]
        at, rows = (torch.arange(n, device=ids.device) for n in (width, count))
        in_prompt, is_token = at < prompt_lengths, at < ends[:, None]
        prompts, group = torch.unique(ids.masked_fill(~in_prompt, -1)[:, :longest], dim=0, return_inverse=True)
        leaders = rows.new_full((len(prompts),), count).scatter_reduce_(0, group, rows, "amin")
        stands = is_token & (~in_prompt | (leaders[group] == rows)[:, None])
        places = (stands.flatten().cumsum(0) - 1).view(count, width)
        places = torch.where(in_prompt, places[leaders[group]], places) * is_token
        of_prompt = group[:, None] * longest + at
        of_completion = len(prompts) * longest + rows[:, None] * (width - first) + at - first
        outputs = torch.where(in_prompt, of_prompt, of_completion)
        of, token = stands.nonzero().unbind(dim=1)
        return cls(of, token, places, ends, leaders, outputs[stands], longest, first)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Attention (1, Hq, N, D) of the row, from its queries, keys and values (1, ., N, D)."""
        death = None if self.deaths is None else self.deaths[layer]
        death = None if death is None else death[..., : self.places.shape[1]]
        q, k, v = (_unfolded(heads, self.places[self.leaders, : self.longest]) for heads in (query, key, value))
        if death is None:
            of_prompts = plain_attention(q, k, v, scale, sinks)
        else:
            of_prompts = death_attention(q, k, v, death[self.leaders, :, : self.longest], scale, sinks)
        q = _unfolded(query, self.places[:, self.first :])
        k, v = (_unfolded(heads, self.places) for heads in (key, value))
        of_completions = death_attention(q, k, v, death, scale, sinks, self.ends)
        # (., Hq, D)
        attended = torch.cat([heads.transpose(1, 2).flatten(0, 1) for heads in (of_prompts, of_completions)])
        return attended.index_select(0, self.outputs).transpose(0, 1)[None]


def _unfolded(row: Tensor, places: Tensor) -> Tensor:
    """The tokens of a row (1, H, N, D) at places (R, L): (R, H, L, D)."""
    tokens = row[0].index_select(1, places.flatten())
    return tokens.view(len(tokens), *places.shape, -1).transpose(0, 1)


register(SHARED, "shared", SharedPrompts.attend)


def check_shares(model: PreTrainedModel, retriever: object = None) -> None:
    """Refuse what cannot read a prompt once for several sequences.

    Raises:
        ValueError: If layers pass a recurrent state from token to token, or pages are retrieved.
    """
    if retriever is not None:
        raise UserError(
            f"model.learner.share_prompts: {retriever!r} chooses pages for each sequence alone. Set it to false."
        )
    if linear_modules(model):
        raise UserError(
            "model.learner.share_prompts: this policy has layers with a recurrent state, which passes from each token "
            "to the next, while samples of a prompt stand side by side in one row. Set it to false."
        )


def shared_statistics(
    model: PreTrainedModel, replays: bool, temperature: float, chunk_size: int, head_in_float32: bool, rollout: Rollout,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-probabilities and entropies (B, T) of completions, with gradient, from one pass that reads prompts once.

    Args:
        model: Policy.
        replays: Attend as the sampler did, instead of densely.
        temperature: Divisor of the logits.
        chunk_size: Number of tokens whose logits exist at the same time.
        head_in_float32: Precision of the logits, as in :func:`~sparse_rl_lightning.logprobs.sequence_logprobs`.
        rollout: Sequences, of which those with the same prompt share it.
        ids: Candidates (B, T, J) in the place of each token, None for the token.

    Raises:
        ValueError: If there is nothing to replay, as in :func:`~sparse_rl_lightning.replay.replay_logprobs`.
    """
    if replays:
        deaths: Any = deaths_by_layer(model.config, replayable(model, rollout))
    else:
        deaths = deaths_by_window(model.config, rollout.sequences)
    shared = replace(SharedPrompts.of(rollout), deaths=deaths)
    at = (shared.rows, shared.positions)
    routing = None if rollout.routing is None else rollout.routing[at][None]
    with attention_implementation(model, SHARED):
        states = hidden_states(model, rollout.sequences[at][None], routing, shared.positions[None], shared=shared)
    mask = rollout.completion_mask
    before = states[0].index_select(0, shared.places[:, :-1][mask[:, 1 : shared.places.shape[1]]])
    head = (temperature, chunk_size, head_in_float32)
    return sequence_logprobs(model, rollout.sequences, mask, *head, hidden=before, ids=ids)
