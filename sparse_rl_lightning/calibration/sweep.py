"""The sweep of a calibration: sequences drawn by the sparse policy at each budget, scored by the dense policy.

Finished parts are files, so an interrupted sweep continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning import __version__
from sparse_rl_lightning.acceptance import rollout_acceptance
from sparse_rl_lightning.budgets import Budgeted
from sparse_rl_lightning.calibration.table import Acceptances
from sparse_rl_lightning.compressors import Compressor, FullKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import stored_tensors, write_files
from sparse_rl_lightning.fingerprints import fingerprint, read_results, write_results
from sparse_rl_lightning.policies.modes import eval_mode
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.retrievers import Retriever
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.rollout.options import OF_MEMORY, full_cache_limit

FINGERPRINT = "fingerprint.json"


@dataclass(frozen=True)
class Sweep:
    """Draws sequences for the same prompts under one method after the other, and saves the results in a folder.

    Args:
        model: Policy, both dense learner and sparse sampler.
        prompts: Token ids of each prompt.
        params: Sampling parameters; ``top_logprobs`` says how many tokens bound the acceptance.
        folder: Folder of the finished parts.
        prompts_per_part: Prompts that are drawn together and written as one file.
        micro_batch: Sequences per dense forward pass.
        keeps: Compressor beside a retriever that is swept, default the full cache.
        sampler_options: Further arguments of :class:`RolloutSampler`.

    Raises:
        ValueError: If there is no prompt, ``top_logprobs`` is 0, or the folder contains a sweep of something else.
    """

    model: PreTrainedModel
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    folder: Path
    prompts_per_part: int = 64
    micro_batch: int = 8
    keeps: Compressor = field(default_factory=FullKV)
    sampler_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.prompts:
            raise UserError("there are no prompts to calibrate on. Give at least one, better a few dozen.")
        if self.params.top_logprobs < 1:
            raise UserError("top_logprobs must be at least 1: the acceptance is bounded from the most likely tokens.")
        if self.params.truncates:
            raise UserError(f"calibrate with the whole distribution: {SamplingParams.whole_distribution()}.")

    @property
    def num_parts(self) -> int:
        """The number of files per method."""
        return -(-len(self.prompts) // self.prompts_per_part)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest possible sequence."""
        return max(map(len, self.prompts)) + self.params.max_completion_length

    def claim(self, method: Budgeted) -> None:
        """Note in the folder which sweep it holds, or check that it is this one; the method's budget does not count.

        Raises:
            ValueError: If it contains a sweep of another policy, method, prompts or settings.
        """
        settings, path = self._fingerprint(method), self.folder / FINGERPRINT
        if read_results(path, settings, dict, "Choose another folder, or remove this one.") is None:
            write_results(path, settings, {})

    def acceptances(self, name: str, method: Budgeted, progress: Callable[[float], None] | None = None) -> Acceptances:
        """Every token that is drawn under a method, read from the files of the folder ``name`` if there are any.

        ``progress`` is called with the share of the method's sequences that is done.

        Raises:
            ValueError: If every completion consists of an end token only.
        """
        sampler = self._sampler(method)
        parts = []
        for number in range(self.num_parts):
            path = self.folder / name / f"part_{number:04d}.safetensors"
            tensors = stored_tensors(path)
            if tensors is None or tensors.keys() != Acceptances.__dataclass_fields__.keys():  # none, or damaged
                drawn = self._draw(sampler, number, progress)
                tensors = {key: tensor.contiguous() for key, tensor in vars(drawn).items()}
                write_files({path: partial(save_file, tensors)})
            parts.append(Acceptances(**tensors))
        drawn = Acceptances.cat(parts)
        if len(drawn) == torch.unique(drawn.sequences).numel() and self.params.max_completion_length > 1:
            raise UserError(
                f"{name}: all {len(drawn)} completions are a single token, the end of the sequence, so no length can "
                "be judged. Check the prompts' format (chat template), the end tokens and the temperature."
            )
        return drawn

    def _sampler(self, method: Budgeted) -> RolloutSampler:
        compressor, retriever = (method, None) if isinstance(method, Compressor) else (self.keeps, method)
        assert retriever is None or isinstance(retriever, Retriever)
        options = dict(self.sampler_options)
        if not compressor.evicts:
            options["memory_limit"] = full_cache_limit(options.get("memory_limit"), self.model.device)
        return RolloutSampler(self.model, compressor, retriever=retriever, **options)

    def _draw(self, sampler: RolloutSampler, number: int, progress: Callable[[float], None] | None) -> Acceptances:
        first, parts = number * self.prompts_per_part, self.num_parts
        prompts = self.prompts[first : first + self.prompts_per_part]
        generations = self.params.num_generations
        sequence_ids = range(first * generations, (first + len(prompts)) * generations)
        rollout = sampler.generate(
            prompts, self.params, sequence_ids=sequence_ids,
            progress=None if progress is None else lambda now: progress((number + now.finished / now.total) / parts),
        )  # fmt: skip
        if not sampler.compressor.evicts:
            sampler.release()  # the dense passes need memory too
        by_length, names = torch.split(rollout.lengths.argsort(), self.micro_batch), torch.tensor(sequence_ids).int()
        return Acceptances.cat([self._score(rollout[rows].trimmed(), names[rows.cpu()]) for rows in by_length])

    def _score(self, rollout: Rollout, names: Tensor) -> Acceptances:
        of_head = self.sampler_options.get("head_in_float32", False)
        temperature = self.params.temperature or 1.0
        with eval_mode(self.model):  # dropout would be taken for a mismatch
            lower, upper = rollout_acceptance(self.model, rollout, temperature, head_in_float32=of_head)
        row, length = rollout.completion_mask.nonzero(as_tuple=True)
        return Acceptances(
            lengths=length.to("cpu", torch.int32),
            lower=lower[row, length].to("cpu", torch.float32),
            upper=upper[row, length].to("cpu", torch.float32),
            sequences=names[row.cpu()],
        )

    def _fingerprint(self, method: Budgeted) -> dict[str, str]:
        """Settings that must be the same for parts to belong together."""
        settings = {name: setting for name, setting in self.sampler_options.items() if name not in OF_MEMORY}
        settings |= {"end_token_ids": self._sampler(FullKV()).end_token_ids}
        any_budget = method.with_budget(_ANY_BUDGET * getattr(method, "page_size", 1))
        return {
            "policy": fingerprint(policy=self.model),
            "prompts": fingerprint(prompts=[list(map(int, prompt)) for prompt in self.prompts]),
            "method": fingerprint(method=any_budget, keeps=self.keeps),
            "sampling": fingerprint(params=self.params, settings=settings),
            "prompts_per_part": str(self.prompts_per_part),
            "version": __version__,
        }


_ANY_BUDGET = 2**24
"""Tokens or pages in the fingerprint, in which the budget does not count."""
