"""What is built serves other machines, other torch and other Python: stable symbols, no folder of its build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from sparse_rl_lightning.ops.library import LIBRARIES, PACKAGE

ROOT = Path(__file__).resolve().parents[2]
BUILT = sorted(path for name in LIBRARIES.values() for path in PACKAGE.glob(f"{name}.*so"))
UNSTABLE = re.compile(r"\b_ZN?K?(2at|3c10|5torch)")  # C++ of libtorch, mangled
each_library = pytest.mark.parametrize("path", BUILT, ids=[path.name for path in BUILT])


def check_library(name: str, content: bytes, *folders: Path) -> None:
    """One file for every Python; no folder of the machine that built it."""
    assert name.endswith(".abi3.so")
    for folder in (*folders, Path(torch.__file__).resolve().parents[1]):
        assert f"{folder}/".encode() not in content, f"{name} names {folder}: build it again"


@each_library
def test_a_library_names_no_folder_of_its_build(path: Path) -> None:
    check_library(path.name, path.read_bytes(), PACKAGE.parent)


def test_unstable_symbols_are_recognized() -> None:
    assert UNSTABLE.search("                 U _ZNK2at10TensorBase8data_ptrEv")
    assert UNSTABLE.search("                 U _ZN3c1013AutogradStateC1Ev")
    assert not UNSTABLE.search("                 U torch_get_const_data_ptr")
    assert not UNSTABLE.search("                 U _ZNSt13runtime_errorC1EPKc")


@each_library
def test_a_library_needs_only_stable_symbols_of_torch_and_python(path: Path) -> None:
    if not (nm := shutil.which("nm")):
        pytest.skip("no nm")
    needed = subprocess.run([nm, "-D", "--undefined-only", path], capture_output=True, text=True, check=True).stdout
    assert "torch_get_mutable_data_ptr" in needed
    assert [line for line in needed.splitlines() if UNSTABLE.search(line)] == []
    assert re.findall(r"\bPy\w+", needed) == ["PyModule_Create2"]  # in Python's limited API since 3.2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_wheel_from_the_source_distribution_runs_from_anywhere(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.so", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "source", ignore=ignored)
    shutil.copytree(ROOT / ".ci", tmp_path / "source" / ".ci")
    environment = {**os.environ, "SPARSE_RL_BUILD": "cpu", "SPARSE_RL_NATIVE": "1"}
    environment.pop("PYTHONPATH", None)

    def run(*call: str | Path, cwd: Path) -> str:
        done = subprocess.run([sys.executable, *call], cwd=cwd, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("-m", "build", "--no-isolation", cwd=tmp_path / "source")
    dist = tmp_path / "source" / "dist"
    run(".ci/check_dist.py", "dist", "--no-install", cwd=tmp_path / "source")
    wheel = next(dist.glob("*.whl"))
    assert "-cp311-abi3-" in wheel.name
    assert sys.platform != "linux" or "-manylinux_" in wheel.name
    with zipfile.ZipFile(wheel) as files:
        libraries = [name for name in files.namelist() if name.endswith(".so")]
        assert libraries == ["sparse_rl_lightning/_C.abi3.so"]
        check_library(libraries[0], files.read(libraries[0]), tmp_path, Path.home())
        files.extractall(tmp_path / "installed")
    code = "from sparse_rl_lightning import ops; print(ops.__file__, ops.MISSING['cpu'] == '')"
    environment["PYTHONPATH"] = str(tmp_path / "installed")
    assert run("-c", code, cwd=tmp_path).split() == [
        str(tmp_path / "installed" / "sparse_rl_lightning" / "ops" / "__init__.py"), "True",
    ]  # fmt: skip
