"""How a module's samplers are built from its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.rollout import RolloutSampler
from sparse_rl_lightning.rollout.engine.memory import check_limit


@dataclass(frozen=True)
class SamplerOptions:
    """What the compressed and the full cache's sampler have in common; arguments as in SparseGRPO."""

    num_slots: int | None = None
    end_tokens: tuple[str, ...] = ()
    memory_limit: int | float | None = None
    kv_dtype: str | None = None
    keep_pool: bool = True
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        if self.memory_limit is not None:
            check_limit(self.memory_limit)

    def sampler(
        self,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        compressor: Compressor,
        retriever: Retriever | None = None,
    ) -> RolloutSampler:
        """A sampler of this policy.

        Raises:
            ValueError: If an option or the retriever does not fit, or an end token is not in the vocabulary.
        """
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
        )
        sampler.end_token_ids = sorted({*sampler.end_token_ids, *self._end_token_ids(tokenizer)})
        return sampler

    def _end_token_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        vocabulary = tokenizer.get_vocab()
        unknown = [token for token in self.end_tokens if token not in vocabulary]
        if unknown:
            raise UserError(f"end_tokens: {unknown} are not in the tokenizer's vocabulary. Remove or correct them.")
        return [vocabulary[token] for token in self.end_tokens]


def as_texts(texts: Sequence[str] | None) -> tuple[str, ...]:
    """A list of a configuration as a tuple; a single text is not taken apart into its letters.

    Raises:
        ValueError: If it is a text.
    """
    if isinstance(texts, str):
        raise UserError(f"Give a list of texts, got the text {texts!r}: write [{texts!r}].")
    return tuple(texts or ())
