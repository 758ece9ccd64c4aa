"""DryRun: the worst case first, so that a run that does not fit into memory ends in its first minute."""

from __future__ import annotations

import copy
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from sparse_rl_lightning.cache.compression import Trigger
from sparse_rl_lightning.callbacks.base import RolloutModule, rollout_module
from sparse_rl_lightning.callbacks.guards.correction_trial import try_corrections
from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.data.sampler import rows_of
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.learner.random_state import random_state, restore_random_state
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.policies.quantized import count_weights
from sparse_rl_lightning.records import NEVER, EvictionRecord, Rollout
from sparse_rl_lightning.rollout import Progress
from sparse_rl_lightning.rollout.engine.memory import record_bytes

GIB = 2**30
DECODE_STEPS = 16  # if nothing is compressed


class DryRun(Callback):
    """Try the largest rollout and update at the start of ``fit``, report time and memory, and undo everything.

    In this order: an optimizer step on zero gradients (its state is kept for the rest of the trial), full slots with
    the longest training prompt up to the first compression, and the learner's forward and backward pass on a
    micro-batch of longest sequences. Weights, optimizer, buffers, gradients and random state are then restored: a run
    is bitwise the same with this callback and without it. Before the policy is loaded, corrections and a loss of your
    own run once on a small rollout that is made up. Modules that roll out add this callback themselves.

    Args:
        enabled: Whether to run the trial; null for GPUs only, but for the made-up rollout.

    Raises:
        ValueError: At the start of ``fit``, if the memory does not suffice; the message says what to lower.
    """

    def __init__(self, enabled: bool | None = None) -> None:
        self.enabled = enabled

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse modules that do not roll out; try the user's own corrections before the policy is loaded."""
        if stage == "fit" and self.enabled is not False:
            try_corrections(trainer, rollout_module(pl_module, self))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run the trial, if enabled."""
        on_gpu = pl_module.device.type == "cuda"
        if not (on_gpu if self.enabled is None else self.enabled):
            return
        if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)) or isinstance(
            trainer.strategy, DeepSpeedStrategy
        ):
            rank_zero_warn(f"DryRun: skipped, {type(trainer.strategy).__name__} cannot undo a trial step.")
            return
        loader = trainer.train_dataloader
        rows, size = getattr(loader, "dataset", None), getattr(loader, "batch_size", None)
        if size is None or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
            rank_zero_warn("DryRun: skipped, because the training loader does not show its rows and its batch size.")
            return
        module = rollout_module(pl_module, self)
        if module.generator.environment is not None and not all(row.get("prompt") for row in rows_of(loader)):
            rank_zero_warn("DryRun: skipped, because the environment gives prompts whose length is not known.")
            return
        _rehearse(trainer, module, size)


def _rehearse(trainer: Trainer, module: RolloutModule, num_prompts: int) -> None:
    case = WorstCase(module, num_prompts)
    fresh = [optimizer for optimizer in trainer.optimizers if not optimizer.state]
    compressor, options = module.generator.compressor, case.options
    kept = f"budget {compressor.schedule} and buffer {compressor.buffer}" if compressor.evicts else "all tokens kept"
    kept += f", decoder {module.generator.sampler().decoder_kind}"
    with _untouched(trainer, module, fresh):
        reports = [
            _try(
                module, f"optimizer step of {count_weights(module.policy):,} parameters",
                lambda: _step(fresh),
                "Choose a smaller policy, weights in bfloat16, or an optimizer with less state",
            ),
            _try(
                module, f"rollout in {case.num_slots} slots ({kept}) with a prompt of {len(case.prompt):,} tokens",
                case.rollout,
                f"Lower model.rollout.num_slots (now {options.num_slots or f'null: {case.num_slots}'}), the "
                f"compressor's budget or buffer, model.sampling.max_completion_length "
                f"({case.sampling.max_completion_length}) or data.prompts_per_rollout ({case.num_prompts}), or set "
                "model.rollout.memory_limit",
            ),
            _try(
                module, f"update on {case.micro_batch} sequences of {case.length:,} tokens",
                case.update,
                f"Raise model.steps_per_generation (now {module.steps_per_generation}) and with it "
                f"trainer.accumulate_grad_batches ({trainer.accumulate_grad_batches}), lower "
                f"model.learner.micro_batch_tokens ({module.learner.options.micro_batch_tokens or 'null'}) or "
                f"model.sampling.max_completion_length ({case.sampling.max_completion_length}), or set "
                f"model.rollout.keep_pool to false (now {str(options.keep_pool).lower()})",
            ),
        ]  # fmt: skip
    rank_zero_info(f"Dry run of the worst case: {'; '.join(reports)}.")


def _try(module: RolloutModule, name: str, work: Callable[[], None], advice: str) -> str:
    """Do the work, and report its time and memory.

    Raises:
        ValueError: If it ran out of memory.
    """
    device, before = module.device, _memory(module.device, peak=False)
    start = time.perf_counter()
    try:
        work()
    except (RuntimeError, MemoryError) as error:
        # torch.OutOfMemoryError is for GPUs; the CPU's allocator is recognized by its message only
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "can't allocate memory" not in str(error):
            raise
        total = f" of {torch.cuda.mem_get_info(device)[1] / GIB:,.2f} GiB" if device.type == "cuda" else ""
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"DryRun: out of memory on {device} in the worst case, {name}; {before / GIB:,.2f} GiB{total} were in use "
            f"before it. {advice}. ({reason})"
        ) from error
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return f"{name}: {time.perf_counter() - start:,.1f} s, peak {_memory(device, peak=True) / GIB:,.2f} GiB"


@contextmanager
def _untouched(trainer: Trainer, module: RolloutModule, stepped: list[torch.optim.Optimizer]) -> Iterator[None]:
    """Restore everything at the end; only weights that will be stepped are copied, to the CPU."""
    parameters = [p for optimizer in stepped for group in optimizer.param_groups for p in group["params"]]
    kept = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in (*parameters, *module.buffers())]
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in stepped]
    random = random_state()
    try:
        yield
    finally:
        module.zero_grad(set_to_none=True)
        module.generator.release()
        for optimizer, state in zip(stepped, states, strict=True):
            optimizer.load_state_dict(state)
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
        restore_random_state(random)


def _step(optimizers: list[torch.optim.Optimizer]) -> None:
    """Make optimizers allocate their state."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _memory(device: torch.device, peak: bool) -> float:
    """Bytes in use, or since the last call at most; on the CPU the most that the process ever used."""
    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if peak:
        return torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


