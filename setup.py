"""Builds the native library; all metadata stands in pyproject.toml.

SPARSE_RL_BUILD chooses: "auto" (default) compiles what the machine can, "cuda" and "cpu" insist on it, "python"
compiles nothing. Further switches: SPARSE_RL_ARCHS (see ARCHS), SPARSE_RL_CFLAGS (appended), CUDA_HOME, MAX_JOBS.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import setuptools

ROOT = Path(__file__).resolve().parent
CHOICES = ("auto", "cuda", "cpu", "python")
OLDEST_SETUPTOOLS = (78, 0, 2)  # as pyproject.toml says, which nobody reads without build isolation
TARGET = "0x020b000000000000"  # oldest libtorch whose stable ABI is used: 2.11


def say(text: str) -> None:
    """Print where pip shows it too: on both streams it would appear twice."""
    print(f"sparse-rl-lightning: {text}", file=sys.stderr)


def find_cuda_home() -> Path | None:
    """The CUDA toolkit; nvcc on the PATH may be a wrapper script, so nvcc itself is asked where it lives."""
    named = os.environ.get("CUDA_HOME")
    if named:
        return Path(named)
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if not nvcc:
        return None
    dryrun = subprocess.run([nvcc, "--dryrun", "-c", "-x", "cu", "/dev/null"], capture_output=True, text=True)
    found = re.search(r"^#\$ TOP=(.+)$", dryrun.stderr, re.MULTILINE)
    home = Path(found[1].strip()) if found else Path(nvcc).resolve().parents[1]
    return home.resolve() if (home / "bin" / "nvcc").exists() else None


CXX_FLAGS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-g0"]  # Python's own flags ask for -g
PTX = "+PTX"
NVCC_FLAGS = ["-std=c++17", "-O3", "--expt-relaxed-constexpr"]


# A100; RTX 40, L40S; H100, H200; B200; RTX 50. PTX, which drivers compile at the first start, is for cards with code of
# their own nowhere here: that of 10.0, since 12.0's would leave out 11.0.
ARCHS = "80;89;90;100+PTX;120"


def architectures() -> str:
    """What to compile for, separated by semicolons: torch cannot guess it where there is no GPU."""
    named = os.environ.get("SPARSE_RL_ARCHS") or ARCHS  # an image sets it empty
    return named if PTX in named else named + PTX  # of the last one, if of none


def gencode() -> list[str]:
    """Machine code for each architecture, and PTX where it is asked for."""
    flags = []
    for arch in architectures().split(";"):
        number = arch.removesuffix(PTX)
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch != number:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def anonymous() -> list[str]:
    """Error messages name the source file: from the root of the repository or of torch, not of this machine."""
    import torch

    return [f"-ffile-prefix-map={folder}=." for folder in (ROOT, Path(torch.__file__).resolve().parents[1])]


def macros(module: str) -> list[tuple[str, str]]:
    """Preprocessor definitions of one library."""
    archs = [("SPARSE_RL_ARCHS", f'"{architectures()}"')] if module == "_cuda" else []
    schemas = runpy.run_path(str(ROOT / "sparse_rl_lightning" / "ops" / "schemas.py"))
    schema = ("SPARSE_RL_SCHEMA", f'"{schemas["schema_hash"]()}"')
    return [("TORCH_TARGET_VERSION", TARGET), schema, ("SPARSE_RL_MODULE", module), *archs]


def sources(folder: str, suffix: str) -> list[str]:
    """Sources of one library, relative to here as setuptools wants them."""
    found = sorted((ROOT / "cuda_ext" / folder).glob(f"*{suffix}"))
    return [str(path.relative_to(ROOT)) for path in [ROOT / "cuda_ext" / "module.cpp", *found]]


def cpu_extension() -> Any:
    """The library ``_C`` with the CPU kernels."""
    from torch.utils.cpp_extension import CppExtension

    flags = [*CXX_FLAGS, *anonymous(), "-fopenmp-simd", "-Wall", "-Wno-psabi"]
    return CppExtension(
        "sparse_rl_lightning._C", sources("cpu", ".cpp"), include_dirs=[str(ROOT / "cuda_ext" / "include")],
        define_macros=macros("_C"), py_limited_api=True,
        extra_compile_args={"cxx": flags + os.environ.get("SPARSE_RL_CFLAGS", "").split()},
        extra_link_args=os.environ.get("SPARSE_RL_CFLAGS", "").split(),
    )  # fmt: skip


def cuda_extension(home: Path) -> Any:
    """The library ``_cuda``: linked without libtorch_cuda, so that it loads where torch has no CUDA."""
    from torch.utils import cpp_extension

    cpp_extension.CUDA_HOME = str(home)  # a CPU-only torch leaves it None even where nvcc is
    return cpp_extension.CppExtension(
        "sparse_rl_lightning._cuda", sources("cuda", ".cu"),
        include_dirs=[*(str(ROOT / "cuda_ext" / folder) for folder in ("include", "cuda")), str(home / "include")],
        library_dirs=[str(home / "lib64"), str(home / "targets" / "x86_64-linux" / "lib")], libraries=["cudart_static"],
        define_macros=[*macros("_cuda"), ("USE_CUDA", "1")], py_limited_api=True,
        extra_compile_args={
            "cxx": [*CXX_FLAGS, *anonymous()],
            "nvcc": [*NVCC_FLAGS, *(f"-Xcompiler={flag}" for flag in anonymous()), *gencode()],
        },
        # libtorch leads to libtorch_cuda where there is one: the linker must not drop it as unused
        extra_link_args=["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"],
    )  # fmt: skip


def choose() -> list[str]:
    """The libraries to build, or a sentence that says why there will be none."""
    choice = os.environ.get("SPARSE_RL_BUILD", "auto")
    if choice not in CHOICES:
        sys.exit(f"SPARSE_RL_BUILD={choice!r} is not known: choose one of {', '.join(CHOICES)}.")
    if choice == "python":
        say("SPARSE_RL_BUILD=python: no native library, all ops run on the PyTorch reference.")
        return []
    try:
        import torch
    except ImportError:
        sys.exit(
            "The native library is compiled against the installed torch, and there is none here: install torch first "
            "and use `pip install --no-build-isolation`, or set SPARSE_RL_BUILD=python to go without it."
        )
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if not compiler:
        if choice != "auto":
            sys.exit(f"SPARSE_RL_BUILD={choice} needs a C++ compiler: install g++ 11 or newer, or set CXX.")
        say("NO NATIVE LIBRARY: no C++ compiler. All ops run on the PyTorch reference. Install g++ to build it.")
        return []
    return ["cpu", *choose_cuda(choice, torch.version.cuda)]


def choose_cuda(choice: str, torch_cuda: str | None) -> list[str]:
    """Whether to compile the CUDA kernels."""
    if choice == "cpu":
        return []
    missing = None
    if not list((ROOT / "cuda_ext" / "cuda").glob("*.cu")):
        missing = "this source tree has no CUDA kernels"
    elif find_cuda_home() is None:
        missing = "nvcc was not found (set CUDA_HOME)"
    elif choice == "auto" and torch_cuda is None:
        missing = "the installed torch is a CPU build"
    if missing is None:
        return ["cuda"]
    if choice == "cuda":
        sys.exit(f"SPARSE_RL_BUILD=cuda cannot be done: {missing}.")
    say(f"CUDA kernels skipped: {missing}. SPARSE_RL_BUILD=cuda insists on them.")
    return []


def build() -> dict[str, Any]:
    """Arguments of ``setup`` for the libraries chosen."""
    if {"--version", "--name", "clean", "egg_info", "sdist", "dist_info"} & set(sys.argv[1:]):
        return {}
    chosen = choose()
    if not chosen:
        return {}
    from torch.utils.cpp_extension import BuildExtension

    extensions = [cpu_extension()]
    if "cuda" in chosen:
        extensions.append(cuda_extension(find_cuda_home() or Path()))
    say(f"building native libraries: {', '.join(chosen)}.")
    options = {"bdist_wheel": {"py_limited_api": "cp311"}}
    return {
        "ext_modules": extensions,
        "cmdclass": {"build_ext": BuildExtension.with_options(use_ninja=bool(shutil.which("ninja")))},
        "options": options,
    }


if __name__ == "__main__":
    if tuple(map(int, re.findall(r"\d+", setuptools.__version__)[:3])) < OLDEST_SETUPTOOLS:
        wanted = ".".join(map(str, OLDEST_SETUPTOOLS))
        sys.exit(f"setuptools {setuptools.__version__} is too old: pip install 'setuptools>={wanted}' wheel")
    setuptools.setup(**build())
