"""The CUDA kernels compile, link and load where there is no GPU; the compile check finds spills."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparse_rl_lightning import ops
from sparse_rl_lightning.ops.schemas import SCHEMAS

ROOT = Path(__file__).resolve().parents[2]
LOG = """\
ptxas info    : Compiling entry function 'fork_kernel' for 'sm_80'
ptxas info    : Function properties for fork_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 512 bytes smem, 536 bytes cmem[0]
ptxas info    : Compiling entry function 'fork_kernel' for 'sm_90'
ptxas info    : Function properties for fork_kernel
    16 bytes stack frame, 20 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 255 registers
"""
SASS = """\
Fatbin elf code:
================
arch = sm_90
		Function : draw_kernel
        /*0a10*/                   ATOMS.ADD R9, [R4], R6 ;
        /*0a20*/                   ATOMG.E.CAS.STRONG.GPU PT, R2, [R2], R4, R5 ;
		Function : count_kernel
        /*0a10*/                   ATOMS.CAST.SPIN.64 R6, [R5], R6, R8 ;
        /*0a90*/                   ATOMS.CAST.SPIN R6, [R5], R6, R8 ;
"""
ATOMICS = """\
__global__ void adds_words(unsigned* out) {
  __shared__ unsigned sum;
  atomicAdd(&sum, out[threadIdx.x]);
  __syncthreads();
  out[0] = sum;
}
__global__ void adds_pairs(unsigned long long* out) {
  __shared__ unsigned long long sum;
  atomicAdd(&sum, out[threadIdx.x]);
  __syncthreads();
  out[0] = sum;
}
"""


def test_every_kernel_waits_for_the_one_ahead_first() -> None:
    """Else it may read what is not written yet, where launches overlap."""
    sources = [path.read_text() for path in (ROOT / "cuda_ext" / "cuda").glob("*.cu*")]
    bodies = [part for text in sources for part in re.split(r"^__global__ void ", text, flags=re.MULTILINE)[1:]]
    assert len(bodies) > 20
    assert all(re.search(r"\{\n(.*)", body)[1] == "  await_previous();" for body in bodies)


CHECK = runpy.run_path(str(ROOT / "cuda_ext" / "check.py"))


def kernel(registers: int, shared: int = 0, arch: str = "90") -> Any:
    return CHECK["Kernel"]("some.cu", "", arch, registers, shared, 0, 0)


def test_the_compile_check_reads_what_ptxas_says() -> None:
    one, two = CHECK["kernels"]("some.cu", LOG)
    assert (one.name, one.arch, one.registers, one.shared, one.stack, one.spilled) == (
        "fork_kernel", "80", 40, 512, 0, 0,
    )  # fmt: skip
    assert (two.arch, two.registers, two.shared, two.stack, two.spilled) == ("90", 255, 0, 16, 64)
    lines, wrong = CHECK["table"]([one, two])
    assert wrong == 1
    assert lines.splitlines()[1].endswith(" 40     512        0      256       6")
    assert lines.splitlines()[2].endswith(" 255       0       80      256       1  <- some.cu: spills")


@pytest.mark.parametrize(
    ("registers", "shared", "arch", "threads", "blocks"),
    [  # NVIDIA's occupancy calculator
        (128, 0, "90", 256, 2), (129, 0, "90", 256, 1), (80, 0, "90", 256, 3), (32, 0, "90", 256, 8),
        (32, 0, "90", 64, 32), (32, 0, "86", 64, 16), (32, 34368, "90", 256, 6), (32, 34368, "80", 256, 4),
        (255, 0, "80", 256, 1), (63, 16384, "80", 256, 4), (64, 0, "80", 64, 16), (40, 0, "90", 256, 6),
    ],
)  # fmt: skip
def test_blocks_on_a_multiprocessor(registers: int, shared: int, arch: str, threads: int, blocks: int) -> None:
    assert kernel(registers, shared, arch).blocks(threads) == blocks


def test_a_kernel_below_its_floor_is_found() -> None:
    name = "attend_tensor<BFloat16, BFloat16, 128, false, true>"
    assert kernel(128, 49152).complaint(name, 128) == ""
    assert kernel(130).complaint(name, 128) == "at least 4 blocks should fit"  # one register more, one block less
    assert kernel(130, arch="80").complaint(name, 128) == ""  # its shared memory would not hold four
    assert kernel(170, arch="80").complaint(name, 128) == "at least 3 blocks should fit"
    assert kernel(120, 49152, arch="89").complaint(name, 128) == ""  # the shared memory of RTX cards holds two
    assert kernel(170, 52000, arch="120").complaint(name, 128) == "at least 2 blocks should fit"
    assert kernel(130, arch="75").complaint(name, 128) == ""  # limits that are not known
    assert "needs __launch_bounds__ and a floor" in kernel(40).complaint("new_kernel<float>", 256)
    assert "needs __launch_bounds__ and a floor" in kernel(40).complaint(name, None)


def test_every_kernel_has_a_block_size_and_a_floor() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "cuda_ext" / "cuda").glob("*.cu*"))
    names = re.findall(r"__global__ void (?:__launch_bounds__\(.*?\) )?(\w+)\(", source)
    sizes = CHECK["block_sizes"]()
    assert len(names) == len(sizes) > 0
    assert set(names) == set(sizes)
    assert [name for name in names if not any(re.search(pattern, f"{name}<") for pattern in CHECK["FLOORS"])] == []


def test_loops_are_found_in_machine_code() -> None:
    assert CHECK["loops"](SASS) == ["count_kernel sm_90: 2"]


def test_an_addition_of_64_bits_in_shared_memory_is_a_loop_and_of_32_bits_is_none(tmp_path: Path) -> None:
    home = runpy.run_path(str(ROOT / "setup.py"))["find_cuda_home"]()
    tool = home and CHECK["disassembler"](home)
    if not tool:
        pytest.skip("no nvcc or no cuobjdump")
    source, compiled = tmp_path / "atomics.cu", f"{tmp_path}/atomics.o"
    source.write_text(ATOMICS, encoding="utf-8")
    call = [str(home / "bin" / "nvcc"), "-c", "-arch=sm_90", "-o", compiled, str(source)]
    subprocess.run(call, check=True, capture_output=True)
    found = CHECK["loops"](CHECK["disassemble"](tool, compiled))
    assert len(found) == 1
    assert re.fullmatch(r"adds_pairs sm_90: [1-9]\d*", found[0])


@pytest.mark.skipif(ops.MISSING["cuda"] != "", reason=f"no compiled CUDA kernels: {ops.MISSING['cuda']}")
def test_a_loaded_cuda_library_has_all_kernels() -> None:
    assert [name for name in SCHEMAS if not ops.has_kernel(name, "cuda")] == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_cuda_library_builds_and_loads_on_any_torch(tmp_path: Path) -> None:
    if runpy.run_path(str(ROOT / "setup.py"))["find_cuda_home"]() is None:
        pytest.skip("no nvcc")
    for name in ("sparse_rl_lightning", "exact_answers", "cuda_ext"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for path in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / path).exists():
            shutil.copy(ROOT / path, tmp_path)
    environment = {**os.environ, "SPARSE_RL_BUILD": "cuda", "SPARSE_RL_ARCHS": "90", "PYTHONPATH": str(tmp_path)}
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tmp_path, env=environment, check=True
    )
    code = (
        "from sparse_rl_lightning import ops; from sparse_rl_lightning.ops.schemas import SCHEMAS; "
        "from sparse_rl_lightning.ops.architectures import built_architectures; from pathlib import Path; "
        "print(built_architectures(Path(ops.__file__).parents[1])); "
        "print(ops.__file__, ops.MISSING, all(ops.has_kernel(n, d) for n in SCHEMAS for d in ('cpu', 'cuda')))"
    )
    environment["SPARSE_RL_NATIVE"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert str(tmp_path) in done.stdout
    assert "{'cpu': '', 'cuda': ''} True" in done.stdout
    assert "Architecture(major=9, minor=0, suffix='', ptx=True)" in done.stdout
