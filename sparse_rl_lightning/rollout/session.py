"""RolloutSession: a rollout that outlives an update, for partial rollouts.

A few long sequences hold up a whole rollout. In a session they wait in their slots while the learner updates, and go
on with the new weights afterwards; every token remembers which version of the policy drew it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sparse_rl_lightning.records import Rollout, tensors_to
from sparse_rl_lightning.rollout.cache.memory import MemoryPlan
from sparse_rl_lightning.rollout.checks import check_prompts
from sparse_rl_lightning.rollout.engine.logs import UNLIMITED
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams, sequence_keys
from sparse_rl_lightning.rollout.engine.scheduler import Held, Progress, Run
from sparse_rl_lightning.rollout.engine.sequences import Ended
from sparse_rl_lightning.rollout.engine.workspace import Workspace
from sparse_rl_lightning.rollout.sampler import RolloutSampler

_TRACKS = ("logprobs", "behavior", "held", "read", "versions", "topk_ids", "topk_logprobs", "ends", "finished")


class RolloutSession:
    """Sequences that are decoded a limited number of steps at a time, with whatever weights the model then has.

    The session has memory of its own; the sampler may be used beside it.

    Args:
        sampler: Model, compressor and settings; ``num_slots`` must be set.
        params: How to draw.
        max_prompt_length: Tokens of the longest prompt there will be.

    Raises:
        ValueError: If the sampler has no ``num_slots``, or records the pages it reads.

    Example::

        session = RolloutSession(sampler, SamplingParams(num_generations=8), max_prompt_length=200)
        session.add(prompts, sequence_ids=range(64))
        session.advance(max_steps=512)
        rollout = session.take(session.complete)  # the others go on after the update
    """

    def __init__(self, sampler: RolloutSampler, params: SamplingParams, max_prompt_length: int) -> None:
        if sampler.num_slots is None:
            raise ValueError("A RolloutSession needs a fixed number of slots: set num_slots of the RolloutSampler.")
        if sampler.record_pages:
            raise ValueError(
                "A RolloutSession keeps no record of the pages read, which would have to outlive updates: set "
                "record_pages of the RolloutSampler to 0."
            )
        self.sampler, self.params, self.max_prompt_length = sampler, params, max_prompt_length
        self._workspace = Workspace()
        self._broken = False
        with sampler.sampling():
            self.run = self._workspace.start(sampler, params, sampler.num_slots, max_prompt_length, versioned=True)

    def add(self, prompts: Sequence[Sequence[int]], sequence_ids: Sequence[int]) -> range:
        """Queue prompts behind those that wait.

        Args:
            prompts: Token ids of each prompt.
            sequence_ids: As for :meth:`RolloutSampler.generate`.

        Returns:
            The numbers under which the prompts are known from now on.

        Raises:
            ValueError: If a prompt cannot be completed, or is longer than ``max_prompt_length``.
        """
        prompts = check_prompts(prompts, self.params, self.sampler.model)
        longest = max(len(prompt) for prompt in prompts)
        if longest > self.max_prompt_length:
            raise ValueError(
                f"A prompt has {longest} tokens, the session was made for max_prompt_length={self.max_prompt_length}."
            )
        total = len(prompts) * self.params.num_generations
        if len(sequence_ids) != total:
            raise ValueError(f"sequence_ids must name {total} sequences, got {len(sequence_ids)}.")
        return self.run.add(prompts, sequence_keys(self.params.seed, sequence_ids).tolist())

    def advance(
        self,
        max_steps: int | None = None,
        *,
        until: Callable[[], bool] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        """Decode with the model's weights as they are now.

        Args:
            max_steps: Decode steps after which to stop; None goes on until every sequence has ended.
            until: Asked after ``max_steps``: decoding goes on while it is False and a sequence has not ended.
            progress: As for :meth:`RolloutSampler.generate`; it counts from the beginning of the session.
        """
        run = self.run
        stop = None if max_steps is None else run.num_steps + max_steps
        if self._broken:
            raise ValueError(
                "An earlier advance() of this RolloutSession was interrupted in the middle of a step: load_state() "
                "what was saved before, or make a new session."
            )
        self._broken = True
        with self.sampler.sampling():
            self._workspace.take_new_weights(self.sampler, run)
            while run.is_busy and (stop is None or run.num_steps < stop or not (until is None or until())):
                run.advance()
                self._broken = False  # between two steps everything is consistent
                if progress is not None:
                    progress(run.progress)
                self._broken = True
        self._broken = False

    @property
    def version(self) -> int:
        """Number of the policy that draws: calls of :meth:`advance` so far."""
        return int(self.run.tracks.version)

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """How many slots the memory limit allowed, and why."""
        return self._workspace.memory_plan

    @property
    def complete(self) -> list[int]:
        """Prompts all of whose sequences have ended, oldest first."""
        return self.run.complete

    @property
    def num_unfinished(self) -> int:
        """Sequences that wait or are in a slot."""
        return len(self.run.waiting) + len(self.run.slots)

    def take(self, prompts: Sequence[int]) -> Rollout:
        """The rollout of complete prompts, which the session forgets; ``policy_versions`` says who drew each token."""
        return self.run.take(prompts)

    # ---------------------------------------------------------------- checkpoints

    def state(self, restart: bool = False) -> dict[str, Any]:
        """Everything needed to go on, as CPU tensors, numbers and texts, fit for ``torch.load(weights_only=True)``.

        Args:
            restart: Leave out what is in the slots: those sequences will be drawn again from their prompts.
        """
        run = self.run
        waiting = list(run.waiting)
        if restart:
            waiting += sorted((held.sequence for held in run.slots.values()), reverse=True)
        slots = {} if restart else {slot: self._slot_state(slot) for slot in run.slots}
        return {
            "prompts": {number: list(prompt) for number, prompt in run.prompts.items()},
            "keys": dict(run.keys),
            "ended": {number: tensors_to(vars(ended), "cpu") for number, ended in run.ended.items()},
            "waiting": waiting,
            "slots": slots,
            "counters": {name: getattr(run, name) for name in _COUNTERS},
            "version": int(run.tracks.version),
            "settings": _settings(run),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`state` returned, in a session of the same settings.

        Raises:
            ValueError: If a slot of the state is not there, or was written under other settings.
        """
        run = self.run
        _check_settings(state, run)
        missing = [slot for slot in state["slots"] if slot >= run.plan.num_slots]
        if missing:
            raise ValueError(
                f"The state was written with at least {max(missing) + 1} slots, this session has {run.plan.num_slots}: "
                "set num_slots as it was, or save unfinished sequences for a restart."
            )
        run.prompts, run.keys = dict(state["prompts"]), dict(state["keys"])
        device = run.plan.end_ids.device
        run.ended = {number: Ended(**tensors_to(ended, device)) for number, ended in state["ended"].items()}
        run.slots, run.read = {}, {}
        run.wait_for(state["waiting"])
        for name, value in state["counters"].items():
            setattr(run, name, value)
        run.tracks.version.fill_(state["version"])
        run.tracks.broken.fill_(UNLIMITED)  # nothing that is broken is ever saved
        for slot, content in state["slots"].items():
            run.slots[slot] = Held(**content["held"])
            run.cache.write(slot, tensors_to(content["cache"], device))
            for name, row in content["tracks"].items():
                getattr(run.tracks, name)[slot] = row
        run.free = sorted(set(range(run.plan.num_slots)) - set(run.slots), reverse=True)
        run.forget_rows()
        self._broken = False

    def _slot_state(self, slot: int) -> dict[str, Any]:
        run = self.run
        tracks = {name: getattr(run.tracks, name) for name in _TRACKS}
        # slot by slot to the CPU: a second pool would not fit beside the first
        rows = {name: tensor[slot].to("cpu", copy=True) for name, tensor in tracks.items() if tensor is not None}
        cache = tensors_to(run.cache.read(slot), "cpu")
        return {"held": vars(run.slots[slot]).copy(), "cache": cache, "tracks": rows}


