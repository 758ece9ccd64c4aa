"""Statistics of queries: against singular vectors and the cache's own queries, into a file and out of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_run import run_console

from sparse_rl_lightning.calibration import gather_statistics, pad
from sparse_rl_lightning.compressors import LearnedScore, QFilters, QueryStatistics, SnapKV, TriAttention
from sparse_rl_lightning.compressors.query_statistics import QueryMoments
from sparse_rl_lightning.compressors.rotary import rotate, rotate_to_mean
from sparse_rl_lightning.policies.geometry import CacheGeometry, model_sizes
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams
from sparse_rl_lightning.testing import ARCHITECTURES, character_tokenizer, random_layer, tiny_model

SIZES = {"budget": 10, "buffer": 4, "num_sinks": 2, "window": 3}
INV_FREQ = random_layer().inv_freq


def test_rotation_is_that_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    vectors, positions = torch.randn(2, 3, 7, 16), torch.randint(0, 900, (2, 7))
    angle = torch.cat([positions.unsqueeze(-1) * INV_FREQ] * 2, dim=-1)
    expected, _ = apply_rotary_pos_emb(vectors, vectors, angle.cos(), angle.sin())
    turned = rotate(vectors, positions[:, None], INV_FREQ)
    torch.testing.assert_close(turned, expected)
    torch.testing.assert_close(rotate(turned, -positions[:, None], INV_FREQ), vectors)
    ahead = torch.tensor([1, 5, 30])
    each = torch.stack([rotate(vectors, positions[:, None] + a, INV_FREQ) for a in ahead])
    torch.testing.assert_close(
        rotate_to_mean(vectors, positions[:, None], ahead, INV_FREQ), each.mean(dim=0), rtol=1e-4, atol=1e-4
    )


def test_moments_are_means_and_singular_vectors() -> None:
    queries = torch.randn(3, 4, 9, 16, dtype=torch.float64) + torch.randn(4, 1, 16, dtype=torch.float64)
    positions, lengths = torch.arange(9).expand(3, 9), torch.tensor([9, 4, 7])
    mask = positions < lengths[:, None]
    padded = queries.masked_fill(~mask[:, None, :, None], torch.nan)
    statistics = QueryStatistics.of_layers([QueryMoments(padded, positions, mask, INV_FREQ)], 2)
    filters = []
    for head in range(4):
        own = torch.cat([queries[b, head, :n] for b, n in enumerate(lengths)])
        torch.testing.assert_close(statistics.mean[0, head].double(), own.mean(dim=0), rtol=0, atol=1e-6)
        pairs = torch.complex(*own.chunk(2, dim=-1)).abs()
        torch.testing.assert_close(statistics.lengths[0, head].double(), pairs.mean(dim=0), rtol=0, atol=1e-6)
        turned = rotate(own, torch.cat([positions[0, :n] for n in lengths]), INV_FREQ)
        left, _, right = torch.linalg.svd(turned, full_matrices=False)
        filters.append(right[0] * left[:, 0].sum().sign())
    expected = torch.stack([(filters[0] + filters[1]) / 2, (filters[2] + filters[3]) / 2])
    torch.testing.assert_close(statistics.filters[0].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_recorded_queries_are_those_of_the_cache(architecture: str) -> None:
    """The ring holds the last queries after rotation; turned back, their mean is the statistics of these tokens."""
    model = tiny_model(architecture, initializer_range=0.2, eos_token_id=None)
    sampler = RolloutSampler(model, SnapKV(budget=60, buffer=4, window=12))
    rollout = sampler.generate([[5, 9, 7]], SamplingParams(max_completion_length=10, seed=0))
    lengths = torch.tensor([12])  # the last token drawn is never fed
    statistics = gather_statistics(model, rollout.sequences, lengths)
    ring = sampler.cache.queries[:, 0]  # (L, Hq, 12, D), position 0 first
    still = rotate(ring, -torch.arange(12), model.get_decoder().rotary_emb.inv_freq)
    torch.testing.assert_close(statistics.mean, still.mean(dim=2), rtol=0, atol=1e-5)
    directions = torch.linalg.svd(ring)[2][:, :, 0]  # (L, Hq, D)
    side = (ring.sum(dim=2) * directions).sum(dim=-1, keepdim=True).sign()
    pairs = (directions * side).unflatten(1, (2, 2)).mean(dim=2)
    torch.testing.assert_close(statistics.filters, pairs, rtol=0, atol=1e-4)


def test_batches_and_padding_do_not_matter() -> None:
    model = tiny_model(initializer_range=0.2)
    texts = [list(range(5, 5 + n)) for n in (3, 17, 9, 40, 1)]
    ids, lengths = pad(texts)
    whole = gather_statistics(model, ids, lengths)
    for size in (1, 2):
        part = gather_statistics(model, ids, lengths, batch_size=size)
        for name in ("mean", "lengths", "filters"):
            torch.testing.assert_close(getattr(part, name), getattr(whole, name), rtol=0, atol=1e-5)
    other = gather_statistics(model, ids.masked_fill(ids == 0, 77), lengths)
    torch.testing.assert_close(other.mean, whole.mean, rtol=0, atol=1e-6)
    assert not model.model.layers[0].self_attn.q_proj._forward_hooks


def test_a_file_gives_the_same_scores(tmp_path: Path) -> None:
    model = tiny_model(initializer_range=0.2)
    statistics = gather_statistics(model, torch.arange(3, 43)[None], torch.tensor([40]))
    path = tmp_path / "statistics.safetensors"
    statistics.save(path)
    layer = random_layer()
    for method in (QFilters, TriAttention):
        ours = method(**SIZES, statistics=statistics).score(layer)
        torch.testing.assert_close(method(**SIZES, statistics=str(path)).score(layer), ours, equal_nan=True)


# ---------------------------------------------------------------- the command and its mistakes


@pytest.fixture
def policy(folder: Path) -> Path:
    tokenizer = character_tokenizer("0123456789+=")
    tokenizer.save_pretrained("policy")
    tiny_model(vocab_size=len(tokenizer), initializer_range=0.2).save_pretrained("policy")
    return folder


def test_the_command_that_messages_name_makes_the_file(
    policy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "1+2=", "completion": "3"}, {"prompt": "4+50=", "answer": "54"}, {"prompt": "12345"}]
    Path("texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["policy", "texts.jsonl", "s.safetensors", "--batch_size=2", "--max_length=4"]
    assert run_console(monkeypatch, "statistics", *given) is None
    assert "statistics of 12 tokens of 3 texts to s.safetensors" in capsys.readouterr().out
    model = tiny_model(vocab_size=15, initializer_range=0.2)
    tokenizer = character_tokenizer("0123456789+=")
    ids, lengths = pad([tokenizer(text)["input_ids"] for text in ("1+2=", "4+50", "1234")])
    expected = gather_statistics(model, ids, lengths)
    torch.testing.assert_close(QueryStatistics.load("s.safetensors", "Test").mean, expected.mean, rtol=0, atol=1e-6)
    assert TriAttention(**SIZES, statistics="s.safetensors").score(random_layer()).shape == (3, 2, 14)


def test_the_command_teaches_the_network_of_learned_scores(
    policy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("texts.jsonl").write_text(json.dumps({"prompt": "1+2=3" * 9}) + "\n")
    given = ["policy", "texts.jsonl", "network.safetensors", "--method=LearnedScore", "--max_length=40"]
    assert run_console(monkeypatch, "statistics", *given) is None
    assert re.search(r"a network that explains -?\d+% of .* of 40 tokens of 1 texts", capsys.readouterr().out)
    model = tiny_model(vocab_size=15, initializer_range=0.2)
    learned = LearnedScore(**SIZES, weights="network.safetensors")
    learned.check_model(model_sizes(model, CacheGeometry.of(model)))
    given[2:] = ["s.safetensors", "--method=SnapKV"]
    assert "LearnedScore" in str(run_console(monkeypatch, "statistics", *given)) + capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "There is no data file 'texts.jsonl'"),
        ("", "there is no text"),
        ('{"prompt": "1"}\noops\n', "texts.jsonl, line 2 is not JSON"),
        ('{"text": "1"}\n', "texts.jsonl, line 1: .*'prompt'"),
        ('{"prompt": ""}\n', "texts.jsonl, line 1: .*empty prompt"),
    ],
)
def test_wrong_texts_are_named(
    policy: Path, content: str | None, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        Path("texts.jsonl").write_text(content)
    assert run_console(monkeypatch, "statistics", "policy", "texts.jsonl", "s.safetensors") == 1
    assert re.match(f"error: .*{message}", capsys.readouterr().err)
    assert not Path("s.safetensors").exists()


@pytest.mark.parametrize("method", [QFilters, TriAttention])
def test_missing_or_foreign_statistics_name_the_command(
    method: type[QFilters] | type[TriAttention], folder: Path
) -> None:
    command = r"with: sparse-rl statistics POLICY TEXTS.jsonl \S+\.safetensors"
    name = method.__name__
    with pytest.raises(ValueError, match=rf"{name}: there is no file statistics='no.safetensors'.*{command}"):
        method(**SIZES, statistics="no.safetensors")
    save_file({"weight": torch.zeros(3)}, "other.safetensors")
    Path("text.safetensors").write_text("no tensors")
    whole = {name: torch.ones(2, 4, 8, dtype=torch.int32) for name in ("mean", "lengths", "filters")}
    save_file(whole, "integers.safetensors")
    for path in ("other.safetensors", "text.safetensors", "integers.safetensors"):
        with pytest.raises(ValueError, match=rf"{name}: statistics='{path}' does not hold .*{command}"):
            method(**SIZES, statistics=path)
    wide = tiny_model(hidden_size=128, num_heads=8, num_layers=1)
    foreign = gather_statistics(wide, torch.arange(3, 13)[None], torch.tensor([10]))
    message = rf"{name}: the statistics are of a model with 1 layers .* \(8, 2, 16\), but layer 1 .* \(4, 2, 16\).*"
    with pytest.raises(ValueError, match=message + command):
        method(**SIZES, statistics=foreign).score(random_layer())
