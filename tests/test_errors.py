"""Every number of every class that a configuration names is checked where it is given."""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable
from inspect import Parameter, signature
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest

from docs import listing
from sparse_rl_lightning import SamplingParams, SparseGRPO
from sparse_rl_lightning.callbacks import ImportanceReweighting
from sparse_rl_lightning.compressors import RKV, KNorm
from sparse_rl_lightning.data import ArithmeticTasks
from sparse_rl_lightning.errors import check_number
from sparse_rl_lightning.policies import TinyPolicy
from sparse_rl_lightning.rewards import compute_rewards
from sparse_rl_lightning.rollout import RolloutSampler

CLASSES = {thing.__name__: thing for _, _, things in [*listing.GROUPS, *listing.CALLBACK_GROUPS] for thing in things}
UNBOUNDED = {"high"}
"""Bounds for which infinity says that there is none."""


def reward(completions: list[str], **_: Any) -> list[float | None]:
    return [0.0] * len(completions)


def needed(thing: Any) -> dict[str, Any]:
    """Arguments without which a class cannot be made."""
    small = RKV(budget=12)
    known: dict[str, Any] = {
        "policy": TinyPolicy(), "compressor": small, "reward_funcs": reward, "compressors": [small, KNorm(12)],
        "budget": 12, "path": "x.jsonl",
    }  # fmt: skip
    alone = {"reward_funcs"}  # needed without an environment
    given = parameters(thing).items()
    return {name: known[name] for name, (_, default) in given if default is Parameter.empty or name in alone}


def parameters(thing: Any) -> dict[str, tuple[Any, Any]]:
    """Arguments of a class with annotation and default; those that it passes on to its parents of ours included."""
    found: dict[str, tuple[Any, Any]] = {}
    for parent in thing.__mro__:
        if "__init__" not in vars(parent) or not parent.__module__.startswith("sparse_rl_lightning"):
            continue
        hints = typing.get_type_hints(parent.__init__)
        own = dict(list(signature(parent.__init__).parameters.items())[1:])
        for name, parameter in own.items():
            if parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
                found.setdefault(name, (hints.get(name), parameter.default))
        if not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in own.values()):
            break  # it says all that it takes
    return found


def numbers_of(*kinds: type) -> list[tuple[str, str]]:
    """Class and argument wherever a number of these types belongs."""
    return [
        (name, argument)
        for name, thing in CLASSES.items()
        if inspect.isclass(thing)
        for argument, (annotation, _) in parameters(thing).items()
        if {*(get_args(annotation) if isinstance(annotation, UnionType) else [annotation])} & {*kinds}
    ]


@pytest.mark.parametrize(("name", "argument"), numbers_of(float))
def test_no_number_is_taken_that_is_not_finite(name: str, argument: str) -> None:
    thing = CLASSES[name]
    for value in (math.nan, -math.inf, *[math.inf] * (argument not in UNBOUNDED)):
        with pytest.raises(ValueError, match=argument) as caught:
            thing(**needed(thing) | {argument: value})
        assert str(value).removeprefix("-") in str(caught.value)


NOT_IN_FLOAT32 = {"alpha", "few", "high", "length_drop", "low", "max_rejection_rate", "memory_limit", "mix_lambda"} | {
    "similarity_threshold", "target", "threshold",
}  # fmt: skip
"""Shares, of which nothing is lost where they are rounded to 0; bounds, whose logarithms are taken before; bytes."""


@pytest.mark.parametrize(("name", "argument"), [own for own in numbers_of(float) if own[1] not in NOT_IN_FLOAT32])
def test_no_number_is_taken_that_float32_does_not_know(name: str, argument: str) -> None:
    """It would be infinite there, or 0, or lose its digits: a weight of rewards of 1e39, a temperature of 1e-40."""
    thing = CLASSES[name]
    for value in (1e39, -1e39, 1e-40, 1e-320, 10**400):
        with pytest.raises(ValueError, match=argument):
            thing(**needed(thing) | {argument: value})


def test_the_classes_that_a_configuration_names_have_numbers() -> None:
    assert len(numbers_of(float)) >= 45  # each in one class
    assert {("GRPOLoss", "beta"), ("SamplingParams", "temperature"), ("TIS", "clip_max")} <= {*numbers_of(float)}


