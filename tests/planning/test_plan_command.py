"""``sparse-rl plan``: overrides as for ``fit``, refusals that name a setting which helps, proposals that parse."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from families import family
from jsonargparse import Namespace
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from sparse_rl_lightning import cli
from sparse_rl_lightning.calibration import SHAPES
from sparse_rl_lightning.calibration.shapes import TIED
from sparse_rl_lightning.cli.plan import job_of as configured
from sparse_rl_lightning.cli.plan import main, sharding_of
from sparse_rl_lightning.cli.yaml_files import read
from sparse_rl_lightning.data import PromptDataModule
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.planning import CARDS, Plan, Sharding, best_knob, card_of, make_plan
from sparse_rl_lightning.planning.blueprint import Blueprint, empty_model, read_config
from sparse_rl_lightning.planning.knobs import changes
from sparse_rl_lightning.planning.memory import likely_bytes, parts_of, slot_size
from sparse_rl_lightning.planning.plan import gigabytes
from sparse_rl_lightning.planning.propose import _scalar, job_of, levels, propose
from sparse_rl_lightning.policies.pretrained import check_numbers
from sparse_rl_lightning.testing import tiny_model

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
LENGTH = 2048


@pytest.fixture
def tiny(folder: Path) -> str:
    """A folder with a configuration of a tiny model, below the working directory."""
    return save_tiny()


def save_tiny() -> str:
    tiny_model("qwen3", vocab_size=5000, num_layers=3, hidden_size=128).config.save_pretrained("tiny")
    return "tiny"


@pytest.fixture(scope="module")
def proposal(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the command proposes for it, which takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("proposal"))
        patch.setattr(sys, "path", [*sys.path])
        main(["--model", save_tiny(), "--memory", "1.5GB", "--length", str(LENGTH), "--output", "proposed.yaml"])
        return Path("proposed.yaml").read_text()


@pytest.fixture
def written(tiny: str, proposal: str) -> str:
    """The file of the proposal."""
    Path("proposed.yaml").write_text(proposal)
    return "proposed.yaml"


def test_a_proposal_parses_and_has_the_plan_at_its_head(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = main(["--config", written, "--memory", "1.5GB"])
    shown = capsys.readouterr().out.strip()
    head = [line[2:] for line in Path(written).read_text().splitlines() if line.startswith("# ")]
    assert shown in "\n".join(head)
    assert plan.verdict.startswith("Fits: ")
    assert f"sparse-rl plan --model tiny --memory 1.5GB --length {LENGTH} --output proposed.yaml" in head[1]
    assert "default_root_dir: runs/proposed" in Path(written).read_text()


def test_what_does_not_fit_ends_with_status_1_and_a_setting_that_helps(
    written: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = ["--config", written, "--model.rollout.num_slots=128", "--model.learner.micro_batch_tokens=null"]
    monkeypatch.setattr(sys, "argv", ["sparse-rl", "plan", *wide, "--memory", "1.2GB"])
    with pytest.raises(SystemExit) as ended:
        cli.console()
    assert ended.value.code == 1
    told = capsys.readouterr()
    assert "activations of the learner" in told.out
    found = re.search(r"What helps most: (\S+), with which it takes ([\d.]+) GB", told.err)
    assert found, told.err
    changed = make_plan(configured([*wide, f"--{found[1]}"]), card_of(memory="1.2GB"))
    assert gigabytes(changed.peak) == found[2]


@pytest.mark.slow
def test_every_knob_of_the_command_line_is_one(written: str) -> None:
    """Applied as an override, a setting gives the job that was predicted."""
    card = card_of(memory="24GB")
    changed = ("loss.beta=0.1", "compressor.budget=1024", "rollout.keep_pool=true")
    given = ["--config", written, *(f"--model.{setting}" for setting in changed)]
    start = configured(given)
    settings = {change.setting: make_plan(change.job, card).peak for change in changes(start)}
    by_key = [setting for setting in settings if " " not in setting]
    names = {setting.partition("=")[0].rpartition(".")[2] for setting in by_key}
    assert names >= {"num_slots", "budget", "beta", "foreach"}
    for setting in by_key:
        other = configured([*given, f"--{setting}"])
        assert make_plan(other, card).peak == settings[setting], setting


@pytest.mark.slow
def test_fewer_bits_and_forms_of_checkpointing_are_settings_of_the_command_line(written: str) -> None:
    """With adapters; each saves weights or activations as it was predicted, and the last forms use the host."""
    adapters = "--model.policy={class_path: LoraPolicy, init_args: {policy: tiny, r: 4, target_modules: [q_proj]}}"
    given, card = ["--config", written, adapters, "--model.learner.gradient_checkpointing=false"], card_of()
    found = {change.setting: make_plan(change.job, card) for change in changes(configured(given))}
    tried = [name for name in found if "quantization" in name or "gradient_checkpointing" in name]
    assert [name.partition("=")[2] for name in tried] == ["selective", "true", "offload", "int8", "nf4"]
    for setting in tried:
        plan = make_plan(configured([*given, f"--{setting}"]), card)
        assert (plan.parts, plan.host) == (found[setting].parts, found[setting].host), setting
        assert (plan.host > 0) == setting.endswith("offload")


def test_the_best_knob_is_found_by_trying(tiny: str) -> None:
    """Of a job whose slots are what is large, fewer slots; of one whose learner is, shorter passes."""
    own: dict[str, Any] = {name: options[-1] for name, options in levels(LENGTH).items()}
    many = job_of(tiny, LENGTH, **own | {"slots": 128, "budget": 256})
    plan = make_plan(many, card_of(memory="24GB"))
    best = best_knob(make_plan(many, card_of(memory=f"{plan.phases['rollout'] / 1e9 - 0.01:.3f}GB")))
    assert best[0].setting == "model.rollout.num_slots=64"
    long = job_of(tiny, LENGTH, **own | {"rows": 4, "slots": 8})
    plan = make_plan(long, card_of(memory="24GB"))
    best = best_knob(make_plan(long, card_of(memory=f"{plan.peak / 1e9 - 0.01:.3f}GB")))
    assert best[0].setting == f"model.learner.micro_batch_tokens={2 * LENGTH}"


@pytest.mark.parametrize(
    ("strategy", "devices", "expected"),
    [
        ("auto", 1, Sharding(0, 1)),
        ("ddp", 4, Sharding(0, 4)),
        ("auto", "auto", Sharding(0, 1)),
        ("ddp", "0,1,2", Sharding(0, 3)),
        ("sparse_rl_deepspeed_stage_2", [0, 1], Sharding(2, 2)),
        ("sparse_rl_deepspeed_stage_3_offload", 2, Sharding(3, 2, True, True)),
    ],
)
def test_strategies_by_name(strategy: str, devices: Any, expected: Sharding) -> None:
    class Trainer:
        num_nodes = 1

    trainer = Trainer()
    trainer.strategy, trainer.devices = strategy, devices  # type: ignore[attr-defined]
    assert sharding_of(trainer) == expected


MANY, NONE = "a plan has to know how many GPUs", "at least one GPU, got trainer.devices=.* and trainer.num_nodes="


@pytest.mark.parametrize(
    ("strategy", "devices", "num_nodes", "message"),
    [
        ("ddp", "auto", 1, MANY), ("auto", -1, 1, MANY), ("auto", "-1", 1, MANY), ("ddp", 0, 1, f"{NONE}1"),
        ("ddp", "0", 1, f"{NONE}1"), ("ddp", [], 1, f"{NONE}1"), ("ddp", 4, 0, f"{NONE}0"), ("ddp", 2, -1, f"{NONE}-1"),
        *[(name, 2, 1, f"stage_1 to 3 by name, not {name}")
          for name in ("fsdp", "sparse_rl_fsdp2", "deepspeed_stage_2", "sparse_rl_deepspeed", "ddp_2")],
    ],
)  # fmt: skip
def test_gpus_that_cannot_be_counted_and_other_strategies_are_refused(
    strategy: str, devices: Any, num_nodes: int, message: str
) -> None:
    """All GPUs that there are were counted as one, and other strategies planned as if they were DDP."""
    with pytest.raises(UserError, match=message):
        sharding_of(Namespace(num_nodes=num_nodes, devices=devices, strategy=strategy))


@pytest.mark.parametrize("name", ["quickstart", "dense", "replay", "retrieval", "recipes/dapo", "sparrow/qwen3-1.7b"])
def test_shipped_configurations_are_planned(name: str, tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Compressors, retrievers, schedules, learned scores and several rewards, with a tiny model."""
    plan = main(["--config", str(CONFIGS / f"{name}.yaml"), f"--model.policy={tiny}", "--card", "h200-141gb"])
    assert plan.of("cache") > 0
    assert plan.of("activations") > 0
    assert plan.slots == min(plan.job.rollout.num_slots or plan.job.sequences, plan.job.sequences)
    assert "Fits: " in capsys.readouterr().out


