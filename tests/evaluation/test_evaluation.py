"""All seven benchmarks end to end with a tiny random model: results, files, resuming, the command line."""

from __future__ import annotations

import dataclasses
import json
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from benchmark_files import GOLDS, write_benchmarks
from pretend_gpu import PretendGPU
from pyarrow import parquet
from tiny_grpo import quiet
from torch.utils.data import DataLoader, IterableDataset

from sparse_rl_lightning.cli import main
from sparse_rl_lightning.compressors import RKV, FullKV, SnapKV
from sparse_rl_lightning.data import JsonlPrompts
from sparse_rl_lightning.evaluation.evaluate import Scores
from sparse_rl_lightning.evaluation.problems import ROWS_NAMED, Problems, row_number, with_room
from sparse_rl_lightning.evaluation.results import (
    BenchmarkResult,
    completion_table,
    judge_answers,
    name_caches,
    results_table,
)
from sparse_rl_lightning.evaluation.time_left import TimeLeft
from sparse_rl_lightning.metrics import accuracy
from sparse_rl_lightning.modules.evaluation import Evaluation
from sparse_rl_lightning.records import ScoredRollout
from sparse_rl_lightning.rewards.math import CONVENTIONS, MathChecker
from sparse_rl_lightning.rollout import Progress, RolloutOptions, SamplingParams
from sparse_rl_lightning.rollout.options import OF_FULL_CACHE
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "eval.yaml"
CACHES = ["dense", "RKV-24", "RKV-12"]

pytestmark = pytest.mark.filterwarnings("ignore:.*is not the published file", "ignore:.* rows, the published one")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in Hugging Face's format."""
    path = tmp_path_factory.mktemp("policy")
    tokenizer = character_tokenizer(string.printable)
    model = tiny_model("qwen2", vocab_size=len(tokenizer), hidden_size=32, max_position_embeddings=400)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def config(folder: Path, policy: Path, **model: Any) -> str:
    """The shipped configuration with tiny sizes, written to a file."""
    settings = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    own = settings["model"]["init_args"]
    own["policy"]["init_args"] = {"path": str(policy), "dtype": "float32"}
    for compressor, budget in zip(own["compressors"], (24, 12), strict=True):
        compressor["init_args"] |= {"budget": budget, "buffer": 4, "window": 4}
    own["sampling"]["max_completion_length"] = 6
    own["sampling_of"] = {"aime24": {"max_completion_length": 8}, "amc23": {"num_generations": 3}}
    own |= {"rollout": {"num_slots": 4}, "batch_size": 2} | model
    settings["data"]["init_args"]["folder"] = str(write_benchmarks(folder / "data"))
    settings["trainer"] |= {"accelerator": "cpu", "enable_progress_bar": False}
    path = folder / "eval.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return str(path)


def stored(folder: Path, cache: str, benchmark: str) -> dict[str, Any]:
    return json.loads((folder / "runs/eval/evaluation" / cache / f"{benchmark}.json").read_text(encoding="utf-8"))


