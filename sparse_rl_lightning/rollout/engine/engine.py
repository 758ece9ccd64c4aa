"""Engine: the memory, the weights prepared for decoding and the decode step of a rollout.

A step never waits for the device nor depends on a number that the host does not know, so it can be captured in a
CUDA graph, once per number of rows, and replayed without Python in between: everything that changes from step to step
is in tensors. Graphs read weights and memory by address. Everything that a step touches is allocated once (the cache,
the logs, the row numbers); if a weight has moved, the engine captures new graphs. Compressors with running state (H2O)
and retrievers without a kernel run eagerly, or are refused if graphs are required.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl_lightning.cache.compression import Compression
from sparse_rl_lightning.cache.slots import CacheSize, SlotCache
from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.ops.append import QKTransform
from sparse_rl_lightning.ops.transfers import upload
from sparse_rl_lightning.policies.geometry import CacheGeometry
from sparse_rl_lightning.rollout.engine.decoders.base import ROW_MULTIPLE, Decoder, DecoderKind
from sparse_rl_lightning.rollout.engine.decoders.choice import check_rotation, make_decoder
from sparse_rl_lightning.rollout.engine.memory import MemoryPlan
from sparse_rl_lightning.rollout.engine.mixed_layers import FullPass, MixedPass
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams, draw, occurring
from sparse_rl_lightning.rollout.engine.sequences import SequenceLogs

BUCKETS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
LARGE_BUCKET = 128  # numbers of rows above are multiples of it
CAPTURE_ERRORS = range(900, 909)  # cudaErrorStreamCaptureUnsupported and related errors


@dataclass
class StepRows:
    """The slot of each row of a batch; the rows after those in use pad the batch."""

    slots: Tensor  # (R,) int64, -1 for padding: argument of the ops
    places: Tensor  # (R,) int64, for padding the last row of per-slot tensors: used for indexing
    used: list[int]  # the slots without padding, known to the host

    @classmethod
    def of(cls, slots: list[int], count: int, num_slots: int, device: torch.device) -> StepRows:
        """Create rows for these slots, padded to ``count``."""
        padding = count - len(slots)
        rows, places = upload([slots + [-1] * padding, slots + [num_slots] * padding], device)
        return cls(rows, places, slots)


def bucket(count: int, on_gpu: bool) -> int:
    """The number of rows that ``count`` slots are padded to; few different numbers if each needs a graph."""
    if on_gpu and count <= BUCKETS[-1]:
        return BUCKETS[bisect_left(BUCKETS, count)]
    multiple = LARGE_BUCKET if on_gpu else ROW_MULTIPLE
    return -(-count // multiple) * multiple


def buckets(num_slots: int) -> list[int]:
    """The numbers of rows that decode batches of up to ``num_slots`` slots have on a GPU, largest first."""
    return sorted({bucket(count, on_gpu=True) for count in range(1, num_slots + 1)}, reverse=True)


CudaGraphs: TypeAlias = bool | Literal["require"]
Pass = TypeVar("Pass", bound=FullPass)
Step: TypeAlias = Callable[[StepRows], None]


@dataclass(frozen=True)
class EngineKey:
    """Everything that an engine depends on; a rollout with an equal key can use the same engine."""

    geometry: CacheGeometry
    size: CacheSize
    params: SamplingParams  # those that matter for drawing
    compressor: Compressor = field(hash=False)  # a class of a user may be no key of a dictionary
    end_token_ids: tuple[int, ...] = ()
    cuda_graphs: CudaGraphs = False
    logs: type[SequenceLogs] = SequenceLogs
    decoder_kind: DecoderKind | None = None  # of the decoder; None for the one that the model allows
    memory_plan: MemoryPlan | None = field(default=None, compare=False)  # the plan that limited the slots
    head_in_float32: bool = False

    def reuse_memory_of(self, last: EngineKey) -> EngineKey:
        """This key with the memory of the last engine if that fits, or with room for both if rollouts alternate.

        A slot may be larger than needed if its size depends on the prompts; if it depends on the compressor alone, a
        raised or lowered budget gets slots of its size.
        """
        size, before, c = self.size, last.size, self.compressor
        if self.geometry != last.geometry:
            return self
        # if the compressor alone decides on the capacities, only equal ones are reused: a lowered budget frees memory
        if before.covers(size) and (size.capacities == before.capacities or not (c.evicts and c.compress_prompt)):
            return replace(self, size=before)
        # alternating rollouts (training and validation) get one cache for both, instead of two allocations per turn;
        # not under a memory limit, whose plan was made for this key alone
        both = size.enlarged(before, size.capacities)
        alike = both == before.enlarged(size, before.capacities)
        return replace(self, size=both) if alike and self.memory_plan is None else self


class Engine:
    """Runs the model on a compressed cache for the scheduler: prompts, then one token for every running sequence.

    Args:
        model: Policy whose current weights are used.
        key: Key that describes the engine.
        cache: Cache of an earlier engine with the same geometry and size; by default it is allocated.
        decoder: Decoder of an earlier engine that is still valid for the model.
        shares_memory_with: Another engine on this cache, with whose graphs its own share their memory pool; they never
            run at the same time.

    Raises:
        ValueError: If graphs are required, and a decode step cannot be captured, or the decoder or the compressor
            does not fit the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        key: EngineKey,
        cache: SlotCache | None = None,
        decoder: Decoder | None = None,
        shares_memory_with: Engine | None = None,
    ) -> None:
        g, size = key.geometry, key.size
        self.key = key
        self.compression = Compression(key.compressor, g.num_layers)
        self.decoder = decoder or make_decoder(model, g, key.decoder_kind, key.head_in_float32)
        check_rotation(key.compressor, self.decoder, g)
        self.decoder.reach(size.max_length)
        self.cache = cache or size.allocate(g)
        self.cache.geometry = g
        self.logs = key.logs(size.num_slots, size.max_length, key.params, g.device)
        self.end_ids = torch.tensor(key.end_token_ids, dtype=torch.int64, device=g.device)
        self._graphs = self._new_graphs()
        if self._graphs is not None and shares_memory_with is not None and shares_memory_with._graphs is not None:
            self._graphs.pool = shares_memory_with._graphs.pool

    def take_weights(self, model: PreTrainedModel, geometry: CacheGeometry) -> None:
        """Continue with the model's current weights; the graphs are kept if no weight has moved."""
        if self.decoder.serves(model, geometry, self.key.head_in_float32):
            self.decoder.refresh()
            return
        del self.decoder, self._graphs  # free copies of weights before new ones are made
        self.decoder = make_decoder(model, geometry, self.key.decoder_kind, self.key.head_in_float32)
        self.decoder.reach(self.key.size.max_length)
        self._graphs = self._new_graphs()

    def with_all_layers(self, full: Pass) -> Pass | MixedPass:
        """The attention of a pass for all layers of the model, from that of its layers of full attention."""
        return MixedPass(full) if self.cache.geometry.is_mixed else full

    def run(self, ids: Tensor, positions: Tensor, attend: FullPass | MixedPass) -> Tensor:
        """Hidden states (R, E) of tokens (R,) at their positions (R,)."""
        return self.decoder(ids, positions, attend)

    def output_weights(self, layer: int) -> Tensor | None:
        """The output projection (Hq, D, E) of a layer of full attention, if the compressor needs it."""
        if not self.compression.compressor.needs_output_norms:
            return None
        return self.decoder.output_weights[self.cache.geometry.full_layers[layer]]

    def decode(self, rows: StepRows) -> None:
        """Feed each slot its last token and draw the next, from a CUDA graph if possible."""
        if self._graphs is None:
            self.step(rows)
        else:
            self._graphs.run(self.step, rows)

    def step(self, rows: StepRows) -> None:
        """Run one decode step: feed a token, draw the next, log it.

        Full slots are compressed afterwards by the host, which knows all lengths.
        """
        cache = self.cache
        # each slot feeds its last token, at that token's position
        tokens, positions = cache.begin_step(rows.places)
        hidden = self.run(tokens, positions, self.with_all_layers(DecodeStep(self, rows, positions)))
        at = cache.end_step(rows.slots, rows.places, positions)
        self.draw(self.decoder.logits(hidden), rows.places, at)

    def draw(self, logits: Tensor, places: Tensor, at: Tensor) -> None:
        """Draw the next token of these slots from logits (n, V), write it to the indices ``at`` (n,) and log it."""
        cache, params = self.cache, self.key.params
        # the number of the token within its completion, not in a batch: random numbers depend on nothing else
        steps = at - cache.prompt_lengths[places]
        occurred = occurring(cache.tokens[places], at, logits.shape[-1]) if params.repetition_penalty != 1 else None
        drawn = draw(logits, params, cache.sequence_keys[places], steps, self.end_ids, occurred)
        cache.tokens[places, at] = drawn.tokens
        self.logs.record(places, at, drawn, self.end_ids)

    @property
    def has_graphs(self) -> bool:
        """Whether decode steps come from CUDA graphs."""
        return self._graphs is not None

    def _new_graphs(self) -> StepGraphs | None:
        device, option, name = self.key.geometry.device, self.key.cuda_graphs, type(self.key.compressor).__name__
        reason = ""
        if device.type != "cuda":
            reason = f"the model is on {device}: move it to a GPU"
        elif not self.cache.can_capture:
            reason = (
                f"{name} has running numbers, which Python updates: use another compressor"
                if self.cache.size.has_state
                else "the retriever has no kernel: use Centroid or Quest"
            )
        if reason and option == "require":
            raise UserError(f"cuda_graphs=require, but decode steps cannot be captured: {reason}, or cuda_graphs=true.")
        return StepGraphs(self.key.size.num_slots, device, option == "require") if option and not reason else None


