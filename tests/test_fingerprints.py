"""A result belongs to what its fingerprint says: the same bytes, however they print and whatever they sum to."""

from __future__ import annotations

import copy
import importlib
import operator
import random
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from torch import nn

from sparse_rl_lightning.calibration.sweep import Sweep
from sparse_rl_lightning.compressors import Combined, KNorm, QFilters, TriAttention
from sparse_rl_lightning.compressors.query_statistics import QueryStatistics
from sparse_rl_lightning.environments import Calculator, Environment
from sparse_rl_lightning.fingerprints import (
    ANSWERS,
    PACKAGE,
    WHOLE,
    _with_imports,
    describe,
    fingerprint,
    source_files,
    sources,
    weights_digest,
)
from sparse_rl_lightning.rewards import boxed_math_reward
from sparse_rl_lightning.rewards.math import MathChecker
from sparse_rl_lightning.rollout import SamplingParams
from sparse_rl_lightning.testing import tiny_model

SIZES: dict[str, Any] = {"budget": 12, "buffer": 3, "num_sinks": 1, "window": 3}


def statistics(seed: int) -> QueryStatistics:
    """Of the tiny model: 2 layers, 4 query heads on 2 KV heads, head size 16."""
    g = torch.Generator().manual_seed(seed)
    return QueryStatistics(*(torch.rand(2, heads, size, generator=g) for heads, size in ((4, 16), (4, 8), (2, 16))))


class Learned(KNorm):
    """A user's: what makes it differ is a network, tensors, a number and a function in private attributes."""

    def __init__(self, seed: int = 0, factor: float = 1.0, power: float = 1.0) -> None:
        super().__init__(**SIZES)
        torch.manual_seed(seed)
        self._net = nn.Linear(16, 1)
        self._net.factor = factor
        self._parts = {"values": [torch.arange(3.0) * power], "array": np.full(2000, power)}
        self._function = (lambda x: x) if power == 1 else (lambda x: x * 2)


METHODS: dict[str, Callable[[int], Any]] = {
    "statistics": lambda number: QFilters(**SIZES, statistics=statistics(number)),
    "wrapped": lambda number: Combined([TriAttention(**SIZES, statistics=statistics(number))]),
    "a network": lambda number: Learned(seed=number),
    "a network's number": lambda number: Learned(factor=1.0 + number),
    "tensors, arrays, functions": lambda number: Learned(power=1.0 + number),
}


def sweep(policy: Any, folder: Path) -> Sweep:
    params = SamplingParams(max_completion_length=4, top_logprobs=4)
    return Sweep(policy, [[3, 4], [5]], params, folder)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", METHODS)
def test_a_calibration_with_another_method_is_refused(name: str, tmp_path: Path) -> None:
    policy, make = tiny_model(), METHODS[name]
    assert repr(make(0)) == repr(make(1))
    assert fingerprint(method=make(0)) == fingerprint(method=make(0)) != fingerprint(method=make(1))
    sweep(policy, tmp_path).claim(make(0))
    sweep(policy, tmp_path).claim(make(0).with_budget(20))  # the budget does not count
    with pytest.raises(ValueError, match="is of another method"):
        sweep(policy, tmp_path).claim(make(1))


def turned(policy: Any) -> None:
    weight = policy.model.layers[1].self_attn.q_proj.weight
    weight.data = weight.data.flip(0)


def swapped(policy: Any) -> None:
    first, second = policy.model.layers[0].mlp.up_proj, policy.model.layers[1].mlp.up_proj
    first.weight.data, second.weight.data = second.weight.data, first.weight.data


def rounded(policy: Any) -> None:
    policy.to(torch.bfloat16)


def stretched(policy: Any) -> None:
    policy.model.rotary_emb.inv_freq = policy.model.rotary_emb.inv_freq / 2


def one_number(policy: Any) -> None:
    policy.model.norm.weight.data[5] += 2**-20


@pytest.mark.parametrize("change", [turned, swapped, rounded, stretched, one_number])
def test_a_calibration_of_other_weights_is_refused(change: Any, tmp_path: Path) -> None:
    policy = tiny_model(initializer_range=0.2)
    sweep(policy, tmp_path).claim(KNorm(**SIZES))
    sweep(copy.deepcopy(policy).train(), tmp_path).claim(KNorm(**SIZES))
    other = copy.deepcopy(policy)
    change(other)
    with pytest.raises(ValueError, match="is of another policy"):
        sweep(other, tmp_path).claim(KNorm(**SIZES))


