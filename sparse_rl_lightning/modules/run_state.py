"""RunState: everything that a resumed run depends on besides its weights, and what becomes of it if it has changed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn

from sparse_rl_lightning.distributed.ranks import gather_to_zero
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.fingerprints import fingerprint
from sparse_rl_lightning.ops.keyed_random import seed_of

if TYPE_CHECKING:
    from sparse_rl_lightning.modules.base import PolicyModule
    from sparse_rl_lightning.modules.sparse_grpo import SparseGRPO

KEY = "sparse_rl_run"
"""Entry of a checkpoint."""

PLACES = {
    "policy": "policy_source", "compressor": "generator.compressor", "retriever": "generator.retriever",
    "environment": "generator.environment", "sampling": "generator.sampling", "rollout": "generator.options",
    "reward_funcs": "rewards.functions", "reward_weights": "rewards.weights", "learner": "learner.options",
}  # fmt: skip
"""Where a module keeps arguments of which it has no attribute of the same name."""


class RunState:
    """The description of a run, which its checkpoints hold and a resumed run is compared with.

    The module calls it from its hooks, the one for loading before a single tensor is overwritten.

    Args:
        module: Module that is trained.
    """

    def __init__(self, module: PolicyModule) -> None:
        self.module = module
        self.seeds: dict[str, int] = {}

    def set_up(self) -> None:
        """Describe the module, when the trainer sets it up."""
        data = getattr(self.module.trainer, "datamodule", None)
        parts = [*parts_of(self.module).items(), ("data", data)]
        self.seeds = dict(found for name, part in parts for found in _seeds_in(name, part))
        self.module.same_on_ranks["seeds"] = str(self.seeds)

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Store the description."""
        checkpoint[KEY] = {"seeds": self.seeds}

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Keep what training continues with."""

    def check(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to continue training where a change would make another run of it.

        Raises:
            ValueError: If it would.
        """
        if self.module.trainer.world_size > 1:  # for all ranks to compare
            self.module.same_on_ranks["checkpoint"] = f"one with the hash {fingerprint(checkpoint=checkpoint)}"
        was, own = checkpoint.get(KEY, {}).get("seeds", {}), self.seeds
        changed = [f"{name} was {was[name]} and is {now}" for name, now in own.items() if was.get(name, now) != now]
        if changed:
            raise UserError(
                f"ckpt_path: this checkpoint is of a run with other seeds: {', '.join(changed)}. Resume with the same, "
                "seed_everything included, which decides those that are not set; or start anew from the checkpoint's "
                "weights: sparse-rl export, and model.policy."
            )


class RolloutState(RunState):
    """The state of a run of rollouts: the rest of one, unfinished sequences, their number, and random numbers."""

    module: SparseGRPO

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Store all of it as tensors, numbers and texts."""
        super().save(checkpoint)
        m, accumulate = self.module, self.module.trainer.accumulate_grad_batches
        if m.block is not None and m.block.cursor % accumulate:
            rank_zero_warn(
                "This checkpoint falls between two optimizer steps: the gradient accumulated so far is not in it. For "
                "an exact resume, save with ModelCheckpoint.every_n_train_steps."
            )
        own = {
            "num_rollouts": m.num_rollouts,
            "num_sequences": m.num_sequences,
            "block": None if m.block is None or m.block.is_spent else m.block.state(),
            "partial": m.generator.partial_state(),
            "random_state": m.training_state.random(),
        }
        checkpoint["sparse_rl"] = own | {"other_ranks": gather_to_zero(own, m._world_size)[1:]}

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Keep it for the first batch."""
        m, state = self.module, checkpoint.get("sparse_rl")
        if m.generator.shadow is not None:
            m.generator.shadow.version = None  # its weights are outdated, even from the same step
        if state is None:
            return
        m.num_rollouts, m.num_sequences = state["num_rollouts"], state.get("num_sequences")
        states, ranks = [state, *state.get("other_ranks", [])], m._world_size
        if len(states) != ranks:
            rank_zero_warn(
                f"The checkpoint is of {len(states)} rank(s), this run has {ranks}: the rest of its last rollout and "
                "its random state are dropped, training goes on with a new rollout."
            )
            return
        state = states[m.global_rank]
        m.training_state.load(state)
        if m.generator.partial is not None:
            m.generator.partial.load_state(state.get("partial"))
        elif state.get("partial") is not None:
            rank_zero_warn(
                "The checkpoint holds unfinished sequences of partial rollouts, which are dropped: model.rollout."
                "partial_rollout_steps is null now."
            )


def arguments_of(kind: type) -> Iterator[str]:
    """Names of the arguments that a class and its bases take."""
    for base in kind.__mro__:
        if "__init__" in vars(base):
            for name, parameter in list(inspect.signature(base.__init__).parameters.items())[1:]:  # type: ignore[misc]
                if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                    yield name


def parts_of(module: PolicyModule) -> dict[str, Any]:
    """A module's arguments as they are now, by their names; a user's own are left out where they are not kept."""
    found = {}
    for name in arguments_of(type(module)):
        try:
            found[name] = attrgetter(PLACES.get(name, name))(module)
        except AttributeError:
            continue
    return found


def _seeds_in(name: str, part: Any) -> Iterator[tuple[str, int]]:
    """The seeds that a part, or one inside it, draws by, with the keys of the configuration that set them."""
    seed = getattr(part, "seed", "none")
    if seed is None or isinstance(seed, int):
        yield f"{name}.seed", seed_of(seed)
    if hasattr(part, "base"):  # of LoraPolicy
        yield from _seeds_in(f"{name}.policy", part.base)
    inside = getattr(part, "_parts", ())
    for index, one in enumerate(inside):
        yield from _seeds_in(f"{name}.compressor" if len(inside) == 1 else f"{name}.compressors.{index}", one)
