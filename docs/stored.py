"""Runs notebooks and stores what they show, without stderr, times and numbers of execution.

    python -m docs.stored [real_answer ...]

They are kept with their outputs, so that they can be read where nobody has run them. Those named ``real_`` need the
model of ``make real-model``.
"""

from __future__ import annotations

import base64
import io
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
REAL = [path for path in NOTEBOOKS if path.stem.startswith("real_")]
LARGEST = 200_000
"""Bytes of a notebook with its outputs."""
SECONDS = 3600
LOGGED = re.compile(r"^\[\d{4}-\d\d-\d\d [\d:,]+\] \[[A-Z]+\].*\n", re.MULTILINE)
"""Lines of DeepSpeed's log, which goes to stdout."""


def execute(notebook: nbformat.NotebookNode, folder: Path, seconds: int = SECONDS) -> None:
    """Run all cells in a folder, in a new kernel of this interpreter; the first error is raised."""
    # without folders of kernel specs, python3 is the interpreter that runs this, whatever else is installed
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    client = NotebookClient(
        notebook, km=manager, timeout=seconds, resources={"metadata": {"path": str(folder)}}, record_timing=False,
        coalesce_streams=True,
    )  # fmt: skip
    client.owns_km = True  # ends the kernel, which holds most of a gigabyte
    client.execute()


def shown(outputs: Iterable[nbformat.NotebookNode]) -> Iterator[nbformat.NotebookNode]:
    """The outputs but for stderr, lines of logs, what is empty without them, and numbers of execution."""
    for output in outputs:
        if output.output_type == "stream":
            output.text = "" if output.name == "stderr" else LOGGED.sub("", output.text)
            if output.text:
                yield output
            continue
        output.metadata = {}
        if output.output_type == "execute_result":
            output.execution_count = None
        if "image/png" in output.get("data", {}):
            output.data["image/png"] = with_few_colors(output.data["image/png"])
        if "text/html" in output.get("data", {}):
            output.data["text/plain"] = ""  # the same once more
        yield output


def tidied(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook as it is stored."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.execution_count, cell.outputs = None, list(shown(cell.outputs))
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def with_few_colors(picture: str) -> str:
    """A PNG of 256 colors, in base64; one that has a palette already stays."""
    image = Image.open(io.BytesIO(base64.b64decode(picture)))
    if image.mode == "P":
        return picture
    small = io.BytesIO()
    image.convert("RGB").quantize(256).save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode() + "\n"


def main(names: list[str]) -> None:
    """Run and store these notebooks, or all."""
    for path in [FOLDER / f"{name}.ipynb" for name in names] or NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, Path(folder))
        text = nbformat.writes(tidied(notebook)) + "\n"
        size = len(text.encode())
        if size > LARGEST:
            sys.exit(f"{path.name} would have {size:,} bytes, more than {LARGEST:,}: show less.")
        path.write_text(text, "utf-8")
        print(f"Written: {path.name}, {size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
