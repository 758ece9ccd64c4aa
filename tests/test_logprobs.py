"""Chunked log-probabilities against the whole logits of a plain forward: values, gradients, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from sparse_rl_lightning.logprobs import hidden_states, logprobs_at, sequence_logprobs, token_logprobs

LENGTHS = (9, 6, 4)
PROMPTS = (3, 2, 1)


def tiny_model(tied: bool = True) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, initializer_range=0.5, attn_implementation="sdpa",
    )  # fmt: skip
    return Qwen2ForCausalLM(config).double().eval()


def batch() -> tuple[Tensor, Tensor]:
    """Right-padded sequences (3, 9) and the mask of their completions."""
    generator = torch.Generator().manual_seed(1)
    index = torch.arange(max(LENGTHS))
    sequences = torch.randint(1, 31, (3, max(LENGTHS)), generator=generator)
    lengths, prompts = torch.tensor(LENGTHS)[:, None], torch.tensor(PROMPTS)[:, None]
    return sequences.masked_fill(index >= lengths, 0), (index >= prompts) & (index < lengths)


def plain(model: Qwen2ForCausalLM, sequences: Tensor, temperature: float = 1.0) -> Tensor:
    """(3, 9, V) by the book: all log-probabilities, one row at a time, no padding."""
    logs = torch.zeros(*sequences.shape, 31, dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        logits = model(sequences[row : row + 1, :length]).logits[0, :-1]
        logs[row, 1:length] = (logits / temperature).log_softmax(-1)
    return logs


def of_tokens(logs: Tensor, sequences: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(3, 9) log-probabilities of the tokens, and entropies."""
    return logs.gather(-1, sequences[..., None])[..., 0] * mask, -(logs.exp() * logs).sum(-1) * mask


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_size", [1, 4, 512])
def test_values_are_those_of_a_plain_forward(temperature: float, chunk_size: int) -> None:
    model, (sequences, mask) = tiny_model(), batch()
    with torch.no_grad():
        logprobs, entropy = sequence_logprobs(model, sequences, mask, temperature, chunk_size)
        expected_logprobs, expected_entropy = of_tokens(plain(model, sequences, temperature), sequences, mask)
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-10, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-10, rtol=0)
    assert bool((logprobs[mask] < 0).all())
    assert logprobs[~mask].count_nonzero() == 0
    assert entropy[~mask].count_nonzero() == 0


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_those_of_a_plain_forward(tied: bool) -> None:
    sequences, mask = batch()
    factors = torch.randn(mask.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    models, gradients = [tiny_model(tied) for _ in range(2)], []
    ours = sequence_logprobs(models[0], sequences, mask, 0.7, 4)
    by_the_book = of_tokens(plain(models[1], sequences, 0.7), sequences, mask)
    for model, (logprobs, entropy) in zip(models, (ours, by_the_book), strict=True):
        (factors * logprobs + factors.flip(1) * entropy).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert min(gradient.abs().max() for gradient in gradients[1].values()) > 1e-3
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-9, rtol=0, msg=name)


def test_a_head_that_draws_is_differentiated_as_it_was_drawn() -> None:
    """An adapter with dropout on the output head: the backward pass computes its chunks again."""
    model, (sequences, mask) = tiny_model(), batch()
    head = model.lm_head
    model.lm_head = torch.nn.Sequential(torch.nn.Dropout(0.5), head)
    model.train()
    products: list[Tensor] = []
    head.register_forward_hook(lambda module, inputs, output: products.append(inputs[0].detach()))
    sequence_logprobs(model, sequences, mask, chunk_size=5)[0].sum().backward()
    drawn, again = products[:3], sorted(products[3:], key=len, reverse=True)
    assert len(again) == 3
    assert all(any(torch.equal(chunk, each) for each in drawn) for chunk in again)


def test_the_head_never_sees_more_than_a_chunk_and_only_masked_tokens() -> None:
    model, (sequences, mask) = tiny_model(), batch()
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: rows.append(output.shape[:-1].numel()))
    logprobs, _ = sequence_logprobs(model, sequences, mask, chunk_size=5)
    assert int(mask.sum()) == 13
    assert rows == [5, 5, 3]
    logprobs.sum().backward()  # the logits of every chunk are made once more, chunk by chunk
    assert sorted(rows) == [3, 3, 5, 5, 5, 5]


def test_logits_are_not_kept_for_the_backward_pass() -> None:
    model, (sequences, mask) = tiny_model(), batch()
    states = hidden_states(model, sequences)[:, :-1][mask[:, 1:]]
    saved: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs, _ = token_logprobs(model.lm_head, states, sequences[mask], chunk_size=5)
    assert logprobs.requires_grad
    assert not [shape for shape in saved if len(shape) == 2 and shape[-1] == 31]


def test_the_mask_picks_what_is_returned_not_what_is_attended() -> None:
    model, (sequences, mask) = tiny_model(), batch()
    single = torch.zeros_like(mask)
    single[0, 7] = True
    with torch.no_grad():
        every, _ = sequence_logprobs(model, sequences, mask)
        one, _ = sequence_logprobs(model, sequences, single)
    torch.testing.assert_close(one[0, 7], every[0, 7], atol=1e-12, rtol=0)
    assert one.count_nonzero() == 1


