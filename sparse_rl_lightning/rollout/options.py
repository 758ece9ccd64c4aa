"""RolloutOptions: options of rollouts other than the sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.downsampling import DownSampling
from sparse_rl_lightning.environments.base import TurnOptions
from sparse_rl_lightning.errors import UserError, check_choice, check_number
from sparse_rl_lightning.policies.geometry import kv_type
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.rollout.engine.decoders.choice import DecoderChoice
from sparse_rl_lightning.rollout.engine.memory import check_limit
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams
from sparse_rl_lightning.rollout.generation_kwargs import with_generation_kwargs
from sparse_rl_lightning.rollout.sampler import RolloutSampler

OF_FULL_CACHE = 0.8
"""Share of the free memory for the slots of evaluations with the full cache; prefill and logits need the rest."""
OF_MEMORY = ("num_slots", "memory_limit", "max_prefill_tokens", "keep_pool", "cuda_graphs")
"""Options of rollouts, and arguments of samplers, that change no result of an evaluation."""
OnLongPrompt = Literal["error", "skip", "truncate"]
OF_TRAINING = {"of": "training"}
"""What options are marked with that have no effect in ``Evaluation``."""


@dataclass(frozen=True)
class RolloutOptions:
    """Memory and speed of rollouts, and the end, rewards and rendering of completions and prompts.

    Args:
        num_slots: Number of sequences decoded at the same time, null for all.
        end_tokens: Tokens that end a completion besides the model's own, such as ``<|im_end|>`` for a base model that
            is prompted in a chat format.
        memory_limit: Memory limit of the slots, up to 1 as a share of the free memory, above that in bytes: as many of
            ``num_slots`` are used as fit.
        decoder: What runs the policy's layers: ``native``, this library (Llama, Mistral, Qwen2, Qwen3),
            ``transformers``, the model's own forward pass, or ``auto``, the first where possible.
        kv_dtype: Type of cached keys and values, such as ``bfloat16``, or ``float8_e4m3fn`` for a byte per number; null
            for the type that the policy computes in.
        keep_pool: Whether the cache's memory is kept while the learner works; false frees it after every rollout.
        cuda_graphs: Whether to decode with CUDA graphs on a GPU; ``require`` makes a step that cannot be captured an
            error, instead of a slower rollout with a warning.
        head_in_float32: Compute the sampler's logits in float32 whatever type the policy has, as the learner does with
            ``learner.head_in_float32``: set both or neither.
        record_routing: With mixtures of experts, record which experts read each token of a rollout; all of the
            learner's passes over it then let the tokens go to the same experts.
        partial_rollout_steps: Number of decode steps of a partial rollout: the learner then continues with the complete
            groups, while unfinished sequences stay in their slots for the next rollout. They are in no checkpoint: a
            resumed run draws the samples of their prompts anew. Null is off.
        oversampling: Factor of dynamic sampling: roll out this many times the prompts that are trained on, and keep the
            groups whose rewards differ. 1 is off.
        downsampling: Rule that keeps ``sampling.num_generations`` samples of each prompt by their rewards, of the more
            that it draws; null trains on all.
        reward_timeout: Seconds that a reward function may take for a rollout; it then runs in a forked process of its
            own, which is killed at the timeout. Null: any time, in the trainer's process.
        reward_failure_limit: Share of a rollout's samples, or of a validation's, at which failing reward functions end
            the run: 1.0 when they fail on all. A function fails on a sample when it raises an error, takes too
            long or returns no finite number. The sample is then left out: no baseline counts it, its advantage is 0,
            and it is counted as ``rewards/{function}/failed``.
        chat_template_kwargs: Arguments of the tokenizer's chat template, such as ``{enable_thinking: false}``; in
            validation too.
        on_long_prompt: What to do with prompts that leave no room for ``max_completion_length`` in the model's context,
            all of which are found before the first rollout: ``error`` names the first, ``skip`` leaves their rows out,
            ``truncate`` keeps their last tokens, as ``max_prompt_length`` of older versions of TRL did.
        skip_special_tokens: Leave special tokens out of the texts that reward functions, environments and tables get,
            as TRL does; false keeps them, such as ``<think>`` where it is one, but for the token that ended the text.
        turns: Limits on conversations with an environment.
        generation_kwargs: Settings of ``sampling`` under their names in transformers or vLLM, which take precedence.

    Raises:
        ValueError: If a number is out of range, or an option does not work with partial rollouts.
    """

    num_slots: int | None = None
    end_tokens: tuple[str, ...] = ()
    memory_limit: float | None = None
    kv_dtype: str | None = None
    keep_pool: bool = True
    cuda_graphs: bool | Literal["require"] = True
    head_in_float32: bool = False
    partial_rollout_steps: int | None = field(default=None, metadata=OF_TRAINING)
    oversampling: float = field(default=1.0, metadata=OF_TRAINING)
    downsampling: DownSampling | None = field(default=None, metadata=OF_TRAINING)
    reward_timeout: float | None = field(default=None, metadata=OF_TRAINING)
    reward_failure_limit: float = field(default=1.0, metadata=OF_TRAINING)
    chat_template_kwargs: dict[str, Any] | None = None
    generation_kwargs: dict[str, Any] | None = None
    turns: TurnOptions = TurnOptions()  # noqa: RUF009  # frozen
    on_long_prompt: OnLongPrompt = field(default="error", metadata=OF_TRAINING)
    skip_special_tokens: bool = True
    decoder: DecoderChoice = "auto"
    record_routing: bool = False

    def __post_init__(self) -> None:
        check_number("rollout.num_slots", self.num_slots, least=1, or_none=True, whole=True)
        if isinstance(self.end_tokens, str):  # would be split into its characters
            raise UserError(
                f"rollout.end_tokens is a list of texts, got the text {self.end_tokens!r}: write [{self.end_tokens!r}]."
            )
        object.__setattr__(self, "end_tokens", tuple(self.end_tokens or ()))
        if isinstance(self.memory_limit, bool):
            raise UserError(f"rollout.memory_limit is a number of bytes or a share, got {self.memory_limit}.")
        if self.memory_limit is not None:
            check_limit(self.memory_limit)
        check_choice("rollout.on_long_prompt", self.on_long_prompt, OnLongPrompt)
        check_choice("rollout.decoder", self.decoder, DecoderChoice)
        kv_type(self.kv_dtype, "rollout.kv_dtype")  # raises for an unknown name
        check_number("rollout.oversampling", self.oversampling, least=1)
        check_number("rollout.reward_timeout", self.reward_timeout, above=0, or_none=True)
        check_number("rollout.reward_failure_limit", self.reward_failure_limit, above=0, most=1)
        if self.partial_rollout_steps is not None:
            self._check_partial(self.partial_rollout_steps)

    def for_training(self, sampling: SamplingParams) -> SamplingParams:
        """The sampling parameters of training, overridden by ``generation_kwargs``.

        Raises:
            ValueError: If nothing can be learned from samples drawn this way.
        """
        sampling = with_generation_kwargs(sampling, self.generation_kwargs)
        if sampling.num_generations < 2:
            raise UserError(
                "sampling.num_generations must be at least 2, because a sample is judged against the others of its "
                f"prompt; got num_generations={sampling.num_generations}. In Python SamplingParams has 1 unless it is "
                "given: write sampling=SamplingParams(num_generations=8, ...)."
            )
        if self.downsampling is not None and self.downsampling.num_samples < sampling.num_generations:
            raise UserError(
                f"rollout.downsampling must draw at least sampling.num_generations={sampling.num_generations} samples, "
                f"of which as many are kept; got num_samples={self.downsampling.num_samples}."
            )
        if sampling.temperature == 0:
            raise UserError(
                "sampling.temperature must be above 0 in training: greedy samples of a prompt are all the same."
            )
        return sampling

    def drawn(self, sampling: SamplingParams) -> SamplingParams:
        """The sampling parameters of training with the number of samples that are drawn of each prompt."""
        rule = self.downsampling
        return sampling if rule is None else replace(sampling, num_generations=rule.num_samples)

    def for_evaluation(self, sampling: SamplingParams) -> SamplingParams:
        """Settings of drawing with ``generation_kwargs`` over them.

        Raises:
            ValueError: If an option is given that is of training alone.
        """
        for option in fields(self):
            name, value = option.name, getattr(self, option.name)
            if option.metadata == OF_TRAINING and value != option.default:
                raise UserError(f"rollout.{name} is of training, got {name}={value}: remove it.")
        return with_generation_kwargs(sampling, self.generation_kwargs)

    def for_full_cache(self, device: torch.device) -> RolloutOptions:
        """These options for evaluations with the full cache, whose slots are many times those of training.

        Without a limit they take as many slots as fit into most of what a GPU has free, and further sequences wait.
        """
        limit = full_cache_limit(self.memory_limit, device)
        return self if limit == self.memory_limit else replace(self, memory_limit=limit)

    def sampler(
        self,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        compressor: Compressor,
        retriever: Retriever | None = None,
    ) -> RolloutSampler:
        """Create a sampler of this policy.

        Raises:
            ValueError: If an option or the retriever does not fit, or an end token is not in the vocabulary.
        """
        end_token_ids = self.end_token_ids(tokenizer)
        sampler = RolloutSampler(
            policy,
            compressor,
            self.num_slots,
            tokenizer=tokenizer,
            kv_dtype=self.kv_dtype,
            keep_pool=self.keep_pool,
            cuda_graphs=self.cuda_graphs,
            memory_limit=self.memory_limit,
            retriever=retriever,
            decoder=self.decoder,
            head_in_float32=self.head_in_float32,
            record_routing=self.record_routing,
        )
        sampler.end_token_ids = sorted({*sampler.end_token_ids, *end_token_ids})
        return sampler

    def end_token_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Token ids of the end tokens.

        Raises:
            ValueError: If one is not in the vocabulary.
        """
        vocabulary = tokenizer.get_vocab()
        unknown = [token for token in self.end_tokens if token not in vocabulary]
        if unknown:
            raise UserError(
                f"rollout.end_tokens: {unknown} are not in the tokenizer's vocabulary. Remove or correct them."
            )
        return [vocabulary[token] for token in self.end_tokens]

    def _check_partial(self, steps: int) -> None:
        """Refuse settings that do not work with partial rollouts, by name."""
        check_number("rollout.partial_rollout_steps", steps, least=1, whole=True)
        reasons = {
            "num_slots=null": (
                self.num_slots is None,
                "unfinished sequences stay in a fixed number of slots. Set model.rollout.num_slots",
            ),
            f"oversampling={self.oversampling}": (
                self.oversampling > 1,
                "a block may hold fewer groups than prompts, so none can be left out. Set model.rollout.oversampling "
                "to 1",
            ),
            f"downsampling={type(self.downsampling).__name__}": (
                self.downsampling is not None,
                "a block's size follows from the samples drawn. Set model.rollout.downsampling to null",
            ),
            "keep_pool=False": (
                not self.keep_pool,
                "unfinished sequences stay in the pool while the learner works. Set model.rollout.keep_pool to true",
            ),
        }
        for setting, (conflicts, why) in reasons.items():
            if conflicts:
                raise UserError(
                    f"rollout.partial_rollout_steps={steps} does not work with {setting}: {why}, or "
                    "model.rollout.partial_rollout_steps to null."
                )


def full_cache_limit(limit: float | None, device: torch.device) -> float | None:
    """The memory limit of a sampler with the full cache; without one, on a GPU, most of the free memory."""
    return OF_FULL_CACHE if limit is None and device.type != "cpu" else limit