def test_modules_that_do_not_roll_out_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="got model=SupervisedWarmup"):
        main(["--config", str(CONFIGS / "warmup.yaml")])


def test_what_fit_takes_is_taken(written: str) -> None:
    """``num_threads`` stands in files, and ``ckpt_path`` in the run_config.yaml of a run."""
    plain, given = Path(written).read_text(), "num_threads: 1\nckpt_path: last\nweights_only: null\n"
    Path("more.yaml").write_text(given + plain)
    assert configured(["--config", "more.yaml"]).block == configured(["--config", written]).block


def test_the_full_cache_stands_beside_the_compressed_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen3-1.7B, 128 sequences of 4,096 tokens of 112 KiB: the numbers of docs/one_card.md."""
    own: dict[str, Any] = {name: options[-1] for name, options in levels(4096).items()}
    job = job_of("Qwen/Qwen3-1.7B", 4096, **own | {"slots": 128, "budget": 512, "quantization": None})
    cache = slot_size(job).of(128)
    plan = Plan(job, card_of(memory="24GB"), {"cache": (cache, cache, cache)}, 128)
    assert plan.full_cache == pytest.approx(128 * 4096 * 112 * 1024, rel=0.03)
    assert plan.caches == ("The cache of 128 sequences of 4096 tokens takes 9.7 GB, a full cache would take 61.0 GB.")
    assert "takes 9.7 GB, a full cache would take 61.0 GB." in (CONFIGS.parent / "docs/one_card.md").read_text("utf-8")


@pytest.mark.slow
def test_the_page_shows_what_its_command_prints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (CONFIGS.parent / "docs/one_card.md").read_text("utf-8")
    (command,) = re.findall(r"^sparse-rl plan (--model .*)$", page, re.MULTILINE)
    main(command.split())
    shown = page.partition("```text\nGB per GPU")[2].partition("```")[0]
    assert len(shown) > 500
    assert shown in capsys.readouterr().out
    compared = re.search(r"\(`plan (--config [^`]+)`\)", page)
    main(compared[1].split())
    said = capsys.readouterr().out
    text = " ".join(page.split())
    memory, hours = re.search(r"it would fit, with ([\d.]+) GB, and take ([\d.]+) hours", text).groups()
    assert re.search(rf"^total +{memory}", said, re.MULTILINE)
    assert f"{hours} hours for all 400" in said
    main("--config my.yaml --memory 24GB --model.sampling.max_completion_length=512".split())
    shorter = re.search(r"with 512 tokens, `plan` says ([\d.]+) hours", text)[1]
    assert f"{shorter} hours for all 400" in capsys.readouterr().out


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("trainer", "rows", "expected"),
    [
        (["max_steps=-1", "max_epochs=3"], 96, 3 * 6 * 2),  # 6 rollouts of 16 prompts, each trained on in 2 steps
        (["max_steps=400"], 96, 400),
        (["max_steps=-1", "max_epochs=3", "devices=2", "strategy=ddp"], 96, 3 * 3 * 2),
        (["max_steps=7", "max_epochs=3"], 96, 7),
        (["max_steps=100", "max_epochs=3"], 96, 36),
        (["max_steps=-1"], 96, 1000 * 12),
        (["max_steps=-1", "max_epochs=-1"], 96, None),
        (["max_steps=-1", "max_epochs=3"], None, None),  # the file is elsewhere
        (["max_steps=-1", "max_epochs=3", "limit_train_batches=4"], 96, None),
    ],
)
def test_the_steps_of_the_whole_run(trainer: list[str], rows: int | None, expected: int | None, written: str) -> None:
    if rows is not None:
        row = {"question": "1 + 1?", "answer": "#### 2"}
        Path("train.jsonl").write_text(f"{json.dumps(row)}\n" * rows)
    job = configured(["--config", written, *(f"--trainer.{setting}" for setting in trainer)])
    assert job.num_steps == expected


class Optional(PromptDataModule):
    """Of a user: a number that may be missing, and the other arguments are the base's."""

    def __init__(self, num_train: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)


