"""DESIGN property 8: two ranks train as one does, with DDP and ZeRO-1, 2 and 3, in real processes over gloo."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import STEPS, TRAINER, run, train
from safetensors.torch import load_file
from tiny_grpo import module

pytestmark = pytest.mark.timeout(900)  # what the processes that all tests share may take on a busy machine
STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "fsdp2"]
SLOW = ["zero1", "zero2"]  # each strategy takes half a dozen runs of two processes
each_strategy = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in STRATEGIES]
)
CANDIDATES: dict[str, dict[str, Any]] = {  # what reads the sampler's most likely tokens
    "ScoreCentering": {"corrected": False},
    "SamplerSupport": {"corrected": False, "settings": {"top_k": 12}},
}
Outcomes = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process samples and trains; its rollouts are what the others are fed."""
    folder = tmp_path_factory.mktemp("alone")
    outcome = train({"name": "alone"}, 1, folder)
    torch.save(outcome["sampled"], folder / "record.pt")
    train({"name": "begin", "checkpoints": str(folder / "begin"), "trainer": {"max_steps": 3}}, 1, folder)
    outcome |= {"record": str(folder / "record.pt"), "last": str(folder / "begin" / "last.ckpt")}
    for name, job in CANDIDATES.items():
        outcome[name] = train({"name": name, "candidates": name, **job}, 1, folder)
        torch.save(outcome[name]["sampled"], folder / f"{name}.pt")
    return outcome | {"folder": str(folder)}


@pytest.fixture(scope="module")
def strategies(request: pytest.FixtureRequest) -> list[str]:
    """All, or without the slow ones if none of their tests was chosen."""
    chosen = any(item.path == request.path and item.get_closest_marker("slow") for item in request.session.items)
    return [name for name in STRATEGIES if chosen or name not in SLOW]