def _settings(run: Run) -> dict[str, Any]:
    """What the state of a session depends on, the number of samples first: on that alone a restart depends."""
    g, size, params = run.cache.geometry, run.cache.size, run.plan.params
    return {
        "num_generations": params.num_generations,
        "max_prompt_length + max_completion_length": size.max_length,
        "top_logprobs": params.top_logprobs,
        "truncated sampling": params.truncates,
        "layers, heads, KV heads and head size": [g.num_layers, g.num_heads, g.num_kv_heads, g.head_dim],
        "kv_dtype": str(g.kv_dtype),
        "type of the queries": str(g.query_dtype),
        "slot capacities": list(size.capacities),
        "num_queries": size.num_queries,
        "state_fields": list(size.state_fields),
        "head_state_fields": [list(one) for one in size.head_state_fields],
        "unequal heads": size.per_head,
    }


def _check_settings(state: dict[str, Any], run: Run) -> None:
    own = _settings(run)
    was = own | state.get("settings", {})  # older states say less
    names = list(own) if state["slots"] else ["num_generations"]
    changed = [f"{name} was {was[name]}, is {own[name]}" for name in names if was[name] != own[name]]
    if changed:
        raise ValueError(
            f"The state was written by a session with other settings: {'; '.join(changed)}. Make the session with the "
            "same, or save unfinished sequences for a restart, state(restart=True), with the same num_generations."
        )


_COUNTERS = ("num_prompts", "num_steps", "num_finished", "num_tokens", "prefill_peak_bytes")
