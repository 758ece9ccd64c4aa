"""The typed objects that travel through the library, with a shape on every field.

Letters: B sequences (prompts x num_generations), T tokens (prompt, completion, right padding), L layers,
S slots, H KV heads, Hq query heads, N entries of a slot, D head dimension, A queries in the ring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.evictions import NEVER as NEVER
from sparse_rl_lightning.evictions import EvictionRecord as EvictionRecord

Rows: TypeAlias = list[dict[str, Any]]
"""Rows of a data set, one prompt each."""


@dataclass(frozen=True)
class LayerState:
    """Everything a compressor may look at: one layer's cache for the slots that are compressed now.

    Entries are in the order of their positions. Entries with ``valid`` False are free memory whose content
    must not be read. All sequences of a call are independent of each other: a score may not mix them.
    """

    keys: Tensor  # (S, H, N, D) post-RoPE, rotated at their true positions
    values: Tensor  # (S, H, N, D)
    valid: Tensor  # (S, H, N) bool
    positions: Tensor  # (S, H, N) true token positions, undefined where not valid
    lengths: Tensor  # (S, H) number of live entries
    token_ids: Tensor  # (S, H, N) ids of the cached tokens, undefined where not valid
    prompt_lengths: Tensor  # (S,)
    queries: Tensor  # (S, Hq, A, D) post-RoPE queries of the most recent tokens, in ring order (no particular order)
    query_positions: Tensor  # (S, A) their positions, -1 where the sequence has fewer tokens so far
    sequence_keys: Tensor  # (S,) int64, a random key per sequence, the same in any batch and slot
    prompt_keys: Tensor  # (S,) int64, a random key per prompt, the same for all its samples
    layer: int | str  # index of the layer, or why it cannot be read: as layer_index
    scale: float  # factor on q.k before the softmax
    inv_freq: Tensor  # (r / 2,) rotary frequencies of the first r channels, as in Compressor.needs_rotation
    attention_scaling: float  # factor that transformers applies to cos and sin (YaRN, longrope), usually 1
    state: Mapping[str, Tensor] = field(default_factory=dict)  # each (S, H, N) float32, as in Compressor.state_fields
    head_state: Mapping[str, Tensor] = field(default_factory=dict)  # each (S, H, C) float32, as in head_state_fields
    turns: Tensor | None = None  # (S, H, N) as in Rollout, undefined where not valid; in conversations, if asked for

    @property
    def layer_index(self) -> int:
        """Index of the layer in the model.

        Raises:
            ValueError: If the compressor does not declare ``needs_layer_index``.
        """
        if isinstance(self.layer, str):
            raise UserError(self.layer)
        return self.layer

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.queries.shape[1] // self.keys.shape[1]


@dataclass(frozen=True)
class StateUpdate:
    """The arguments of ``Compressor.update_state``: one layer's running numbers, and Q new tokens per sequence.

    While decoding Q is 1. A prompt comes in blocks of Q tokens, from its first to its last, before anything of it is
    evicted, and what is given between turns in blocks behind what is left; where a text is cut must not make a
    difference. The new tokens are the last Q live entries of every head.
    """

    state: Mapping[str, Tensor]  # each (S, H, N) float32, written in place; 0 for new tokens, undefined after them
    head_state: Mapping[str, Tensor]  # each (S, H, C) float32, to be written in place; 0 before the prompt
    lengths: Tensor  # (S, H) number of live entries, new tokens included
    positions: Tensor  # (S, Q) true positions of the new tokens
    keys: Tensor  # (S, H, Q, D) keys of the new tokens, post-RoPE
    values: Tensor  # (S, H, Q, D)
    prompt_lengths: Tensor  # (S,)
    layer_index: int
    asked: Mapping[str, Tensor] = field(default_factory=dict)  # tensors that the compressor declared it needs

    @property
    def entries(self) -> Tensor:
        """The indices (S, H, Q) of the new tokens among the N entries, for gather and scatter."""
        count = self.positions.shape[1]
        return self.lengths.unsqueeze(-1).long() - count + torch.arange(count, device=self.lengths.device)

    @property
    def mass(self) -> Tensor:
        """The attention (S, H, Q, N) float32 that each new token pays to each entry, summed over its group's heads.

        It is 0 for entries the token does not see: later tokens of its block, and free memory.
        """
        return self._declared("mass", "needs_attention")

    @property
    def hidden_states(self) -> Tensor:
        """The input (S, Q, E) float32 of the layer's attention: after the norm, before the projections."""
        return self._declared("hidden_states", "needs_hidden_states")

    @property
    def output_norms(self) -> Tensor:
        """The 1-norm (S, Hq, Q) float32 of W v: how much each new value moves the layer's output, for each head."""
        return self._declared("output_norms", "needs_output_norms")

    def _declared(self, name: str, declaration: str) -> Tensor:
        if name not in self.asked:
            raise UserError(f"update_state reads {name}, which the compressor does not ask for: {declaration} = True.")
        return self.asked[name]


