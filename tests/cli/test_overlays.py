"""A configuration on top of its base: how values are merged, where the base is looked for, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_run import config, run_console, write

from sparse_rl_lightning.budgets import Adaptive, Pyramid
from sparse_rl_lightning.calibration import gather_statistics
from sparse_rl_lightning.cli import main
from sparse_rl_lightning.cli.yaml_files import UnusableYAML, merged, read, read_file
from sparse_rl_lightning.compressors import Combined, KNorm, SnapKV, TriAttention
from sparse_rl_lightning.policies import TinyPolicy

RKV = {"class_path": "RKV", "init_args": {"budget": 30, "buffer": 4, "mix_lambda": 0.1}}
LONG, FUNCTION = "sparse_rl_lightning.compressors.RKV", "sparse_rl_lightning.rewards.arithmetic_reward"
MODEL = {"class_path": "SparseGRPO", "init_args": {"sampling": {"num_generations": 8}, "compressor": RKV}}


@pytest.mark.parametrize(
    ("base", "overlay", "expected"),
    [
        ({"a": 1, "b": 2}, {"b": 3}, {"a": 1, "b": 3}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}}, {"a": {"b": 1, "c": 3}}),
        ({"a": {"b": 1}}, {"a": "text"}, {"a": "text"}),
        ({"a": "text"}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": {"b": 1}}, {"a": None}, {"a": None}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": [1, 2]}, {"a+": [3]}, {"a": [1, 2, 3]}),
        ({"a": [1]}, {"a+": {"b": 2}}, {"a": [1, {"b": 2}]}),
        ({"a": {"b": 1}}, {"a+": [2]}, {"a": [{"b": 1}, 2]}),
        ({"a": None}, {"a+": [1]}, {"a": [1]}),
        ({}, {"a+": [1]}, {"a+": [1]}),  # to the list of an earlier --config
        ({"a+": [1]}, {"a+": [2]}, {"a+": [1, 2]}),
        ({"a+": [1]}, {"a": [2]}, {"a": [2]}),
        ({}, {"a": {"b": [1], "b+": [2]}}, {"a": {"b": [1, 2]}}),
        ({1: 2}, {1: 3}, {1: 3}),
        (RKV, {"init_args": {"buffer": 8}}, {**RKV, "init_args": {"budget": 30, "buffer": 8, "mix_lambda": 0.1}}),
        (RKV, {"class_path": "RKV"}, RKV),
        (RKV, {"class_path": LONG}, {**RKV, "class_path": LONG}),
        (RKV, {"class_path": "FullKV"}, {"class_path": "FullKV"}),
        (
            RKV,
            {"class_path": "SnapKV", "init_args": {"budget": 12}},
            {"class_path": "SnapKV", "init_args": {"budget": 12, "buffer": 4}},
        ),
        (RKV, {"class_path": "mine.Unknown"}, {"class_path": "mine.Unknown"}),
        (RKV, {"class_path": FUNCTION}, {"class_path": FUNCTION}),
        (
            MODEL,
            {"class_path": "ReplayGRPO", "init_args": {"replay_objective": "dense"}},
            {"class_path": "ReplayGRPO", "init_args": {**MODEL["init_args"], "replay_objective": "dense"}},  # type: ignore[dict-item]
        ),
        (MODEL, {"class_path": "SupervisedWarmup"}, {"class_path": "SupervisedWarmup"}),
    ],
)
def test_values_are_merged_lists_replaced_or_appended_to_and_another_class_keeps_what_it_takes(
    base: dict[str, Any], overlay: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert merged(base, overlay) == expected


def test_nothing_is_changed_in_place() -> None:
    base: dict[str, Any] = {"a": [1], "b": {"class_path": "RKV", "init_args": {"budget": 1}}}
    merged(base, {"a+": [2], "b": {"class_path": "FullKV"}})
    assert base == {"a": [1], "b": {"class_path": "RKV", "init_args": {"budget": 1}}}


# ---------------------------------------------------------------- files


def files(**texts: str) -> None:
    for name, text in texts.items():
        path = Path(name.replace("__", "/") + ".yaml")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_a_base_is_looked_for_beside_the_file_that_names_it(folder: Path) -> None:
    files(low="a: 1\nb: 1\nc: 1", x__middle="base: ../low.yaml\nb: 2\nc: 2", y__top="base: ../x/middle.yaml\nc: 3")
    assert read_file("y/top.yaml") == {"a": 1, "b": 2, "c": 3}
    files(absolute=f"base: {folder}/low.yaml\nb: 2")
    assert read_file("absolute.yaml") == {"a": 1, "b": 2, "c": 1}


def test_of_several_bases_the_last_lies_uppermost(folder: Path) -> None:
    files(root="x: [0]", one="base: root.yaml\na: 1\nb: 1\nx+: [1]", two="base: root.yaml\nb: 2\nx+: [2]")
    files(top="base: [one.yaml, two.yaml]\nx+: [3]")
    assert read_file("top.yaml") == {"a": 1, "b": 2, "x": [0, 2, 3]}  # two.yaml has the list of root.yaml


def test_a_text_without_a_file_has_no_base(folder: Path) -> None:
    files(low="a: 1")
    assert read("base: low.yaml\nb: 2") == {"base": "low.yaml", "b": 2}
    assert read("base: low.yaml\nb: 2", "top.yaml") == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base: none.yaml", r"^top.yaml: base: 'none.yaml' cannot be read: No such file .* folder of the file"),
        ("base: circle.yaml", r"^top.yaml: base: 'circle.yaml' cannot be read: (Symlink loop|Too many levels)"),
        ('base: "a\\0b.yaml"', r"^top.yaml: base: 'a\\x00b.yaml' cannot be read"),
        ("base: ~no-user-of-this-name/x.yaml", r"^top.yaml: base: '~no-user.*' cannot be read: "),
        ("base: ./", r"^top.yaml: base: './' cannot be read: Is a directory"),
        ("base: binary.yaml", r"^top.yaml: base: 'binary.yaml' cannot be read: not a text"),
        ("base: list.yaml", r"^top.yaml: base: 'list.yaml' must hold keys such as model: and trainer:, got a list"),
        ("base: twice.yaml", r"^top.yaml: twice.yaml: the key 'a' is given twice, in lines 1 and 2"),
        ("base: low.yaml\nbase: low.yaml", r"^top.yaml: the key 'base' is given twice"),
        ("base: tab.yaml", r"^top.yaml: tab.yaml: .*cannot start any token"),
        ("base:\na: 1", r"^top.yaml: base must name a file or a list of files.*got None"),
        ("base: []", r"got \[\]"),
        ("base: {a: b}", r"got {'a': 'b'}"),
        ("base: [low.yaml, 3]", r"got \['low.yaml', 3\]"),
        ("base: x/../top.yaml", r"^top.yaml: base: 'x/../top.yaml' leads back to a file that is on top of it"),
        ("base: [low.yaml, round.yaml]", r"^top.yaml: round.yaml: base: 'top.yaml' leads back"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_base_is_refused_by_name(text: str, said: str, folder: Path) -> None:
    files(top=text, low="a: 1", list="[1]", round="base: top.yaml", x__low="", twice="a: 1\na: 2", tab="a:\n\tb")
    (folder / "circle.yaml").symlink_to("circle.yaml")
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UnusableYAML, match=f"(?s){said}"):
        read_file("top.yaml")


# ---------------------------------------------------------------- the command line


def test_a_run_of_an_overlay_saves_what_it_ran_with(folder: Path) -> None:
    (folder / "configs").mkdir()
    Path(write(config())).rename("configs/base.yaml")
    overlay = {
        "base": "base.yaml",
        "model": {"class_path": "ReplayGRPO", "init_args": {"compressor": {"class_path": "SnapKV"}}},
        "trainer": {"max_steps": 1, "callbacks+": [{"class_path": "MismatchSplit"}]},
    }
    Path("configs/top.yaml").write_text(yaml.safe_dump(overlay), encoding="utf-8")
    cli = main(["fit", "--config", "configs/top.yaml", "--model.compressor.budget=14"])
    assert cli.trainer.global_step == 1
    text = (folder / "runs/own/version_0/run_config.yaml").read_text(encoding="utf-8")
    saved = yaml.safe_load(text)
    assert "base" not in saved
    assert saved["model"]["class_path"] == "sparse_rl_lightning.ReplayGRPO"
    compressor = saved["model"]["init_args"]["compressor"]
    assert compressor["class_path"] == "sparse_rl_lightning.compressors.SnapKV"
    assert [compressor["init_args"][name] for name in ("budget", "buffer", "num_sinks")] == [14, 4, 1]
    names = [callback["class_path"].rpartition(".")[2] for callback in saved["trainer"]["callbacks"]]
    assert names == ["SparsityAwareRejection", "ModelCheckpoint", "MismatchSplit"]
    Path("saved.yaml").write_text(text, encoding="utf-8")
    assert main(["fit", "--config", "saved.yaml"]).trainer.global_step == 1


def test_a_base_is_as_an_earlier_config(folder: Path) -> None:
    Path(write(config(max_steps=1))).rename("base.yaml")
    loss = {"init_args": {"loss": {"beta": 0.1}}}
    change: dict[str, Any] = {"trainer": {"callbacks+": [{"class_path": "TIS"}]}, "model": loss}
    Path("change.yaml").write_text(yaml.safe_dump(change), encoding="utf-8")
    Path("top.yaml").write_text(yaml.safe_dump({"base": "base.yaml", **change}), encoding="utf-8")
    two = main(["fit", "--config", "base.yaml", "--config", "change.yaml"])
    one = main(["fit", "--config", "top.yaml"])
    for cli in (one, two):
        del cli.config["fit"]["config"]
    assert one.config["fit"] == two.config["fit"]


SIZES = {"budget": 20, "buffer": 4, "num_sinks": 1, "window": 4, "protect_token_ids": [3]}
PARTS = [
    {"class_path": "SnapKV", "init_args": {**SIZES, "kernel_size": 5}},
    {"class_path": "sparse_rl_lightning.compressors.KNorm", "init_args": SIZES},
]
MIXTURE = {"class_path": "Combined", "init_args": {"weights": [2, 1], "compressors": PARTS}}
NESTED = {"class_path": "Combined", "init_args": {"across_heads": "mean", "compressors": [MIXTURE]}}


def with_compressor(compressor: dict[str, Any], **trainer: Any) -> dict[str, Any]:
    values = config(max_steps=1, **trainer)
    values["model"]["init_args"]["compressor"] = compressor
    return values


def test_nested_wrappers_from_yaml(folder: Path) -> None:
    cli = main(["fit", "--config", write(with_compressor(NESTED))])
    union = cli.model.generator.compressor
    assert isinstance(union, Combined)
    assert union.across_heads == "mean"
    assert (union.budget, union.buffer, union.num_sinks, union.window) == (20, 4, 1, 4)
    assert union.protect_token_ids == [3]
    (mixture,) = union._parts
    assert isinstance(mixture, Combined)
    assert mixture.weights == [2, 1]
    assert [type(part) for part in mixture._parts] == [SnapKV, KNorm]
    saved = yaml.safe_load((folder / "runs/own/version_0/run_config.yaml").read_text())
    (inner,) = saved["model"]["init_args"]["compressor"]["init_args"]["compressors"]
    assert inner["init_args"]["compressors"][0]["init_args"]["kernel_size"] == 5


def test_a_wrapper_and_a_budget_rule_from_the_shell(folder: Path) -> None:
    arguments = [
        "--model.compressor=Combined", "--model.compressor.across_heads=max",
        "--model.compressor.compressors+=RandomEviction",
        "--model.compressor.compressors.budget=18", "--model.compressor.compressors.buffer=4",
        "--model.compressor.compressors.budget_rule=Adaptive", "--model.compressor.compressors.budget_rule.floor=9",
        "--model.compressor.compressors.budget_rule.layers=Pyramid",
        "--model.compressor.compressors.budget_rule.layers.beta=1.5",
    ]  # fmt: skip
    values = with_compressor({"class_path": "KNorm", "init_args": {"budget": 20}}, fast_dev_run=True)
    rule = main(["validate", "--config", write(values), *arguments]).model.generator.compressor.budget_rule
    assert isinstance(rule, Adaptive)
    assert rule.floor == 9
    assert isinstance(rule.layers, Pyramid)
    assert rule.layers.beta == 1.5


def test_statistics_from_a_file(folder: Path) -> None:
    model, _ = TinyPolicy(hidden_size=32, num_layers=2).load()
    gather_statistics(model, torch.arange(3, 15)[None], torch.tensor([12])).save("statistics.safetensors")
    arguments = ["--model.compressor=TriAttention", "--model.compressor.statistics=statistics.safetensors"]
    cli = main(["fit", "--config", write(config(max_steps=1)), *arguments])
    assert isinstance(cli.model.generator.compressor, TriAttention)
    assert (cli.model.generator.compressor.budget, cli.model.generator.compressor.buffer) == (12, 4)


STEEP = {"class_path": "Pyramid", "init_args": {"beta": 0.1}}
MISTAKES: list[tuple[dict[str, Any], int, list[str]]] = [
    (
        {"class_path": "QFilters", "init_args": {**SIZES, "statistics": "none.safetensors"}}, 1,
        ["QFilters: there is no file statistics='none.safetensors'", "sparse-rl statistics"],
    ),
    ({"class_path": "TriAttention", "init_args": SIZES}, 2, ["statistics"]),
    ({"class_path": "LagKV", "init_args": SIZES}, 1, ["LagKV: lag_size must be from 2 to 11", "got lag_size=128"]),
    (
        {"class_path": "RandomEviction", "init_args": {**SIZES, "budget_rule": "Pyramidd"}}, 2,
        ["no class 'Pyramidd'", "Did you mean 'Pyramid'?"],
    ),
    (
        {"class_path": "RandomEviction", "init_args": {**SIZES, "budget_rule": STEEP}}, 1,
        ["Pyramid: beta must be at least 1", "beta=0.1"],
    ),
    (
        {"class_path": "ExpectedAttention", "init_args": {**SIZES, "query_windo": 3}}, 2,
        ["'query_windo' is not accepted", "'query_window'"],
    ),
    (
        {"class_path": "Combined", "init_args": {"compressors": [
            {"class_path": "KNorm", "init_args": SIZES},
            {"class_path": "KeyDiff", "init_args": {**SIZES, "budget": 30}},
        ]}}, 1, ["Combined: all compressors inside must have the same budget", "KeyDiff has budget=30"],
    ),
    ({"class_path": "Combined", "init_args": {"compressors": [{"class_path": "FullKV"}]}}, 1, ["never evicts"]),
    ({"class_path": "CUR", "init_args": {**SIZES, "leverage": "sum"}}, 2, ["'product'", "sum"]),
]  # fmt: skip


@pytest.mark.parametrize(("compressor", "status", "says"), MISTAKES, ids=lambda v: str(v)[:40])
def test_mistakes_are_one_clear_line(
    compressor: dict[str, Any], status: int, says: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert run_console(monkeypatch, "fit", "--config", write(with_compressor(compressor))) == status
    error = capsys.readouterr().err
    assert [part for part in says if part not in error] == []
    assert "Traceback" not in error
