"""Every shipped configuration: one optimizer step through the command line, a readable size, the paper's numbers."""

from __future__ import annotations

import itertools
import json
import string
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from sparse_rl_lightning.budgets import PublishedSchedule
from sparse_rl_lightning.callbacks.outputs.checkpoint import EVERY_N_TRAIN_STEPS
from sparse_rl_lightning.cli import main
from sparse_rl_lightning.cli.yaml_files import read_file
from sparse_rl_lightning.compressors import RKV
from sparse_rl_lightning.learner.block import BlockPlan
from sparse_rl_lightning.retrievers import Centroid
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

ROOT = Path(__file__).resolve().parents[2]
OTHERS = {"calibrate", "eval"}  # not of `fit`: see test_calibrate.py and test_evaluation.py
CONFIGS = sorted(path for path in (ROOT / "configs").glob("**/*.yaml") if path.stem not in OTHERS)
PAPER_MODELS = {
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "llama-3.2-1b-instruct": "meta-llama/Llama-3.2-1B-Instruct",
}
END_OF_TURN = "<|im_end|>"
SPARROW = ("qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b")
ARMS = ("dense", "naive", "replay", "reweighting", "sparse_rl_official", "sparse_rl_paper")
CORRECTIONS = ("SparsityAwareRejection", "ImportanceReweighting")
MODULES = {"replay": "ReplayGRPO"}  # of the other arms: SparseGRPO
MAX_SETTINGS = 45  # class names not counted
MAX_RECIPE_SETTINGS = 40
MAX_LINES = 580  # of all files together
MAX_OVERLAY_LINES = 13  # comments not counted
RECIPES: dict[str, dict[str, Any]] = {  # and nothing else apart from sparse_rl_paper.yaml
    # arXiv 2507.18071, 5.1
    "gspo": {"loss": {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}},
    "dapo": {
        "loss": {"loss_type": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": True},
        "rollout": {"oversampling": 2},
    },
    "dr_grpo": {"loss": {"loss_type": "dr_grpo"}, "scale_rewards": "none"},  # arXiv 2503.20783
    "cispo": {"loss": {"loss_type": "cispo", "epsilon_high": 5.0}},  # arXiv 2506.13585; the cap is TRL's
}

SMALL = {  # a setting above its limit is lowered to it
    "trainer.max_steps": 1,
    "trainer.accumulate_grad_batches": 2,
    "model.init_args.steps_per_generation": 4,
    "model.init_args.sampling.max_completion_length": 48,
    "model.init_args.compressor.init_args.budget": 30,
    "model.init_args.compressor.init_args.buffer": 4,
    "data.init_args.prompts_per_rollout": 2,
    "data.init_args.num_train": 64,
    "data.init_args.num_val": 4,
}

every_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


def read(path: Path) -> dict[str, Any]:
    """The configuration on top of its base."""
    values: dict[str, Any] = read_file(path)
    return values


def lookup(config: Any, key: str) -> Any:
    """The value under a dotted key, None where there is none."""
    for name in key.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting with its own key; a list of numbers or names is one setting."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, name)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for item in value:
            yield from leaves(item, key)
    else:
        yield key, value


def callbacks(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Arguments of the callbacks by class."""
    return {item["class_path"]: item.get("init_args", {}) for item in config["trainer"]["callbacks"]}


# ---------------------------------------------------------------- one step


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders with tiny models of the architecture that a model's name stands for."""

    def save(name: str) -> Path:
        folder = tmp_path_factory.getbasetemp() / f"tiny-{name}"
        if not folder.exists():
            tokenizer = character_tokenizer(string.printable)
            tokenizer.add_special_tokens({"additional_special_tokens": [END_OF_TURN]})
            layers = 3 if name == "qwen3" else 2  # Sparrow leaves two dense
            if name == "qwen3":  # its template can be told not to think
                tokenizer.chat_template += "{% if enable_thinking is false %}{% endif %}"
            sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_layers": layers}
            model = tiny_model(name, **sizes, initializer_range=0.1)
            if name == "llama":  # rotary frequencies as in Llama 3.2
                model.config.rope_parameters = {
                    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
                }  # fmt: skip
                model = LlamaForCausalLM(model.config)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return folder

    return save


def prompt_file(folder: Path, chat: bool, prompt: str, answer: str) -> Path:
    """Four rows as the data of the configurations has them: rendered ChatML or chat messages, or a bare question."""
    rows = []
    for n in range(4):
        system, user = "You are a helpful assistant.", f"What is {n}+{n}? Put your answer within \\boxed{{}}."
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        rendered = messages if chat else f"{text}<|im_start|>assistant\n"
        rows.append({prompt: user if prompt == "problem" else rendered, answer: str(2 * n)})
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def shrunk(config: dict[str, Any], folder: Path, policy: Callable[[str], Path]) -> list[str]:
    """Command-line arguments that leave the configuration as it is but for sizes, model and data."""
    changes: dict[str, Any] = {"num_threads": 1, "trainer.accelerator": "cpu"}
    if "strategy" in config["trainer"]:  # of several GPUs: see test_ranks.py
        changes |= {"trainer.strategy": "auto", "trainer.devices": 1}
    for key, limit in SMALL.items():
        given = lookup(config, key)
        if given is not None:
            changes[key] = min(given, limit)
    source = config["model"]["init_args"]["policy"]
    if isinstance(source, str):
        changes["model.init_args.policy"] = policy("qwen2")
    elif source["class_path"] == "PretrainedPolicy":
        path = source["init_args"]["path"].lower()
        name = next(family for family in ("llama", "qwen3", "qwen2") if family in path)
        changes["model.init_args.policy.init_args.path"] = policy(name)
    elif source["class_path"] == "LoraPolicy" and isinstance(source["init_args"]["policy"], str):
        changes["model.init_args.policy.init_args.policy"] = policy("qwen2")
    elif source["class_path"] == "LoraPolicy":
        changes["model.init_args.policy.init_args.policy.init_args.path"] = policy("qwen3")
    if config["data"]["init_args"].get("answer_pattern") == "gsm8k":
        changes |= {"data.init_args.prompt_column": "problem", "data.init_args.answer_pattern": "null"}
    of_hub = [key for key in ("config", "val_split") if key in config["data"]["init_args"]]
    changes |= {f"data.init_args.{key}": "null" for key in of_hub}
    if config["data"]["class_path"] == "JsonlPrompts":
        columns = config["data"]["init_args"] | {key.rpartition(".")[2]: value for key, value in changes.items()}
        names = columns.get("prompt_column", "prompt"), columns.get("answer_column", "answer")
        files = map("data.init_args.{}".format, columns.keys() & {"path", "val_path"})
        changes |= dict.fromkeys(files, prompt_file(folder, "llama" in str(source).lower(), *names))
    return [f"--{key}={value}" for key, value in changes.items()]


@every_config
def test_one_optimizer_step(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_policy: Callable[[str], Path]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # main adds the working directory
    config = read(path)
    cli = main(["fit", "--config", str(path), *shrunk(config, tmp_path, tiny_policy)])

    assert cli.trainer.global_step == 1
    assert type(cli.model).__name__ == config["model"]["class_path"]
    metrics = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
    assert metrics
    assert all(torch.tensor(value).isfinite() for value in metrics.values()), metrics
    if "compressor" in config["model"]["init_args"]:
        compressor = config["model"]["init_args"]["compressor"]["class_path"]
        assert (metrics["kv/saving_final"] > 0) == (compressor != "FullKV")
    if path.stem in PAPER_MODELS:
        policy = cli.model.policy
        dtype = getattr(torch, config["model"]["init_args"]["policy"]["init_args"]["dtype"])
        assert {p.dtype for p in policy.parameters()} == {dtype}
        assert metrics["kl"] >= 0  # the reference policy was there
        expected = ("LlamaForCausalLM", "llama3") if "llama" in path.stem else ("Qwen2ForCausalLM", "default")
        assert (type(policy).__name__, policy.config.rope_parameters["rope_type"]) == expected
    for folder in output_folders(config):
        assert (tmp_path / folder).is_dir()
    saves = config["trainer"].get("enable_checkpointing", True)
    assert (tmp_path / f"runs/{path.stem}/checkpoints/last.ckpt").is_file() is saves
    assert (tmp_path / f"runs/{path.stem}/version_0/run_config.yaml").is_file() is saves  # and metrics.csv


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
@pytest.mark.parametrize("name", ["retrieval", "quickstart"])
def test_one_step_in_another_type(
    name: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_policy: Callable[[str], Path]
) -> None:
    """Lightning makes it torch's default type, too; with pages read, and with running sums."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = ROOT / "configs" / f"{name}.yaml"
    arguments = [*shrunk(read(path), tmp_path, tiny_policy), f"--trainer.precision={precision}"]
    arguments += ["--model.init_args.optimizer.init_args.eps=1e-4"]  # AdamW's own is 0 in float16
    if name == "quickstart":
        arguments = [argument for argument in arguments if "compressor" not in argument]
        arguments += ["--model.compressor=H2O", "--model.compressor.budget=30", "--model.compressor.buffer=4"]
    cli = main(["fit", "--config", str(path), *arguments])
    assert cli.trainer.global_step == 1
    metrics = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
    assert all(torch.tensor(value).isfinite() for value in metrics.values()), metrics


# ---------------------------------------------------------------- what is written where


def output_folders(config: dict[str, Any]) -> list[str]:
    """What a run writes: run folder, checkpoints, exported policy."""
    folders = [config["trainer"]["default_root_dir"]]
    for arguments in callbacks(config).values():
        folders += [arguments[key] for key in ("dirpath", "folder") if key in arguments]
    return folders


@every_config
def test_configurations_are_short_write_below_a_folder_and_can_be_resumed(path: Path) -> None:
    config = read(path)
    assert {Path(folder).parts[:2] for folder in output_folders(config)} == {("runs", path.stem)}
    assert not config["trainer"].get("logger")  # then metrics.csv is there too: see test_one_optimizer_step
    if config["trainer"].get("enable_checkpointing", True):
        assert callbacks(config)["RolloutCheckpoint"] == {}  # its defaults: see test_checkpoint.py
        by_the_clock = path.stem in ("real", "math")  # whose steps take long
        assert by_the_clock or 1 <= EVERY_N_TRAIN_STEPS <= config["trainer"]["max_steps"] // 3
    else:
        assert config["model"]["class_path"] == "SupervisedWarmup"  # a minute's work
    assert len([key for key, _ in leaves(config) if key != "class_path"]) <= MAX_SETTINGS
    lines = path.read_text(encoding="utf-8").splitlines()
    header = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    first, settings = lines[len(header)], [line for line in lines if not line.lstrip().startswith("#")]
    assert first == "seed_everything: 0" or (first.startswith("base: ") and len(settings) <= MAX_OVERLAY_LINES)
    assert any(f"sparse-rl fit --config {path.relative_to(ROOT).as_posix()} " in f"{line} " for line in header)


def test_all_configurations_together_are_short() -> None:
    files = (ROOT / "configs").rglob("*.yaml")
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= MAX_LINES


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_differ_from_the_paper_where_they_must(name: str) -> None:
    recipe = read(ROOT / "configs" / "recipes" / f"{name}.yaml")
    recipe["trainer"]["default_root_dir"] = "runs/sparse_rl_paper"
    settings = [key for key, _ in leaves(recipe) if key != "class_path"]
    assert len(settings) <= MAX_RECIPE_SETTINGS
    model = recipe["model"]["init_args"]
    assert {key: model.pop(key) for key in RECIPES[name]} == RECIPES[name]
    assert recipe == read(ROOT / "configs" / "sparse_rl_paper.yaml")


def test_every_recipe_is_checked() -> None:
    assert {path.stem for path in CONFIGS if path.parent.name == "recipes"} == set(RECIPES)


# ---------------------------------------------------------------- the paper's settings


def test_every_model_of_the_paper_has_its_file() -> None:
    paths = {path.stem: lookup(read(path), "model.init_args.policy.init_args.path") for path in CONFIGS}
    known = {stem: name for stem, name in paths.items() if name}
    assert {stem: name for stem, name in known.items() if stem not in SPARROW} == PAPER_MODELS
    assert {known[stem].lower() for stem in SPARROW} == {f"qwen/{stem}" for stem in SPARROW}


def block_plan(config: dict[str, Any]) -> BlockPlan:
    """Of one rank."""
    model, prompts = config["model"]["init_args"], config["data"]["init_args"]["prompts_per_rollout"]
    return BlockPlan(
        prompts, model["sampling"]["num_generations"], model["steps_per_generation"], model.get("num_iterations", 1),
        config["trainer"]["accumulate_grad_batches"],
    )  # fmt: skip


@pytest.mark.parametrize("stem", SPARROW)
def test_hyper_parameters_of_sparrow(stem: str) -> None:
    """ArXiv 2606.08446 and its code: 8 samples, clip 0.2 and 0.28, no KL, 1e-6, pages of 16, two dense layers."""
    config = read(ROOT / "configs" / "sparrow" / f"{stem}.yaml")
    model = config["model"]["init_args"]
    assert model["sampling"]["num_generations"] == 8
    assert model["loss"] == {"epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0}
    assert model["optimizer"]["init_args"]["lr"] == 1e-6
    schedule = model["retriever"]["init_args"]["budget"]["init_args"]
    assert schedule["name"] == f"{stem}-0.86"
    retriever = Centroid(PublishedSchedule(**schedule))
    assert (retriever.page_size, retriever.num_dense_layers) == (16, 2)
    reserved = retriever.page_size * (retriever.num_first_pages + retriever.num_last_pages)
    assert reserved == schedule["reserved"]
    assert callbacks(config)["TIS"] == {"clip_max": 3.0}
    plan = block_plan(config)  # the same block however many ranks share it
    assert (config["trainer"]["devices"] * plan.prompts, plan.optimizer_steps, plan.micro_batch) == (128, 4, 1)


@pytest.mark.parametrize("stem", PAPER_MODELS)
def test_hyper_parameters_of_the_paper(stem: str) -> None:
    """Settings of the authors' scripts and of arXiv 2601.10079; 100 rollouts of 4 steps of 256 samples."""
    config = read(ROOT / "configs" / f"{stem}.yaml")
    model, data, trainer = config["model"]["init_args"], config["data"]["init_args"], config["trainer"]
    adamw = {"lr": 1e-6, "betas": [0.9, 0.98], "weight_decay": 0.1}
    assert model["optimizer"] == {"class_path": "torch.optim.AdamW", "init_args": adamw}
    assert "lr_scheduler" not in model  # constant
    ranks = trainer["devices"]
    assert model["sampling"] == {"num_generations": 8, "max_completion_length": 4096}  # all else by default
    assert (ranks * data["prompts_per_rollout"], model["loss"]) == (128, {"beta": 1e-4})
    assert model["rollout"]["end_tokens"] == ([END_OF_TURN] if "qwen" in stem else [])  # base models in a chat template
    assert (trainer["max_steps"], trainer["gradient_clip_val"]) == (400, 1.0)
    plan = block_plan(config)
    assert (plan.optimizer_steps, plan.micro_batch) == (4, 8)
    assert trainer["max_steps"] / plan.optimizer_steps == 100
    assert callbacks(config)["SparsityAwareRejection"] == {"threshold": 1e-4}
    assert callbacks(config)["ImportanceReweighting"] == {}

    assert model["compressor"]["class_path"] == "RKV"
    rkv = RKV(**model["compressor"]["init_args"])
    compressor = vars(rkv) | {"budget": rkv.schedule.plain}
    paper = {
        "budget": 512, "buffer": 128, "num_sinks": 0, "window": 8, "compress_prompt": False, "mix_lambda": 0.1,
        "similarity_threshold": 0.5, "kernel_size": 7, "pooling": "max", "group_reduction": "max",
    }  # fmt: skip
    assert {name: compressor.get(name) for name in paper} == paper


def test_data_format_fits_the_model() -> None:
    """Base models read rendered ChatML, the instruct model chat messages: two different files of the same data."""
    files = {stem: read(ROOT / "configs" / f"{stem}.yaml")["data"]["init_args"] for stem in PAPER_MODELS}
    assert {stem for stem, data in files.items() if "_qwen_" in data["path"]} == {s for s in files if "qwen" in s}
    assert {data["answer_column"] for data in files.values()} == {"label"}


def test_the_arms_of_an_experiment_differ_in_a_few_lines() -> None:
    rests, compressors, corrections, options = [], {}, {}, {}
    for arm in ARMS:
        config = read(ROOT / "configs" / f"{arm}.yaml")
        assert config["trainer"].pop("default_root_dir") == f"runs/{arm}"
        model = config["model"]["init_args"]
        compressors[arm] = model.pop("compressor")
        options[arm] = {key: model.pop(key) for key in ("loss", "replay_objective") if key in model}
        corrections[arm] = {name: a for name, a in callbacks(config).items() if name in CORRECTIONS}
        given, left_out = config["trainer"]["callbacks"], (*CORRECTIONS, "MismatchSplit")
        config["trainer"]["callbacks"] = [item for item in given if item["class_path"] not in left_out]
        assert config["model"].pop("class_path") == MODULES.get(arm, "SparseGRPO")
        rests.append(config)
    assert rests[1:] == rests[:-1]
    assert compressors.pop("dense") == {"class_path": "FullKV"}
    assert all(compressor == compressors["naive"] for compressor in compressors.values())
    official = {"loss": {"denominator": "kept_tokens", "kl_on": "kept"}}
    replay = {"replay_objective": "sparse"}
    assert options == {arm: {} for arm in ARMS} | {"replay": replay, "sparse_rl_official": official}
    assert corrections["dense"] == corrections["naive"] == corrections["replay"] == {}
    assert corrections["reweighting"] == {"ImportanceReweighting": {"clip_max": 1.5}}
    paper = {"SparsityAwareRejection": {"threshold": 1e-4}, "ImportanceReweighting": {}}
    assert corrections["sparse_rl_paper"] == paper
    assert corrections["sparse_rl_official"] == {
        "SparsityAwareRejection": {"threshold": 1e-4, "low": 0.5, "high": 1.5},
        "ImportanceReweighting": {
            "mode": "token_mask", "clip_min": 0.5, "clip_max": 1.5, "normalize": "micro_batch",
            "normalize_clip_max": 1.5,
        },
    }  # fmt: skip