def test_every_row_of_a_large_weight_counts() -> None:
    table = nn.Embedding(30_000, 24)
    assert table.weight.numel() > WHOLE
    before = weights_digest(table)
    for first, second in ((0, 1), (17_321, 29_999)):
        with torch.no_grad():
            table.weight[[first, second]] = table.weight[[second, first]]
        assert weights_digest(table) != before
        with torch.no_grad():
            table.weight[[first, second]] = table.weight[[second, first]]
        assert weights_digest(table) == before


def test_arrays_of_objects_are_told_by_what_is_in_them() -> None:
    """As pandas gives lists and texts; their bytes are addresses, which are others in every process."""
    first, again, other = (np.array(["".join(part), 2], dtype=object) for part in (("a", "b"), ("a", "b"), ("a", "c")))
    assert first[0] is not again[0]
    assert fingerprint(a=first) == fingerprint(a=again)
    assert len({fingerprint(a=a) for a in (first, other, np.array(["ab", 2]))}) == 3


def test_what_holds_itself_ends_and_what_has_no_address_is_repeated() -> None:
    class Round:
        def __init__(self) -> None:
            self.own, self.kinds, self.path, self.thing = self, {torch.float32, int}, Path("a"), object()

    assert fingerprint(a=Round()) == fingerprint(a=Round())
    assert len({fingerprint(a=a) for a in (torch.ones(4), torch.ones(2, 2), torch.ones(4).double(), [1.0] * 4)}) == 4


class Slotted:
    """Without attributes that can be added, and without a text of its own."""

    __slots__ = ("__number", "later")

    def __init__(self, number: Any) -> None:
        self.__number = number


class Below(Slotted):
    """Beside slots it has attributes."""

    def __init__(self, number: Any, name: str = "") -> None:
        super().__init__(number)
        self.name = name


@dataclass(slots=True)
class Fields:
    """Whose text leaves a field out."""

    a: int
    b: int = field(default=0, repr=False)


LONG = "(?:" + "|".join(f"word{number}" for number in range(99))
DIFFERING: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "long patterns": (lambda: re.compile(LONG + "|a)"), lambda: re.compile(LONG + "|b)")),
    "flags": (lambda: re.compile(LONG + ")"), lambda: re.compile(LONG + ")", re.IGNORECASE)),
    "slots": (lambda: Slotted(1), lambda: Slotted(2)),
    "slots of a base": (lambda: Below(1, "a"), lambda: Below(2, "a")),
    "attributes beside slots": (lambda: Below(1, "a"), lambda: Below(1, "b")),
    "fields without a text": (lambda: Fields(1, 2), lambda: Fields(1, 3)),
    "paths": (lambda: Path("a"), lambda: Path("b")),
    "dates": (lambda: datetime(2026, 1, 1), lambda: datetime(2026, 1, 2)),
    "bytes": (lambda: b"a" * 999, lambda: b"a" * 998 + b"b"),
    "ranges and parts": (lambda: [range(3), slice(1)], lambda: [range(3), slice(2)]),
    "types of numbers": (lambda: np.dtype([("a", "f4")]), lambda: np.dtype([("b", "f4")])),
    "texts of networks": (nn.GELU, lambda: nn.GELU("tanh")),
    "tuples of networks": (lambda: net(dilation=(1, 1)), lambda: net(dilation=(2, 2))),
    "flags of networks": (lambda: net(reverse=False), lambda: net(reverse=True)),
    "what networks lack": (lambda: net(limit=None), lambda: net(limit=0)),
    "types of networks": (lambda: net(accumulate=torch.float32), lambda: net(accumulate=torch.float64)),
    "tensors of networks": (lambda: net(scale=torch.ones(2)), lambda: net(scale=torch.zeros(2))),
    "functions of networks": (lambda: net(act=torch.relu), lambda: net(act=torch.tanh)),
    "flags by adapter": (lambda: net(ranked={"a": False}), lambda: net(ranked={"a": True})),
    "getters": (lambda: operator.itemgetter(1), lambda: operator.itemgetter(2)),
}


def net(**attributes: Any) -> nn.Module:
    """A network inside another, with these attributes."""
    inner = nn.Identity()
    vars(inner).update(attributes)
    return nn.Sequential(inner)


def test_use_and_place_of_a_network_count_not() -> None:
    before = fingerprint(a=net(name_or_path="a"))
    used = net(name_or_path="b", gradient_checkpointing=True, hf_device_map={"": 0})
    assert fingerprint(a=used.eval()) == before