class DecodeStep:
    """Attention of a decode step: each row appends a token to its slot, and attends over what the slot holds."""

    mode: Literal["step"] = "step"

    def __init__(self, engine: Engine, rows: StepRows, positions: Tensor) -> None:
        self.cache, self.positions, self._engine = engine.cache, positions, engine
        self.slots, self.places, self._used = rows.slots, rows.places, rows.used

    def __call__(
        self, layer: int, projected: Tensor, transform: QKTransform, hidden: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend in a layer of full attention."""
        cache, used = self.cache, self._used
        if not cache.size.has_state:
            return cache.append_and_attend(layer, self.slots, projected, transform, None, sinks)
        # running state is updated layer by layer, since all layers share the memory of the probabilities
        probs = cache.probabilities(layer, len(used))
        out = cache.append_and_attend(layer, self.slots, projected, transform, probs, sinks)
        weights = self._engine.output_weights(layer)
        self._engine.compression.record_step(cache, layer, used, self.positions, probs, hidden, weights)
        return out


# -------------------------------------------------------------------- CUDA graphs


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device: torch's own is on whichever device was current when it was made.

    Libraries keep memory for every stream that they have been used on, cuBLAS 32 MiB on an H100.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped


class StepGraphs:
    """The graphs of one step on one cache; steps that cannot be captured run eagerly.

    Args:
        num_slots: Number of slots of the cache.
        device: Device of the cache.
        required: Whether a step that cannot be captured is an error.
    """

    def __init__(self, num_slots: int, device: torch.device, required: bool = False) -> None:
        self.num_slots, self.device, self.required = num_slots, device, required
        self.enabled = True
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, StepRows]] = {}
        self.pool: Any = torch.cuda.graph_pool_handle()  # memory shared by all graphs

    def run(self, step: Step, rows: StepRows) -> None:
        """Run one decode step for these rows."""
        if self.enabled and not self._graphs:
            self._capture_all(step)
        if not self.enabled:
            step(rows)
            return
        # the graph reads row numbers at a fixed address
        graph, captured = self._graphs[len(rows.slots)]
        captured.slots.copy_(rows.slots)
        captured.places.copy_(rows.places)
        graph.replay()

    def _capture_all(self, step: Step) -> None:
        """Capture a step for every number of rows: the largest first, whose memory serves the others too.

        Raises:
            ValueError: If graphs are required, and a step cannot be captured.
            RuntimeError: Any error that the step itself raises, such as a lack of memory. Only a step that cannot be
                captured is run eagerly from now on.
        """
        graphs: dict[int, tuple[torch.cuda.CUDAGraph, StepRows]] = {}
        for count in buckets(self.num_slots):
            rows = StepRows.of([], count, self.num_slots, self.device)  # all of them padding: no slot changes
            graph = self._capture(step, rows)
            if graph is None:
                self.enabled = False
                return
            graphs[count] = graph, rows
        self._graphs = graphs

    def _capture(self, step: Step, rows: StepRows) -> torch.cuda.CUDAGraph | None:
        """Capture one step; None if it cannot be captured."""
        device = self.device
        with _without_autocast_cache():  # casts of weights must be in the graph
            side = capture_stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                step(rows)  # libraries allocate and choose kernels here
            torch.cuda.current_stream(device).wait_stream(side)
            graph, outside = torch.cuda.CUDAGraph(), sys.exception()
            try:
                with _recovering(device, self.pool):
                    with torch.cuda.graph(graph, self.pool, side, capture_error_mode="thread_local"):
                        step(rows)
            except RuntimeError as error:
                first = first_error(error, outside)
                if not is_of_capture(first):
                    raise first from None
                if self.required:
                    raise UserError(f"cuda_graphs=require, but a decode step cannot be captured: {first}") from None
                warnings.warn(f"Decoding without CUDA graphs, because a step cannot be captured: {first}", stacklevel=2)
                return None
        return graph


def first_error(error: BaseException, outside: BaseException | None) -> BaseException:
    """The original error: ending a broken capture raises another.

    Args:
        error: Error that ended the capture.
        outside: Exception that was being handled before the capture, if any; it is not a cause.
    """
    while error.__context__ is not None and error.__context__ is not outside:
        error = error.__context__
    return error


def is_of_capture(error: BaseException) -> bool:
    """Whether an error means 'cannot be captured', not out of memory or a fault of the device."""
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return False
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) in CAPTURE_ERRORS
    return "captur" in str(error).lower()  # from torch's generators and libraries


@contextlib.contextmanager
def _recovering(device: torch.device, pool: Any) -> Iterator[None]:
    """Restore stream, generator and allocator, which torch leaves captured if a capture fails at its end."""
    generator = torch.cuda.default_generators[device.index]
    before = generator.clone_state()
    try:
        with torch.cuda.stream(torch.cuda.current_stream(device)):  # resets the stream
            yield
    except BaseException:
        generator.graphsafe_set_state(before)
        with contextlib.suppress(RuntimeError):  # nothing left to end if the capture was ended properly
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        raise


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    caching = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(caching)
