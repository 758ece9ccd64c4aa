"""Every YAML block of the documentation is read by the command line, and what it names is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import Namespace
from lightning.pytorch import Callback
from test_readme import DOCS, README, Block, ParsedError, find_blocks, named, read
from tiny_run import config

from sparse_rl_lightning import callbacks as library
from sparse_rl_lightning.callbacks.base import RolloutCallback
from sparse_rl_lightning.callbacks.corrections.naive import learns_from_less
from sparse_rl_lightning.cli import main, training

CORRECTIONS = {
    one for one in vars(library).values()
    if isinstance(one, type) and issubclass(one, RolloutCallback) and one.correct is not RolloutCallback.correct
}  # fmt: skip
TOP = {"model", "data", "trainer", "seed_everything", "num_threads"}
built: list[Namespace] = []


class BuildOnly(training.SparseRLCLI):
    """Builds the classes that a configuration names, but no trainer."""

    def before_instantiate_classes(self) -> None:
        built.append(self.parser.instantiate(self.config)[self.subcommand])
        raise ParsedError


@pytest.fixture
def base(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a whole configuration, over which a block is laid."""
    monkeypatch.setattr(training, "SparseRLCLI", BuildOnly)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    values = config()
    values["trainer"]["callbacks"] = []
    (folder / "configs").symlink_to(README.parent / "configs")
    (folder / "base.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return folder


def whole(block: Block) -> dict[str, Any]:
    """What a block says, as a part of a whole configuration: callbacks, top-level keys, or keys of the model."""
    values = yaml.safe_load(block.code)
    if isinstance(values, list):
        return {"trainer": {"callbacks": values}}
    return values if TOP & set(values) else {"model": {"init_args": values}}


def build(block: Block, folder: Path) -> Namespace:
    values = whole(block)
    if "base" in values:  # of another example
        (folder / values["base"]).write_bytes((folder / "base.yaml").read_bytes())
    (folder / "block.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    built.clear()
    with pytest.raises(ParsedError):
        main(["fit", "--config", "base.yaml", "--config", "block.yaml", "--trainer.accelerator=cpu"])
    return built[0]


def yaml_blocks(document: Path) -> list[Block]:
    return [block for block in find_blocks(read(document)) if block.language == "yaml"]


def joined(blocks: list[Block]) -> list[Block]:
    """The blocks, those that only name callbacks as one block at the end: a page that lists them has dozens."""
    lists = [block for block in blocks if names_callbacks_alone(whole(block))]
    alone = [block for block in blocks if block not in lists]
    together = {"trainer": {"callbacks": [one for block in lists for one in whole(block)["trainer"]["callbacks"]]}}
    return [*alone, Block("yaml", yaml.safe_dump(together), lists[0].line)] if lists else alone


def names_callbacks_alone(values: dict[str, Any]) -> bool:
    return values.keys() == {"trainer"} and values["trainer"].keys() == {"callbacks"}


@named([d for d in (README, *DOCS) if yaml_blocks(d)])
def test_yaml_blocks_are_read(document: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in joined(yaml_blocks(document)):
        try:
            build(block, base)
        except (SystemExit, ValueError) as error:
            pytest.fail(f"{document.name}, at or below line {block.line}: {error}\n{block.code}")


def trains_naively(values: dict[str, Any], found: Namespace) -> bool:
    """Whether a block names a whole module whose rollouts evict, and nothing that accounts for it."""
    model, callbacks = values.get("model"), values.get("trainer", {})
    if not isinstance(model, dict) or "compressor" not in model.get("init_args", {}) or "base" in values:
        return False
    module: Any = found.model
    if not learns_from_less(module):
        return False
    given = [*callbacks.get("callbacks", []), *callbacks.get("callbacks+", [])]
    return not any(getattr(library, one["class_path"], Callback) in CORRECTIONS for one in given)


@named([d for d in (README, *DOCS) if any("compressor" in block.code for block in yaml_blocks(d))])
def test_no_configuration_that_is_shown_trains_naively(document: Path, base: Path) -> None:
    shown = [block for block in yaml_blocks(document) if "class_path" in whole(block).get("model", {})]
    naive = [block.line for block in shown if trains_naively(whole(block), build(block, base))]
    assert not naive, f"{document.name}, line {naive}: a compressed cache without a correction"


def test_a_naive_block_is_found(base: Path) -> None:
    shown = "model: {class_path: %s, init_args: {compressor: {class_path: RKV}}}"
    block, replay = Block("yaml", shown % "SparseGRPO", 1), Block("yaml", shown % "ReplayGRPO", 1)
    assert trains_naively(whole(block), build(block, base))
    assert not trains_naively(whole(replay), build(replay, base))
    callbacks = Block("yaml", f"{block.code}\ntrainer: {{callbacks: [{{class_path: TIS}}]}}", 1)
    assert not trains_naively(whole(callbacks), build(callbacks, base))


@pytest.mark.parametrize(
    "code",
    [
        "compressor: {class_path: SnapKW}",
        "- {class_path: TIS, init_args: {clip: 2}}",
        "trainer: {max_step: 3}",
        "temperature: 0.0",
    ],
)
def test_a_wrong_block_is_refused(code: str, base: Path) -> None:
    with pytest.raises((SystemExit, ValueError)):
        build(Block("yaml", code, 1), base)