class Several(PromptDataModule):
    """Of a user: several files, and no number of prompts."""

    def __init__(self, path: list[str] = ["train.jsonl"]) -> None:  # noqa: B006  # not changed
        super().__init__(prompts_per_rollout=4)


class Bare(PromptDataModule):
    """Of a user: without any argument."""

    def __init__(self) -> None:
        super().__init__(prompts_per_rollout=4)


@pytest.mark.parametrize("data", [Optional, Several, Bare])
def test_data_of_a_user_s_own_is_planned_with(data: type, written: str) -> None:
    Path("train.jsonl").write_text("{}")
    values = yaml.safe_load(Path(written).read_text())
    values["data"] = {"class_path": f"{data.__module__}.{data.__qualname__}"}
    values["trainer"] |= {"max_steps": -1, "max_epochs": 3}
    Path("own.yaml").write_text(yaml.safe_dump(values))
    job = configured(["--config", "own.yaml"])
    assert (job.block.prompts, job.num_steps) == (16, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"precision": "transformer-engine"},
            "trainer.precision='transformer-engine': a plan knows 16-, bf16-, 32- and 64-true",
        ),
        ({"accumulate_grad_batches": 0}, "trainer.accumulate_grad_batches must be at least 1"),
        ({"max_steps": -1, "max_epochs": 1}, "val_batch_size must be at least 1"),
    ],
)
def test_mistakes_of_trainer_and_data_are_lines(changes: dict[str, Any], message: str, written: str) -> None:
    Path("train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}')
    values = yaml.safe_load(Path(written).read_text())
    data = {"path": "train.jsonl", "val_batch_size": 0 if "max_steps" in changes else 16}
    values["data"] = {"class_path": "JsonlPrompts", "init_args": data}
    values["trainer"] |= changes
    Path("own.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(UserError, match=message):
        configured(["--config", "own.yaml"])


@pytest.mark.parametrize("precision", ["64", "64-true"])
def test_weights_of_64_bits(precision: str, written: str) -> None:
    assert configured(["--config", written, f"--trainer.precision={precision}"]).dtype == torch.float64


def test_the_hours_of_the_whole_run(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = main(["--config", written, "--memory", "1.5GB", "--trainer.max_steps=1000000"])
    hours = 1_000_000 * sum(plan.seconds.values()) / plan.job.block.optimizer_steps / 3600
    assert plan.job.block.optimizer_steps == 2
    line = f"{hours:.1f} hours for all 1000000, in 500,000 rollout(s). Predicted, not measured."
    assert line in capsys.readouterr().out


def test_what_takes_time_is_told_beside_the_answer(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--model", tiny, "--memory", "1.5GB", "--length", str(LENGTH), "--output", "one.yaml"])
    told = capsys.readouterr()
    assert f"Looking for a configuration of tiny with sequences of up to {LENGTH} tokens" in told.err
    assert "Trying trains_all: true" in told.err
    with pytest.raises(UserError, match="What helps most"):
        main(["--config", "one.yaml", "--memory", "1.05GB"])
    more = capsys.readouterr()
    assert "Counting tiny" in more.err
    assert "Trying model." in more.err
    assert "Trying" not in told.out + more.out


def test_what_costs_least_is_given_up_first(tiny: str) -> None:
    """With memory to spare everything is at its most preferred; with less the last levels go first."""
    rich = main(["--model", tiny, "--memory", "141GB", "--length", str(LENGTH), "--output", "rich.yaml"])
    own = {name: options[0] for name, options in levels(LENGTH).items()}
    assert make_plan(job_of(tiny, LENGTH, **own), rich.card).parts == rich.parts
    memory = f"{rich.peak / 1e9 - 0.01:.2f}GB"
    poorer = main(["--model", tiny, "--memory", memory, "--length", str(LENGTH), "--output", "poorer.yaml"])
    assert poorer.job.blueprint.adapters is None
    assert poorer.slots == rich.slots
    assert not poorer.job.rollout.keep_pool
    assert poorer.job.optimizer.keywords["foreach"] is None  # type: ignore[attr-defined]


@pytest.mark.slow
def test_nothing_fits_with_the_nearest_miss_and_the_length_that_would(tiny: str) -> None:
    with pytest.raises(UserError, match=r"does not fit 1.5 GB at --length 65536.*takes [\d.]+ GB.*--length \d+ fits"):
        main(["--model", tiny, "--memory", "1.5GB", "--length", "65536"])
    with pytest.raises(UserError, match="No shorter length fits"):
        main(["--model", tiny, "--memory", "0.5GB", "--length", "1024"])


def test_a_file_is_not_replaced_by_accident(written: str) -> None:
    again = ["--model", "tiny", "--memory", "1.5GB", "--length", str(LENGTH), "--output", written]
    with pytest.raises(UserError, match=r"exists. Give another name, or --overwrite"):
        main(again)
    before = Path(written).read_text()
    main([*again, "--overwrite"])
    assert Path(written).read_text() == before


def test_a_folder_of_any_name_is_the_one_of_the_proposal(tiny: str) -> None:
    """Of ``a,b/policy`` the file named a model ``a`` and a key ``b/policy``."""
    shutil.copytree(tiny, "my, own/policy")
    given = ["--model", "my, own/policy", "--memory", "1.5GB", "--length", str(LENGTH), "--output", "its: own.yaml"]
    main(given)
    head = Path("its: own.yaml").read_text().splitlines()
    (again,) = re.findall("`(.*)`", head[1])
    assert shlex.split(again) == ["sparse-rl", "plan", *given]
    assert shlex.split(head[2].lstrip("# ")) == ["sparse-rl", "fit", "--config", "its: own.yaml"]
    assert configured(["--config", "its: own.yaml"]).blueprint.path == "my, own/policy"


def test_names_are_quoted_where_they_would_read_as_something_else() -> None:
    others = ("a}b", "a,b", "a #b", "a: b", "1e3", "null", "'a'", " a", "a\nb: 1", "\x7f", "naïve 😀, " + "long " * 40)
    for name in ("Qwen/Qwen3-4B", "../models/it's one", "~/policy_1", "/data/my models/a+b@=%:c", *others):
        given = _scalar(name)
        assert read(f"{{path: {given}, dtype: float32}}") == {"path": name, "dtype": "float32"}
        assert read(f"folder: {given}\nsteps: 1") == {"folder": name, "steps": 1}
        assert (given == name) == (name not in others)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"hidden_size": 1e9}, "config.json.hidden_size must be at least 1 and at most 16777216"),
        ({"num_hidden_layers": 1001, "layer_types": None}, "num_hidden_layers must be at least 1 and at most 1000"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers must be"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be at least 1"),
        ({"head_dim": -1}, "head_dim must be at least 1"),
        ({"max_position_embeddings": -1}, "config.json.max_position_embeddings must be at least 1"),
        ({"vocab_size": 10**12}, "vocab_size must be at least 1 and at most 16777216"),
        ({"intermediate_size": "wide"}, "intermediate_size must be a finite number"),
        ({"hidden_size": 2.5}, "config.json of 'bad' cannot be read.*expected int"),
        ({"text_config": {"vocab_size": -1}}, "config.json.text_config.vocab_size must be at least 1"),
        ({"intermediate_size": [64, 10**12]}, "config.json.intermediate_size must be at least 1 and at most 16777216"),
        ({"intermediate_size": [64, 0]}, "config.json.intermediate_size must be at least 1"),
        ({"num_local_experts": 10**30}, "config.json.num_local_experts must be at most 16777216"),
        ({"model_type": "gpt2", "n_layer": 200_000}, "config.json.n_layer must be at most 1000"),
        ({"hidden_act": "sigmoidal"}, "no model is described by 'bad'.*sigmoidal"),
        ({"model_type": "nothing"}, "config.json of 'bad' cannot be read.*nothing"),
        ({"quantization_config": {"quant_method": "gptq"}}, "holds quantized weights"),
        *[(text, "config.json") for text in ("[]", "{", "3", "null")],
    ],
)
def test_sizes_that_no_model_has_are_refused_before_they_are_counted(
    changed: dict[str, Any] | str, expected: str, tiny: str
) -> None:
    """Some made transformers build lists of as many layers, others ended in the middle of a product."""
    content = json.loads(Path(tiny, "config.json").read_text())
    Path("bad").mkdir()
    Path("bad/config.json").write_text(changed if isinstance(changed, str) else json.dumps(content | changed))
    read_config.cache_clear()
    with pytest.raises(UserError, match=expected):
        propose("bad", card_of(memory="24GB"), 512)


