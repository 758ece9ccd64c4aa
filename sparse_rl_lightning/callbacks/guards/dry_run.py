"""DryRun: the worst case first, so that a run which does not fit into memory ends in its first minute."""

from __future__ import annotations

import copy
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from sparse_rl_lightning.callbacks.guards.worst_case import LargestCase
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.learner.random_state import random_state, restore_random_state

if TYPE_CHECKING:
    from sparse_rl_lightning.modules.sparse_grpo import SparseGRPO

GIB = 2**30


class DryRun(Callback):
    """Try the largest rollout and update at the start of ``fit``, report time and memory, and undo everything.

    In this order: an optimiser step on zero gradients (its state stays for the rest of the trial), full slots with the
    longest training prompt up to the first compression, and the learner's forward and backward pass on a micro-batch
    of longest sequences. Weights, optimiser, buffers, gradients and random state are then as before: a run is bitwise
    the same with this callback and without it. Modules that roll out add it themselves.

    Args:
        enabled: Null for GPUs only.

    Raises:
        ValueError: At the start of ``fit``, if the memory does not suffice, with what to lower.
    """

    def __init__(self, enabled: bool | None = None) -> None:
        self.enabled = enabled

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse modules that do not roll out."""
        if stage == "fit" and self.enabled is not False and not hasattr(pl_module, "micro_batch_loss"):
            raise UserError(
                f"DryRun: {type(pl_module).__name__} does not roll out. Use it with SparseGRPO, or remove it from "
                "trainer.callbacks."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Try, where it is wanted."""
        on_gpu = pl_module.device.type == "cuda"
        if not (on_gpu if self.enabled is None else self.enabled):
            return
        if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)) or is_deepspeed(trainer):
            rank_zero_warn(f"DryRun: skipped, {type(trainer.strategy).__name__} cannot undo a trial step.")
            return
        loader = trainer.train_dataloader
        rows, size = getattr(loader, "dataset", None), getattr(loader, "batch_size", None)
        if size is None or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
            rank_zero_warn("DryRun: skipped, because the training loader does not show its rows and its batch size.")
            return
        _rehearse(trainer, cast("SparseGRPO", pl_module), size)


def is_deepspeed(trainer: Trainer) -> bool:
    """Whether gradients and optimiser are DeepSpeed's."""
    return isinstance(trainer.strategy, DeepSpeedStrategy)


def _rehearse(trainer: Trainer, module: SparseGRPO, num_prompts: int) -> None:
    case = LargestCase(module, num_prompts)
    fresh = [optimizer for optimizer in trainer.optimizers if not optimizer.state]
    compressor, options = module.compressor, module.sampler_options
    kept = f"budget {compressor.schedule} and buffer {compressor.buffer}" if compressor.evicts else "all tokens kept"
    with _untouched(trainer, module, fresh):
        told = [
            _try(
                module, f"optimiser step of {sum(p.numel() for p in module.parameters()):,} parameters",
                lambda: _step(fresh),
                "Choose a smaller policy, weights in bfloat16, or an optimiser with less state",
            ),
            _try(
                module, f"rollout in {case.num_slots} slots ({kept}) with a prompt of {len(case.prompt):,} tokens",
                case.rollout,
                f"Lower model.num_slots (now {options.num_slots or f'null: {case.num_slots}'}), the compressor's "
                f"budget or buffer, model.max_completion_length ({module.sampling.max_completion_length}) or "
                f"data.prompts_per_rollout ({case.num_prompts}), or set model.memory_limit",
            ),
            _try(
                module, f"update on {case.micro_batch} sequences of {case.length:,} tokens",
                case.update,
                f"Raise model.steps_per_generation (now {module.steps_per_generation}) and with it "
                f"trainer.accumulate_grad_batches ({trainer.accumulate_grad_batches}), lower "
                f"model.learner.micro_batch_tokens ({module.learner.micro_batch_tokens or 'null'}) or "
                f"model.max_completion_length ({module.sampling.max_completion_length}), or set model.keep_pool to "
                f"false (now {str(options.keep_pool).lower()})",
            ),
        ]  # fmt: skip
    rank_zero_info(f"Dry run of the worst case: {'; '.join(told)}.")


def _try(module: SparseGRPO, name: str, work: Callable[[], None], advice: str) -> str:
    """Do the work, and say what it took.

    Raises:
        ValueError: If it ran out of memory.
    """
    device, before = module.device, _memory(module.device, peak=False)
    start = time.perf_counter()
    try:
        work()
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
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
def _untouched(trainer: Trainer, module: SparseGRPO, stepped: list[torch.optim.Optimizer]) -> Iterator[None]:
    """Give everything back as it was; only weights that will be stepped are copied, to the CPU."""
    parameters = [p for optimizer in stepped for group in optimizer.param_groups for p in group["params"]]
    kept = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in (*parameters, *module.buffers())]
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in stepped]
    random = random_state()
    try:
        yield
    finally:
        module.zero_grad(set_to_none=True)
        module.sampler().release()
        for optimizer, state in zip(stepped, states, strict=True):
            optimizer.load_state_dict(state)
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
        restore_random_state(random)


def _step(optimizers: list[torch.optim.Optimizer]) -> None:
    """Let optimisers allocate their state."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _memory(device: torch.device, peak: bool) -> float:
    """Bytes in use and, from then on, at most; on the CPU the most that the process ever used."""
    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if peak:
        return torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _is_out_of_memory(error: Exception) -> bool:
    # torch.OutOfMemoryError is a GPU's; the CPU's allocator has nothing but its message
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
