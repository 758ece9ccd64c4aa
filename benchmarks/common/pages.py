"""Pages of results: date and machine of a measurement, and blocks of text between marks."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import sys
from pathlib import Path

import torch

from sparse_rl_lightning import __version__, ops
from sparse_rl_lightning.files import write_whole

END = "<!-- until here -->"
UNITS = ("avx512_bf16", "amx_bf16")


def say(text: str) -> None:
    """Print for whoever waits; the tables alone go to standard output."""
    print(text, file=sys.stderr, flush=True)


def machine(device: str) -> str:
    """Date, machine and versions."""
    gpu = f", {torch.cuda.get_device_name()}" if device == "cuda" else ""
    where = f"{processor()} ({torch.backends.cpu.get_cpu_capability()}), {torch.get_num_threads()} threads{gpu}"
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    versions = f"{packages}, sparse-rl-lightning {__version__}"  # a checkout need not be installed
    native = "kernels" if ops.has_kernel("decode_attention", device) else "PyTorch reference"
    return f"{datetime.date.today()}, {where}, {versions}, own ops: {native}"


def processor() -> str:
    """Name, numbers and units of 16 bits of the processor: machines of one name round and draw otherwise."""
    info = Path("/proc/cpuinfo")
    lines = (line.partition(":") for line in (info.read_text() if info.exists() else "").splitlines())
    first = {name.strip(): value.strip() for name, _, value in reversed([*lines])}
    numbers = [first[name] for name in ("cpu family", "model", "stepping") if name in first]
    units = [unit for unit in UNITS if unit in first.get("flags", "").split()]
    name = first.get("model name") or platform.processor() or platform.machine()
    return " ".join(filter(None, [name, "/".join(numbers), *units]))


def page_name(what: str, device: str) -> str:
    """Name of a page of results: rollout-cpu, gpu-rollout."""
    return f"gpu-{what}" if device == "cuda" else f"{what}-{device}"


def save(folder: Path | None, name: str, title: str, text: str) -> None:
    """Write a page of tables where a folder is given; whoever is stopped leaves the last page that was whole."""
    if folder is not None:
        write_whole(folder / f"{name}.md", f"# {title}\n\n{text}\n")


def mark(writer: str, block: str = "") -> str:
    """The line before a block that a module writes into a page; :data:`END` stands behind the block."""
    return f"<!-- written by {writer}{f': {block}' if block else ''} -->"


def replaced(text: str, begin: str, block: str) -> str:
    """A page's text with another block between its marks; a text without them gets both at its end."""
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(END)
    return f"{head}{begin}\n\n{block}\n\n{END}{tail or chr(10)}"


def insert(page: Path, block: str, begin: str) -> None:
    """Write a block into the file of a page, which need not be there yet."""
    page.parent.mkdir(parents=True, exist_ok=True)
    before = page.read_text(encoding="utf-8") if page.exists() else ""
    page.write_text(replaced(before, begin, block), encoding="utf-8")


def insert_if_marked(page: Path, block: str, begin: str) -> None:
    """The same where the page has a place for the block; any other page is left alone."""
    if page.is_file() and begin in page.read_text(encoding="utf-8"):
        insert(page, block, begin)
