"""What a slot goes through between the end of its sequence and the host's next look cannot fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_rl_lightning.compressors import SnapKV
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.records import LayerState, Rollout
from sparse_rl_lightning.rollout import RolloutSampler, RolloutSession, SamplingParams
from sparse_rl_lightning.testing import character_tokenizer, tiny_model

TOKENIZER = character_tokenizer()
SIZES: dict[str, Any] = {"budget": 16, "buffer": 5, "num_sinks": 2, "window": 4}
PROMPTS = [[30, 31, 32], [40, 41, 42, 43, 44]]
LOOK = "sparse_rl_lightning.rollout.engine.scheduler.CHECK_EVERY"


def policy(eos_token_id: int | None) -> Any:
    return tiny_model(initializer_range=0.12, vocab_size=len(TOKENIZER), eos_token_id=eos_token_id, seed=4)


def outcome(check_every: int, seed: int, patch: pytest.MonkeyPatch, stop: bool, session: bool) -> Rollout | str:
    """A rollout with a protected third of the vocabulary, or what it says when more must stay than a head keeps."""
    patch.setattr(LOOK, {"cpu": check_every})
    protected = SnapKV(**SIZES, protect_token_ids=list(range(0, len(TOKENIZER), 3)))
    model = policy(None if stop else [5, 6, 7, 8])
    sampler = RolloutSampler(model, protected, num_slots=3, tokenizer=TOKENIZER)
    params = SamplingParams(
        num_generations=3, max_completion_length=48, seed=seed,
        stop_strings=tuple(TOKENIZER.decode([token]) for token in (5, 6, 7, 8)) if stop else (),
    )  # fmt: skip
    try:
        if not session:
            return sampler.generate(PROMPTS, params)
        own = RolloutSession(sampler, params, 5)
        own.add(PROMPTS, range(6))
        own.advance()
        return own.take(own.complete)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(("stop", "session"), [(False, False), (True, False), (True, True)])
def test_looking_seldom_refuses_what_looking_always_refuses(
    stop: bool, session: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for seed in range(8):
        always, seldom = (outcome(every, seed, monkeypatch, stop, session) for every in (1, 8))
        assert isinstance(always, str) == isinstance(seldom, str), seed
        if not isinstance(always, str) and not isinstance(seldom, str):
            assert torch.equal(always.sequences, seldom.sequences)
            assert torch.equal(always.sampler_logprobs, seldom.sampler_logprobs)
            assert torch.equal(always.evictions.death, seldom.evictions.death)
        else:
            assert "must stay" in str(always)
            assert "must stay" in str(seldom)
        found.append(isinstance(always, str))
    assert 0 < sum(found) < len(found), "the case is not what it should be"


def test_a_conversation_without_room_is_not_compressed_again() -> None:
    """The first compression is due where the last token by length has been drawn."""

    class PromptsAlone(SnapKV):
        """Refuses all that was drawn."""

        def score(self, layer: LayerState) -> Tensor:
            if bool((layer.positions.masked_fill(~layer.valid, 0) >= 40).any()):
                raise UserError("drawn")
            return super().score(layer)

    sampler, length = RolloutSampler(policy(None), PromptsAlone(**SIZES), num_slots=1), SIZES["buffer"] + 1
    session = RolloutSession(sampler, SamplingParams(max_completion_length=length), 40, turns=True)
    session.add([[30] * 40], range(1))
    session.advance()
    session.finish(0)
    assert session.take([0]).completion_lengths.tolist() == [length]


class Picky(SnapKV):
    """Bears the end token nowhere."""

    def __init__(self, error: type[Exception], **sizes: Any) -> None:
        super().__init__(**sizes)
        self.error, self.raised = error, 0

    def score(self, layer: LayerState) -> Tensor:
        if bool(((layer.token_ids == 5) & layer.valid).any()):
            self.raised += 1
            raise self.error("token 5")
        return super().score(layer)


def test_a_refusal_of_a_compressor_is_looked_into_first(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(num_generations=8, max_completion_length=60, seed=2)
    rollouts = []
    for every in (1, 8):
        monkeypatch.setattr(LOOK, {"cpu": every})
        rollouts.append(RolloutSampler(policy(5), Picky(UserError, **SIZES)).generate(PROMPTS, params))
    assert bool(rollouts[0].finished.any())
    assert torch.equal(rollouts[0].sequences, rollouts[1].sequences)
    assert torch.equal(rollouts[0].evictions.death, rollouts[1].evictions.death)
    with pytest.raises(UserError, match="token 5"):
        RolloutSampler(policy(None), Picky(UserError, **SIZES)).generate(PROMPTS, params)


@pytest.mark.parametrize("error", [KeyError, TypeError, RuntimeError, torch.OutOfMemoryError])
@pytest.mark.parametrize("eos_token_id", [5, None])
def test_any_other_error_of_a_score_ends_the_run_at_its_line(
    error: type[Exception], eos_token_id: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOOK, {"cpu": 8})
    picky = Picky(error, **SIZES)
    sampler = RolloutSampler(policy(eos_token_id), picky)
    with pytest.raises(error, match="token 5") as raised:
        sampler.generate(PROMPTS, SamplingParams(num_generations=8, max_completion_length=60, seed=2))
    assert raised.traceback[-1].path == Path(__file__)
    assert picky.raised == 1
