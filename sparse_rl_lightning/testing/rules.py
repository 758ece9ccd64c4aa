"""The rules behind check_compressor: each function returns what is wrong with a compressor, or None."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sparse_rl_lightning.compressors.base import Compressor
from sparse_rl_lightning.compressors.wrapped import Wrapped
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.evict import pinned_entries
from sparse_rl_lightning.policies.tiny import tiny_model
from sparse_rl_lightning.records import NEVER, LayerState
from sparse_rl_lightning.rewards.base import users_line
from sparse_rl_lightning.rollout import RolloutSampler, SamplingParams, replay_logprobs
from sparse_rl_lightning.testing.layers import (
    HEAD_DIM,
    RandomPrompts,
    cast,
    fill_free_memory,
    move,
    random_layer,
    resize,
    take_slots,
)

Find: TypeAlias = Callable[[Compressor], str | None]
"""Finds what is wrong with a compressor, None if nothing is."""


@dataclass(frozen=True)
class Rule:
    """One promise of every compressor."""

    name: str
    change: str  # what to do if it is broken
    find: Find


RULES: list[Rule] = []
"""The rules, in the order in which they are checked."""


def _rule(change: str) -> Callable[[Find], Find]:
    """Make a rule of a function, under the function's name."""

    def add(find: Find) -> Find:
        RULES.append(Rule(find.__name__.replace("_", " "), change, find))
        return find

    return add


@_rule(
    "Call super().__init__(budget, **sizes) in an own __init__; num_queries is a whole number and state_fields a "
    "tuple of different names, head_state_fields(head_dim) a dictionary of names and whole numbers."
)
def declarations(compressor: Compressor) -> str | None:
    """The attributes that the cache reads must exist and have the right types."""
    for name in ("budget", "buffer", "num_sinks", "window", "budget_rule"):
        if not hasattr(compressor, name):
            return f"the instance has no attribute {name!r}"
    num_queries, fields = compressor.num_queries, compressor.state_fields
    if not isinstance(num_queries, int) or num_queries < 0:
        return f"num_queries is {num_queries!r}"
    if not isinstance(fields, tuple) or len({*fields}) < len(fields) or any(not isinstance(f, str) for f in fields):
        return f"state_fields is {fields!r}"
    if not callable(compressor.head_state_fields):
        return f"head_state_fields is {compressor.head_state_fields!r}, not a method that takes head_dim"
    by_head = compressor.head_state_fields(HEAD_DIM)
    if not isinstance(by_head, dict) or any(not isinstance(width, int) or width < 1 for width in by_head.values()):
        return f"head_state_fields returned {by_head!r}"
    if not fields and not by_head and type(compressor).update_state is not Compressor.update_state:
        if not isinstance(compressor, Wrapped):  # it has fields if its parts do
            return "update_state is written, but state_fields is empty, so nobody calls it"
    return None


@_rule("Return one floating-point number per entry: (slots, KV heads, entries), the shape of layer.valid.")
def shape(compressor: Compressor) -> str | None:
    """The score must be one floating-point number per entry."""
    layer = fill_free_memory(_layer(compressor), 0.0)
    scores = compressor.score(layer)
    if not isinstance(scores, Tensor):
        return f"score returned {type(scores).__name__}"
    if scores.shape != layer.valid.shape:
        return f"score returned shape {tuple(scores.shape)} for slots, KV heads, entries = {tuple(layer.valid.shape)}"
    return None if scores.is_floating_point() else f"score returned {scores.dtype}"


@_rule(
    "Declare it, and layers are scored one at a time. All other methods score several layers at once, as more slots, "
    "and such a call has no index."
)
def layer_index(compressor: Compressor) -> str | None:
    """Who reads the index of the layer must declare it."""
    try:
        compressor._shaped_score(fill_free_memory(_layer(compressor), 0.0))
    except UserError as error:
        return f"{error}{users_line(error)}" if "needs_layer_index" in str(error) else None
    return None