def test_all_seven_benchmarks_end_to_end(folder: Path, policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = config(folder, policy)
    cli = main(["test", "--config", file])
    assert list(cli.model.caches) == CACHES
    results = json.loads((folder / "runs/eval/evaluation/results.json").read_text(encoding="utf-8"))
    assert [(r["benchmark"], r["cache"]) for r in results] == [(name, cache) for name in GOLDS for cache in CACHES]
    for name, golds in GOLDS.items():
        for cache in CACHES:
            result = stored(folder, cache, name)
            samples, limit = (3 if name == "amc23" else 1), (8 if name == "aime24" else 6)
            assert (result["accuracy"]["num_problems"], result["accuracy"]["num_samples"]) == (len(golds), samples)
            assert result["counters"]["checks"] == len(golds) * samples
            assert 0 < result["mean_length"] <= limit
            assert (result["kv_saving_final"] > 0) == (cache != "dense")
            table = parquet.read_table(folder / "runs/eval/evaluation" / cache / f"{name}.parquet").to_pydict()
            assert table["answer"] == [gold for gold in golds for _ in range(samples)]
            assert table["sample"] == list(range(samples)) * len(golds)
            assert set(table["benchmark"]) == {name}
            assert not any(table["correct"])  # random letters
    printed = capsys.readouterr().out
    assert "Avg@3" in printed
    assert "mean" in printed
    assert float(cli.trainer.callback_metrics["test/mean/dense"]) == 0.0


def test_sparrows_evaluation(folder: Path) -> None:
    """Retrieval beside the full cache, on published files and on one's own."""
    tokenizer, policy = character_tokenizer(string.printable), folder / "sharp"
    model = tiny_model("qwen3", vocab_size=len(tokenizer), hidden_size=32, initializer_range=0.5)
    model.save_pretrained(policy)  # to whom it matters what is read
    tokenizer.save_pretrained(policy)
    settings = yaml.safe_load((ROOT / "configs" / "sparrow" / "eval.yaml").read_text(encoding="utf-8"))
    own, data = settings["model"]["init_args"], settings["data"]["init_args"]
    own["policy"]["init_args"] = {"path": str(policy), "dtype": "float32"}
    own["sampling"] |= {"max_completion_length": 12, "num_generations": 2}
    own["rollout"] = {"num_slots": 4}
    small = {"budget": 8, "page_size": 4, "num_dense_layers": 1, "num_first_pages": 0, "num_last_pages": 1}
    own["retrievers"][0]["init_args"] = small
    data["folder"] = str(write_benchmarks(folder / "data"))
    for name in data["own"]:
        path = folder / f"{name}.jsonl"
        path.write_text('{"problem": "1+1", "answer": "2"}\n{"problem": "", "answer": "3"}\n', encoding="utf-8")
        data["own"][name] = str(path)
    settings["trainer"] |= {"accelerator": "cpu", "enable_progress_bar": False}
    (folder / "sparrow.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    run = main(["test", "--config", str(folder / "sparrow.yaml")])
    found = {(result.benchmark, result.cache): result for result in run.model.results}
    names = ["aime24", "aime25", "aime26", "amc23"]
    assert list(found) == [(name, cache) for name in names for cache in ("dense", "Centroid-8")]
    assert run.datamodule.reports["aime25"].dropped == [1]  # it asks nothing
    assert all(result.accuracy.num_samples == 2 for result in found.values())
    assert found["amc23", "Centroid-8"].kv_saving_final == 0  # nothing is deleted
    drawn = [folder / "runs/eval/evaluation" / cache / "amc23.parquet" for cache in ("dense", "Centroid-8")]
    texts = [parquet.read_table(path).to_pydict()["completion"] for path in drawn]
    assert texts[0] != texts[1]  # but less is read


def test_an_interrupted_evaluation_goes_on_where_it_stopped(folder: Path, policy: Path) -> None:
    file = config(folder, policy)
    cli = main(["test", "--config", file, "--data.init_args.benchmarks=[gsm8k,aime24]"])
    root = folder / "runs/eval/evaluation"
    before = {path: path.stat().st_mtime_ns for path in root.glob("*/*.json")}
    assert len(before) == 6
    (root / "RKV-12" / "aime24.json").unlink()  # killed before it was whole
    main(["test", "--config", file, "--data.init_args.benchmarks=[aime24,gsm8k]"])
    after = {path: path.stat().st_mtime_ns for path in root.glob("*/*.json")}
    assert [path for path in after if after[path] != before[path]] == [root / "RKV-12" / "aime24.json"]
    main(["test", "--config", file, "--data.init_args.benchmarks=[aime24,gsm8k]", "--model.init_args.sampling.seed=1"])
    assert all(path.stat().st_mtime_ns != after[path] for path in after)  # other settings, other results
    assert cli.model.results[0].benchmark == "gsm8k"


def test_results_depend_on_neither_batches_nor_slots_nor_other_benchmarks(folder: Path, policy: Path) -> None:
    columns = []
    for number, (size, rollout) in enumerate(((1, {"num_slots": 1}), (8, {}))):
        (folder / str(number)).mkdir()
        file = config(folder / str(number), policy, batch_size=size, rollout=rollout)
        names = "[amc23]" if number else "[gsm8k,amc23]"
        root = str(folder / str(number) / "runs")
        main(["test", "--config", file, f"--data.init_args.benchmarks={names}", f"--trainer.default_root_dir={root}"])
        columns.append(parquet.read_table(f"{root}/evaluation/RKV-12/amc23.parquet")["completion"].to_pylist())
    assert columns[0] == columns[1]
    assert len(set(columns[0])) == 3


def test_a_checkpoint_is_evaluated_instead_of_the_folder(folder: Path, policy: Path) -> None:
    file = config(folder, policy)
    only = "--data.init_args.benchmarks=[aime24]"
    main(["test", "--config", file, only])
    before = stored(folder, "dense", "aime24")
    module = Evaluation(str(policy))
    module.configure_model()
    state = {name: value + 0.01 for name, value in module.state_dict().items()}
    checkpoint = {"state_dict": state, "pytorch-lightning_version": "2.6.0", "epoch": 0, "global_step": 0}
    checkpoint |= {"loops": None, "callbacks": {}, "optimizer_states": [], "lr_schedulers": []}
    torch.save(checkpoint, folder / "last.ckpt")
    main(["test", "--config", file, only, "--ckpt_path", str(folder / "last.ckpt")])
    assert stored(folder, "dense", "aime24")["settings"] != before["settings"]


def test_a_full_cache_takes_what_a_gpu_has_free(policy: Path) -> None:
    """Its slots are many times those of the compressed caches beside it."""
    module = Evaluation(str(policy), [RKV(12, buffer=4, num_sinks=1, window=3)])
    module.configure_model()
    with PretendGPU() as gpu:
        module.policy = gpu.copy_of(module.policy)
        limits = []
        for cache in module.caches:
            with module.caching(cache) as sampler:
                limits.append(sampler.memory_limit)
    assert limits == [OF_FULL_CACHE, None]


def test_answers_are_checked_with_their_rows_tolerance(policy: Path) -> None:
    module = Evaluation(str(policy))
    rows = [
        {"prompt": "Half?", "answer": r"\frac{1}{2}", "benchmark": "own", "index": 7},
        {"prompt": "Large?", "answer": "4.5e33", "benchmark": "own", "index": 9, "tolerance": 1e-4},
    ]
    module.configure_model()
    with module.caching("dense") as sampler:
        params = SamplingParams(num_generations=2, max_completion_length=3)
        rollout = sampler.generate(module.generator.encode(rows), params)
    texts = [r"\boxed{0.5}", r"\boxed{0.50001}", r"\boxed{4.5001\times10^{33}}", "4.5e33"]
    scored = ScoredRollout(rollout, rows, texts, {}, 0)
    scores = Scores.of(scored, judge_answers(scored, MathChecker()))
    table = completion_table(Problems("own", rows, rows, [], []), scores)
    assert table["correct"] == [True, False, True, False]
    assert table["extracted"] == ["0.5", "0.50001", r"4.5001\times10^{33}", None]
    assert table["index"] == [7, 7, 9, 9]
    assert table["sample"] == [0, 1, 0, 1]
    assert table["kv_stored"] == table["kv_full"]
    assert {len(values) for values in table.values()} == {4}
    longer = completion_table(Problems("own", [*rows, rows[0]], rows, [], [rows[0]]), scores)  # its prompt has no room
    for column in ("length", "kv_stored", "kv_full", "kv_stored_steps", "kv_full_steps", "finished", "correct"):
        assert longer[column] == [*table[column], 0, 0]


def test_predict_completes_a_file_of_prompts(folder: Path, policy: Path) -> None:
    file = config(folder, policy)
    (folder / "prompts.jsonl").write_text(
        '{"prompt": "1+1=", "index": "a-1"}\n{"prompt": "2+2=", "index": null}\n{"prompt": "3"}\n', encoding="utf-8"
    )  # an index of the file's own
    data = {"class_path": "JsonlPrompts", "init_args": {"path": "prompts.jsonl", "answer_column": None}}
    settings = yaml.safe_load(Path(file).read_text(encoding="utf-8")) | {"data": data}
    Path(file).write_text(yaml.safe_dump(settings), encoding="utf-8")
    main(["predict", "--config", file, "--model.init_args.sampling.num_generations=2"])
    rows = [json.loads(line) for line in (folder / "runs/eval/predictions.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["1+1=", "2+2=", "3"]
    assert all(list(row["completions"]) == CACHES for row in rows)
    assert all(len(texts) == 2 for row in rows for texts in row["completions"].values())
    with pytest.raises(ValueError, match="Evaluation tests on MathBenchmarks"):
        main(["test", "--config", file, "--data.init_args.val_path=prompts.jsonl"])


# ---------------------------------------------------------------- rows that name a benchmark, of other data


def named(*names: str) -> list[dict[str, str]]:
    """Rows that name these benchmarks."""
    return [{"prompt": f"{n}+1=", "answer": str(n + 1), "benchmark": name} for n, name in enumerate(names)]


def by_fours(folder: Path, rows: list[dict[str, str]]) -> JsonlPrompts:
    """A file with these rows, in batches of four."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return JsonlPrompts(str(file), val_path=str(file), val_batch_size=4)


def of_two(policy: Path, **options: Any) -> Evaluation:
    return Evaluation(str(policy), sampling=SamplingParams(max_completion_length=2), **options)


MIXED = ["algebra"] * 3 + ["geometry"] * 3


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (MIXED, "where every benchmark is one batch, got a batch with rows of algebra and geometry. "),
        (["algebra"] * 5, "where every benchmark is one batch, got a second batch of algebra. "),
    ],
)
def test_batches_that_are_no_benchmarks_are_refused(names: list[str], said: str, folder: Path, policy: Path) -> None:
    """Before anything is measured; one would have the other's name, or overwrite it."""
    module = of_two(policy)
    told = rf"^Evaluation tests on MathBenchmarks, {said}Set data to it, with .* in data.own"
    with pytest.raises(ValueError, match=told):
        quiet(default_root_dir=folder).test(module, datamodule=by_fours(folder, named(*names)), verbose=False)
    assert module.results == []
    assert not list(folder.glob("evaluation/*/*.json"))


class Stream(IterableDataset[list[dict[str, str]]]):
    """Batches that come one at a time."""

    def __init__(self, *batches: list[dict[str, str]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[dict[str, str]]]:
        return iter(self.batches)


def test_a_stream_is_refused_where_a_name_comes_again(folder: Path, policy: Path) -> None:
    module, batches = of_two(policy), (named("algebra"), named("geometry", "geometry"), named("algebra"))
    loader = DataLoader(Stream(*batches), batch_size=None)
    with pytest.raises(ValueError, match="got a second batch of algebra"):
        quiet(default_root_dir=folder).test(module, loader, verbose=False)
    assert [(result.benchmark, result.accuracy.num_problems) for result in module.results] == [
        ("algebra", 1), ("geometry", 2)
    ]  # fmt: skip
    loader = DataLoader(Stream([*named("algebra"), {"prompt": "1"}]), batch_size=None)
    with pytest.raises(ValueError, match="a batch with rows of algebra and data"):
        quiet(default_root_dir=folder).test(of_two(policy), loader)


def test_other_data_may_have_one_batch_per_benchmark(folder: Path, policy: Path) -> None:
    module, names = of_two(policy), ["algebra"] * 4 + ["geometry"] * 2
    quiet(default_root_dir=folder).test(module, datamodule=by_fours(folder, named(*names)), verbose=False)
    assert [(result.benchmark, result.accuracy.num_problems) for result in module.results] == [
        ("algebra", 4), ("geometry", 2)
    ]  # fmt: skip


def test_only_what_will_be_tested_has_to_be_benchmarks(folder: Path, policy: Path) -> None:
    module, data = of_two(policy), by_fours(folder, named(*["algebra"] * 5))
    quiet(default_root_dir=folder, limit_test_batches=1).test(module, datamodule=data, verbose=False)
    assert [result.accuracy.num_problems for result in module.results] == [4]


def test_a_batch_to_predict_on_has_one_sampling(folder: Path, policy: Path) -> None:
    """Two benchmarks in a batch are drawn alike, which matters if their settings differ."""
    counts = {"algebra": {"num_generations": 2}}
    said = "sampling_of: a batch has rows of algebra and geometry, whose settings differ"
    with pytest.raises(ValueError, match=said):
        quiet(default_root_dir=folder).predict(of_two(policy, sampling_of=counts), by_fours(folder, named(*MIXED)))
    for names, own, drawn in (
        (MIXED, None, [1] * 6),
        (MIXED, {"algebra": {"num_generations": 1}}, [1] * 6),
        (["algebra"] * 4 + ["geometry"], counts, [2, 2, 2, 2, 1]),
    ):
        module, data = of_two(policy, sampling_of=own), by_fours(folder, named(*names))
        batches = quiet(default_root_dir=folder).predict(module, data)
        assert [len(row["completions"]["dense"]) for batch in batches for row in batch] == drawn


# ---------------------------------------------------------------- parts


def test_the_papers_settings() -> None:
    own = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["model"]["init_args"]
    model = Evaluation("nowhere", sampling=SamplingParams(**own["sampling"]), sampling_of=own["sampling_of"])
    paper = SamplingParams(num_generations=1, max_completion_length=8192, temperature=0.8, top_p=0.95)
    for name in GOLDS:
        expected = (32, 16384) if name in ("aime24", "amc23") else (1, 8192)
        params = model.params(name)
        assert (params.num_generations, params.max_completion_length) == expected
        assert (params.temperature, params.top_p, params.top_k) == (paper.temperature, paper.top_p, 0)
    header = CONFIG.read_text(encoding="utf-8").partition("\nseed_everything")[0]
    assert "sparse-rl test --config configs/eval.yaml" in header


def test_names_of_caches() -> None:
    sizes = {"buffer": 4, "window": 4}
    caches = name_caches([FullKV(), RKV(budget=24, **sizes), SnapKV(budget=24, **sizes), RKV(budget=24, **sizes)])
    assert list(caches) == ["dense", "RKV-24", "SnapKV-24", "RKV-24#2"]
    with pytest.raises(ValueError, match="needs dense: true, compressors or retrievers"):
        Evaluation("nowhere", dense=False)


def test_numbers_of_rows() -> None:
    assert row_number({"benchmark": "aime24", "index": 7}, 2) == 7
    assert row_number({"benchmark": "aime24", "index": "7"}, 2) == 7
    assert row_number({"benchmark": "aime24"}, 2) == row_number({"benchmark": "aime24", "index": "²"}, 2) == 2
    assert row_number({"benchmark": "mine", "index": "a-1"}, 2) == row_number({"benchmark": "x", "index": None}, 2) == 2
    assert row_number({"index": 7}, 2) == row_number({"index": "a-1"}, 2) == 2


MANY, MOST = {"amc23": {"num_generations": 4000}}, "num_generations must be at most 1000, got num_generations"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampling": SamplingParams(num_generations=1001)}, rf"sampling\.{MOST}=1001"),
        ({"sampling_of": {"aime24": {"num_generations": 1000}, **MANY}}, rf"sampling_of\[amc23\]\.{MOST}=4000"),
        ({"sampling_of": {"amc23": {"top_p": 2}}}, r"sampling_of\[amc23\]: top_p must be in \(0, 1\], got top_p=2"),
        ({"sampling_of": {"amc23": {"top": 2}}}, r"sampling_of\[amc23\]: .*'top'.* num_generations, max_completion_l"),
        ({"sampling_of": {"amc23": {"top_p": "a"}}}, r"sampling_of\[amc23\]: "),
        ({"rollout": RolloutOptions(oversampling=2)}, r"rollout\.oversampling is of training, got oversampling=2"),
        ({"batch_size": 0}, "batch_size must be at least 1, got batch_size=0"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Evaluation("nowhere", **options)
    Evaluation("nowhere", sampling=SamplingParams(num_generations=1000))


def test_settings_given_in_part_keep_the_other_defaults(folder: Path, policy: Path) -> None:
    """Of a YAML and of the shell; those of a benchmark go over both."""
    settings = yaml.safe_load(Path(config(folder, policy)).read_text(encoding="utf-8"))
    of_one = {"gsm8k": {"top_k": 5, "stop_strings": ["#"]}}
    settings["model"]["init_args"] |= {"sampling": {"max_completion_length": 6}, "sampling_of": of_one}
    (folder / "own.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    only = "--data.benchmarks=[gsm8k]"
    model = main(["test", "--config", str(folder / "own.yaml"), only, "--model.sampling.top_p=0.9"]).model
    assert model.sampling == SamplingParams(max_completion_length=6, temperature=0.8, top_p=0.9, seed=0)
    assert model.params("gsm8k") == dataclasses.replace(model.sampling, top_k=5, stop_strings=("#",))
    assert model.params("aime24") == model.sampling
    assert Evaluation("nowhere").sampling == SamplingParams(max_completion_length=8192, temperature=0.8, top_p=0.95)


def results() -> list[BenchmarkResult]:
    correct = torch.tensor([[True, False], [True, True]])
    costs = {"mean_length": 10.0, "clipped": 0.25, "kv_saving_integral": 0.1, "kv_peak_bytes": 2048, "seconds": 1.0}
    strict = {"dense": accuracy(correct), "RKV-24": accuracy(correct[:1])}
    return [
        BenchmarkResult(name, cache, strict[cache], accuracy(correct[1:]), kv_saving_final=0.5, **costs)
        for name in ("gsm8k", "aime24")
        for cache in ("dense", "RKV-24")
    ]


def test_table() -> None:
    """A row per benchmark and cache, then their means; two conventions, and costs."""
    lines = results_table(results()).splitlines()
    assert lines[0].split()[:6] == ["benchmark", "problems", "measure", "cache", "strict", "lenient"]
    assert [line.split()[0] for line in lines[2:8]] == ["gsm8k"] * 2 + ["aime24"] * 2 + ["mean"] * 2
    assert lines[2].split()[1:5] == ["2", "Avg@2", "dense", "75.0"]
    assert lines[3].split()[3:5] == ["RKV-24", "50.0"]
    assert lines[2].endswith("10.0   25.0 %    50.0 %  2.0 KiB")


def test_the_convention_of_the_answers_chooses_what_is_shown_first() -> None:
    strict, lenient = (results_table(results(), answers).splitlines() for answers in CONVENTIONS)
    assert lenient[0].split()[4:6] == ["lenient", "strict"]
    assert strict[2].index("75.0") < strict[2].index("100.0")
    assert lenient[2].index("75.0") > lenient[2].index("100.0")


def test_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    clock = TimeLeft(total=1000, seconds=0.0)
    clock.report("gsm8k, dense", Progress(step=1, active=2, finished=0, total=4, tokens=9), limit=100)
    clock.report("gsm8k, dense", Progress(step=9, active=2, finished=2, total=4, tokens=99), limit=100)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "gsm8k, dense: 0/4 sequences of this batch, 0 % of the whole, ? left"
    assert re.fullmatch(r"gsm8k, dense: 2/4 sequences of this batch, 20 % of the whole, [\d:]+ left", second)
    clock.done, clock._start = 250, clock._start - 60.0
    clock.report("{x}", Progress(step=1, active=2, finished=0, total=4, tokens=9), limit=100)
    assert capsys.readouterr().out == "{x}: 0/4 sequences of this batch, 25 % of the whole, 03:00 left\n"


def test_real_rows_go_through_too(folder: Path, policy: Path, data_dir: Path) -> None:
    file = config(folder, policy)
    arguments = ["--data.init_args.max_rows=1", f"--data.init_args.folder={data_dir}"]
    cut = "--model.init_args.policy.init_args.path"
    tokenizer = character_tokenizer(string.printable)
    model = tiny_model("qwen2", vocab_size=len(tokenizer), hidden_size=32, max_position_embeddings=4000)
    model.save_pretrained(folder / "long")
    tokenizer.save_pretrained(folder / "long")
    cli = main(["test", "--config", file, *arguments, f"{cut}={folder / 'long'}"])
    assert [r.accuracy.num_problems for r in cli.model.results] == [1] * 21


@pytest.mark.parametrize("command", ["test", "predict"])
def test_settings_of_an_unknown_benchmark_are_refused(command: str, folder: Path, policy: Path) -> None:
    arguments = [command, "--config", config(folder, policy), "--data.benchmarks=[gsm8k]"]
    with pytest.raises(ValueError, match=r"sampling_of: there is no benchmark 'aime42'. Did you mean 'aime24'\?"):
        main([*arguments, "--model.init_args.sampling_of={amc23: {top_k: 5}, aime42: {top_k: 5}}"])


@pytest.mark.parametrize(("count", "more"), [(ROWS_NAMED, ""), (ROWS_NAMED + 1, ", ...")])
def test_rows_without_room_are_named_up_to_a_number(count: int, more: str) -> None:
    rows = [{"prompt": "1", "answer": "1"}] * (count + 1)
    with pytest.warns(UserWarning, match=re.escape(f", {ROWS_NAMED}{more}) leave no room")):
        found = with_room("own", rows, [[5], *[[5] * 9] * count], SamplingParams(max_completion_length=4), 8)
    assert (len(found.sampled), len(found.too_long)) == (1, count)
