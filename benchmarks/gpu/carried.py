"""Real models on a machine without a network: their publishers' files in pieces that calls can carry.

python -m benchmarks.gpu.carried --split real math [--state build/gpu]    # where there is a network
python -m benchmarks.gpu.carried --join math --device cuda                # there, when all pieces have arrived

What has been joined is the publisher's file by its hash, or refused.
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
MOST = 46 * 2**20  # bytes of a piece


def split(name: str, state: Path) -> None:
    """Put pieces of the publisher's file into folders, so that each of several calls carries one."""
    state.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=state) as scratch:
        whole = gguf_file(CARRIED[name], Path(scratch)).read_bytes()
    count = -(-len(whole) // MOST)
    size = -(-len(whole) // count)
    for letter, start in zip(string.ascii_lowercase, range(0, len(whole), size), strict=False):
        folder = state / f"{name}-{letter}"
        folder.mkdir(exist_ok=True)
        (folder / "piece").write_bytes(whole[start : start + size])
    print(f"{state}: {name}-a to {name}-{string.ascii_lowercase[count - 1]}, {size / 2**20:.1f} MiB each")


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
    whole = state / f"{name}.gguf"
    whole.write_bytes(b"".join(piece.read_bytes() for piece in sorted(state.glob(f"{name}-?/piece"))))
    import_gguf.main([str(checked(MODELS[CARRIED[name]], whole)), str(folder)])
    return folder


def main() -> None:
    """Split or join."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--state", type=Path, default=Path("build/gpu"), help="folder of the pieces")
    for verb in ("split", "join"):
        parser.add_argument(f"--{verb}", nargs="+", choices=CARRIED, default=[])
    args = parser.parse_args()
    for name in args.split:
        split(name, args.state)
    for name in args.join:
        print(policy_of(name, args.state.absolute(), args.device))


if __name__ == "__main__":
    main()
