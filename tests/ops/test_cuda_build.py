"""The CUDA kernels compile, link and load where there is no GPU; the compile check finds spills."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_rl_lightning import ops
from sparse_rl_lightning.ops.schemas import SCHEMAS

ROOT = Path(__file__).resolve().parents[2]
LOG = """\
ptxas info    : Compiling entry function '_Z3onev' for 'sm_80'
ptxas info    : Function properties for _Z3onev
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 512 bytes smem, 536 bytes cmem[0]
ptxas info    : Compiling entry function '_Z3twov' for 'sm_90'
ptxas info    : Function properties for _Z3twov
    16 bytes stack frame, 20 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 255 registers
"""


def test_the_compile_check_reads_what_ptxas_says() -> None:
    check = runpy.run_path(str(ROOT / "cuda_ext" / "check.py"))
    one, two = check["kernels"]("some.cu", LOG)
    assert (one.name, one.arch, one.registers, one.shared, one.stack, one.spilled) == ("_Z3onev", "80", 40, 512, 0, 0)
    assert (two.arch, two.registers, two.shared, two.stack, two.spilled) == ("90", 255, 0, 16, 64)
    assert check["table"]([one, two]).splitlines()[2].endswith("255       0     16       64  <- some.cu")


@pytest.mark.skipif(ops.MISSING["cuda"] != "", reason=f"no compiled CUDA kernels: {ops.MISSING['cuda']}")
def test_a_loaded_cuda_library_has_all_kernels() -> None:
    assert [name for name in SCHEMAS if not ops.has_kernel(name, "cuda")] == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_cuda_library_builds_and_loads_on_any_torch(tmp_path: Path) -> None:
    if runpy.run_path(str(ROOT / "setup.py"))["find_cuda_home"]() is None:
        pytest.skip("no nvcc")
    for name in ("sparse_rl_lightning", "cuda_ext"):
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
        "print(ops.__file__, ops.MISSING, all(ops.has_kernel(n, d) for n in SCHEMAS for d in ('cpu', 'cuda')))"
    )
    environment["SPARSE_RL_NATIVE"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert str(tmp_path) in done.stdout
    assert "{'cpu': '', 'cuda': ''} True" in done.stdout
