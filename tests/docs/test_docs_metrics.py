"""The page of logged metrics against what tiny runs really log, in both directions."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

import pytest
from chatter import talking
from lightning.pytorch.loggers import Logger
from test_docs import DOCS
from tiny_grpo import fit, module

from docs import docstrings, generate
from exact_answers.checker import COUNTERS
from sparse_rl_lightning.callbacks import (
    AcceptanceMonitor,
    MismatchSplit,
    SamplerSupport,
    ScoreCentering,
    SparsityAwareRejection,
    StepTimes,
    TailGuard,
    ZeroSharding,
)
from sparse_rl_lightning.data import ArithmeticTasks
from sparse_rl_lightning.downsampling import MaxVariance
from sparse_rl_lightning.metrics import conversations, rollout
from sparse_rl_lightning.modules import DistillSparse, ReplayGRPO, SparseAdapter, SupervisedWarmup
from sparse_rl_lightning.policies import TinyPolicy
from sparse_rl_lightning.rollout.partial import PartialRollouts

ROW = re.compile(r"^\| `([^`]+)` \| ([^|]*) \|", re.MULTILINE)
LIGHTNINGS = {"epoch"}
ELSEWHERE = (  # several ranks, a GPU, a record of pages or experts, benchmarks: tests of their own
    "sharding/", "memory/", "test/", "val/{benchmark}/", "rewards/{function}/{counter}", "mismatch_split/routing/",
)  # fmt: skip


class Keys(Logger):
    """A logger that keeps the names."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    name = version = "keys"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.seen |= set(metrics)


def page_keys() -> dict[str, str]:
    """Unit by key, counters of the answer checker left out."""
    text = (DOCS / "metrics.md").read_text("utf-8")
    return dict(ROW.findall(text.partition("## Counters")[0]))


def pattern(key: str) -> re.Pattern[str]:
    """What a key of the page stands for: names in braces and dots for anything."""
    parts = re.split(r"\{\w+\}|\.\.\.", key)
    return re.compile(".+".join(map(re.escape, parts)))


def runs(logger: Keys) -> Iterator[None]:
    """Runs that together log nearly everything."""
    common: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1, "limit_val_batches": 1, "val_check_interval": 2}
    monitors = [AcceptanceMonitor(every_n_rollouts=1, bin_size=8), TailGuard(min_tokens=1, window=1), MismatchSplit()]
    watching = [SparsityAwareRejection(), *monitors]
    yield fit(module(beta=0.1, downsampling=MaxVariance(9)), 3, watching, **common)
    yield fit(module(kind=ReplayGRPO, replay_objective="mixed"), 1, **common)
    yield fit(module(steps_per_generation=1), 1, [ScoreCentering()], **common)
    yield fit(module(top_p=0.9), 1, [SamplerSupport()], **common)
    yield fit(module(partial_rollout_steps=6, num_slots=8), 2, **common)
    yield fit(talking(), 1, **common)
    if importlib.util.find_spec("peft"):
        yield fit(module(kind=DistillSparse, adapter=SparseAdapter(r=2)), 2, **common)
    data = ArithmeticTasks(num_terms=2, num_train=16, num_val=4, prompts_per_rollout=4)
    yield fit(SupervisedWarmup(TinyPolicy(hidden_size=32)), 2, data=data, **common)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def logged() -> set[str]:
    logger = Keys()
    for _ in runs(logger):
        pass
    return {re.sub("_(step|epoch)$", "", key) for key in logger.seen} - LIGHTNINGS


def test_what_runs_log_is_on_the_page(logged: set[str]) -> None:
    patterns = [pattern(key) for key in page_keys()]
    assert len(logged) > 80
    assert sorted(key for key in logged if not any(p.fullmatch(key) for p in patterns)) == []


def test_what_is_on_the_page_is_logged(logged: set[str]) -> None:
    if not importlib.util.find_spec("peft"):
        pytest.skip("DistillSparse needs peft")
    claimed = [key for key in page_keys() if not key.startswith(ELSEWHERE)]
    assert [key for key in claimed if not any(pattern(key).fullmatch(name) for name in logged)] == []


@pytest.mark.parametrize(
    "source", [rollout, conversations, StepTimes, AcceptanceMonitor, ZeroSharding, PartialRollouts]
)
def test_what_docstrings_say_of_keys_is_on_the_page(source: Any) -> None:
    text = (DOCS / "metrics.md").read_text("utf-8")
    rows = docstrings.rows(source.__doc__)
    written = [f"| `{key}` | {unit} | {generate.cell(docstrings.markdown(meaning))} |" for key, unit, meaning in rows]
    assert written
    assert [row for row in written if row not in text] == []


def test_every_key_has_a_unit() -> None:
    unitless = {"sparse/...", "test/...", "distill/loss"}
    assert [key for key, unit in page_keys().items() if not unit.strip() and key not in unitless] == []


def test_counters_of_the_checker_are_on_the_page() -> None:
    counters = (DOCS / "metrics.md").read_text("utf-8").partition("## Counters")[2]
    assert {key.rsplit("/", 1)[1] for key, _ in ROW.findall(counters)} == set(COUNTERS)


def test_what_callbacks_say_they_log_is_on_the_page() -> None:
    text = (DOCS / "callbacks.md").read_text("utf-8")
    said = re.findall(r"`([a-z_]+/[a-z_0-9]+)`", " ".join(re.findall(r"^Logs .*$", text, re.MULTILINE)))
    assert len(said) > 5
    assert [key for key in said if key not in page_keys()] == []


def test_keys_with_names_to_fill_in_are_matched() -> None:
    assert pattern("acceptance/p05/{bin}").fullmatch("acceptance/p05/0-8")
    assert pattern("sparse/...").fullmatch("sparse/kept_fraction")
    assert not pattern("kl").fullmatch("kl2")
    assert not pattern("val/pass@{k}_dense").fullmatch("val/pass@1_sparse")
