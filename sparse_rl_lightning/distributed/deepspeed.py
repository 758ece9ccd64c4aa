"""DeepSpeed's ZeRO with this library's rules: loss divided once, CPUs allowed, checkpoints complete or absent."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, StrategyRegistry
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from sparse_rl_lightning.checkpoints.zero_shards import ZeroShards
from sparse_rl_lightning.distributed.sharded import ShardedStrategy
from sparse_rl_lightning.errors import UserError


class SparseRLDeepSpeed(ShardedStrategy, DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy with one division of the loss, on GPUs or (for tests and laptops) on CPUs.

    Lightning and DeepSpeed both divide the loss by the accumulated micro-batches; here only Lightning does. The
    checkpoint is a folder that appears under its name once all of it has been written, see
    :mod:`sparse_rl_lightning.checkpoints`. Needs the extra ``deepspeed``. By name on the
    command line: ``--trainer.strategy=sparse_rl_deepspeed_stage_2``, with stages 1 to 3 and ``_offload`` after 2, 3.

    Args:
        stage: State that is sharded over ranks: 1 the optimizer's state, 2 gradients too, 3 weights too.
        offload_optimizer: Keep the optimizer's state in the CPU's memory.
        offload_parameters: Keep stage 3's weights there.
        config: A DeepSpeed configuration, or a JSON file with one, instead of the three above
            (``configs/deepspeed/`` has them to start from).
        **kwargs: Arguments of Lightning's DeepSpeedStrategy.
    """

    strategy_name = "sparse_rl_deepspeed"

    def __init__(
        self,
        stage: int = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        config: str | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        config = zero_config(stage, offload_optimizer, offload_parameters) if config is None else config
        super().__init__(config=config, **kwargs)
        self.shards = ZeroShards(self)

    # ---------------------------------------------------------------- CPUs

    def setup_environment(self) -> None:
        """Set up the processes like Lightning, without its check for a GPU; float16 on CPUs is refused."""
        if isinstance(self.accelerator, CPUAccelerator):
            precision = self.precision_plugin.precision
            if precision.startswith("16"):
                raise UserError(
                    f"trainer.precision={precision} with trainer.strategy={type(self).__name__}: DeepSpeed has no "
                    "float16 on CPUs. Set trainer.precision to bf16-mixed or 32-true."
                )
            count = len(self.parallel_devices or [])
            self.parallel_devices = [torch.device("cpu", index) for index in range(count)]  # DeepSpeed asks for indices
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        """Set up the process group like Lightning, without selecting a device on CPUs."""
        if not isinstance(self.accelerator, CPUAccelerator):
            super().setup_distributed()
            return
        from deepspeed import ops

        ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled now; gloo suffices
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    # ---------------------------------------------------------------- training

    def model_sharded_context(self) -> AbstractContextManager[None]:  # type: ignore[override]  # Lightning says Generator
        """Load models whole: Hugging Face's loading cannot fill weights that are created as shards.

        DeepSpeed shards stage 3 when the engine is created; until then every rank has one whole model.
        """
        self._init_config_if_needed()
        return nullcontext()

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Keep DeepSpeed from scaling the loss, which Lightning has already divided."""
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)

    def _initialize_deepspeed_train(self, model: Module) -> None:
        """Initialize like Lightning; in every precision the optimizer checks gradients and skips bad steps."""
        super()._initialize_deepspeed_train(model)
        optimizer = self.optimizers[0]
        if hasattr(optimizer, "check_grad_overflow"):
            optimizer.check_grad_overflow = True


def zero_config(stage: int, offload_optimizer: bool = False, offload_parameters: bool = False) -> dict[str, Any]:
    """DeepSpeed's configuration of a ZeRO stage; Lightning sets accumulation, clipping and precision.

    Arguments are those of :class:`SparseRLDeepSpeed`.
    """
    if stage not in (1, 2, 3):
        raise UserError(f"stage must be 1, 2 or 3, got stage={stage}. Without sharding use --trainer.strategy=ddp.")
    if offload_parameters and stage != 3:
        raise UserError(f"offload_parameters needs stage=3, which shards them; got stage={stage}.")
    zero: dict[str, Any] = {"stage": stage, "contiguous_gradients": True, "overlap_comm": True}
    if offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload_parameters:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,  # only DeepSpeed's own log reads it
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # any optimizer may be offloaded
        "zero_optimization": zero,
    }


def not_deepspeed(setting: str) -> str:
    """The error message for a setting that names Lightning's own DeepSpeed strategy, with what to use instead."""
    wanted = f"sparse_rl_{setting.rpartition('=')[2]}"
    names = [name for name in StrategyRegistry.available_strategies() if name.startswith("sparse_rl_deepspeed")]
    return (
        f"{setting} is Lightning's own, which divides the loss twice where gradients are accumulated. Use "
        f"--trainer.strategy={wanted if wanted in names else f'sparse_rl_deepspeed_stage_2 (or {names})'}, or "
        "SparseRLDeepSpeed with a configuration of your own."
    )


for _stage, _offload in ((1, False), (2, False), (2, True), (3, False), (3, True)):
    StrategyRegistry.register(
        f"{SparseRLDeepSpeed.strategy_name}_stage_{_stage}{'_offload' * _offload}", SparseRLDeepSpeed,
        description=f"DeepSpeed ZeRO stage {_stage}{', offloaded to the CPU' * _offload}, as sparse-rl drives it",
        stage=_stage, offload_optimizer=_offload, offload_parameters=_offload and _stage == 3,
    )  # fmt: skip