def test_sizes_of_every_causal_model_of_transformers_are_none_of_these() -> None:
    """A few have a list of sizes, or -1 for none."""
    configs = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        with suppress(Exception):  # without arguments it is no configuration
            configs[kind.__name__] = json.loads(kind().to_json_string(use_diff=False))
    assert len(configs) > 50
    for name, sizes in configs.items():
        check_numbers(sizes, name)


@pytest.mark.parametrize("length", [0, -1, 511, 99999999999999, 10**30])
def test_lengths_that_nothing_has_are_refused(length: int, tiny: str) -> None:
    with pytest.raises(UserError, match=f"--length must be at least 512.*at most 16777216, got {length}"):
        main(["--model", tiny, "--memory", "24GB", "--length", str(length)])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--prompt=0"], "--prompt must be at least 1, got --prompt=0"),
        (["--prompt=99999999999999"], "counts up to 16,777,216 tokens of the longest sequence, got"),
        (["--model.sampling.max_completion_length=99999999999999"], "tokens of the longest sequence, got"),
        (["--data.prompts_per_rollout=16000000000"], "tokens of the sequences of a rollout, got"),
    ],
)
def test_tokens_that_cannot_be_counted_are_refused(given: list[str], expected: str, written: str) -> None:
    with pytest.raises(UserError, match=expected):
        main(["--config", written, *given])