@pytest.fixture(scope="module")
def together(alone: dict[str, Any], strategies: list[str], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Two processes, one strategy after the other: on the record, and sampling themselves for one step."""
    jobs = [{"name": name, "strategy": name, "record": alone["record"]} for name in strategies]
    folder = tmp_path_factory.mktemp("together")
    for name in strategies:
        whole, parts = str(folder / f"{name}-whole"), str(folder / f"{name}-parts")
        last = {"strategy": name, "checkpoints": parts, "ckpt_path": f"{parts}/last.ckpt"}
        jobs += [
            {"name": f"live-{name}", "strategy": name, "checkpoints": whole},
            {"name": f"part-{name}", "strategy": name, "checkpoints": parts, "trainer": {"max_steps": 3}},
            {"name": f"rest-{name}", **last},
            {"name": f"poison-{name}", "strategy": name, "poison": True, "trainer": {"max_steps": 3}},
        ]
    jobs += [
        {"name": f"{name}-{s}", "strategy": s, "candidates": name, "record": f"{alone['folder']}/{name}.pt", **job}
        for name, job in CANDIDATES.items() for s in strategies
    ]  # fmt: skip
    jobs += [uneven(name, "ReplayGRPO", replay_objective="mixed") for name in strategies]
    kept = {"checkpoints": str(folder / "ddp-kept"), "trainer": {"max_steps": 3}}
    jobs += [
        {"name": "kept", "strategy": "ddp", **kept},
        {"name": "one-to-two", "strategy": "ddp", "ckpt_path": alone["last"]},
        {"name": "zero3-to-zero2", "strategy": "zero2", "ckpt_path": str(folder / "zero3-parts" / "last.ckpt")},
        {"name": "zero3-to-fsdp2", "strategy": "fsdp2", "ckpt_path": str(folder / "zero3-parts" / "last.ckpt")},
        {"name": "fsdp2-to-zero2", "strategy": "zero2", "ckpt_path": str(folder / "fsdp2-parts" / "last.ckpt")},
    ]
    adam = {"strategy": "fsdp2", "adam": True}
    half = adam | {"checkpoints": str(folder / "adam"), "trainer": {"max_steps": 3}}
    jobs += [
        {"name": "adam-whole", **adam},
        {"name": "adam-part", **half},
        {"name": "adam-rest", **adam, "ckpt_path": str(folder / "adam" / "last.ckpt")},
        {"name": "adam-more", **adam, "ckpt_path": str(folder / "adam-one" / "last.ckpt")},
    ]
    jobs += unlike(folder)
    one = run([half | {"name": "adam-one", "checkpoints": str(folder / "adam-one")}], folder, 1)
    return one | run(jobs, folder, 2, timeout=840) | {"folder": {"path": str(folder)}}


def uneven(strategy: str, module: str, **settings: Any) -> dict[str, Any]:
    """Everything that runs the policy, on ranks whose completions differ in length in every rollout."""
    return {
        "name": f"uneven-{module}-{strategy}", "strategy": strategy, "module": module, "settings": settings,
        "uneven": {"rejects": True}, "trainer": {"max_steps": 6},
        "learner": {"head_chunk_size": 4, "head_in_float32": module == "ReplayGRPO"},
    }  # fmt: skip


def unlike(folder: Path) -> list[dict[str, Any]]:
    """What ranks must not differ in; the files are those of earlier jobs."""
    whole, kept = ({"ckpt_path": str(folder / name / "last.ckpt")} for name in ("ddp-whole", "ddp-kept"))
    place = {"checkpoints": str(folder / "shared"), "last_rank": {"own_folder": str(folder / "elsewhere")}}
    return [
        {"name": "unlike-rows", "strategy": "zero1", "last_rank": {"rows": 9}},
        {"name": "unlike-weights", "strategy": "fsdp2", "settings": {"beta": 0.0}, "last_rank": {"scale": 1.5}},
        {"name": "unlike-reference", "strategy": "ddp", "last_rank": {"scale": 1.5}},
        {"name": "unlike-last", "strategy": "ddp", **kept, "last_rank": whole},
        {"name": "unlike-folder-zero2", "strategy": "zero2", **place},
        {"name": "unlike-folder-fsdp2", "strategy": "fsdp2", **place},
    ]


def test_the_comparison_means_something(alone: dict[str, Any]) -> None:
    assert len(alone["gradients"]) == STEPS
    for gradients in alone["gradients"]:
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        assert norm > 1.5 * TRAINER["gradient_clip_val"], "clipping does not bite"
    assert len(alone["sampled"]) == 3
    assert alone["metrics"]["rejection_rate"] > 0


@each_strategy
def test_gradients_and_weights_of_one_rank(name: str, alone: dict[str, Any], together: Outcomes) -> None:
    outcome = together[name]
    assert len(outcome["gradients"]) == STEPS
    for own, want in zip(outcome["gradients"], alone["gradients"], strict=True):
        assert own.keys() == want.keys()
        for key, value in want.items():
            torch.testing.assert_close(own[key], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()))
    for key, value in alone["weights"].items():
        torch.testing.assert_close(outcome["weights"][key], value, rtol=0, atol=1e-6)
    length = float(torch.stack([g.norm() for g in alone["gradients"][-1].values()]).norm())
    assert outcome["metrics"]["grad_norm"] == pytest.approx(length, rel=1e-5)


@pytest.mark.parametrize("callback", CANDIDATES)
@each_strategy
def test_most_likely_tokens_of_the_sampler_are_of_one_rank(
    name: str, callback: str, alone: dict[str, Any], together: Outcomes
) -> None:
    usual, want, outcome = alone["gradients"], alone[callback]["gradients"], together[f"{callback}-{name}"]["gradients"]
    assert len(outcome) == STEPS
    for step, (gradients, wanted) in enumerate(zip(outcome, want, strict=True)):
        for key, value in wanted.items():
            torch.testing.assert_close(gradients[key], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()))
        assert any(not torch.equal(wanted[key], usual[step][key]) for key in wanted)


@each_strategy
def test_live_sampling_agrees_on_the_first_step(name: str, alone: dict[str, Any], together: Outcomes) -> None:
    first, own = alone["sampled"][0], together[f"live-{name}"]["sampled"][0]
    for position, prompt in enumerate(own["prompts"]):
        place = first["prompts"].index(prompt)
        for field in ("sequences", "completion_mask"):
            mine, other = own["rollout"][field][4 * position :][:4], first["rollout"][field][4 * place :][:4]
            width = min(mine.shape[1], other.shape[1])
            assert torch.equal(mine[:, :width], other[:, :width])
    gradients = together[f"live-{name}"]["gradients"][0]
    for key, value in alone["gradients"][0].items():
        torch.testing.assert_close(gradients[key], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()))


@each_strategy
def test_resume_is_bitwise_on_two_ranks(name: str, together: Outcomes) -> None:
    """Stopped in the middle of the second rollout, whose rest every rank takes from the checkpoint."""
    whole, rest = together[f"live-{name}"], together[f"rest-{name}"]
    assert (rest["global_step"], len(rest["gradients"]), len(rest["sampled"])) == (STEPS, STEPS - 3, 1)
    assert whole["weights"].keys() == rest["weights"].keys()
    assert all(torch.equal(value, rest["weights"][key]) for key, value in whole["weights"].items())


def test_resume_on_more_ranks(alone: dict[str, Any], together: Outcomes) -> None:
    """The rest of the rollout is dropped, the data go on with prompts that were not used yet."""
    outcome = together["one-to-two"]
    assert (outcome["global_step"], outcome["num_rollouts"], len(outcome["sampled"])) == (STEPS, 3, 1)
    assert set(outcome["sampled"][0]["prompts"]) < set(alone["sampled"][2]["prompts"])
    assert "this run has 2: the rest of its last rollout" in text(together)


def test_resume_on_fewer_ranks(alone: dict[str, Any], together: Outcomes, tmp_path: Path) -> None:
    checkpoint = Path(together["folder"]["path"]) / "ddp-kept" / "last.ckpt"
    with pytest.warns(UserWarning, match=r"checkpoint is of 2 rank\(s\), this run has 1"):
        outcome = train({"name": "fewer", "ckpt_path": str(checkpoint)}, 1, tmp_path)
    assert (outcome["global_step"], outcome["num_rollouts"]) == (STEPS, 3)
    assert outcome["sampled"][0]["prompts"] == alone["sampled"][2]["prompts"]


def test_the_state_of_a_sharded_optimizer_is_taken_by_any_number_of_ranks(together: Outcomes) -> None:
    whole, rest = together["adam-whole"], together["adam-rest"]
    assert all(torch.equal(value, rest["weights"][name]) for name, value in whole["weights"].items())
    for saved, resumed in (("adam-part", "adam-rest"), ("adam-one", "adam-more")):
        before, after = together[saved]["moments"][-1], together[resumed]["moments"][0]
        assert before.keys() == after.keys() == whole["weights"].keys()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        assert sum(float(value.sum()) for value in before.values()) > 0


@pytest.mark.parametrize(("was", "now"), [("zero3", "zero2"), ("zero3", "fsdp2"), ("fsdp2", "zero2")])
def test_resume_with_another_sharding(was: str, now: str, together: Outcomes) -> None:
    """Shards that do not fit are left alone: weights come from safetensors, here of the finished run."""
    want = together[f"rest-{was}"]["weights"]
    assert all(torch.equal(want[key], value) for key, value in together[f"{was}-to-{now}"]["weights"].items())
    names = [f"ZeRO-{name[-1]}" if name.startswith("zero") else "FSDP2" for name in (was, now)]
    assert f"is of 2 rank(s) with {names[0]}, this run has 2 with {names[1]}: the weights are taken" in text(together)


def test_only_sharded_weights_are_gathered(strategies: list[str], together: Outcomes) -> None:
    for name in strategies:
        metrics, weights = together[name]["metrics"], together[name]["weights"]
        whole = sum(value.nbytes for value in weights.values())
        sharded = name in ("zero3", "fsdp2")
        assert ("sharding/shadow_bytes" in metrics) == sharded
        # of FSDP2 a step is inside the outermost unit, whose weights are whole then
        assert metrics["sharding/parameter_bytes"] == pytest.approx(whole / 2 if sharded else whole, rel=0.05)
        assert metrics["sharding/wait_seconds"] >= 0
        assert metrics["sharding/optimizer_bytes"] == (whole / 2 if name.startswith("zero") else 0)  # SGD has none
    assert together["zero3"]["metrics"]["sharding/shadow_bytes"] == whole
    assert together["zero3"]["metrics"]["sharding/gather_seconds"] > 0


@pytest.mark.parametrize("name", ["zero3", "fsdp2"])
def test_checkpoint_folder(name: str, together: Outcomes) -> None:
    """Nothing is left of the writing, and the weights beside are those of the policy."""
    folder = Path(together["folder"]["path"]) / f"{name}-parts"
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == {
        "epoch=0-step=5.ckpt", "last.ckpt"
    }  # fmt: skip
    assert not any(path for hidden in folder.glob(".*") for path in hidden.iterdir())
    assert {path.name for path in (folder / "last.ckpt").iterdir()} == {
        "checkpoint", "manifest.json", "trainer.pt", "weights.safetensors"
    }  # fmt: skip
    weights = load_file(folder / "last.ckpt" / "weights.safetensors")
    want = together[f"rest-{name}"]["weights"]
    assert weights.keys() == want.keys()
    assert all(torch.equal(weights[key], value) for key, value in want.items())


@each_strategy
def test_ranks_need_not_have_as_many_tokens(name: str, together: Outcomes) -> None:
    """Chunks of the output head differ in number, in learning, rescoring, replay and acceptance; no rank waits."""
    outcome, ddp = together[f"uneven-ReplayGRPO-{name}"], together["uneven-ReplayGRPO-ddp"]
    assert (outcome["global_step"], outcome["num_rollouts"]) == (6, 3)
    assert [one["rollout"]["completion_mask"].sum().item() for one in outcome["sampled"]] == [16, 96, 16]
    assert {outcome["metrics"][f"rewards/counted/of_rank_{rank}"] for rank in (0, 1)} == {1.0}
    for own, want in zip(outcome["gradients"][:2], ddp["gradients"][:2], strict=True):  # of the first rollout
        for key, value in want.items():
            torch.testing.assert_close(own[key], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rows", r"Ranks differ in their training rows: rank 0 has 16 of the hash \w+, rank 1 has 9 of the hash"),
        ("weights", r"Ranks differ in their starting weights: rank 0 has \w+, rank 1 has \w+. All must read the same"),
        ("reference", "Ranks differ in their reference policy: rank 0 has"),
        ("last", "Ranks differ in their checkpoint: rank 0 has one with the hash"),
        ("folder-zero2", "of ModelCheckpoint is another folder on rank 1 than on rank 0"),
        ("folder-fsdp2", "of ModelCheckpoint is another folder on rank 1 than on rank 0"),
    ],
)
def test_ranks_that_are_unlike_are_refused_before_the_first_step(name: str, said: str, together: Outcomes) -> None:
    outcome = together[f"unlike-{name}"]
    assert re.search(said, outcome["refused"]), outcome["refused"]
    assert outcome["num_rollouts"] == (2 if name == "last" else 0)


def text(together: Outcomes) -> str:
    return (Path(together["folder"]["path"]) / "rank0.txt").read_text()


@each_strategy
def test_a_bad_gradient_on_one_rank_is_skipped_on_all(name: str, together: Outcomes) -> None:
    """Both steps of the first rollout are skipped, so the third is the first that counts, from the initial weights."""
    outcome = together[f"poison-{name}"]
    assert outcome["metrics"]["skipped_steps"] == 2
    fresh = module()
    fresh.configure_model()
    initial = dict(fresh.policy.named_parameters())
    for key, value in outcome["weights"].items():
        assert bool(value.isfinite().all())
        assert not torch.equal(value, initial[key])
        assert float((value - initial[key]).norm()) <= 0.5 * TRAINER["gradient_clip_val"] + 1e-6, "more than one step"