@_rule(
    "Guard divisions by zero and logarithms; behind a softmax, mask queries whose layer.query_positions is -1 (or use "
    "recent_attention of compressors.attention). +inf (must stay) and -inf (goes first) are allowed, NaN is not."
)
def numbers(compressor: Compressor) -> str | None:
    """Live entries must not score NaN, even if all keys and values are the same."""
    for layer in _layers(compressor):
        filled = fill_free_memory(layer, 0.0)
        constant = replace(filled, keys=torch.ones_like(layer.keys), values=torch.ones_like(layer.values))
        for name, case in (("random keys", filled), ("equal keys", constant)):
            wrong = int((compressor.score(case).isnan() & layer.valid).sum())
            if wrong:
                return f"NaN for {wrong} of {int(layer.valid.sum())} live entries with {name}"
    return None


@_rule("Work on copies: the layer is the cache itself. Replace in-place operations (add_, x[...] = ...) of score.")
def read_only(compressor: Compressor) -> str | None:
    """Scoring must not change the layer."""
    for layer in _layers(compressor):
        before = _contents(layer)
        compressor.score(layer)
        if changed := _changed(layer, before):
            return f"score changed {', '.join(f'layer.{name}' for name in changed)}"
    return None


@_rule(
    "Draw random numbers as a function of layer.sequence_keys, layer.layer_index and layer.positions, with "
    "sparse_rl_lightning.ops.keyed_random.hash_uniform."
)
def determinism(compressor: Compressor) -> str | None:
    """Scores of the same layer must be the same, whatever was scored in between."""
    first, *rest = _layers(compressor)
    scores = _scores(compressor, first)
    for layer in rest:
        compressor.score(layer)
    difference = _difference(_scores(compressor, first), scores)
    return difference and f"scoring the same layer again gave other numbers: {difference}"


@_rule(
    "One instance serves all layers, slots and ranks: set attributes in __init__ only. Numbers that add up over the "
    "steps are named in state_fields and live in layer.state."
)
def no_state(compressor: Compressor) -> str | None:
    """Scoring must not change the instance."""
    before = _contents(compressor)
    for layer in _layers(compressor):
        compressor.score(layer)
    changed = _changed(compressor, before)
    return f"score changed {', '.join(f'self.{name}' for name in changed)}" if changed else None


@_rule(
    "Entries where layer.valid is False hold anything: mask them before every sum, mean, maximum or softmax over "
    "entries, for example layer.keys.masked_fill(~layer.valid.unsqueeze(-1), 0), and divide by layer.lengths."
)
def free_memory(compressor: Compressor) -> str | None:
    """Scores must not depend on the content of free memory."""
    for layer in _layers(compressor):
        clean = _scores(compressor, fill_free_memory(layer, 0.0))
        for garbage in (torch.nan, torch.inf, 1e30):
            if difference := _difference(_scores(compressor, fill_free_memory(layer, garbage)), clean):
                return f"with {garbage} in free memory, scores of live entries change: {difference}"
    return None


@_rule(
    "The queries lie in a ring, whose places are not in order: the newest one is where layer.query_positions is "
    "largest. sparse_rl_lightning.compressors.entries.newest_queries(layer, n) has the n newest; -1 marks places "
    "without one."
)
def ring_of_queries(compressor: Compressor) -> str | None:
    """Scores must not depend on where in the ring the queries lie, only on their positions."""
    for layer in _layers(compressor):
        scores, size = _scores(compressor, layer), layer.queries.shape[2]
        for turn in range(1, size):
            queries, positions = layer.queries.roll(turn, dims=2), layer.query_positions.roll(turn, dims=1)
            turned = replace(layer, queries=queries, query_positions=positions)
            if difference := _difference(_scores(compressor, turned), scores):
                return f"with the ring turned by {turn} of {size} places, scores change: {difference}"
    return None


