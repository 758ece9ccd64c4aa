"""Compile every CUDA source for every architecture and check the compiler's report; no GPU is needed.

Prints a table of kernels with registers, shared memory and the blocks that fit on a multiprocessor at the same time.
Fails on any warning, on register spills and stack frames, and on kernels with fewer blocks than their floor: too few
hide no latency, and one register more may halve them. Fails on atomic operations that the hardware lacks, which become
loops that try until nobody else was faster; cuobjdump and nvdisasm show them. Where there is no nvcc it says so and
succeeds.

    python cuda_ext/check.py            # SPARSE_RL_ARCHS, CUDA_HOME and MAX_JOBS as for setup.py
    python cuda_ext/check.py fork evict # only these
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


# By compute capability: 32-bit registers, threads, blocks and bytes of shared memory of a multiprocessor.
LIMITS = {
    "80": (65536, 2048, 32, 164 * 1024), "86": (65536, 1536, 16, 100 * 1024), "89": (65536, 1536, 24, 100 * 1024),
    "90": (65536, 2048, 32, 228 * 1024), "100": (65536, 2048, 32, 228 * 1024), "120": (65536, 1536, 24, 100 * 1024),
}  # fmt: skip
# Fewest blocks on a multiprocessor: the first pattern that is found in a kernel's name counts. What is there today; a
# kernel that keeps the memory busy with fewer gets a lower floor, with its reason. Compilers for 10.0 and 12.0 take
# more registers, and RTX cards (8.6, 8.9, 12.0) have less shared memory and fewer threads.
FLOORS: dict[str, int | dict[str, int]] = {  # by compute capability, if it differs
    r"append_kernel": {"80": 8, "89": 8, "90": 8, "100": 6, "120": 6},
    r"attend_tensor<.*, 64, \w+(, \w+)?>": {"80": 6, "86": 4, "89": 4, "90": 6, "100": 6, "120": 4},  # blocks of 24 KiB
    r"attend_tensor<\w+, Float8": 4,
    # blocks of 48 KiB: all that the shared memory holds
    r"attend_tensor|attend_wide": {"80": 3, "86": 2, "89": 2, "90": 4, "100": 4, "120": 2},
    r"attend_plain": 2,  # float32 and heads above 256, for tests
    r"combine_(splits|appended)_kernel": 8,
    r"draw_sums_kernel": 4,
    r"draw_token_kernel": 2,
    r"entry_scores_kernel<float>": 2,  # eight floats of a row in each lane
    r"entry_scores_kernel": 3,
    r"evict_kernel": 2,
    r"fork_kernel": 5,
    r"importance_kernel": 2,
    r"redundancy_kernel<float>": 2,  # 80 registers spill on 8.0; models keep 16 bits
    r"redundancy_kernel": 4,
    r"linear_kernel<float>": 2,
    r"(linear|spare)_kernel": 4,
    r"similar_rows_kernel<float>": 2,
    r"similar_rows_kernel": 3,  # 64 registers spill on 9.0
    r"rms_norm_kernel": 4,
    r"select_pages_kernel": {"80": 3, "89": 3, "90": 3, "100": 2, "120": 2},
    r"silu_mul_kernel": 4,
    r"summarize_kernel": {"80": 5, "89": 5, "90": 5, "100": 4, "120": 4},
}


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

    def blocks(self, threads: int) -> int:
        """Blocks of so many threads that fit on a multiprocessor, as many as wanted if its limits are not known."""
        registers, most_threads, most_blocks, shared = LIMITS.get(self.arch, (2**30,) * 4)
        warps = -(-threads // 32)
        # registers go to warps in units of 256, warps to four parts of a multiprocessor
        fitting = registers // (-(-self.registers * 32 // 256) * 256) // 4 * 4
        by_shared = shared // (-(-self.shared // 128) * 128 + 1024)
        return min(fitting // warps, most_threads // (32 * warps), most_blocks, by_shared)

    def complaint(self, name: str, threads: int | None) -> str:
        """What is wrong with the kernel of this readable name, empty if nothing is."""
        if self.stack or self.spilled:
            return "spills"
        floor = next((count for pattern, count in FLOORS.items() if re.search(pattern, name)), None)
        if floor is None or threads is None:
            return "needs __launch_bounds__ and a floor in check.py"
        if isinstance(floor, dict):
            floor = floor.get(self.arch, min(floor.values()))
        return "" if self.blocks(threads) >= floor else f"at least {floor} blocks should fit"


def block_sizes() -> dict[str, int]:
    """Threads per block of each kernel, as the sources name them in __launch_bounds__."""
    folder = ROOT / "cuda_ext" / "cuda"
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.cu*")))
    numbers = dict(re.findall(r"\b(k\w*Threads) = (\d+)", text))
    found = re.findall(r"__launch_bounds__\((\w+).*?\)\s+(\w+)\(", text)
    return {name: int(numbers[constant]) for constant, name in found}


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


def disassembler(home: Path) -> Path | None:
    """cuobjdump, of the toolkit, on the PATH, or of the package nvidia-cuda-cuobjdump; nvdisasm lies beside it."""
    packaged = [folder for path in sys.path for folder in Path(path).glob("nvidia/*/bin")]
    found = shutil.which("cuobjdump", path=os.pathsep.join(map(str, [home / "bin", os.environ["PATH"], *packaged])))
    return Path(found) if found else None


def disassemble(tool: Path, compiled: str) -> str:
    """The machine code in an object file."""
    environment = {**os.environ, "PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}
    call = [str(tool), "--dump-sass", compiled]
    return subprocess.run(call, env=environment, capture_output=True, text=True, check=True).stdout


def loops(sass: str) -> list[str]:
    """Kernel, architecture and number of atomic operations that are compare-and-swap loops."""
    found: dict[tuple[str, str], int] = {}
    name = arch = ""
    for line in sass.splitlines():
        if header := re.search(r"^\s*arch = (\S+)", line):
            arch = header[1]
        elif header := re.search(r"^\s*Function : (\S+)", line):
            name = header[1]
        elif "CAST.SPIN" in line:
            found[name, arch] = found.get((name, arch), 0) + 1
    names = readable([kernel for kernel, _ in found])
    return [f"{name} {arch}: {count}" for name, ((_, arch), count) in zip(names, found.items(), strict=True)]


def readable(names: list[str]) -> list[str]:
    """The name without mangling, if the binutils are there, and without namespaces."""
    try:
        done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return names
    short = re.sub(r"\(anonymous namespace\)::|_GLOBAL__N__\w+::|sparse_rl::|c10::|^void ", "", done.stdout, flags=re.M)
    return [re.sub(r"\(.*", "", line) for line in short.splitlines()]


def table(found: list[Kernel]) -> tuple[str, int]:
    """One line per kernel and architecture, and the number of kernels that are not as they should be."""
    names, sizes, wrong = readable([kernel.name for kernel in found]), block_sizes(), 0
    lines = [f"{'kernel':<48} {'sm':>3} {'registers':>9} {'shared':>7} {'spilled':>8} {'threads':>8} {'blocks':>7}"]
    for name, kernel in zip(names, found, strict=True):
        threads = next((count for start, count in sizes.items() if start in name), None)
        complaint = kernel.complaint(name, threads)
        wrong += bool(complaint)
        blocks = "?" if threads is None or kernel.arch not in LIMITS else kernel.blocks(threads)
        lines.append(
            f"{name:<48} {kernel.arch:>3} {kernel.registers:>9} {kernel.shared:>7} {kernel.stack + kernel.spilled:>8} "
            f"{threads or '?':>8} {blocks:>7}" + (f"  <- {kernel.source}: {complaint}" if complaint else "")
        )
    return "\n".join(lines), wrong


@dataclass
class Result:
    """What came of one source: its name, whether it compiled, the compiler's words, and loops in the machine code."""

    source: str
    compiled: bool
    log: str
    loops: list[str]

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings, or all that was said if there is nothing else."""
        found = [line for line in self.log.splitlines() if re.search(r"\b(error|warning)\b", line, re.IGNORECASE)]
        return found if self.compiled or found else [self.log]


def compile_all(home: Path, setup: dict[str, Any], paths: list[Path], tool: Path | None) -> list[Result]:
    """Compile the sources, and look into the machine code if there is a tool."""
    with tempfile.TemporaryDirectory() as folder:

        def compile_one(path: Path) -> Result:
            target = f"{folder}/{path.stem}.o"
            done = subprocess.run(command(setup, home, path, target), capture_output=True, text=True)
            compiled = done.returncode == 0
            spinning = loops(disassemble(tool, target)) if tool and compiled else []
            return Result(path.name, compiled, done.stdout + done.stderr, spinning)

        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            return list(pool.map(compile_one, paths))


def main() -> int:
    """Compile, print, and judge."""
    setup = runpy.run_path(str(ROOT / "setup.py"))
    home = setup["find_cuda_home"]()
    if home is None:
        print("cuda-check: nvcc was not found (set CUDA_HOME), the CUDA kernels were not compiled.")
        return 0
    wanted, tool = sys.argv[1:], disassembler(home)
    paths = [p for p in sorted((ROOT / "cuda_ext" / "cuda").glob("*.cu")) if not wanted or p.stem in wanted]
    start = time.monotonic()
    results = compile_all(home, setup, paths, tool)
    for result in results:
        if result.complaints:
            print(f"{result.source}:\n" + "\n".join(result.complaints))
        for loop in result.loops:
            print(f"{result.source}: atomic operations that are loops, {loop}")
    found = [kernel for result in results for kernel in kernels(result.source, result.log)]
    lines, wrong = table(sorted(found, key=lambda kernel: (kernel.source, kernel.name, kernel.arch)))
    seconds = time.monotonic() - start
    print(f"{lines}\n{len(found)} kernels in {seconds:.0f} s, {wrong} with a stack frame, spills or too few blocks")
    if tool is None:
        print("loops were not looked for: no cuobjdump (pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm)")
    return int(any(result.complaints or result.loops for result in results) or wrong > 0 or not found)


if __name__ == "__main__":
    sys.exit(main())
