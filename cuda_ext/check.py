"""Compile every CUDA source for every architecture and check the compiler's report; no GPU is needed.

Prints a table of kernels with registers and shared memory. Fails on any warning, on register spills and on stack
frames. Where there is no nvcc it says so and succeeds.

    python cuda_ext/check.py            # SPARSE_RL_ARCHS, CUDA_HOME and MAX_JOBS as for setup.py
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Kernel:
    """The report of ptxas about one kernel on one architecture."""

    source: str
    name: str
    arch: str
    registers: int
    shared: int
    stack: int
    spilled: int


def command(setup: dict[str, Any], home: Path, source: Path, target: str) -> list[str]:
    """The call of nvcc, with the flags of setup.py and all warnings as errors."""
    from torch.utils import cpp_extension

    macros = [f"-D{name}={value}" for name, value in setup["macros"]("_cuda")]
    includes = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    return [
        str(home / "bin" / "nvcc"), "-c", str(source), "-o", target, f"-I{ROOT / 'cuda_ext' / 'include'}",
        f"-I{ROOT / 'cuda_ext' / 'cuda'}", *includes,
        *macros, "-DUSE_CUDA=1", *cpp_extension.COMMON_NVCC_FLAGS, "-Xcompiler", "-fPIC", *setup["NVCC_FLAGS"],
        *setup["gencode"](), "-Xptxas", "-v", "-Werror", "all-warnings",
    ]  # fmt: skip


def kernels(source: str, log: str) -> list[Kernel]:
    """Read the report of ``-Xptxas -v``."""
    found, name, arch, stack, spilled = [], "", "", 0, 0
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)' for 'sm_(\w+)'", line):
            name, arch = entry.groups()
        elif frame := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, spilled = int(frame[1]), int(frame[2]) + int(frame[3])
        elif used := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            found.append(Kernel(source, name, arch, int(used[1]), int(shared[1]) if shared else 0, stack, spilled))
    return found


def readable(names: list[str]) -> list[str]:
    """The name without mangling, if the binutils are there, and without namespaces."""
    try:
        done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return names
    short = re.sub(r"\(anonymous namespace\)::|_GLOBAL__N__\w+::|sparse_rl::|c10::|^void ", "", done.stdout, flags=re.M)
    return [re.sub(r"\(.*", "", line) for line in short.splitlines()]


def table(found: list[Kernel]) -> str:
    """Format one line per kernel and architecture."""
    names = readable([kernel.name for kernel in found])
    lines = [f"{'kernel':<44} {'sm':>3} {'registers':>9} {'shared':>7} {'stack':>6} {'spilled':>8}"]
    for name, kernel in zip(names, found, strict=True):
        bad = "  <- " + kernel.source if kernel.stack or kernel.spilled else ""
        lines.append(
            f"{name:<44} {kernel.arch:>3} {kernel.registers:>9} {kernel.shared:>7} {kernel.stack:>6} "
            f"{kernel.spilled:>8}{bad}"
        )
    return "\n".join(lines)


def main() -> int:
    """Compile, print, and judge."""
    setup = runpy.run_path(str(ROOT / "setup.py"))
    home = setup["find_cuda_home"]()
    if home is None:
        print("cuda-check: nvcc was not found (set CUDA_HOME), the CUDA kernels were not compiled.")
        return 0
    paths = sorted((ROOT / "cuda_ext" / "cuda").glob("*.cu"))
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:

        def compile_one(path: Path) -> subprocess.CompletedProcess[str]:
            call = command(setup, home, path, f"{folder}/{path.stem}.o")
            return subprocess.run(call, capture_output=True, text=True)

        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            results = list(pool.map(compile_one, paths))
    found: list[Kernel] = []
    failed = False
    for path, done in zip(paths, results, strict=True):
        log = done.stdout + done.stderr
        found += kernels(path.name, log)
        complaints = [line for line in log.splitlines() if re.search(r"\b(error|warning)\b", line, re.IGNORECASE)]
        if done.returncode or complaints:
            failed = True
            print(f"{path.name}:\n" + "\n".join(complaints or [log]))
    print(table(sorted(found, key=lambda kernel: (kernel.source, kernel.name, kernel.arch))))
    spills = sum(bool(kernel.stack or kernel.spilled) for kernel in found)
    print(f"{len(found)} kernels in {time.monotonic() - start:.0f} s, {spills} with a stack frame or spilled registers")
    return int(failed or spills > 0 or not found)


if __name__ == "__main__":
    sys.exit(main())
