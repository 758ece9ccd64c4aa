"""How far a prompt walks: the files and functions that one training step of the quickstart enters.

``python tests/walk.py`` prints it for the third step of a tiny policy, which begins with a rollout. A move is a pair of
files, one left and another entered by a call next. Comprehensions do not count as functions; rooms are files, and all
of ``ops/`` together.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import sparse_rl_lightning
from sparse_rl_lightning import SparseGRPO

PACKAGE = str(Path(sparse_rl_lightning.__file__).parent)
CALLBACKS = "[{class_path: SparsityAwareRejection}, {class_path: ImportanceReweighting}]"


class Walk:
    """A profile function that notes what is entered."""

    def __init__(self) -> None:
        self.files, self.functions = set[str](), set[tuple[str, str]]()
        self.moves, self._last = set[tuple[str, str]](), ""

    def __call__(self, frame: Any, event: str, argument: object) -> None:
        file: str = frame.f_code.co_filename
        if event != "call" or not file.startswith(PACKAGE):
            return
        name: str = frame.f_code.co_qualname
        self.files.add(file)
        if not name.rpartition(".")[2].startswith("<"):
            self.functions.add((file, name))
        if file != self._last:
            self.moves.add((self._last, file))
        self._last = file


def measured() -> dict[str, int]:
    """Train four steps, and count what the third enters."""
    walk, plain, step = Walk(), SparseGRPO.training_step, [0]

    def watched(self: SparseGRPO, *arguments: Any) -> Any:
        step[0] += 1
        sys.setprofile(walk if step[0] == 3 else None)
        try:
            return plain(self, *arguments)
        finally:
            sys.setprofile(None)

    SparseGRPO.training_step = watched  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = [
            "sparse-rl", "fit", "--config", "configs/quickstart.yaml", "--trainer.max_steps=4",
            f"--trainer.callbacks={CALLBACKS}", "--trainer.logger=false", f"--trainer.default_root_dir={folder}",
            "--model.policy={class_path: TinyPolicy}",
        ]  # fmt: skip
        runpy.run_module("sparse_rl_lightning", run_name="__main__", alter_sys=True)
    with_ops_as_one = {(room_of(one), room_of(other)) for one, other in walk.moves}
    return {
        "files": len(walk.files), "functions": len(walk.functions), "moves": len(walk.moves),
        "rooms": len({room_of(file) for file in walk.files}),
        "moves between rooms": len({pair for pair in with_ops_as_one if len(set(pair)) == 2}),
    }  # fmt: skip


def room_of(file: str) -> str:
    """The file, or the folder of ops, which is one room."""
    ops = str(Path(PACKAGE) / "ops")
    return ops if file.startswith(ops) else file


if __name__ == "__main__":
    print(json.dumps(measured()))
