"""What is saved can be read: numbers of numpy become plain ones, anything else is refused by name at the first save."""

from __future__ import annotations

import datetime
import enum
import io
import os
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from tiny_grpo import every_step, fit, loaded, module, weights
from tiny_run import config, write

from sparse_rl_lightning.checkpoints.plain import readable
from sparse_rl_lightning.cli.training.export import load_policy
from sparse_rl_lightning.modules import SparseGRPO


class Level(enum.IntEnum):
    HIGH = 3


PLAIN: dict[str, tuple[Any, Any]] = {
    "float64": (np.float64(0.1), 0.1),
    "float32": (np.float32(0.1), float(np.float32(0.1))),
    "float16": (np.float16(0.5), 0.5),
    "longdouble": (np.longdouble(0.5), 0.5),
    "int8": (np.int8(-3), -3),
    "uint64": (np.uint64(2**64 - 1), 2**64 - 1),
    "bool": (np.bool_(True), True),
    "NaN": (np.float32("inf"), float("inf")),
    "complex": (np.complex128(1j), 1j),
    "str": (np.str_("a"), "a"),
    "0-d": (np.array(7), 7),
    "0-d bool": (np.array(False), False),
    "enumeration": (Level.HIGH, 3),
    "key": ({np.int64(3): 1}, {3: 1}),
    "deep": ({"a": [(np.int64(1), {np.float64(2.0)})]}, {"a": [(1, {2.0})]}),
    "Counter": (Counter({"a": np.int64(2)}), Counter({"a": 2})),
}
OTHERS: dict[str, Any] = {
    "an array": np.zeros(3), "objects": np.array(None), "a date": np.datetime64("2026-01-01"), "a class": int,
    "a delta": datetime.timedelta(1), "a fraction": Fraction(1, 2), "a path": Path("x"), "a function": lambda: 0,
    "a defaultdict": defaultdict(int), "a frozenset": frozenset([1]), "an object": object(),
}  # fmt: skip


def read_back(checkpoint: dict[str, Any]) -> Any:
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def types_of(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), [(types_of(key), types_of(item)) for key, item in value.items()]
    return (type(value), [types_of(item) for item in value]) if isinstance(value, (list, tuple, set)) else type(value)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_numbers_become_pythons(name: str) -> None:
    given, want = PLAIN[name]
    found = read_back(readable({"callbacks": {"Best": given}}))["callbacks"]["Best"]
    assert found == want
    assert types_of(found) == types_of(want)


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_refused_by_its_place(name: str) -> None:
    kind = type(OTHERS[name]).__qualname__
    said = rf"callbacks/Best/best/1 holds a \S*{kind}.* For callbacks: convert it in the callback's state_dict"
    with pytest.raises(ValueError, match=said):
        readable({"callbacks": {"Best": {"best": [0, OTHERS[name]]}}})


def test_what_torch_reads_is_left_as_it_is() -> None:
    state = OrderedDict(w=torch.zeros(2))
    state._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    given = {"state_dict": state, "x": [torch.Size([2]), torch.float32, torch.device("cpu"), None, b"1", True, 10**30]}
    found = readable(given)
    assert found["x"] == given["x"] == read_back(found)["x"]
    assert found["state_dict"]["w"] is state["w"]
    assert found["state_dict"]._metadata == {"": {"version": 2}}


# ---------------------------------------------------------------- in a run


class Best(Callback):
    """Remembers something."""

    def __init__(self, best: Any = None) -> None:
        self.best = best

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]


class Adds(SparseGRPO):
    """Stores something behind the base class's back."""

    own: Any = np.float64(0.5)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["mine"] = {"own": self.own}


THREE = np.int64(3)


class Hyper(SparseGRPO):
    def __init__(self, *args: Any, width: Any = THREE, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.save_hyperparameters("width")


class HyperObject(SparseGRPO):
    def __init__(self, *args: Any, where: Any = Path("x"), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.save_hyperparameters("where")


def cosine(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(np.pi * min(step / 10, 1))))


GOES_ON: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "a schedule": ({"lr_scheduler": cosine}, []),
    "a callback": ({}, [Best(np.float64(0.5))]),
    "an optimizer": ({"optimizer": partial(torch.optim.AdamW, lr=np.float64(0.01), betas=(np.float64(0.8), 0.9))}, []),
    "a module": ({"kind": Adds}, []),
    "hyperparameters": ({"kind": Hyper}, []),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", GOES_ON)
def test_a_run_with_numbers_of_numpy_goes_on(name: str, tmp_path: Path) -> None:
    options, callbacks = GOES_ON[name]

    def run(folder: Path, steps: int, ckpt_path: Path | None = None) -> torch.Tensor:
        grpo = module(**options)
        fit(grpo, steps, [every_step(folder), *callbacks], enable_checkpointing=True, ckpt_path=ckpt_path)
        return weights(grpo)

    whole = run(tmp_path / "whole", 3)
    run(tmp_path / "cut", 1)
    assert torch.equal(run(tmp_path / "cut", 3, tmp_path / "cut" / "last.ckpt"), whole)
    exported = loaded(**options)
    load_policy(exported, tmp_path / "cut" / "last.ckpt")
    assert torch.equal(weights(exported), whole)


@pytest.mark.parametrize(
    ("options", "callback", "said"),
    [
        ({}, Best(np.zeros(2)), r"callbacks/Best/best holds a numpy.ndarray of the shape \(2,\)"),
        ({"kind": HyperObject}, Best(), "hyper_parameters/where holds a .*save_hyperparameters.ignore="),
        ({"kind": type("Odd", (Adds,), {"own": {1: Fraction(1, 2)}})}, Best(), "mine/own/1 holds a fractions.Fraction"),
    ],
)
def test_the_first_save_refuses_what_it_could_not_read(
    options: dict[str, Any], callback: Callback, said: str, tmp_path: Path
) -> None:
    grpo = module(**options)
    with pytest.raises(ValueError, match=f"cannot be saved so that it could go on: {said}"):
        fit(grpo, 3, [every_step(tmp_path), callback], enable_checkpointing=True)
    assert grpo.trainer.global_step == 1
    assert not list(tmp_path.rglob("*.ckpt"))


class BestNumber(Best):
    def __init__(self) -> None:
        super().__init__(np.float64(0.5))


class BestArray(Best):
    def __init__(self) -> None:
        super().__init__(np.zeros(2))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "status"), [(BestNumber, 0), (BestArray, 1)])
def test_the_sharded_writer_does_the_same(kind: type[Best], status: int, folder: Path) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is an extra")
    root = Path(__file__).resolve().parents[2]
    values = config(max_steps=2)
    values["trainer"]["callbacks"].append({"class_path": f"tests.checkpoints.test_plain.{kind.__name__}"})
    command = [sys.executable, "-m", "sparse_rl_lightning", "fit", "--config", write(values)]
    path = os.pathsep.join([str(root), str(root / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "XDG_STATE_HOME": str(folder)}
    strategy = "--trainer.strategy=sparse_rl_deepspeed_stage_2"
    done = subprocess.run([*command, strategy], env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    saved = folder / "runs" / "own" / "checkpoints" / "last.ckpt"
    if status:
        assert f"callbacks/{kind.__name__}/best holds a numpy.ndarray" in done.stderr
        assert not saved.exists()
    else:
        own = torch.load(saved / "trainer.pt", weights_only=True)["callbacks"][kind.__name__]
        assert (own, type(own["best"])) == ({"best": 0.5}, float)