@_rule(
    "A score may not look at other slots or at its place among them: reduce over dimensions 1 and up, not over "
    "dimension 0, and keep no random numbers per slot."
)
def batch_independence(compressor: Compressor) -> str | None:
    """Scores of a sequence must be the same alone, and in any slot."""
    for layer in _layers(compressor):
        together = _scores(compressor, layer)
        for order in ([0], [1], [2], [2, 0, 1], [1, 1]):
            if difference := _difference(_scores(compressor, take_slots(layer, order)), together[order]):
                return f"slots {order} of three score otherwise on their own: {difference}"
    return None


@_rule(
    "Count entries by layer.lengths or layer.valid, never by the size of a tensor: slots differ in length, and memory "
    "behind the live entries may grow."
)
def ragged_lengths(compressor: Compressor) -> str | None:
    """Scores of a sequence must not depend on the amount of memory after its entries."""
    for layer in _layers(compressor):
        scores = _scores(compressor, layer)
        width = scores.shape[-1]
        wide = _scores(compressor, resize(layer, 5))[..., :width]
        if difference := _difference(wide, scores):
            return f"with 5 more free places per slot, scores change: {difference}"
        short = int(layer.lengths[0].max())
        if difference := _difference(
            _scores(compressor, resize(take_slots(layer, [0]), short - width)), scores[:1, :, :short]
        ):
            return f"without the free places behind a short sequence, its scores change: {difference}"
    return None


@_rule(
    "Write score only. Sinks, window, ties and budgets are the base's: do not override select or plan_eviction, and "
    "change no sizes after super().__init__."
)
def selection(compressor: Compressor) -> str | None:
    """Sinks, window and the best of the rest must be kept, as many as the budget allows."""
    if not compressor.evicts:
        return None
    for layer in _layers(compressor):
        kept, (scores, budgets) = compressor.select(layer), compressor.plan_eviction(layer)
        pinned = pinned_entries(layer.valid, layer.positions, compressor.num_sinks, compressor.window)
        if bool((kept & ~layer.valid).any()):
            return "select keeps free memory"
        if bool((pinned & ~kept).any()):
            return f"{int((pinned & ~kept).sum())} entries of sinks and window were evicted"
        expected = torch.minimum(layer.lengths, budgets)
        if not torch.equal(kept.sum(dim=-1), expected):
            return f"entries kept per slot and head: {kept.sum(dim=-1).tolist()}, expected {expected.tolist()}"
        free = layer.valid & ~pinned
        worst_kept = scores.masked_fill(~(free & kept), torch.inf).amin(dim=-1)
        if bool((worst_kept < scores.masked_fill(~(free & ~kept), -torch.inf).amax(dim=-1)).any()):
            return "an entry was kept although one with a higher score was evicted"
    return None


@_rule("Compute in float32, for example with layer.keys.float(): keys, values and queries come in the model's type.")
def half_precision(compressor: Compressor) -> str | None:
    """Scores of numbers in half precision must be those of the same numbers in float32."""
    for dtype in (torch.float16, torch.bfloat16):
        for layer in _layers(compressor, dtype):
            full = cast(layer, torch.float32)
            half, single = _scores(compressor, layer).double(), _scores(compressor, full).double()
            finite = layer.valid & single.isfinite()
            spread = single[finite].max() - single[finite].min() if bool(finite.any()) else 0.0
            if bool((half[layer.valid].isfinite() != single[layer.valid].isfinite()).any()):
                return f"{dtype}: scores are not finite where they are in float32"
            error = float((half - single)[finite].abs().max()) if bool(finite.any()) else 0.0
            if error > 1e-3 * float(spread) + 1e-6:
                return f"{dtype}: scores are off by {error:.3g}, and range over {float(spread):.3g}"
    return None


