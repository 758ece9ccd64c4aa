"""Problems that do not fit into the context of the evaluated policy: not sampled, wrong, counted and said."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyarrow import parquet
from tiny_grpo import quiet

from sparse_rl_lightning.cli import main
from sparse_rl_lightning.compressors import SnapKV
from sparse_rl_lightning.data import MathBenchmarks
from sparse_rl_lightning.environments import Environment
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.modules import Evaluation, RolloutOptions
from sparse_rl_lightning.policies import LoadedPolicy
from sparse_rl_lightning.retrievers import Quest
from sparse_rl_lightning.rollout import Generator, SamplingParams
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

QUESTIONS = ["1+1?", "What is one plus one, " + "if one is one, " * 30, "One and one?"]
CACHES = ["dense", "KNorm-24"]


@pytest.fixture
def file(write_evaluation: Callable[..., str]) -> str:
    """A configuration with a policy of 400 tokens, one per letter, and a benchmark that is too long in the middle."""
    write_benchmark(QUESTIONS)
    compressor = {"class_path": "KNorm", "init_args": {"budget": 24, "buffer": 4, "window": 4}}
    sampling = {"num_generations": 2, "max_completion_length": 6}
    return write_evaluation(400, compressors=[compressor], sampling=sampling)


def write_benchmark(questions: list[str]) -> None:
    rows = [json.dumps({"problem": question, "answer": "2"}) + "\n" for question in questions]
    Path("mine.jsonl").write_text("".join(rows), encoding="utf-8")


def completions(cache: str) -> dict[str, list[Any]]:
    return parquet.read_table(Path("run") / "evaluation" / cache / "mine.parquet").to_pydict()


def test_a_problem_without_room_is_wrong_counted_and_said_once(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Generator, "texts", lambda self, rollout: [r"\boxed{2}"] * len(rollout))
    with pytest.warns(UserWarning, match=r"mine: 1 of 3 problems \(rows 1\)") as caught:
        cli = main(["test", "--config", file])
    (said,) = [str(warning.message) for warning in caught if "mine" in str(warning.message)]
    assert "no room for max_completion_length=6 in the model's context of 400 tokens" in said
    assert "count as wrong" in said
    for result, cache in zip(cli.model.results, CACHES, strict=True):
        assert (result.cache, result.too_long) == (cache, 1)
        assert (result.accuracy.num_problems, result.accuracy.mean) == (3, pytest.approx(2 / 3))
        table = completions(cache)
        assert list(zip(table["index"], table["completion"], table["correct"], strict=True)) == [
            *[(index, r"\boxed{2}", True) for index in (0, 0, 2, 2)], *[(1, None, False)] * 2
        ]  # fmt: skip
        assert result.mean_length == sum(table["length"]) / 4  # of those that were sampled
        assert result.counters["checks"] == 4
        assert cli.trainer.callback_metrics[f"test/mine/{cache}"] == pytest.approx(2 / 3)
    assert cli.trainer.callback_metrics["test/mine/too_long"] == 1
    assert cli.model._clock.done == cli.model._clock.total  # the time left is of what is sampled


def test_a_resumed_evaluation_says_the_same(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for _ in range(2):
        with pytest.warns(UserWarning, match="mine: 1 of 3 problems"):
            cli = main(["test", "--config", file])
        assert cli.trainer.callback_metrics["test/mine/too_long"] == 1
        shown.append((capsys.readouterr().out.partition("benchmark")[2], cli.model.results))
    assert shown[0] == shown[1]  # its seconds too: it was taken up
    assert "Not sampled, counted as wrong, since prompt and completion exceed the context: mine 1." in shown[0][0]
    settings = json.loads(Path("policy/config.json").read_text()) | {"max_position_embeddings": 800}
    Path("policy/config.json").write_text(json.dumps(settings))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="mine")
        cli = main(["test", "--config", file])
    assert [result.too_long for result in cli.model.results] == [0, 0]  # with room it is not taken up
    assert "Not sampled" not in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:mine")
def test_the_others_draw_what_they_would_draw_without_it_and_another_order_is_evaluated_anew(file: str) -> None:
    """The place of a row decides its random numbers, that of one without room too."""
    main(["test", "--config", file])
    assert completions("dense")["index"] == [0, 0, 2, 2, 1, 1]
    beside = {cache: completions(cache)["completion"][:4] for cache in CACHES}
    write_benchmark([QUESTIONS[0], "Two?", QUESTIONS[2]])
    main(["test", "--config", file])
    for cache in CACHES:
        drawn = completions(cache)["completion"]
        assert beside[cache] == drawn[:2] + drawn[4:]
    write_benchmark([QUESTIONS[0], QUESTIONS[2], QUESTIONS[1]])
    main(["test", "--config", file])
    assert completions("dense")["index"] == [0, 0, 1, 1, 2, 2]


def test_a_benchmark_without_any_room_is_refused_before_anything_is_sampled(file: str) -> None:
    Path("first.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n', encoding="utf-8")
    own = "--data.init_args.own={first: first.jsonl, mine: mine.jsonl}"
    arguments = ["test", "--config", file, own, "--data.init_args.benchmarks=[first,mine]"]
    said = (
        r"mine: no problem leaves room for max_completion_length=395 in the model's context of 400 tokens, the "
        r"shortest prompt has \d+ tokens.*lower max_completion_length of .*, or of mine in model.sampling_of"
    )
    with pytest.raises(ValueError, match=said):
        main([*arguments, "--model.init_args.sampling_of={mine: {max_completion_length: 395}}"])
    assert not list(Path("run").rglob("*.json"))
    with pytest.warns(UserWarning, match="mine: 1 of 3"):
        main([*arguments, "--model.init_args.sampling_of=null"])


class Boxes(Environment):
    """Answers a boxed 7 once, which is nobody's answer but its own."""

    def reset(self, row: dict[str, Any]) -> None:
        self.asked = False

    def step(self, text: str) -> tuple[str | None, float | None]:
        first, self.asked = not self.asked, True
        return (r"\boxed{7}" if first else None), None


