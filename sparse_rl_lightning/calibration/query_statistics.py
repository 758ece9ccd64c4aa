"""Gather the query statistics that calibrated compressors need, from a policy's own text.

From the shell, for text that the policy wrote or should write (``sparse-rl predict`` writes such a file)::

    sparse-rl statistics runs/warmup/policy predictions.jsonl statistics.safetensors

or in Python, from a rollout: ``gather_statistics(model, rollout.sequences, lengths).save(path)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparse_rl_lightning.calibration.watched import Seen, watch
from sparse_rl_lightning.compressors.query_statistics import QueryMoments, QueryStatistics
from sparse_rl_lightning.compressors.rotary import rotate
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.rollout.observations import encode_behind
from sparse_rl_lightning.rollout.prompts import encode_prompt

MAX_LENGTH = 4096
"""Default number of tokens to read of a text: float64 sums of a layer take much memory per token."""


@torch.no_grad()
def gather_statistics(
    model: PreTrainedModel, sequences: Tensor, lengths: Tensor, batch_size: int = 4
) -> QueryStatistics:
    """Statistics of all queries of ``sequences``, from plain forward passes.

    Only those of layers of full attention mean anything where others have a sliding window: the rotation of those may
    be another one, and no compressor reads them.

    Args:
        model: The policy.
        sequences: (B, T) token ids, right-padded.
        lengths: (B,) number of tokens of each sequence.
        batch_size: Sequences per forward pass.

    Raises:
        ValueError: If rollouts do not support the model.
    """
    geometry = CacheGeometry.of(model)
    total: dict[int, QueryMoments] = {}
    for rows in torch.split(torch.arange(len(sequences)), batch_size):
        row_lengths = lengths[rows].to(geometry.device)
        ids = sequences[rows, : int(row_lengths.max())].to(geometry.device)
        positions = torch.arange(ids.shape[1], device=geometry.device)
        add = partial(_add, total, positions, positions < row_lengths[:, None], geometry)
        watch(model, ids, add)
    return QueryStatistics.of_layers([total[layer] for layer in sorted(total)], geometry.num_kv_heads)


def _add(total: dict[int, QueryMoments], positions: Tensor, mask: Tensor, geometry: CacheGeometry, seen: Seen) -> None:
    """Add up a layer's queries while it runs: all layers' together are many times the memory of a cache."""
    still = _still(seen.query, positions, geometry)
    moments = QueryMoments(still, positions.expand_as(mask), mask, geometry.inv_freq)
    total[seen.layer] = total[seen.layer].add(moments) if seen.layer in total else moments


def _still(queries: Tensor, positions: Tensor, geometry: CacheGeometry) -> Tensor:
    """Queries (B, Hq, T, D) as they were before rotary positions, in float64."""
    still = rotate(queries.to(torch.float64), -positions, geometry.inv_freq)
    still[..., : 2 * len(geometry.inv_freq)] /= geometry.attention_scaling  # a factor on cosine and sine
    return still


def encode_texts(
    table: Iterable[tuple[str, Mapping[str, Any]]], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> list[list[int]]:
    """Token ids of rows: ``prompt``, text or chat messages, and ``completion`` if there is one.

    Args:
        table: Each row with its place, for the message.
        tokenizer: Tokenizer of the policy.
        max_length: Tokens of a text to read; the rest is left out.

    Raises:
        ValueError: If there is no row, or one without a prompt; includes its place.
    """
    texts = []
    for where, row in table:
        try:
            ids = encode_prompt(tokenizer, row["prompt"]) + encode_behind(tokenizer, row.get("completion") or "")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{where}: expected a prompt, and text as completion. {error}") from error
        texts.append(ids[:max_length])
    if not texts:
        raise UserError("there is no text. Give a file of rows with prompt and completion.")
    return texts


def pad(texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Right-padded ids (B, T) and lengths (B,)."""
    lengths = torch.tensor([len(text) for text in texts])
    return pad_sequence([torch.tensor(text, dtype=torch.int64) for text in texts], batch_first=True), lengths