@_rule(
    "Write update.state[name] and update.head_state[name] in place in update_state (add_, mul_, copy_, scatter_), "
    "with numbers of the same slot and head, and nothing else; name in state_fields and head_state_fields what the "
    "cache is to keep."
)
def running_state(compressor: Compressor) -> str | None:
    """update_state must write its own numbers, slot by slot."""
    if not _has_state(compressor):
        return None
    prompts = RandomPrompts(compressor)
    before, inputs = _contents(compressor), _contents(prompts.inputs)
    together = prompts.read([RandomPrompts.LENGTH])
    if changed := _changed(compressor, before):
        return f"update_state changed {', '.join(f'self.{name}' for name in changed)}"
    if changed := _changed(prompts.inputs, inputs):
        return f"update_state changed {', '.join(f'update.{name}' for name in changed)}"
    for name, numbers in together.items():
        if bool(numbers.isnan().any()):
            return f"{name} is NaN after update_state, where it was 0 before its token came"
    for name, numbers in prompts.read([RandomPrompts.LENGTH], [2]).items():
        if difference := _difference(numbers, together[name][[2]]):
            return f"{name} of a sequence depends on the others: {difference}"
    if not any(bool(numbers.any()) for numbers in together.values()):
        return "update_state changed nothing in update.state and update.head_state"
    return None


@_rule(
    "A prompt comes in blocks, cut wherever memory allows: an update for Q tokens must do what Q updates for one do. "
    "Weigh each token of a block by its own age (a decay to the power of the tokens behind it), count "
    "update.positions.shape[1] tokens and not calls."
)
def reading(compressor: Compressor) -> str | None:
    """Running numbers must not depend on where a prompt is cut while it is read."""
    if not _has_state(compressor):
        return None
    prompts = RandomPrompts(compressor)
    one_by_one = prompts.read([1] * RandomPrompts.LENGTH)
    for cuts in ([RandomPrompts.LENGTH], [4, 5], [1, 6, 2]):
        for name, numbers in prompts.read(cuts).items():
            if difference := _difference(numbers, one_by_one[name]):
                return f"{name} after blocks of {cuts} tokens differs from that after single tokens: {difference}"
    return None


@_rule("Keep numbers, texts and tensors as attributes, no lambdas or open files: workers copy the compressor.")
def copies(compressor: Compressor) -> str | None:
    """Copies must score alike."""
    layer = _layer(compressor)
    methods: dict[str, Callable[[Compressor], Compressor]] = {"copy.deepcopy": copy.deepcopy, "pickle": _pickled}
    for name, duplicate_by in methods.items():
        try:
            duplicate = duplicate_by(compressor)
        except Exception as error:
            return f"{name} does not work: {error}"
        if difference := _difference(_scores(duplicate, layer), _scores(compressor, layer)):
            return f"a copy made by {name} scores otherwise: {difference}"
    return None


@_rule(
    "Make tensors where the layer's are, such as torch.arange(n, device=layer.keys.device), and move networks and "
    "tensors of the compressor's own there: self.network.to(layer.keys.device)."
)
def devices(compressor: Compressor) -> str | None:
    """Nothing may be computed with tensors on the CPU where the layer is on another device."""
    elsewhere = copy.deepcopy(compressor)  # whose own numbers may be moved, and are lost
    passes: list[Callable[[], object]] = [lambda: elsewhere.score(move(_layer(compressor), "meta"))]
    if _has_state(compressor):  # which comes first in rollouts
        passes.insert(0, lambda: RandomPrompts(elsewhere, device="meta").read([RandomPrompts.LENGTH]))
    for compute in passes:
        try:
            compute()
        except Exception as error:  # without numbers "meta" cannot compute everything; nor does it tell in products
            if "not on the expected device" in str(error):
                return f"a tensor is on the CPU although the layer is not{users_line(error)}"
    return None


