"""``python -m sparse_rl_lightning.cli.doctor``: which kernels run here, what is missing, and what to do about it."""

from __future__ import annotations

import os

import torch

from sparse_rl_lightning import ops
from sparse_rl_lightning.callbacks.outputs.run_facts import package_versions
from sparse_rl_lightning.ops.library import NATIVE_DTYPES, PACKAGE
from sparse_rl_lightning.ops.schemas import SCHEMAS

INSTRUCTION_SETS = {"AVX512": "AVX-512", "AVX2": "AVX2"}


def report() -> str:
    """The whole diagnosis as text."""
    parts = (versions(), devices(), paths(), advice())
    return "\n\n".join("\n".join(part) for part in parts)


def versions() -> list[str]:
    """Package versions, and the Python that imports them."""
    found = package_versions() | {"CUDA of torch": torch.version.cuda or "none, a CPU build"}
    return [f"{name:<20} {version}" for name, version in found.items()]


def devices() -> list[str]:
    """The processor and GPUs."""
    found = torch.backends.cpu.get_cpu_capability()
    clone = INSTRUCTION_SETS.get(found, "plain x86-64 or none")
    lines = [f"CPU: {os.cpu_count()} cores, {torch.get_num_threads()} threads used, kernels compiled for {clone}"]
    if not torch.cuda.is_available():
        return [*lines, "GPU: none that torch can use"]
    for index in range(torch.cuda.device_count()):
        name, (major, minor) = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        lines.append(f"GPU {index}: {name}, sm_{major}{minor}")
    return lines


def paths() -> list[str]:
    """One line per op: kernel or reference, on the CPU and on a GPU."""
    lines = [f"{'op':<20} {'CPU':<10} {'GPU' if torch.cuda.is_available() else 'GPU (if there were one)'}"]
    for name in SCHEMAS:
        here = ["native" if ops.has_kernel(name, device) else "reference" for device in ("cpu", "cuda")]
        lines.append(f"{name:<20} {here[0]:<10} {here[1]}")
    for device, dtypes in NATIVE_DTYPES.items():
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        lines.append(f"native {device.upper()} kernels take {names}; other types run on the reference")
    return lines


def advice() -> list[str]:
    """What keeps kernels from running, and the command that changes it."""
    wanted = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    missing = [f"missing for {device.upper()}: {ops.MISSING[device]}" for device in wanted if ops.MISSING[device]]
    if not missing:
        return ["Nothing is missing."]
    if (PACKAGE.parent / "setup.py").exists():
        missing.append(
            "From a source checkout: SPARSE_RL_BUILD=cpu (or cuda) pip install --no-build-isolation -e . "
            "It needs g++ 11 or newer, for CUDA also nvcc."
        )
    return [*missing, "Everything works without them, slower."]


def main() -> None:
    """Print the report."""
    print(report())


if __name__ == "__main__":
    main()
