"""learner.gradient_checkpointing: the same rollouts, loss and weights, less memory, every layer computed twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import assert_same_logprobs, assert_same_sums
from test_replay_grpo import ADAPTERS, part_of
from test_replay_grpo import module as replay_module
from test_sparse_grpo import Recorder, fit, weights
from test_sparse_grpo import module as sparse_module
from tiny_grpo import is_checkpointing

from sparse_rl_lightning.callbacks import ImportanceReweighting, SparsityAwareRejection
from sparse_rl_lightning.compressors import RKV
from sparse_rl_lightning.learner.forward import Learner
from sparse_rl_lightning.modules import LearnerOptions
from sparse_rl_lightning.records import Rollout
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.testing import tiny_model

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "dense": (sparse_module, {}),
    "packed": (sparse_module, {"micro_batch_tokens": 40}),
    "replay": (replay_module, {}),
    "mixed": (replay_module, {"replay_objective": "mixed"}),
    "adapters": (replay_module, {"adapters": ADAPTERS}),
}


FORMS: list[Any] = [(case, True) for case in CASES]
FORMS += [(case, how) for case in ("packed", "mixed") for how in ("selective", "offload")]


def build(case: str, checkpointing: Any) -> Any:
    kind, options = CASES[case]
    options = dict(options)
    if "adapters" in options:
        pytest.importorskip("peft", reason="peft is an extra")
    tokens = options.pop("micro_batch_tokens", None)
    learner = LearnerOptions(micro_batch_tokens=tokens, gradient_checkpointing=checkpointing)
    grpo = kind(learner=learner, beta=0.05, steps_per_generation=2, **options)
    grpo.configure_model()
    return grpo


def trained(case: str, checkpointing: Any) -> tuple[torch.Tensor, list[Rollout], list[int]]:
    """Weights after two rollouts, the rollouts, and passes through a layer with gradient and without."""
    grpo, recorder, passes = build(case, checkpointing), Recorder(), [0, 0]

    def count(*_: Any) -> None:
        passes[torch.is_grad_enabled()] += 1

    grpo.policy.model.layers[0].input_layernorm.register_forward_hook(count)
    fit(grpo, 4, [SparsityAwareRejection(0.3), ImportanceReweighting(), recorder])
    return weights(grpo), [scored.rollout for scored in recorder.scored], passes


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("case", "how"), FORMS)
def test_training_is_the_same_and_layers_run_twice(case: str, how: Any) -> None:
    plain, rollouts, (without, once) = trained(case, False)
    checkpointed, same, (still_without, twice) = trained(case, how)
    untrained = build(case, False)
    assert (plain - weights(untrained)).abs().max() > 1e-4
    assert_same_sums(checkpointed, plain, size=weights(untrained))
    assert len(rollouts) == len(same) == 2
    for one, other in zip(rollouts, same, strict=True):  # the second under weights that were trained so
        assert torch.equal(one.sequences, other.sequences)
        assert_same_logprobs(one.sampler_logprobs, other.sampler_logprobs, share=1e-5)
        assert_same_logprobs(one.old_logprobs, other.old_logprobs, share=1e-5)
    # a split micro-batch goes through the layers twice anyway, part by part
    assert twice == (1.5 if case == "packed" else 2) * once > 0
    assert still_without == without  # rollouts and rescoring


@pytest.mark.parametrize("micro_batch_tokens", [None, 60])
@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("how", [True, "selective", "offload"])
def test_gradients_are_the_same_bit_by_bit(how: Any, replays: bool, micro_batch_tokens: int | None) -> None:
    gradients = []
    for checkpointing in (False, how):
        model = tiny_model(initializer_range=0.2, eos_token_id=None)
        sampler = RolloutSampler(model, RKV(budget=12, buffer=5, num_sinks=1, window=3))
        rollout = sampler.generate([list(range(3, 20)), [4, 5]], SamplingParams(max_completion_length=30))
        options = LearnerOptions(micro_batch_tokens=micro_batch_tokens, gradient_checkpointing=checkpointing)
        learner = Learner(options, replays=replays)
        learner.prepare(model.train())
        learner.logprobs(model, rollout)[0].square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("how", [None, "layers", 2])
def test_an_unknown_form_is_refused(how: Any) -> None:
    with pytest.raises(ValueError, match="must be true, false, 'selective' or 'offload', got gradient_checkpointing="):
        LearnerOptions(gradient_checkpointing=how)


@pytest.mark.parametrize("case", [case for case in CASES if case != "packed"])
def test_what_is_kept_for_the_backward_pass_is_far_less(case: str) -> None:
    kept = []
    for checkpointing in (False, True):
        grpo = build(case, checkpointing)
        rollout, sizes = part_of(grpo), []
        own = {p.untyped_storage().data_ptr() for p in grpo.policy.parameters()}

        def pack(tensor: torch.Tensor, own: set[int] = own, sizes: list[int] = sizes) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            grpo.micro_batch_loss(rollout, grpo.denominators(rollout))
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 2


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_embeddings_have_no_hook(checkpointing: bool) -> None:
    """The sampler calls them too, and packs what has none."""
    grpo = build("dense", checkpointing)
    assert is_checkpointing(grpo.policy) == checkpointing
    assert not grpo.policy.get_input_embeddings()._forward_hooks