@dataclass
class KVUsage:
    """The cache that a rollout used, counted and measured, compared to a full cache.

    Token counts are means over layers and KV heads. The integral sums the count over all decode steps.
    """

    stored: Tensor  # (B,) entries stored at the end of the sequence
    full: Tensor  # (B,) entries in a full cache at that point
    stored_integral: Tensor  # (B,) entry-steps
    full_integral: Tensor  # (B,)
    peak_bytes: int  # allocated key and value pools, sum of capacities x bytes per entry, plus the pages' metadata
    full_peak_bytes: int  # the same slots sized for the longest prompt + max_completion_length
    prefill_peak_bytes: int  # staging besides the pools while prompts are read
    read_integral: Tensor | None = None  # (B,) entry-steps read, under retrieval; else what is stored

    @property
    def saving_final(self) -> float:
        """Share of KV tokens not stored at the end of the sequences."""
        return 1.0 - float(self.stored.sum() / self.full.sum().clamp(min=1))

    @property
    def saving_integral(self) -> float:
        """Share of KV tokens not stored, averaged over the decode steps."""
        full = self.full_integral.sum()
        return 1.0 - float(self.stored_integral.sum() / full) if full > 0 else 0.0

    @property
    def read_share(self) -> float:
        """Share of the KV tokens of a full cache that decode attention read, over all decode steps."""
        full = self.full_integral.sum()
        read = self.stored_integral if self.read_integral is None else self.read_integral
        return float(read.sum() / full) if full > 0 else 1.0

    def __getitem__(self, index: Tensor | slice) -> KVUsage:
        per_sequence: dict[str, Any] = {n: value[index] for n, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **per_sequence)

    @classmethod
    def cat(cls, usages: Sequence[KVUsage]) -> Self:
        """All sequences in the order given; the bytes are the largest of any cache."""
        columns = {f.name: [getattr(usage, f.name) for usage in usages] for f in fields(cls)}
        read = columns.pop("read_integral")
        joined: dict[str, Any] = {n: max(v) if n.endswith("bytes") else torch.cat(v) for n, v in columns.items()}
        if any(column is not None for column in read):  # the others read all that they store
            stored = columns["stored_integral"]
            joined["read_integral"] = torch.cat([s if r is None else r for r, s in zip(read, stored, strict=True)])
        return cls(**joined)


ON_HOST = ("topk_ids", "topk_logprobs")
"""Fields of a rollout that stay in the host's memory: they take more than all others together."""