class _Enough(Exception):
    """Ends a rollout that has reached its peak."""


class WorstCase:
    """Full slots with the longest training prompt, and a micro-batch of nothing but longest sequences."""

    def __init__(self, module: RolloutModule, num_prompts: int) -> None:
        self.module, self.num_prompts = module, num_prompts
        self.row: dict[str, Any] = module.generator.longest(rows_of(module.trainer.train_dataloader))
        self.prompt = module.generator.encode([self.row])[0]
        self.options, self.sampling = module.generator.options, module.generator.drawing
        self.length = len(self.prompt) + self.sampling.max_completion_length
        self.num_sequences = num_prompts * self.sampling.num_generations
        self.geometry = CacheGeometry.of(module.policy, longest=self.length)
        self.micro_batch = module.plan(max(1, round(num_prompts / self.options.oversampling))).micro_batch
        # unless a memory limit allows fewer
        self.num_slots = min(self.options.num_slots or self.num_sequences, self.num_sequences)

    def rollout(self) -> None:
        """Read the longest prompt into every slot, decode up to the first compression, and allocate a rollout's data.

        The record of evictions of all sequences is the largest part of that data.
        """
        g, compressor, steps = self.geometry, self.module.generator.compressor, DECODE_STEPS
        if compressor.evicts:
            steps = Trigger(compressor, g.num_layers).after_prompt(len(self.prompt))[1]
        steps = min(steps, self.sampling.max_completion_length - 1)

        def stop(progress: Progress) -> None:
            if progress.step >= steps:
                torch.empty(record_bytes(g, self.num_sequences, self.length), dtype=torch.uint8, device=g.device)
                raise _Enough

        sampler, params = self.module.generator.sampler(), replace(self.sampling, stop_strings=())
        ends, sampler.end_token_ids = sampler.end_token_ids, []  # slots stay full
        environment, self.module.generator.environment = self.module.generator.environment, None
        try:
            with self.module.trainer.precision_plugin.train_step_context():
                self.module.generator.generate([self.row] * self.num_prompts, params, progress=stop)
        except _Enough:
            pass
        finally:
            sampler.end_token_ids, self.module.generator.environment = ends, environment

    def update(self) -> None:
        """Run the learner's forward and backward pass on the largest micro-batch; the gradients stay."""
        module, micro_batch = self.module, self._longest_sequences()
        with module.trainer.precision_plugin.train_step_context():
            micro_batch.ref_logprobs = module.reference_logprobs(micro_batch)
            # no collective: if memory is short on one rank only, the others do not wait for it
            denominators = module.loss.denominators(micro_batch, self.sampling.max_completion_length)
            output = module.micro_batch_loss(micro_batch, denominators)
        output.loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def _longest_sequences(self) -> Rollout:
        """A micro-batch with everything that callbacks may add to it."""
        device, shape, top = self.module.device, (self.micro_batch, self.length), self.sampling.top_logprobs
        tokens = (self.prompt * (self.length // len(self.prompt) + 1))[: self.length]
        mask = (torch.arange(self.length, device=device) >= len(self.prompt)).expand(shape)
        zeros, g = torch.zeros(shape, device=device), self.geometry
        death = oldest_go(self.module.generator.compressor, g.num_layers, len(self.prompt), self.length).to(device)
        death = death[:, None, None].expand(-1, self.micro_batch, g.num_kv_heads, -1)
        # choices of experts, all empty: the routers choose, except in the passes that would replay choices
        routed = self.module.generator.sampler().recorded
        sequences = torch.tensor(tokens, device=device).repeat(self.micro_batch, 1)
        if self.module.learner.options.share_prompts:  # as many samples of a prompt as an optimizer step has
            steps = max(1, self.module.steps_per_generation // self.module.trainer.accumulate_grad_batches)
            sequences[:, 0] = torch.arange(self.micro_batch) // max(1, self.sampling.num_generations // steps)
        return Rollout(
            sequences=sequences,
            prompt_lengths=torch.full(shape[:1], len(self.prompt), device=device),
            completion_mask=mask,
            finished=torch.ones(shape[:1], dtype=torch.bool, device=device),
            sampler_logprobs=zeros,
            old_logprobs=zeros,
            replay_logprobs=zeros if self.module.keeps_evictions else None,
            evictions=EvictionRecord.from_dense(death) if self.module.keeps_evictions else None,
            advantages=torch.ones(shape[:1], device=device),
            # what rejection takes away costs most where it is replayed; other objectives pass over it all the same
            keep=mask & (not self.module.learns_from_rejected),
            weights=zeros + 1,
            weight_reference=zeros + 1,
            topk_ids=torch.zeros(*shape, top, dtype=torch.int32) if top else None,
            topk_logprobs=torch.zeros(*shape, top) if top else None,
            support=mask.int() if top else None,
            keys=torch.zeros(self.micro_batch, 2, dtype=torch.int64, device=device),
            routing=None if routed is None else routed.empty(*shape, device=device),
        )


def oldest_go(compressor: Compressor, num_layers: int, prompt_length: int, length: int) -> torch.Tensor:
    """The death (L, T) of the tokens of a sequence of which every compression evicts the oldest behind the sinks."""
    trigger, sinks = Trigger(compressor, num_layers), compressor.num_sinks
    death = torch.full((num_layers, length), NEVER)
    before, step = (0,) * num_layers, prompt_length
    lost, room = trigger.after_prompt(prompt_length)
    while True:
        for layer_death, first, end in zip(death, before, lost, strict=True):
            layer_death[sinks + first : sinks + end] = step
        step += room
        if step >= length:
            return death
        before, lost = lost, trigger.evicted(step, lost)
        room = trigger.room(step, lost)
