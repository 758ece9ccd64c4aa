"""Build a copy of the package in which the emulated CUDA kernels replace the CPU kernels.

Called by ``make cuda-emulate``, with the folder to build in.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(target: Path) -> None:
    """Compile ``cuda/*.cu`` as C++ and link them into ``target``'s copy of the package."""
    from torch.utils import cpp_extension

    setup = runpy.run_path(str(ROOT / "setup.py"))
    for name in ("sparse_rl_lightning", "exact_answers", "tests"):
        shutil.copytree(
            ROOT / name, target / name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    objects = target / "objects"
    objects.mkdir(exist_ok=True)
    compiler = os.environ.get("CXX", "g++")
    flags = [
        "-std=c++17", "-O1", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-Wno-unused-function",
        *(f"-I{ROOT / 'cuda_ext' / folder}" for folder in ("include", "emulation")),
        f"-I{sysconfig.get_paths()['include']}",
        *(flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)),
        *(f"-D{name}={value}" for name, value in setup["macros"]("_C")),
    ]  # fmt: skip

    def compile_one(source: Path) -> str:
        done = str(objects / f"{source.stem}.o")
        subprocess.run([compiler, *flags, "-x", "c++", "-c", str(source), "-o", done], check=True)
        return done

    sources = [ROOT / "cuda_ext" / "module.cpp", *sorted((ROOT / "cuda_ext" / "cuda").glob("*.cu"))]
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
        compiled = list(pool.map(compile_one, sources))
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-ltorch", "-ltorch_cpu", "-lc10"]
    library = target / "sparse_rl_lightning" / "_C.abi3.so"
    subprocess.run([compiler, "-shared", *compiled, *libraries, "-o", str(library)], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
