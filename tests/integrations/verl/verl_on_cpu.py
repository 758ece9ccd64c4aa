"""A platform for verl where there is no accelerator, so that its trainer runs whole: FSDP2 over gloo, a CPU for a GPU.

verl loads it by ``VERL_USE_EXTERNAL_MODULES`` and ``VERL_PLATFORM=cpu``.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from verl.models.transformers import monkey_patch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

NOTHING = (
    "empty_cache", "ipc_collect", "manual_seed", "manual_seed_all", "max_memory_allocated", "max_memory_reserved",
    "memory_allocated", "memory_reserved", "reset_peak_memory_stats", "set_device", "synchronize",
)  # fmt: skip


def device_module() -> types.ModuleType:
    """What verl asks of ``torch.cuda``."""
    module = types.ModuleType("torch_cpu")
    module.__getattr__ = lambda name: getattr(torch.cpu, name)  # type: ignore[method-assign]
    answers: dict[str, Any] = {name: 0 for name in NOTHING}
    answers |= {"device_count": 1, "current_device": "cpu", "get_device_name": "cpu", "mem_get_info": (2**33, 2**34)}
    for name, answer in answers.items():
        setattr(module, name, lambda *_, answer=answer, **__: answer)
    module.get_rng_state, module.set_rng_state = torch.get_rng_state, torch.set_rng_state
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """The processor as verl's only device; Ray still counts it as a GPU."""

    device_name = vendor_name = "cpu"
    device_module = device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_ipc_supported(self) -> bool:
        return False

    def _nothing(self, *_: Any) -> None:
        pass

    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = _nothing


def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """Start it, where verl names a backend for the CPU and one for the device, which are the same here."""
    initialize("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


initialize = torch.distributed.init_process_group
torch.distributed.init_process_group = init_process_group
monkey_patch.is_trl_available = lambda: False  # for value heads, of an older trl