def evaluation(**options: Any) -> Evaluation:
    tokenizer = character_tokenizer()
    policy = tiny_model(vocab_size=len(tokenizer), initializer_range=0.1, eos_token_id=[1, 9, 30, 40, 50])
    own: dict[str, Any] = {
        "compressors": [SnapKV(budget=16, buffer=8, window=4)], "environment": Boxes,
        "sampling": SamplingParams(max_completion_length=60, num_generations=2), "rollout": RolloutOptions(num_slots=4),
    }  # fmt: skip
    return Evaluation(LoadedPolicy(policy, tokenizer), **{**own, **options})


def test_a_policy_is_evaluated_in_conversations(tmp_path: Path) -> None:
    questions = [{"problem": f"{n} + 1", "answer": "7"} for n in range(3)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, questions)), encoding="utf-8")
    data = MathBenchmarks(benchmarks=["own"], own={"own": str(tmp_path / "own.jsonl")})
    module = evaluation()
    quiet(default_root_dir=tmp_path).test(module, datamodule=data)
    assert [result.accuracy.mean for result in module.results] == [0.0, 0.0]
    tables = list((tmp_path / "evaluation").rglob("own.parquet"))
    assert len(tables) == 2
    for table in map(pd.read_parquet, tables):
        assert table["completion"].str.contains(r"[environment] \boxed{7}", regex=False).any()
        assert table["completion"].str.startswith("[assistant] ").all()
        assert not table["extracted"].eq("7").any()


class Fails(Boxes):
    """At every other call."""

    count = 0

    def step(self, text: str) -> tuple[str | None, float | None]:
        Fails.count += 1
        if Fails.count % 2:
            raise OSError("no sandbox")
        return super().step(text)


def test_failures_are_said_and_their_results_are_not_kept(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text(json.dumps({"problem": "1 + 1", "answer": "7"}), encoding="utf-8")
    data = MathBenchmarks(benchmarks=["own"], own={"own": str(tmp_path / "own.jsonl")})
    with pytest.warns(UserWarning, match="the environment failed in .*no sandbox"):
        quiet(default_root_dir=tmp_path).test(evaluation(environment=Fails), datamodule=data)
    assert not list((tmp_path / "evaluation").rglob("own.json"))


def test_retrievers_are_refused() -> None:
    with pytest.raises(UserError, match="environment does not work with retrievers"):
        evaluation(retrievers=[Quest(budget=64)])