@pytest.mark.parametrize("args", [["--help"], []])
def test_help_tells_both_ways(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(args)
    told = "".join(capsys.readouterr())
    assert "--length" in told
    assert not args or all(word in told for word in ("--config", "--prompt", "--memory", "--output", "--card"))


def test_sizes_of_known_models() -> None:
    """Parameters as the model cards have them, in billions."""
    published = {
        "Qwen/Qwen2.5-0.5B": 0.494, "Qwen/Qwen2.5-7B-Instruct": 7.616, "Qwen/Qwen2.5-14B": 14.77,
        "meta-llama/Llama-3.2-1B-Instruct": 1.236, "meta-llama/Llama-3.2-3B": 3.213, "meta-llama/Llama-3.1-8B": 8.03,
        "Qwen/Qwen3-0.6B": 0.596, "Qwen/Qwen3-1.7B": 1.721, "Qwen/Qwen3-4B": 4.022, "Qwen/Qwen3-8B": 8.191,
    }  # fmt: skip
    for name, billions in published.items():
        model = empty_model(Blueprint(name), torch.bfloat16)
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=2e-3), name
    assert SHAPES.keys() >= TIED


def test_folders_are_read_and_unknown_names_refused(tiny: str) -> None:
    assert read_config(tiny).num_hidden_layers == 3
    with pytest.raises(UserError, match=r"sizes of 'nobody/unknown' are not known.*Give a folder, or one of qwen2.5"):
        read_config("nobody/unknown")
    for form in ("AWQ", "FP8", "GGUF", "GPTQ-Int4", "MLX-8bit"):  # other sizes in memory, and weights that are not read
        with pytest.raises(UserError, match="not known"):
            read_config(f"Qwen/Qwen3-4B-{form}")


