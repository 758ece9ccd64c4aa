"""What the CUDA library was compiled for, and which of its code a GPU runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

OLDEST = (8, 0)
"""The first compute capability with asynchronous copies (cp.async), which the kernels need."""
REBUILD = "SPARSE_RL_BUILD=cuda SPARSE_RL_ARCHS={} builds it"


@dataclass(frozen=True)
class Architecture:
    """Machine code of one compute capability, perhaps with its PTX; code of 9.0a and the like runs on that alone."""

    major: int
    minor: int
    suffix: str = ""
    ptx: bool = False

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}{self.suffix}"

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a card of this capability runs the machine code: of its own generation, and not newer."""
        version = (self.major, self.minor)
        return version == capability if self.suffix else self.major == capability[0] and version <= capability

    def compiles_on(self, capability: tuple[int, int]) -> bool:
        """Whether the driver of such a card can compile the PTX."""
        return self.ptx and not self.suffix and (self.major, self.minor) <= capability


def parse_architectures(text: str) -> list[Architecture]:
    """Read a list as setup.py writes it.

    >>> [str(arch) for arch in parse_architectures("80;90a;100+PTX")]
    ['8.0', '9.0a', '10.0']
    """
    names = re.findall(r"(\d+)(\d)([a-z]?)(\+PTX)?", text)
    return [Architecture(int(major), int(minor), suffix, bool(ptx)) for major, minor, suffix, ptx in names]


def built_architectures(folder: Path) -> list[Architecture]:
    """What the CUDA library in a folder was compiled for, read without loading it; nothing if there is none."""
    for path in sorted(folder.glob("_cuda.*so")):
        if match := re.search(rb"sparse_rl_archs=([\w;+]*)", path.read_bytes()):
            return parse_architectures(match[1].decode())
    return []


def describe_architectures(built: list[Architecture]) -> str:
    """All of them in words."""
    ptx = [f"PTX of {arch}" for arch in built if arch.ptx]
    return f"machine code for {', '.join(map(str, built))}" + "".join(f", {text}" for text in ptx)


def has_code(built: list[Architecture], capability: tuple[int, int]) -> bool:
    """Whether the kernels run on a card of this compute capability; a build that does not say what for has its code."""
    fits = (arch.runs_on(capability) or arch.compiles_on(capability) for arch in built)
    return capability >= OLDEST and (not built or any(fits))


def code_for(built: list[Architecture], capability: tuple[int, int]) -> str:
    """Which of the built code a card of this compute capability runs, as the driver chooses it."""
    major, minor = capability
    remedy = REBUILD.format(f"{major}{minor}")
    if fitting := [arch for arch in built if arch.runs_on(capability)]:
        best = max(fitting, key=lambda arch: arch.minor)
        if best.minor == minor:
            return f"runs machine code for {best}, its own"
        return f"runs machine code for {best}, there is none for {major}.{minor}: {remedy}"
    if portable := [arch for arch in built if arch.compiles_on(capability)]:
        best = max(portable, key=lambda arch: (arch.major, arch.minor))
        return f"runs the PTX of {best}, which its driver compiles at the first start; no machine code fits: {remedy}"
    if capability < OLDEST:
        return "HAS NO CODE here: the kernels need 8.0, so operations run on the PyTorch reference"
    return f"HAS NO CODE here: {remedy}, until then operations run on the PyTorch reference"
