"""``python -m sparse_rl_lightning.cli.doctor``: which kernels run here, what is missing, and what to do about it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from sparse_rl_lightning import ops
from sparse_rl_lightning.callbacks.outputs.run_facts import package_versions
from sparse_rl_lightning.cli import options
from sparse_rl_lightning.ops.architectures import built_architectures, code_for, describe_architectures, has_code
from sparse_rl_lightning.ops.library import NATIVE_DTYPES, PACKAGE
from sparse_rl_lightning.ops.schemas import SCHEMAS

INSTRUCTION_SETS = {"AVX512": "AVX-512", "AVX2": "AVX2"}


def report() -> str:
    """The whole diagnosis as text."""
    sections = (versions(), devices(), paths(), advice())
    return "\n\n".join("\n".join(section) for section in sections)


def versions() -> list[str]:
    """Package versions, and the Python that imports them."""
    packages = package_versions() | {"CUDA of torch": torch.version.cuda or "none, a CPU build"}
    return [f"{name:<20} {version}" for name, version in packages.items()]


def devices() -> list[str]:
    """The processor and GPUs."""
    capability = torch.backends.cpu.get_cpu_capability()
    clone = INSTRUCTION_SETS.get(capability, "plain x86-64 or none")
    lines = [f"CPU: {os.cpu_count()} cores, {torch.get_num_threads()} threads used, kernels compiled for {clone}"]
    built = built_architectures(PACKAGE)
    archs = describe_architectures(built) if built else ops.MISSING["cuda"] or "of a build that does not say what for"
    lines.append(f"CUDA kernels: {archs}")
    if not torch.cuda.is_available():
        unused = unused_gpus()
        return [
            *lines,
            f"GPU: {', '.join(unused)}, which torch cannot use" if unused else "GPU: none that torch can use",
        ]
    for index, (major, minor) in enumerate(capabilities()):
        code = f"; {code_for(built, (major, minor))}" if built else ""
        lines.append(f"GPU {index}: {torch.cuda.get_device_name(index)}, sm_{major}{minor}{code}")
    return lines


def capabilities() -> list[tuple[int, int]]:
    """The compute capability of every GPU that torch can use."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_capability(index) for index in range(count)]


def unused_gpus(proc: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """NVIDIA GPUs of this machine by nvidia-smi or, where it is missing or fails, by their driver."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            pass
        else:
            return [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return [f"an NVIDIA GPU at {path.name}" for path in sorted(proc.glob("*"))]


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
    unusable = [] if torch.cuda.is_available() or not unused_gpus() else [why_unused()]
    missing = [f"missing for {device.upper()}: {ops.MISSING[device]}" for device in wanted if ops.MISSING[device]]
    without = [] if ops.MISSING["cuda"] else gpus_without_code()
    if not missing and not without:
        where = "" if torch.cuda.is_available() else " for CPUs, and no GPU was found"
        return unusable or [f"Nothing is missing{where}."]
    lines = [*unusable, *missing, *without]
    if missing and (PACKAGE.parent / "setup.py").exists():
        lines.append(
            "From a source checkout: SPARSE_RL_BUILD=cpu (or cuda) pip install --no-build-isolation -e . "
            "It needs g++ 11 or newer, for CUDA also nvcc."
        )
    return [*lines, "Everything works without them, slower."]


def gpus_without_code() -> list[str]:
    """A line for each GPU that no kernel runs on, with what changes it."""
    built = built_architectures(PACKAGE)
    return [
        f"missing for GPU {index}: sm_{capability[0]}{capability[1]} {code_for(built, capability)}"
        for index, capability in enumerate(capabilities())
        if not has_code(built, capability)
    ]


def why_unused() -> str:
    """Why torch does not use a GPU that is there, and what changes it."""
    version = torch.__version__.split("+")[0]
    if torch.version.cuda is None:
        return (
            f"There is a GPU, but this torch is a CPU build: pip install --force-reinstall torch=={version} from PyPI, "
            "whose wheels for Linux are built for CUDA (pytorch.org/get-started has others). Then build the kernels: "
            "SPARSE_RL_BUILD=cuda pip install --no-build-isolation -e ."
        )
    return (
        f"There is a GPU, but torch, built for CUDA {torch.version.cuda}, cannot use it: CUDA_VISIBLE_DEVICES may hide "
        "it, or its driver (nvidia-smi) may be older than that."
    )


def main(args: Sequence[str] | None = None) -> None:
    """Print the report; the arguments, by default the process's, may ask for ``--help`` alone."""
    options.doctor().parse_args(args)
    print(report())


if __name__ == "__main__":
    main()