@pytest.mark.parametrize("name", DIFFERING)
def test_what_shows_a_part_of_itself_is_told_apart_by_all_of_it(name: str) -> None:
    make, other = DIFFERING[name]
    used = make()
    str(used)  # a path keeps its text
    assert fingerprint(a=make()) == fingerprint(a=used) != fingerprint(a=other())


def test_an_address_in_a_text_means_nothing() -> None:
    """And where a generator of numbers stands changes with every use; a built-in method has no module."""

    def unused() -> list[Any]:
        generators = [np.random.default_rng(0), np.random.RandomState(0), torch.Generator(), random.Random(0)]
        return [*generators, threading.Lock()]

    kept = unused()
    kept[0].random(), kept[1].rand(), torch.rand(1, generator=kept[2]), kept[3].random()
    assert [fingerprint(a=one) for one in kept] == [fingerprint(a=one) for one in unused()]
    assert describe(kept[:4]) == describe(unused()[:4])
    assert re.search(" at 0x", repr(kept[0]))
    assert describe([str.strip, partial(str.lower)]) != describe([str.strip, partial(str.upper)])


def parsed(share: float) -> Callable[[], Environment]:
    """A class of a configuration as the command line hands it over: inside a closure that holds the parser."""
    parser = ArgumentParser()
    parser.add_instantiator(lambda kind, *given, **named: kind(*given, **named), Environment, prepend=True)
    parser.add_argument("--environment", type=Callable[[], Environment])
    own = {"class_path": "sparse_rl_lightning.environments.Calculator", "init_args": {"step_share": share}}
    made: Callable[[], Environment] = parser.instantiate(parser.parse_object({"environment": own})).environment
    return made


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning's command line uses add_instantiator too
def test_a_class_of_a_configuration_is_told_apart_by_its_arguments() -> None:
    assert vars(parsed(0.5)()) == vars(Calculator(0.5))
    assert fingerprint(made=parsed(0.5)) == fingerprint(made=parsed(0.5)) != fingerprint(made=parsed(0.25))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_class_of_a_configuration_is_described_as_the_same_one_in_python() -> None:
    """Defaults included, and nothing of the parser."""
    for made in (parsed(0.5), partial(Calculator, 0.5), partial(Calculator, step_share=0.5)):
        assert describe(made) == "partial(Calculator, 0.5, 12, False)"


def test_what_is_shared_is_visited_once() -> None:
    """Sixty closures, each holding the one below twice: by paths they would be 2**60 objects."""

    def above(one: Any, other: Any) -> Any:
        return lambda: (one, other)

    def tower(height: int, ground: int) -> Any:
        top = above(ground, ground)
        for _ in range(height):
            top = above(top, top)
        return top

    assert fingerprint(tower=tower(60, 1)) == fingerprint(tower=tower(60, 1)) != fingerprint(tower=tower(60, 2))
    same, other = [1.5], [1.5]
    assert fingerprint(x=[same, same]) == fingerprint(x=[same, other]), "whether equal lists are one is no setting"


def test_sources_are_the_files_that_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of a user's class, what it imports below its folder however it does, and nothing else."""
    monkeypatch.syspath_prepend(str(folder))
    kinds = Path("kinds")
    kinds.mkdir()
    (kinds / "__init__.py").write_text("")
    (kinds / "base.py").write_text("import torch\n\nclass Base:\n    x = 1\n")
    (kinds / "late.py").write_text("y = 1\n")
    (kinds / "other.py").write_text("from kinds import own\n")
    Path("top.py").write_text("import missing_here\n")
    text = "from .base import Base\n\nclass Own(Base):\n    def f(self):\n        "
    (kinds / "own.py").write_text(f"{text}from . import late\n        import top\n")

    def found() -> str:
        for name in [name for name in sys.modules if name.partition(".")[0] == "kinds"]:
            del sys.modules[name]
        return sources(importlib.import_module("kinds.own").Own)

    before = found()
    for file in ("kinds/base.py", "kinds/late.py", "top.py", "kinds/own.py"):
        Path(file).write_text(f"{Path(file).read_text()}# a word\n")
        own = found()
        assert own != before, file
        before = own
    (kinds / "other.py").write_text("z = 2\n")
    assert found() == before
    (kinds / "own.py").write_text("not Python")
    assert sources(sys.modules["kinds.own"].Own) == before, "an edit during a run is not what runs"


