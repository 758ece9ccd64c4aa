"""Real models on a machine without a network: their publishers' files in pieces that calls can carry.

    python -m benchmarks.gpu.carried [--state build/gpu] [--models real math]

``real`` and ``math`` join them there, when all pieces have arrived: by its hash it is the publisher's file, or refused.
"""

from __future__ import annotations

import argparse
import string
from pathlib import Path
from tempfile import TemporaryDirectory

from examples.models import MODELS, checked, gguf_file
from sparse_rl_lightning.cli.training import import_gguf
from sparse_rl_lightning.policies.tiny import TinyPolicy

CARRIED = {"real": "smollm2-135m-instruct", "math": "qwen2.5-coder-0.5b-instruct"}
MOST = 47 * 2**20  # bytes of a piece


def split(name: str, state: Path) -> None:
    """Put pieces of the publisher's file into folders, so that each of several calls carries one."""
    state.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=state) as scratch:
        whole = gguf_file(CARRIED[name], Path(scratch)).read_bytes()
    for number, start in enumerate(range(0, len(whole), MOST)):
        folder = state / f"{name}-{string.ascii_lowercase[number]}"
        folder.mkdir(exist_ok=True)
        (folder / "piece").write_bytes(whole[start : start + MOST])
        print(folder)


def policy_of(name: str, state: Path, device: str) -> Path:
    """The folder of the policy, made of all pieces; in a rehearsal of a tiny one.

    Raises:
        ValueError: If the pieces are not the publisher's file.
    """
    folder = state / f"{name}-{device}" / "policy"
    if (folder / "config.json").is_file():
        return folder
    if device == "cpu":
        for saved in TinyPolicy(alphabet=string.printable, max_position_embeddings=512).load():
            saved.save_pretrained(folder)
        return folder
    whole, pieces = state / f"{name}.gguf", sorted(state.glob(f"{name}-?/piece"))
    print(f"{len(pieces)} pieces of {CARRIED[name]}")
    whole.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
    import_gguf.main([str(checked(MODELS[CARRIED[name]], whole)), str(folder)])
    return folder


def main() -> None:
    """Fetch the files and split them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=Path("build/gpu"), help="folder of the pieces")
    parser.add_argument("--models", nargs="+", choices=CARRIED, default=list(CARRIED))
    args = parser.parse_args()
    for name in args.models:
        split(name, args.state)


if __name__ == "__main__":
    main()
