"""Generator: completions for rows of a data set, under the compressed cache or the full one."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparse_rl_lightning.compressors import Compressor, FullKV
from sparse_rl_lightning.compressors.base import checked_method
from sparse_rl_lightning.environments.tools import as_factory
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.policies.geometry import longest_sequence
from sparse_rl_lightning.policies.sharding import ShadowPolicy
from sparse_rl_lightning.policies.support import check_length
from sparse_rl_lightning.records import Conversation, Rollout, Rows, ScoredRollout
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.rollout.conversations import Conversations, check_not_all_failed, converse
from sparse_rl_lightning.rollout.engine.memory import MemoryPlan
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams
from sparse_rl_lightning.rollout.engine.scheduler import Progress
from sparse_rl_lightning.rollout.options import RolloutOptions
from sparse_rl_lightning.rollout.partial import PartialRollouts, check_storable
from sparse_rl_lightning.rollout.prompts import check_prompts, decode_texts, encode_prompts, long_prompts, with_tools
from sparse_rl_lightning.rollout.sampler import RolloutSampler

logger = logging.getLogger(__name__)
ReportProgress = Callable[[Progress], None]
VALIDATION = 2**62
"""Number of a validation's first sequence: training never counts so far, so none of its random numbers are shared."""


class Generator:
    """Draws completions with a policy's live weights, and encodes and decodes their text.

    The *sparse* policy reads the cache that ``compressor`` and ``retriever`` leave, the *dense* one the full cache.
    :meth:`bind` sets the policy once it is loaded.

    Args:
        compressor: Compressor of the sparse policy's cache.
        sampling: Sampling parameters of training rollouts.
        options: Options of both samplers.
        retriever: Retriever of the pages of the cache that each query reads, None for all.
        steps_per_generation: Number of micro-batches that a rollout must fill.
        tell: Function that shows the user a line about memory.
        environment: Creates what answers a sample's turns, as for ``environments.as_factory``; None for completions of
            a single turn.

    Raises:
        ValueError: If compressor, retriever or limits do not work with the environment, or it cannot be used.
    """

    def __init__(
        self,
        compressor: Compressor,
        sampling: SamplingParams,
        options: RolloutOptions,
        retriever: Retriever | None = None,
        steps_per_generation: int = 1,
        tell: Callable[[str], None] = logger.info,
        environment: Callable[[], Any] | None = None,
    ) -> None:
        if environment is not None:
            _check_conversations(compressor, retriever, options)
        self.environment = None if environment is None else as_factory(environment)
        self.compressor = checked_method(compressor)
        self.retriever = retriever
        self.sampling = sampling
        self.top: dict[object, int] = {}  # most likely tokens that callbacks, by id, want of training rollouts
        self.options = options
        self.rank, self.world_size = 0, 1  # this process among those that share a rollout
        # contexts that switch the policy to the sparse one, and to the dense one
        self.sparse_mode: Callable[[], AbstractContextManager[None]] = nullcontext
        self.dense_mode: Callable[[], AbstractContextManager[None]] = nullcontext
        self.version: Callable[[], int] = int  # version of the policy's weights, which a shadow must match
        self.shadow: ShadowPolicy | None = None  # whole copy of a sharded policy, which rollouts read in its place
        self.partial: PartialRollouts | None = None
        if options.partial_rollout_steps is not None:
            unit = steps_per_generation // math.gcd(steps_per_generation, sampling.num_generations)
            self.partial = PartialRollouts(options.partial_rollout_steps, unit)
        self._draw = self.generate if self.partial is None else self._partial
        self._policy: PreTrainedModel | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._samplers: dict[bool, RolloutSampler] = {}
        self._tell = tell
        self._reported_plans: set[bool] = set()  # caches whose memory plan was reported
        self._reported_rows: set[str] = set()  # lines on rows that were reported

    def bind(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Set the policy to sample from."""
        self._policy, self._tokenizer, self._samplers = policy, tokenizer, {}

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer.

        Raises:
            RuntimeError: If no policy is loaded yet.
        """
        if self._tokenizer is None:
            raise RuntimeError("The policy is not loaded yet: call the module's configure_model() first.")
        return self._tokenizer

    @property
    def is_sparse(self) -> bool:
        """Whether rollouts see less than a full cache."""
        return self.compressor.evicts or self.retriever is not None

    @property
    def drawing(self) -> SamplingParams:
        """The sampling parameters of the next training rollout, with what callbacks want to see of it."""
        most = max([self.sampling.top_logprobs, *self.top.values()])
        return self.sampling if most == self.sampling.top_logprobs else replace(self.sampling, top_logprobs=most)

    def sampler(self, dense: bool = False) -> RolloutSampler:
        """The sampler with compressor and retriever, or with the full cache."""
        tokenizer, policy = self.tokenizer, self._policy if self.shadow is None else self.shadow.model
        assert policy is not None
        if any(sampler.model is not policy for sampler in self._samplers.values()):
            self._samplers = {}  # of another shadow, whose weights they would keep
        if dense not in self._samplers:
            compressor, retriever = (FullKV(), None) if dense else (self.compressor, self.retriever)
            options = self.options.for_full_cache(policy.device) if dense else self.options
            self._samplers[dense] = options.sampler(policy, tokenizer, compressor, retriever)
        return self._samplers[dense]

    def release(self) -> None:
        """Free the memory of both caches."""
        for sampler in self._samplers.values():
            sampler.release()

    def generate(
        self,
        rows: Rows,
        params: SamplingParams | None = None,
        *,
        dense: bool = False,
        index: int = 0,
        places: Sequence[int] | None = None,
        progress: ReportProgress | None = None,
        first: int | None = None,
    ) -> ScoredRollout:
        """Draw completions for rows of a data set and decode them to text; rewards come later.

        Args:
            rows: Rows with a ``prompt`` column.
            params: Sampling parameters, default those of training.
            dense: Whether to use the full cache.
            index: Number of the rollout.
            places: Indices of the prompts among those of all ranks, default one rank's after the other's.
            progress: Function called after every decode step.
            first: Number of the first sequence, with which seed and places determine the random numbers; default as
                after ``index`` rollouts of this size.
        """
        start, params = time.perf_counter(), params or self.drawing
        if self.shadow is not None:
            self.shadow.fill(self.version())

        def report(now: Progress) -> None:
            self._tell_memory_plan(self.sampler(dense).memory_plan, dense)
            if progress is not None:
                progress(now)

        sampler, ids = self.sampler(dense), self._sequence_ids(index, len(rows), params.num_generations, places, first)
        conversations: list[Conversation] | None = None
        with self.dense_mode() if dense else self.sparse_mode():
            if self.environment is None:
                rollout = sampler.generate(self.encode(rows, params), params, progress=report, sequence_ids=ids)
            else:
                rows, rollout, conversations = converse(sampler, self.conversations(), rows, params, ids, report)
        return self.decode(rollout, rows, index, start, conversations)

    def roll_out(
        self, rows: Rows, index: int, places: Sequence[int] | None = None, progress: ReportProgress | None = None,
        first: int | None = None,
    ) -> ScoredRollout:  # fmt: skip
        """Draw the next training rollout: of these rows, or in partial rollouts of those with all samples finished."""
        scored = self._draw(rows, index=index, places=places, progress=progress, first=first)
        if scored.conversations is not None:
            check_not_all_failed(scored.conversations)
        return scored

    def _partial(
        self,
        rows: Rows,
        *,
        index: int,
        places: Sequence[int] | None,
        progress: ReportProgress | None,
        first: int | None,
    ) -> ScoredRollout:
        """Draw a limited number of steps, and take the groups that are complete; either kind of completion."""
        assert self.partial is not None
        start, sampler = time.perf_counter(), self.sampler()
        ids = self._sequence_ids(index, len(rows), self.sampling.num_generations, places, first)
        rollout, complete, conversations = self.partial.draw(sampler, self.drawing, rows, ids, self.encode, progress)
        assert self.partial.session is not None
        self._tell_memory_plan(self.partial.session.memory_plan, dense=False)
        return self.decode(rollout, complete, index, start, conversations)

    def conversations(self) -> Conversations:
        """Conversations with environments, none begun."""
        assert self.environment is not None
        return Conversations(self.environment, self.options, self.tokenizer)

    def begin(self, all_rows: Callable[[], Rows]) -> None:
        """Start training; rows of partial rollouts stay in checkpoints until their group is complete.

        Raises:
            ValueError: If a row cannot be stored, the longest prompt is not known, or it leaves no room for its
                completion.
        """
        if self.partial is None:
            return
        assert self._policy is not None
        rows = all_rows()
        check_storable(rows)
        most = self.options.turns.max_prompt_length if self.environment is not None else None
        if most is None and not all(row.get("prompt") for row in rows):
            raise UserError(
                "partial_rollout_steps must know the longest prompt before the first rollout, and a row of the "
                "training data has none: set model.rollout.turns.max_prompt_length to its number of tokens."
            )
        longest = [0] * most if most is not None else self.encode([self.longest(rows)])[0]
        check_prompts([longest], self.drawing, self._policy)
        check_length(self._policy, len(longest) + self.sampling.max_completion_length)
        self.partial.begin(len(longest), None if self.environment is None else self.conversations())

    def longest(self, rows: Rows) -> dict[str, Any]:
        """The row with the longest prompt in tokens."""
        lengths = [len(prompt) for prompt in self.encode(rows)]
        return rows[lengths.index(max(lengths))]

    def encode(self, rows: Rows, params: SamplingParams | None = None) -> list[list[int]]:
        """The token ids of the rows' prompts, with an environment's tools; long ones are cut if an option says so.

        The sampling parameters, default those of training, say how much room the completion needs.
        """
        encoded = encode_prompts(self.tokenizer, [row["prompt"] for row in rows], self._described)
        most = self.room(params) if self.options.on_long_prompt == "truncate" else None
        return encoded if most is None else [prompt[-most:] for prompt in encoded]

    def room(self, params: SamplingParams | None = None) -> int | None:
        """The number of tokens of the longest prompt that leaves room for its completion, None for any.

        Raises:
            ValueError: If there is room for none.
        """
        assert self._policy is not None
        context, longest = longest_sequence(self._policy.config), (params or self.sampling).max_completion_length
        if context is not None and context <= longest:
            raise UserError(
                f"max_completion_length={longest} leaves no room for a prompt in the model's context of {context} "
                "tokens: lower it."
            )
        return None if context is None else context - longest

    def admit(self, rows: Rows, where: Callable[[int], str], params: SamplingParams | None = None) -> Rows:
        """The rows whose prompts can be completed; an option decides what becomes of those that are too long.

        Args:
            rows: All rows of a data set.
            where: Where a row comes from, by its index.
            params: Sampling parameters, default those of training.

        Raises:
            ValueError: If a row has no prompt, it cannot be encoded, or it is too long.
        """
        if self.environment is not None:  # it may give the prompt
            return rows
        for index, row in enumerate(rows):
            if "prompt" not in row:
                raise UserError(f"{where(index)} has no column 'prompt'. Its columns are: {', '.join(map(repr, row))}.")
        assert self._policy is not None
        most, how = self.room(params), self.options.on_long_prompt
        too_long = long_prompts(self.tokenizer, [row["prompt"] for row in rows], most, self._described, where)
        if not too_long:
            return rows
        first, length = next(iter(too_long.items()))
        longest = (params or self.sampling).max_completion_length
        text = (
            f"{where(first)}: the prompt has {length} tokens; with max_completion_length={longest} that exceeds "
            f"the model's context of {longest_sequence(self._policy.config)} tokens, as in {len(too_long)} of "
            f"{len(rows)} rows."
        )
        if how == "error":
            raise UserError(
                f"{text} Drop such rows, lower max_completion_length, or set model.rollout.on_long_prompt to skip or "
                "truncate."
            )
        left = rows if how == "truncate" else [row for index, row in enumerate(rows) if index not in too_long]
        if not left:
            raise UserError(f"{text} No row is left.")
        text += f" They are {'cut to their last tokens' if how == 'truncate' else 'skipped'}."
        if text not in self._reported_rows:  # validation rows are admitted several times
            self._reported_rows.add(text)
            self._tell(text)
        return left

    @cached_property
    def _described(self) -> dict[str, Any]:
        """The arguments of the chat template."""
        tools = () if self.environment is None else self.environment().tools
        return with_tools(self.options.chat_template_kwargs, tools)

    def decode(
        self, rollout: Rollout, rows: Rows, index: int, start: float, conversations: list[Conversation] | None = None
    ) -> ScoredRollout:
        """The rollout with its text and conversations, and with the time since ``start``."""
        seconds = {"rollout": time.perf_counter() - start}
        texts = self.texts(rollout) if conversations is None else [c.completion for c in conversations]
        prompt_texts = partial(self._prompt_texts, rollout)
        return ScoredRollout(
            rollout, rows, texts, {}, index, seconds, conversations=conversations, prompt_texts=prompt_texts
        )

    def texts(self, rollout: Rollout) -> list[str]:
        """The completions of a rollout as text."""
        skip = self.options.skip_special_tokens
        ends = [] if skip else self.sampler().end_token_ids
        return decode_texts(self.tokenizer, rollout.completion_ids, ends, skip)

    def _prompt_texts(self, rollout: Rollout) -> list[str]:
        """The prompts of a rollout as the policy read them, special tokens included."""
        pairs = zip(rollout.sequences, rollout.prompt_lengths.tolist(), strict=True)
        return self.tokenizer.batch_decode([ids[:length].tolist() for ids, length in pairs])

    def _sequence_ids(
        self, index: int, prompts: int, generations: int, places: Sequence[int] | None, first: int | None
    ) -> list[int]:
        """Ids of this rank's sequences in rollout ``index``, different in every rollout and rank."""
        places = range(self.rank * prompts, (self.rank + 1) * prompts) if places is None else places
        first = index * prompts * self.world_size * generations if first is None else first
        return [first + position * generations + sample for position in places for sample in range(generations)]

    def _tell_memory_plan(self, plan: MemoryPlan | None, dense: bool) -> None:
        """Report once per cache how many slots the memory limit allows, during the first rollout."""
        if plan is not None and dense not in self._reported_plans:
            self._reported_plans.add(dense)
            self._tell(f"Memory plan of the {'full' if dense else 'compressed'} cache: {plan.why}")


def _check_conversations(compressor: Compressor, retriever: Retriever | None, options: RolloutOptions) -> None:
    """Refuse, by name, options that conflict with an environment.

    Raises:
        ValueError: If there is a retriever, or protected observations do not fit the budget.
    """
    if retriever is not None:
        raise UserError(
            f"environment does not work with retriever={type(retriever).__name__}: what an environment answers is "
            "read in chunks, and pages are chosen for single tokens. Set model.retriever to null."
        )
    count, longest = compressor.protect_observations, options.turns.max_observation_length
    if options.on_long_prompt != "error":
        raise UserError(
            f"rollout.on_long_prompt={options.on_long_prompt!r} does not work with environment, whose reset() may give "
            "the prompt: let it shorten what is too long, and leave the option out."
        )
    if count and longest is None:
        raise UserError(
            f"protect_observations={count} keeps observations whole, so their length must be limited: set "
            "model.rollout.turns.max_observation_length."
        )
    needed = count * (longest or 0) + compressor.num_sinks + compressor.window
    if count and needed > compressor.schedule.minimum:
        raise UserError(
            f"protect_observations={count} with rollout.turns.max_observation_length={longest}, num_sinks and window "
            f"needs {needed} tokens, more than the budget of {compressor.schedule.minimum}. Raise budget or lower one "
            "of them."
        )