def test_attention_arguments_reach_the_model() -> None:
    model, (sequences, mask) = tiny_model(), batch()
    length = sequences.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(3, 1, -1, -1).clone()
    with torch.no_grad():
        free, _ = sequence_logprobs(model, sequences, mask)
        same, _ = sequence_logprobs(model, sequences, mask, attention_mask=causal)
        causal[0, :, 6:, 1] = False  # queries from index 6 on no longer see token 1
        blind, _ = sequence_logprobs(model, sequences, mask, attention_mask=causal)
        expected = model(sequences[:1], attention_mask=causal[:1]).logits[0, 6].log_softmax(-1)[sequences[0, 7]]
    torch.testing.assert_close(same, free, atol=1e-10, rtol=0)
    torch.testing.assert_close(blind[:, :7], free[:, :7], atol=1e-10, rtol=0)
    assert (blind[0, 7] - free[0, 7]).abs() > 1e-4
    torch.testing.assert_close(blind[0, 7], expected, atol=1e-10, rtol=0)


def test_low_precision_models_give_float32() -> None:
    model, (sequences, mask) = tiny_model().bfloat16(), batch()
    with torch.no_grad():
        logprobs, entropy = sequence_logprobs(model, sequences, mask)
        expected, _ = sequence_logprobs(model.float(), sequences, mask)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, atol=0.3, rtol=0)
    assert not torch.equal(logprobs.bfloat16().float(), logprobs)  # the softmax itself ran in float32


def test_an_empty_mask_gives_zeros_attached_to_the_graph() -> None:
    model, (sequences, mask) = tiny_model(), batch()
    logprobs, entropy = sequence_logprobs(model, sequences, torch.zeros_like(mask))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.tolist() == torch.zeros(mask.shape).tolist()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.count_nonzero() == 0


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"mask": torch.ones(3, 9, dtype=torch.bool)}, r"mask\[:, 0\] must be False"),
        ({"mask": batch()[1][:, 1:]}, r"mask must be bool with the shape of sequences \(3, 9\)"),
        ({"temperature": 0}, "temperature=0"), ({"chunk_size": 0}, "chunk_size=0"),
        ({"ids": batch()[0]}, r"ids must be \(B, T, K\) with \(B, T\) = \(3, 9\), got \(3, 9\)"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(wrong: dict[str, Any], match: str) -> None:
    model, (sequences, mask) = tiny_model(), batch()
    with pytest.raises(ValueError, match=match):
        logprobs_at(model, sequences, **{"ids": sequences[..., None], "mask": mask, **wrong})
    if "ids" not in wrong:
        with pytest.raises(ValueError, match=match):
            sequence_logprobs(model, sequences, **{"mask": mask, **wrong})


def asked(k: int = 5) -> Tensor:
    """(3, 9, K) different tokens for every place."""
    return torch.rand(3, max(LENGTHS), 31, generator=torch.Generator().manual_seed(3)).argsort(-1)[..., :k]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_size", [1, 4, 512])
def test_logprobs_at_are_those_of_a_plain_forward(temperature: float, chunk_size: int) -> None:
    model, (sequences, mask) = tiny_model(), batch()
    ids = asked()
    found = logprobs_at(model, sequences, ids, mask, temperature, chunk_size)
    with torch.no_grad():
        expected = plain(model, sequences, temperature).gather(-1, ids) * mask[..., None]
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    assert not found.requires_grad
    own = logprobs_at(model, sequences, sequences[..., None], mask, temperature, chunk_size)[..., 0]
    with torch.no_grad():
        torch.testing.assert_close(own, sequence_logprobs(model, sequences, mask, temperature)[0], atol=1e-10, rtol=0)


def test_logprobs_at_hold_one_chunk_of_logits_and_pass_on_attention() -> None:
    model, (sequences, mask) = tiny_model(), batch()
    rows: list[int] = []
    hook = model.lm_head.register_forward_hook(lambda _m, _i, output: rows.append(output.shape[:-1].numel()))
    free = logprobs_at(model, sequences, asked(), mask, chunk_size=5)
    hook.remove()
    assert rows == [5, 5, 3]
    causal = torch.ones(3, 1, max(LENGTHS), max(LENGTHS), dtype=torch.bool).tril()
    same = logprobs_at(model, sequences, asked(), mask, attention_mask=causal)
    torch.testing.assert_close(same, free, atol=1e-10, rtol=0)
    causal[0, :, 6:, 1] = False
    blind = logprobs_at(model, sequences, asked(), mask, attention_mask=causal)
    assert (blind[0, 7] - free[0, 7]).abs().max() > 1e-4


def test_logprobs_at_in_low_precision_and_with_a_float32_head() -> None:
    model, (sequences, mask) = tiny_model().bfloat16(), batch()
    narrow = logprobs_at(model, sequences, asked(), mask)
    wide = logprobs_at(model, sequences, asked(), mask, head_in_float32=True)
    exact = logprobs_at(model.float(), sequences, asked(), mask)
    assert narrow.dtype == wide.dtype == torch.float32
    assert not torch.equal(narrow, wide)
    torch.testing.assert_close(narrow, exact, atol=0.5, rtol=0)
    torch.testing.assert_close(wide, exact, atol=0.5, rtol=0)
    hidden = hidden_states(tiny_model().bfloat16(), sequences)[:, :-1][mask[:, 1:]]
    logits = hidden.float() @ tiny_model().bfloat16().lm_head.weight.float().T
    torch.testing.assert_close(wide[mask], logits.log_softmax(-1).gather(-1, asked()[mask]), atol=1e-5, rtol=0)


def test_logprobs_at_of_an_empty_mask() -> None:
    model, (sequences, mask) = tiny_model(), batch()
    assert logprobs_at(model, sequences, asked(), torch.zeros_like(mask)).count_nonzero() == 0
