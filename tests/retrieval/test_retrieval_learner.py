"""The learner under retrieval: it chooses the pages that the sampler chose, and has its log-probs.

And retrieval as a setting of the training modules, from Python and from the command line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from chosen_pages import ChosenPages
from test_retrieval import PARAMS
from test_retrieval import RETRIEVERS as ALL
from tiny_grpo import Recorder, fit, module
from tiny_run import config

from sparse_rl_lightning.callbacks import MismatchSplit
from sparse_rl_lightning.callbacks.outputs.run_facts import default_title, describe
from sparse_rl_lightning.cli import main
from sparse_rl_lightning.compressors import FullKV, SnapKV
from sparse_rl_lightning.learner.checkpointing import enable_checkpointing
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.modules import ReplayGRPO
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.retrieval.logprobs import LearnerPages
from sparse_rl_lightning.retrievers import Centroid, Quest, Retriever
from sparse_rl_lightning.rollout import RolloutSampler, replay_logprobs, retrieval_logprobs
from sparse_rl_lightning.testing import ARCHITECTURES, tiny_model

PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 9, 33, 1)]
RETRIEVERS = {name: retriever for name, retriever in ALL.items() if name != "own"}
each_retriever = pytest.mark.parametrize("retriever", RETRIEVERS.values(), ids=RETRIEVERS)


def roll_out(retriever: Retriever, architecture: str = "qwen2", **options: Any) -> tuple[Any, Rollout]:
    policy = tiny_model(architecture, initializer_range=0.2, num_layers=3, eos_token_id=None, **options)
    sampler = RolloutSampler(policy, retriever=retriever, num_slots=3)
    return policy, sampler.generate(PROMPTS, PARAMS)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@each_retriever
def test_the_samplers_pages_reproduce_its_logprobs(
    architecture: str, retriever: Retriever, chosen: ChosenPages
) -> None:
    policy, rollout = roll_out(retriever, architecture)
    replayed = chosen.replay_logprobs(policy, rollout, PARAMS.seed, retriever, 0.9)
    torch.testing.assert_close(replayed, rollout.sampler_logprobs, atol=2e-5, rtol=0)
    with torch.no_grad():
        dense, _ = sequence_logprobs(policy, rollout.sequences, rollout.completion_mask, 0.9)
    assert (dense - rollout.sampler_logprobs).abs().max() > 1e-2, "nothing that matters was left out"
    replayed.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.parameters())


@each_retriever
def test_the_learner_chooses_the_same_pages(retriever: Retriever, chosen: ChosenPages) -> None:
    policy, rollout = roll_out(retriever)
    again = retrieval_logprobs(policy, rollout, retriever, 0.9)
    assert chosen.share_differing(rollout, PARAMS.seed, retriever) == 0  # the seed meets no near-tie
    torch.testing.assert_close(again.logprobs, rollout.sampler_logprobs, atol=2e-5, rtol=0)
    assert (again.entropy[rollout.completion_mask] > 0).all()


def test_another_policy_wants_other_pages(chosen: ChosenPages) -> None:
    retriever = RETRIEVERS["centroid"]
    _, rollout = roll_out(retriever)
    other = tiny_model("qwen2", initializer_range=0.2, num_layers=3, eos_token_id=None, seed=9)
    retrieval_logprobs(other, rollout, retriever, 0.9)
    assert 0.1 < chosen.share_differing(rollout, PARAMS.seed, retriever) <= 1


@each_retriever
def test_one_query_at_a_time_gives_the_same_numbers_and_gradients(retriever: Retriever) -> None:
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 37, 8, generator=g) for heads in (6, 2, 2))
    inputs = [t.requires_grad_() for t in (query, key, value)]
    lengths = torch.tensor([5, 1])
    results = []
    for mask_bytes in (1, 2000, 10**9):
        out = LearnerPages(lengths, retriever, mask_bytes=mask_bytes).attend(1, *inputs, 0.3)
        results.append([out, *torch.autograd.grad((out * out.detach().cos()).sum(), inputs)])
    for other in results[:-1]:
        for a, b in zip(other, results[-1], strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@each_retriever
def test_attention_is_that_of_a_loop_over_queries(retriever: Retriever) -> None:
    g = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, heads, 37, 8, generator=g, dtype=torch.float64) for heads in (6, 2, 2))
    prompt, r = 5, retriever
    got = LearnerPages(torch.tensor([prompt]), r).attend(1, query, key, value, 0.3)
    for at in range(37):
        there, limit = at // r.page_size + 1, r.schedule.at(at + 1) // r.page_size
        for h in range(2):
            read = set(range(there))
            if there > limit and at >= prompt:
                whole = key[0, h, : at // r.page_size * r.page_size].unflatten(0, (-1, r.page_size))
                scores = r.score(query[0, 3 * h : 3 * h + 3, None, at], r.summarize(whole).transpose(0, 1))[0]
                middle = range(r.num_first_pages, there - r.num_last_pages)
                best = sorted(middle, key=lambda p, scores=scores: -float(scores[p]))
                free = limit - r.num_first_pages - r.num_last_pages
                read = (read - set(middle)) | set(best[:free])
            tokens = [t for t in range(at + 1) if t // r.page_size in read]
            for q in range(3 * h, 3 * h + 3):
                shares = (0.3 * key[0, h, tokens] @ query[0, q, at]).softmax(0)
                torch.testing.assert_close(got[0, q, at], shares @ value[0, h, tokens], atol=1e-12, rtol=0)


def test_gradient_checkpointing_chooses_the_same_pages_again() -> None:
    retriever = RETRIEVERS["quest"]
    policy, rollout = roll_out(retriever)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            enable_checkpointing(policy, use_reentrant=False)
        policy.train()
        policy.zero_grad()
        retrieval_logprobs(policy, rollout, retriever, 0.9).logprobs.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_bfloat16_chooses_nearly_the_same_pages(chosen: ChosenPages) -> None:
    """Bound as of replay in bfloat16; few of the pages differ, and those that do explain no large part of the rest."""
    retriever = RETRIEVERS["centroid"]
    policy = tiny_model(initializer_range=0.2, num_layers=3, eos_token_id=None).bfloat16()
    rollout = RolloutSampler(policy, retriever=retriever).generate(PROMPTS, PARAMS)
    mask = rollout.completion_mask
    with torch.no_grad():
        replayed = chosen.replay_logprobs(policy, rollout, PARAMS.seed, retriever, 0.9)
        retrieval_logprobs(policy, rollout, retriever, 0.9)
        dense, _ = sequence_logprobs(policy, rollout.sequences, mask, 0.9)
    noise, sparse = ((own - rollout.sampler_logprobs)[mask].abs().mean() for own in (replayed, dense))
    assert noise < 0.03
    assert sparse > 10 * noise
    assert chosen.share_differing(rollout, PARAMS.seed, retriever) < 0.1


def test_what_cannot_be_followed_is_refused() -> None:
    retriever = RETRIEVERS["centroid"]
    policy, rollout = roll_out(retriever)
    with pytest.raises(ValueError, match="no record of its evictions"):
        replay_logprobs(policy, rollout)
    compressor = SnapKV(budget=24, buffer=5, num_sinks=2, window=4)
    both = RolloutSampler(policy, compressor, retriever=retriever).generate(PROMPTS, PARAMS)
    with pytest.raises(ValueError, match="compressed besides"):
        retrieval_logprobs(policy, both, retriever)


def test_rollouts_of_a_fit_read_pages() -> None:
    retriever, recorder = Quest(6, page_size=2, num_dense_layers=1), Recorder()
    grpo = module(compressor=FullKV(), retriever=retriever)
    trainer = fit(grpo, steps=2, callbacks=[recorder], limit_val_batches=1, check_val_every_n_epoch=1)
    rollout = recorder.scored[0].rollout
    assert rollout.kv.read_share < 1
    assert rollout.kv.saving_final == 0
    assert trainer.callback_metrics["kv/read_share"] == pytest.approx(recorder.scored[-1].rollout.kv.read_share)
    assert trainer.callback_metrics["mismatch/kl_k3"] > 0
    assert grpo.generator.sampler().retriever is retriever
    assert grpo.generator.sampler(dense=True).retriever is None
    assert grpo.generator.is_sparse
    assert default_title(grpo) == "SparseGRPO with FullKV, Quest reading 6 tokens"
    assert describe(grpo)["retriever"].startswith("Quest(budget=6, page_size=2")


def test_partial_rollouts_go_on_with_their_pages() -> None:
    grpo = module(retriever=Centroid(8, page_size=2, num_dense_layers=0), num_slots=8, partial_rollout_steps=6)
    fit(grpo, steps=3)
    assert grpo.num_rollouts == 3


def test_replay_refuses_a_retriever_by_name() -> None:
    with pytest.raises(ValueError, match=r"ReplayGRPO replays evictions, and Quest evicts nothing.*SparseGRPO"):
        module(kind=ReplayGRPO, retriever=Quest(6, page_size=2))


def test_the_split_of_the_mismatch_refuses_a_retriever() -> None:
    with pytest.raises(ValueError, match="MismatchSplit replays evictions"):
        fit(module(retriever=Quest(6, page_size=2, num_dense_layers=1)), steps=1, callbacks=[MismatchSplit()])


def test_a_configuration_names_a_retriever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = config()
    schedule = {"class_path": "LengthSchedule", "init_args": {"starts": [0, 16], "budgets": [12, 16]}}
    arguments = {"budget": schedule, "page_size": 4, "num_dense_layers": 1, "group_reduction": "max"}
    settings["model"]["init_args"]["retriever"] = {"class_path": "Centroid", "init_args": arguments}
    settings["model"]["init_args"]["compressor"] = {"class_path": "FullKV"}
    Path("run.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    grpo = main(["fit", "--config", "run.yaml"]).model
    assert isinstance(grpo.generator.retriever, Centroid)
    assert (grpo.generator.retriever.group_reduction, grpo.generator.retriever.schedule.at(20)) == ("max", 16)
    Path("run.yaml").write_text(yaml.safe_dump(settings).replace("Centroid", "Centroids"), encoding="utf-8")
    with pytest.raises((ValueError, SystemExit)):
        main(["fit", "--config", "run.yaml"])