@dataclass
class Rollout:
    """Sampled sequences and everything later stages add to them; index t of a tensor refers to token t.

    A prompt's ``num_generations`` samples are adjacent. Fields after ``kv`` are filled by the training module.
    """

    sequences: Tensor  # (B, T) prompt then completion, right-padded
    prompt_lengths: Tensor  # (B,)
    completion_mask: Tensor  # (B, T) bool, the tokens that were drawn, end tokens included
    finished: Tensor  # (B,) bool: ended by an end token or a stop string, not by length
    sampler_logprobs: Tensor  # (B, T) log-softmax(logits / temperature) of the sparse policy, 0 outside the completion
    behavior_logprobs: Tensor | None = None  # (B, T) under the truncated distribution drawn from, if it differs
    topk_ids: Tensor | None = None  # (B, T, K) int32 the sparse policy's most likely tokens, if requested
    topk_logprobs: Tensor | None = None  # (B, T, K)
    support: Tensor | None = None  # (B, T) int32 how many of these truncation left to draw from, 0 for all tokens
    policy_versions: Tensor | None = None  # (B, T) int32 version that drew each token, in partial rollouts
    routing: Tensor | None = None  # (B, T, L, K) 1 + the experts that read token t, 0 if it was never fed, if recorded
    evictions: EvictionRecord | None = None  # None under retrieval, where deaths alone do not determine what was seen
    kv: KVUsage | None = None
    turns: Tensor | None = None  # (B, T) int32 in conversations: odd ones were drawn, even ones given, 0 elsewhere
    keys: Tensor | None = None  # (B, 2) int64 random keys of the prompt and of the sequence
    old_logprobs: Tensor | None = None  # (B, T) dense policy before the update
    ref_logprobs: Tensor | None = None  # (B, T) reference policy, when beta > 0
    replay_logprobs: Tensor | None = None  # (B, T) policy before the update, under the sampler's evictions
    rewards: Tensor | None = None  # (B,)
    advantages: Tensor | None = None  # (B,)
    keep: Tensor | None = None  # (B, T) bool, tokens that rejection leaves
    weights: Tensor | None = None  # (B, T) importance weights, no gradient
    weight_reference: Tensor | None = None  # (B, T) if set, its micro-batch mean divides the weights at loss time

    def __len__(self) -> int:
        return self.sequences.shape[0]

    @property
    def completion_lengths(self) -> Tensor:
        """The number of tokens (B,) that were drawn of each completion."""
        return self.completion_mask.sum(dim=1)

    @property
    def lengths(self) -> Tensor:
        """The number of tokens (B,) of each sequence: prompt, completion, and what it was given in between."""
        completion = self.completion_mask if self.turns is None else self.turns > 0
        return self.prompt_lengths + completion.sum(dim=1)

    @property
    def completion_ids(self) -> list[list[int]]:
        """Token ids of every completion, without prompt and padding, and without what was given."""
        pairs = zip(self.sequences, self.completion_mask, strict=True)
        return [sequence[mask].tolist() for sequence, mask in pairs]

    @property
    def sparse_logprobs(self) -> Tensor:
        """Log-probabilities (B, T) of the sparse policy, the divisor of xi: replayed if known, else the sampler's."""
        return self.sampler_logprobs if self.replay_logprobs is None else self.replay_logprobs

    def __getitem__(self, index: Tensor | slice) -> Rollout:
        """The sequences at ``index`` (a slice or a tensor of indices), every field cut alike."""
        host = index.cpu() if isinstance(index, Tensor) and self.topk_ids is not None else index
        values: dict[str, Any] = {
            name: None if value is None else value[host if name in ON_HOST else index]
            for name, value in _values(self).items()
        }
        return Rollout(**values)

    def trimmed(self) -> Rollout:
        """The rollout without the padding that all of its sequences have."""
        length = int(self.lengths.max()) if len(self) else 0
        tensors = {n: value for n, value in _values(self).items() if isinstance(value, Tensor) and value.ndim > 1}
        changes: dict[str, Any] = {name: value[:, :length] for name, value in tensors.items()}
        if self.evictions is not None:  # dead tokens lie within their sequences
            changes["evictions"] = replace(self.evictions, length=length)
        return replace(self, **changes)

    def parts(self, count: int) -> list[Rollout]:
        """The rollout cut into ``count`` pieces of adjacent sequences; a remainder makes one more."""
        size = max(1, len(self) // count)
        return [self[start : start + size] for start in range(0, len(self), size)]

    def trimmed_parts(self, count: int) -> list[Rollout]:
        """As :meth:`parts`, each no wider than its longest sequence; :meth:`widened` puts results together again."""
        return [piece.trimmed() for piece in self.parts(count)]

    def widened(self, values: Tensor) -> Tensor:
        """Values (B, t, ...) of the sequences without padding as (B, T, ...), with zeros for the padding."""
        return F.pad(values, (*(0,) * (2 * values.ndim - 4), 0, self.sequences.shape[1] - values.shape[1]))

    def to(self, device: torch.device | str) -> Self:
        """Copy of the rollout with every tensor on ``device`` but those ``ON_HOST``."""
        return self.from_state(tensors_to(self.state(), device))

    def state(self) -> dict[str, Any]:
        """Plain dictionaries of tensors and integers, fit for a checkpoint that is read with ``weights_only``."""
        inner = (EvictionRecord, KVUsage)
        named = {name: value for name, value in _values(self).items() if value is not None}
        return {name: _values(value) if isinstance(value, inner) else value for name, value in named.items()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """The rollout with this :meth:`state`."""
        state = dict(state)
        if "evictions" in state:
            state["evictions"] = EvictionRecord(**state["evictions"])
        if "kv" in state:
            state["kv"] = KVUsage(**state["kv"])
        return cls(**state)


@dataclass
class Conversation:
    """The messages between a sequence and its environment; its tokens are in the rollout."""

    row: dict[str, Any] = field(default_factory=dict)  # of the data, as the environment got it
    messages: list[dict[str, str]] = field(default_factory=list)  # role and content of all turns, hostile text
    reward: float = 0.0  # sum over the turns, NaN if the environment failed
    num_turns: int = 0  # of the policy
    end: str = ""  # why it is over: environment, turns, length, failed, timeout; until then empty
    error: str = ""  # what failed
    cut_turns: int = 0  # turns of the policy that a limit ended
    cut_observations: int = 0  # observations of which the end is missing

    @property
    def completion(self) -> str:
        """The policy's turns, each on lines of its own."""
        return "\n".join(message["content"] for message in self.messages if message["role"] == "assistant")

    @property
    def has_failed(self) -> bool:
        """Whether the environment raised an error or took too long."""
        return self.end in ("failed", "timeout")

    @property
    def text(self) -> str:
        """All turns as text, each behind its role; further lines are indented, so that no text can pose as a role."""
        indented = [(message["role"], message["content"].replace("\n", "\n    ")) for message in self.messages]
        return "\n".join(f"[{role}] {content}" for role, content in indented)


@dataclass
class ScoredRollout:
    """A rollout with its texts and rewards, which rollout callbacks read and edit."""

    rollout: Rollout
    rows: Rows  # one row of the data set per prompt
    completions: list[str]  # B decoded completions, hostile text
    reward_table: dict[str, Tensor]  # (B,) per reward function, NaN where it does not apply
    index: int  # number of this rollout since the start of training
    seconds: dict[str, float] = field(default_factory=dict)  # time of each stage
    reward_counters: dict[str, float] = field(default_factory=dict)  # counts of the reward functions
    reward_failures: dict[str, int] = field(default_factory=dict)  # samples that each reward function could not score
    failed: dict[str, Tensor] = field(default_factory=dict)  # (B,) bool per function that failed, on which samples
    downsampling: dict[str, Tensor] = field(default_factory=dict)  # numbers () of the samples drawn and dropped
    conversations: list[Conversation] | None = None  # B of them, if there is an environment
    failures: dict[str, float] = field(default_factory=dict)  # conversations that it broke off, of all that were drawn
    prompt_texts: Callable[[], list[str]] | None = None  # (B) prompts as the policy read them, if it is known

    @property
    def asked(self) -> Rows:
        """The rows as they are in the data: an environment may have replaced the prompt of its own copy."""
        talks = self.conversations
        return self.rows if talks is None else [talk.row for talk in talks[:: self.num_generations]]

    @property
    def texts(self) -> list[str]:
        """The completions to be read: of conversations all turns, each behind its role."""
        return self.completions if self.conversations is None else [talk.text for talk in self.conversations]

    @property
    def num_generations(self) -> int:
        """Samples per prompt."""
        return len(self.completions) // len(self.rows)


@dataclass
class LossOutput:
    """A scalar loss with gradient, and detached numbers to log with it."""

    loss: Tensor  # ()
    metrics: dict[str, Tensor]  # each ()


def _values(record: Rollout | EvictionRecord | KVUsage) -> dict[str, Any]:
    """What the fields of a record hold by their names, without attributes that somebody has added to it."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def tensors_to(state: Any, device: torch.device | str) -> Any:
    """The same dictionary with every tensor on ``device`` but those ``ON_HOST``, including inner dictionaries."""
    if isinstance(state, dict):
        return {name: value if name in ON_HOST else tensors_to(value, device) for name, value in state.items()}
    return state.to(device) if isinstance(state, Tensor) else state