@_rule(
    "Eviction must be the only thing that a compressor does: the learner attends under the record of evictions, and "
    "finds other log-probs if keys or values were changed as well."
)
def replay(compressor: Compressor) -> str | None:
    """The learner must reproduce the log-probs of a rollout under its record of evictions."""
    model = tiny_model(initializer_range=0.2, eos_token_id=None)
    length = compressor.budget + compressor.buffer + 20
    params = SamplingParams(num_generations=2, max_completion_length=length, seed=1)
    most = compressor.budget - compressor.window if compressor.protect_prompt else 17
    prompts = [list(range(5, 5 + min(n, most))) for n in (3, 8, 17)]
    rollout = RolloutSampler(model, compressor).generate(prompts, params)
    assert rollout.evictions is not None
    if compressor.evicts and bool((rollout.evictions.death == NEVER).all()):
        return f"nothing was evicted from sequences of {length} tokens and more"
    with torch.no_grad():
        difference = (replay_logprobs(model, rollout) - rollout.sampler_logprobs).abs().max()
    return f"log-probs differ by up to {float(difference):.3g}" if difference > 5e-5 else None


# ---------------------------------------------------------------- scores


def _has_state(compressor: Compressor) -> bool:
    written = {*compressor.state_fields} - {compressor.score_field}  # that is the cache's to write
    return bool(written or compressor.head_state_fields(HEAD_DIM))


def _layer(compressor: Compressor, seed: int = 0, dtype: torch.dtype = torch.float32) -> LayerState:
    capacity = compressor.budget + compressor.buffer if compressor.evicts else 14
    return random_layer(
        seed, capacity=capacity, num_sinks=compressor.num_sinks, window=compressor.window,
        num_queries=compressor.num_queries, state_fields=compressor.state_fields,
        head_state_fields=compressor.head_state_fields(HEAD_DIM), dtype=dtype,
    )  # fmt: skip


def _layers(compressor: Compressor, dtype: torch.dtype = torch.float32) -> Iterator[LayerState]:
    return (_layer(compressor, seed, dtype) for seed in range(3))


def _scores(compressor: Compressor, layer: LayerState) -> Tensor:
    return compressor.score(layer).masked_fill(~layer.valid, 0.0)


def _pickled(compressor: Compressor) -> Compressor:
    """A copy with pickled attributes; pickle cannot find a class from an interactive session, which does not matter."""
    duplicate = copy.copy(compressor)
    vars(duplicate).update(pickle.loads(pickle.dumps(vars(compressor))))
    return duplicate


def _contents(thing: Any) -> dict[str, Any]:
    """A copy of an object's attributes, or of a dictionary."""
    return copy.deepcopy(thing if isinstance(thing, dict) else vars(thing))


def _changed(thing: Any, before: dict[str, Any]) -> list[str]:
    """The names of what has changed since."""
    after = thing if isinstance(thing, dict) else vars(thing)
    return [name for name in sorted(before.keys() | after.keys()) if not _equal(before.get(name), after.get(name))]


def _equal(a: Any, b: Any, seen: frozenset[int] = frozenset()) -> bool:
    """Whether the content is the same; NaN equals NaN. Objects, including torch modules, are compared by attributes."""
    if id(a) in seen:  # a part that contains the whole
        return True
    inner = seen | {id(a)}
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key], inner) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_equal(x, y, inner) for x, y in zip(a, b, strict=True))
    if type(a) is type(b) and hasattr(a, "__dict__") and not isinstance(a, type | FunctionType):
        return _equal(vars(a), vars(b), inner)
    return bool(a == b)


def _difference(a: Tensor, b: Tensor) -> str | None:
    """The difference between two tensors of scores, None if there is none."""
    wrong = ~torch.isclose(a.double(), b.double(), rtol=1e-4, atol=1e-6, equal_nan=True)
    if not bool(wrong.any()):
        return None
    return (
        f"{int(wrong.sum())} of {wrong.numel()}, for example {float(b[wrong][0]):.6g} became {float(a[wrong][0]):.6g}"
    )
