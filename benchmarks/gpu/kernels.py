"""Compiles the kernels where nvcc is, without a GPU, and puts them in place where the GPU is.

    python -m benchmarks.gpu.kernels --build build/gpu/kernels --archs 90    # then carry the folder to the GPU
    python -m benchmarks.gpu.kernels --place build/gpu/kernels               # there; compiles if it must

A library is bound to no version of Python or torch (both stable ABIs), but to the sources it was made of: a folder of
other sources is not used.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import ROOT
from benchmarks.gpu.ledger import ask_card, fingerprint

PACKAGE = ROOT / "sparse_rl_lightning"
STAMP = "sources.txt"


def sources() -> str:
    """What libraries are made of, as a hash."""
    return hashlib.sha256(fingerprint(("cuda_ext",)).encode() + (ROOT / "setup.py").read_bytes()).hexdigest()[:16]


def is_current(folder: Path) -> bool:
    """Whether the folder has a CUDA library of these sources."""
    stamp = folder / STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == sources() and any(folder.glob("_cuda*.so"))


def build(folder: Path, archs: str) -> None:
    """Compile for these architectures, into this folder and nowhere else."""
    settings = {"SPARSE_RL_BUILD": "cuda", **({"SPARSE_RL_ARCHS": archs} if archs else {})}
    with tempfile.TemporaryDirectory() as scratch:
        where = ("--build-lib", f"{scratch}/lib", "--build-temp", f"{scratch}/temp")
        command = [sys.executable, "setup.py", "-q", "build_ext", *where]
        subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, check=True)
        folder.mkdir(parents=True, exist_ok=True)
        for library in Path(scratch, "lib", PACKAGE.name).glob("*.so"):
            shutil.copy2(library, folder)
    (folder / STAMP).write_text(sources() + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.glob("*.so")) / 2**20
    print(f"Compiled into {folder}: {size:.1f} MiB, for {archs or 'all architectures of setup.py'}.")


def place(folder: Path, package: Path = PACKAGE) -> None:
    """Copy the libraries into the package, compiled for the card of this machine if the folder has none that fit."""
    was_carried = is_current(folder)
    if not was_carried:
        build(folder, ask_card("compute_cap").replace(".", ""))
    for library in sorted(folder.glob("*.so")):
        new = package / f".{library.name}"
        shutil.copy2(library, new)
        new.replace(package / library.name)  # a process that has the old one loaded keeps it
    print("Kernels that were brought along are in place." if was_carried else "Kernels compiled here are in place.")


def main() -> None:
    """Build or place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--build", type=Path, metavar="FOLDER")
    action.add_argument("--place", type=Path, metavar="FOLDER")
    parser.add_argument("--archs", default="", help="of --build: compute capabilities such as 90 or 80;90; all without")
    args = parser.parse_args()
    if args.build:
        build(args.build.absolute(), args.archs)
    else:
        place(args.place.absolute())


if __name__ == "__main__":
    main()
