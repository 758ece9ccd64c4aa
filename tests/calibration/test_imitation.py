"""A network that foresees the full cache's attention: its target beside transformers' own, and what it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import family
from torch import Tensor

from sparse_rl_lightning import RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.calibration import imitate_attention, pad
from sparse_rl_lightning.calibration.imitation import centered, future_attention
from sparse_rl_lightning.calibration.watched import Seen, watch
from sparse_rl_lightning.compressors import LearnedScore
from sparse_rl_lightning.compressors.learned_score import ScoreNetwork, save_network
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.replay.hooks import attention_inputs
from sparse_rl_lightning.testing import tiny_model

HORIZON = 5


def texts(seed: int = 0, count: int = 6, vocabulary: int = 97) -> tuple[Tensor, Tensor]:
    """Random ids of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [int(n) for n in torch.randint(8, 24, (count,), generator=generator)]
    return pad([torch.randint(1, vocabulary, (n,), generator=generator).tolist() for n in lengths])


def everything_seen(model: torch.nn.Module, ids: Tensor) -> list[Seen]:
    found: list[Seen] = []
    watch(model, ids, found.append)
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "gpt_oss"])
def test_the_target_is_the_largest_attention_that_transformers_computes(name: str) -> None:
    model = family(name)
    ids, lengths = texts(vocabulary=model.config.get_text_config().vocab_size)
    seen = everything_seen(model, ids)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(ids, attention_mask=torch.ones_like(ids), output_attentions=True).attentions
    compared, geometry = 0, CacheGeometry.of(model)
    for own, attention in zip(seen, attentions, strict=True):
        if geometry.window_of(own.layer):
            continue
        compared += 1
        found, shown = future_attention(own, lengths, HORIZON)
        batch, heads, length, _ = own.query.shape
        group = heads // own.key.shape[1]
        assert found.shape == (batch, heads // group, (length - 1) // HORIZON, length)
        for b in range(batch):
            for place in range(found.shape[2]):
                start, end = (place + 1) * HORIZON, min((place + 2) * HORIZON, int(lengths[b]))
                assert shown[b, place].tolist() == [j < start < int(lengths[b]) for j in range(length)]
                for h in range(heads // group):
                    for j in range(start if end > start else 0):
                        expected = attention[b, h * group : (h + 1) * group, start:end, j].max()
                        assert found[b, h, place, j].item() == pytest.approx(expected.item(), rel=1e-3, abs=1e-6)
    assert compared


def test_numbers_are_centered_where_they_count() -> None:
    numbers = torch.tensor([[[[1.0, 2, 9], [4, 4, 4]]]])
    shown = torch.tensor([[[True, True, False], [False, False, False]]])
    assert centered(numbers, shown).tolist() == [[[[-0.5, 0.5, 0], [0, 0, 0]]]]


def kept_attention(model: torch.nn.Module, network: ScoreNetwork | None, ids: Tensor) -> float:
    """The share of what is looked at next that the best third by a network keeps in new texts, or a third by chance."""
    total = kept = 0.0
    lengths, hidden = torch.full((len(ids),), ids.shape[1]), list[Tensor]()
    with attention_inputs(model, hidden.append):
        seen = everything_seen(model, ids)
    for layer, own in enumerate(seen):
        attention = future_attention(own, lengths, HORIZON)[0][:, :, -1]
        count = (ids.shape[1] - 1) // HORIZON * HORIZON
        score = torch.rand((*attention.shape[:2], count), generator=torch.Generator().manual_seed(layer))
        if network is not None:
            with torch.no_grad():
                age = torch.log1p((count - 1 - torch.arange(count)).float())
                worth = network(layer, own.key, own.value, hidden[layer])[..., :count]
                score = worth - network.recency[layer][:, None] * age
        best = score.topk(count // 3, dim=-1).indices
        total += float(attention[..., :count].sum())
        kept += float(attention.gather(-1, best).sum())
    return kept / total


def test_it_foresees_new_texts_and_leaves_the_policy_alone(tmp_path: Path) -> None:
    """Texts of few tokens, some of which all others look at: what a token's own states tell."""
    model = tiny_model(vocab_size=12, initializer_range=0.5).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids, lengths = texts(count=32, vocabulary=12)
    network, explained = imitate_attention(model, ids, lengths, horizon=HORIZON, epochs=12, seed=1)
    assert explained > 0.1
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    unseen = torch.randint(1, 12, (16, 21), generator=torch.Generator().manual_seed(9))
    assert kept_attention(model, network, unseen) > kept_attention(model, None, unseen) + 0.07
    save_network(network, tmp_path / "network.safetensors")
    learned = LearnedScore(budget=8, buffer=4, weights=str(tmp_path / "network.safetensors"), num_sinks=0, window=2)
    rollout = RolloutSampler(model.eval(), learned).generate([[3, 4, 5]], SamplingParams(max_completion_length=30))
    off = (replay_logprobs(model, rollout) - rollout.sampler_logprobs).abs().max()
    assert off < 1e-4


def test_the_same_seed_gives_the_same_network() -> None:
    model, (ids, lengths) = tiny_model(), texts()
    one, two, other = (imitate_attention(model, ids, lengths, horizon=4, epochs=1, seed=s)[0] for s in (1, 1, 2))
    assert torch.equal(one.key, two.key)
    assert not torch.equal(one.key, other.key)


def test_texts_up_to_the_horizon_teach_nothing() -> None:
    model, (ids, lengths) = tiny_model(), texts()
    short = pad([[5] * 4])
    longer = torch.zeros(len(ids) + 1, ids.shape[1], dtype=ids.dtype)
    longer[:-1] = ids
    longer[-1, :4] = short[0][0]
    alone, _ = imitate_attention(model, ids, lengths, horizon=4, epochs=1, seed=1)
    beside, _ = imitate_attention(model, longer, torch.cat([lengths, short[1]]), horizon=4, epochs=1, seed=1)
    assert torch.equal(alone.key, beside.key)
    with pytest.raises(
        ValueError, match=r"The longest text has 4 tokens, and what LearnedScore learns from begins behind 4"
    ):
        imitate_attention(model, *short, horizon=4)


def test_windows_in_all_layers_count_beyond_their_length() -> None:
    """Up to there rollouts evict from them, so the network learns them; beyond nothing is left to evict from."""
    model = family("mistral", sliding_window=30)
    ids, lengths = texts(vocabulary=model.config.vocab_size)
    network, explained = imitate_attention(model, ids, lengths, horizon=4, epochs=4)
    assert 0 < explained < 1
    assert network.outer.abs().sum(dim=(1, 2)).min() > 0, "a layer has learned nothing"
    with pytest.raises(ValueError, match="no layer is left for LearnedScore"):
        imitate_attention(family("mistral", sliding_window=8), ids, lengths, horizon=4)


def test_no_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="The longest text has 0 tokens"):
        imitate_attention(tiny_model(), torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))


@pytest.mark.parametrize("name", ["width", "horizon", "epochs", "batch_size", "learning_rate"])
def test_sizes_are_checked(name: str) -> None:
    ids, lengths = texts()
    with pytest.raises(ValueError, match=f"imitate_attention.*{name}|{name}.*imitate_attention"):
        imitate_attention(tiny_model(), ids, lengths, **{name: 0})
