"""Compressors, wrappers and budget rules from YAML and from the shell, and what is said where they do not fit."""

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
from sparse_rl_lightning.compressors import Combined, KNorm, LagKV, SnapKV, TriAttention
from sparse_rl_lightning.policies import TinyPolicy

SIZES = {"budget": 20, "buffer": 4, "num_sinks": 1, "window": 4, "protect_token_ids": [3]}
NESTED = {
    "class_path": "Combined",
    "init_args": {
        "across_heads": "mean",
        "compressors": [
            {
                "class_path": "Combined",
                "init_args": {
                    "weights": [2, 1],
                    "compressors": [
                        {"class_path": "SnapKV", "init_args": {**SIZES, "kernel_size": 5}},
                        {"class_path": "sparse_rl_lightning.compressors.KNorm", "init_args": SIZES},
                    ],
                },
            }
        ],
    },
}


def with_compressor(compressor: dict[str, Any], **trainer: Any) -> dict[str, Any]:
    values = config(max_steps=1, **trainer)
    values["model"]["init_args"]["compressor"] = compressor
    return values


def test_a_shipped_compressor_from_the_shell(folder: Path) -> None:
    arguments = ["--model.compressor=KNorm", "--model.compressor.budget=14", "--model.compressor.window=3"]
    cli = main(["fit", "--config", write(config(max_steps=1)), *arguments])
    assert type(cli.model.generator.compressor) is KNorm
    assert repr(cli.model.generator.compressor).startswith("KNorm(budget=14, buffer=4, num_sinks=1, window=3,")


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


def test_options_of_a_method_beside_its_sizes(folder: Path) -> None:
    compressor = {"class_path": "LagKV", "init_args": {"budget": 16, "buffer": 4, "lag_size": 5, "num_sinks": 1}}
    cli = main(["validate", "--config", write(with_compressor(compressor, fast_dev_run=True))])
    assert isinstance(cli.model.generator.compressor, LagKV)
    assert cli.model.generator.compressor.lag_size == 5


def test_help_shows_options_and_sizes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_console(monkeypatch, "fit", "--model", "SparseGRPO", "--model.compressor.help=TriAttention") == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("arXiv 2604.04921", "Largest distance ahead", "Most recent tokens that are never evicted", "null for"):
        assert part in text


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