def unions(annotation: Any) -> list[set[Any]]:
    """The members of every union in an annotation."""
    own = [{*get_args(annotation)}] if isinstance(annotation, UnionType) or get_origin(annotation) is Union else []
    return own + [found for part in get_args(annotation) for found in unions(part)]


@pytest.mark.parametrize("thing", [*CLASSES.values(), RolloutSampler])
def test_no_setting_depends_on_which_of_two_numbers_a_parser_tries_first(thing: Any) -> None:
    """Typing keeps ``int | float | None`` and ``float | int | None`` as one, in the order that was seen first."""
    taken = parameters(thing).items() if inspect.isclass(thing) else typing.get_type_hints(thing).items()
    hints = {name: hint[0] if inspect.isclass(thing) else hint for name, hint in taken}
    assert [name for name, hint in hints.items() for each in unions(hint) if len(each & {bool, int, float}) > 1] == []


def test_unions_are_found_wherever_they_stand() -> None:
    assert unions(dict[str, int | float] | None) == [{dict[str, int | float], type(None)}, {int, float}]
    assert unions(Union[int, list[float]]) == [{int, list[float]}]  # noqa: UP007  # as others write it
    assert unions(Literal[1, 2.0]) == unions(int) == []


@pytest.mark.parametrize("make", [
    lambda seed: SamplingParams(seed=seed), lambda seed: ArithmeticTasks(seed=seed),
])  # fmt: skip
def test_a_seed_fits_into_64_bits(make: Callable[[int], object]) -> None:
    make(2**63 - 1)
    make(-(2**63))
    for seed in (2**63, -(2**63) - 1, 10**30):
        with pytest.raises(ValueError, match="seed must be"):
            make(seed)


@pytest.mark.parametrize("arguments", [
    {"clip_max": 0.0}, {"clip_max": -1.0}, {"clip_min": -0.5}, {"normalize": "batch", "normalize_clip_max": 0.0},
])  # fmt: skip
def test_a_weight_is_never_clipped_to_nothing_or_below(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{[*arguments][-1]} must be"):
        ImportanceReweighting(**arguments)


@pytest.mark.parametrize("weights", [[math.nan], [math.inf], [-math.inf], [None], [1e39], [1e-40]])
def test_weights_of_rewards_are_numbers(weights: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"reward_weights\[0\] must be a finite number.*, got"):
        SparseGRPO(**needed(SparseGRPO), reward_weights=weights)
    with pytest.raises(ValueError, match=r"reward_weights\[0\] must be a finite number.*, got"):
        compute_rewards([reward], weights, ["1"], ["2"], [[3]], {})


@pytest.mark.parametrize(("bounds", "value", "said"), [
    ({}, math.nan, "a finite number, got"),
    ({"least": 0}, -1, "at least 0, got"),
    ({"above": 0}, 0, "above 0, got"),
    ({"least": 0, "below": 1}, 1, "at least 0 and below 1, got"),
    ({"above": 0, "most": 1}, 1.5, "above 0 and at most 1, got"),
    ({}, None, "a finite number, got"),
    ({"least": 0}, math.inf, "a finite number, at least 0, got"),
    ({}, "3", "a finite number, got"),
    ({"least": 0, "most": 1, "or_none": True}, 2, "at least 0 and at most 1, or null, got"),
    ({"least": 0}, 1e-40, r"a finite number, at least 0 \(0, or of a size from 1.2e-38 to 3.4e\+38: float32\), got"),
])  # fmt: skip
def test_a_number_is_refused_in_words(bounds: dict[str, float], value: object, said: str) -> None:
    shown = repr(value) if isinstance(value, str) else value
    with pytest.raises(ValueError, match=f"^RKV: part.x must be {said} x={shown}.$"):
        check_number("part.x", value, **bounds, owner="RKV")


def test_numbers_at_their_bounds_are_taken() -> None:
    check_number("x", 0, least=0)
    check_number("x", 1, most=1)
    check_number("x", -3.4e38)
    check_number("x", 1.2e-38)
    check_number("x", 0.999, below=1)
    check_number("x", np.float32(2))
    check_number("x", np.int64(2), most=2)