def test_a_checkout_of_a_large_package_counts_as_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers in an editable installation is not the user's own: its thousands of files took half a minute."""
    monkeypatch.syspath_prepend(str(folder))
    for name in ("trl", "mine"):
        Path(name).mkdir()
        Path(f"{name}/__init__.py").write_text("from . import more\n\nclass Kind:\n    x = 1\n")
        Path(f"{name}/more.py").write_text("")
        monkeypatch.delitem(sys.modules, name, raising=False)
        names = {path.name for path in source_files(importlib.import_module(name).Kind)}
        assert names == ({"__init__.py"} if name == "trl" else {"__init__.py", "more.py"})
        del sys.modules[name]  # monkeypatch would bring it back
    Path("peft.py").write_text("import other\n\nclass Kind:\n    x = 1\n")  # a user's file of that name
    Path("other.py").write_text("")
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    assert {path.name for path in source_files(importlib.import_module("peft").Kind)} == {"peft.py", "other.py"}
    del sys.modules["peft"]  # monkeypatch would bring it back


def test_sources_of_the_librarys_own_are_those_of_its_folder() -> None:
    combined = PACKAGE / "compressors" / "combined.py"
    names = {path.relative_to(PACKAGE).as_posix() for path in _with_imports(combined, Combined.__module__)}
    assert {"compressors/combined.py", "compressors/entries.py", "compressors/base.py"} <= names
    assert "compressors/knorm.py" not in names
    assert {name.partition("/")[0] for name in names} == {"compressors"}
    names = {path.relative_to(PACKAGE.parent).as_posix() for path in source_files(boxed_math_reward)}
    checker = {path.relative_to(PACKAGE.parent).as_posix() for path in ANSWERS.rglob("[!_]*.py")
        if path.parent.name != "tests"}  # fmt: skip
    assert len(checker) > 15
    assert checker - {"exact_answers/symbolic/worker.py"} <= names  # a script, which nobody imports
    assert {name.rsplit("/", 1)[0] for name in names if not name.startswith("exact_")} == {
        "sparse_rl_lightning/rewards", "sparse_rl_lightning/rewards/math",
    }  # fmt: skip
    assert {path.parts[-2] for path in source_files(MathChecker.__base__)} == {"exact_answers", "spellings", "symbolic"}


def test_what_was_typed_into_a_notebook_is_told_by_its_code() -> None:
    def typed(text: str) -> Any:
        names: dict[str, Any] = {"__name__": "__main__", "KNorm": KNorm}
        exec(text, names)
        return names["Own"](**SIZES)

    text = "class Own(KNorm):\n    def score(self, layer):\n        return layer.keys.norm(dim=-1)\n"
    others = [text.replace("norm(", "amax("), text.replace("-1", "-2"), text.replace("return", "return -")]
    assert fingerprint(a=typed(text)) == fingerprint(a=typed(text))
    assert len({fingerprint(a=typed(one)) for one in (text, *others)}) == 4


def test_a_cell_of_a_notebook_has_a_file_s_name_and_no_file() -> None:
    def typed(text: str) -> Any:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(text, "/tmp/ipykernel_1/2.py", "exec"), names)
        return names["reward"]

    texts = [describe(typed(f"def reward(completions): return [{number}]")) for number in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_what_functions_hold_counts() -> None:
    def made(number: int) -> list[Any]:
        def default(x: int, more: int = number) -> int:
            return x + more

        return [lambda x: x + number, default, partial(pow, number), KNorm(number, buffer=3).layer_budgets]

    assert [fingerprint(f=one) for one in made(50)] == [fingerprint(f=one) for one in made(50)]
    assert all(fingerprint(f=one) != fingerprint(f=other) for one, other in zip(made(50), made(60), strict=True))


def test_what_a_cached_property_has_stored_does_not_count() -> None:
    params = SamplingParams(max_completion_length=7)
    before = fingerprint(params=params)
    assert params.for_drawing is params.for_drawing
    assert fingerprint(params=params) == before


def test_use_changes_no_fingerprint_of_statistics() -> None:
    own = QFilters(**SIZES, statistics=statistics(1))
    before = fingerprint(cache=own)
    own.statistics._copies[torch.device("cpu")] = [torch.zeros(1)]
    assert fingerprint(cache=own) == before


class Fresh:
    """Has its state in a list that is made anew for every look."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> dict[str, Any]:
        return {"state": [[self.number]]}


def test_what_is_made_for_a_look_is_not_taken_for_what_was_there_before() -> None:
    """Its memory, and so its identity, would be given to the next."""
    assert re.findall(r"\[\[(\d+)\]\]", describe([Fresh(number) for number in range(20)])) == list(map(str, range(20)))