def test_cards_are_found_by_name_and_by_memory() -> None:
    assert card_of(memory="24GB").name == "rtx-4090-24gb"
    assert card_of(memory="30GB").name == "rtx-5090-32gb"
    assert card_of(memory="40GB").name == "l40s-48gb"
    assert card_of(memory="150GB").name == "b200-180gb"
    assert card_of(memory="300GB") == replace(CARDS["b200-180gb"], memory=300e9)  # the largest there is
    assert [card.memory for card in CARDS.values()] == sorted(card.memory for card in CARDS.values())
    assert card_of("h200-141gb", "100GiB").memory == 100 * 2**30
    assert card_of().name == "h100-80gb"
    assert all(card.hardware.bandwidth < card.bandwidth for card in CARDS.values())
    for given in ({"name": "tpu"}, {"memory": "24"}, {"memory": "0GB"}, {"memory": "1.2.3GB"}, {"memory": "-1GB"}):
        with pytest.raises(UserError, match=r"--card must be one of|--memory must be a number"):
            card_of(**given)


def test_samples_that_are_not_trained_on_are_no_part_of_the_block(written: str) -> None:
    plain = configured(["--config", written])
    drawn = configured([
        "--config", written, "--model.rollout.downsampling", "MaxVariance",
        "--model.rollout.downsampling.num_samples", str(2 * plain.block.num_generations),
    ])  # fmt: skip
    assert drawn.block == plain.block
    assert drawn.sequences == 2 * plain.sequences


def test_most_likely_tokens_are_counted_and_those_of_a_monitor_too(written: str) -> None:
    """They lie in the host's memory, and on the GPU while the learner compares a micro-batch's."""
    asked = (
        "--model.sampling.top_logprobs=20", "--trainer.callbacks+=AcceptanceMonitor",
        "--trainer.callbacks+={class_path: ScoreCentering, init_args: {top: 20}}",
    )  # fmt: skip
    jobs = [configured(["--config", written, *words]) for words in ([], *([word] for word in asked))]
    none, *some = (parts_of(job, 80e9)[0].get("the most likely tokens") for job in jobs)
    rows = jobs[0].micro_batch.rows
    assert none is None
    assert some == [(0, rows * jobs[0].length * 20 * 36, 0)] * 3
    alone = ("--trainer.callbacks=AcceptanceMonitor", "--trainer.callbacks+=lightning.pytorch.callbacks.ModelSummary")
    assert [configured(["--config", written, word]).sampling.top_logprobs for word in alone] == [20, 0]
    assert [likely_bytes(job) for job in jobs] == [0, *[jobs[0].sequences * jobs[0].length * 20 * 8 * 3 // 2] * 3]


def test_a_form_that_cannot_be_counted_is_not_proposed(folder: Path) -> None:
    """Experts are counted in 16 bits alone, so training all weights in float32 is out."""
    family("qwen3_moe").config.save_pretrained("experts")
    assert propose("experts", card_of(memory="4GB"), 512).job.blueprint.adapters is not None
