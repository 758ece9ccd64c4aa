"""Partial rollouts: long sequences continue after the update instead of delaying it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.records import Conversation, Rollout, Rows
from sparse_rl_lightning.rollout.conversations import Conversations, Opening
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams
from sparse_rl_lightning.rollout.engine.scheduler import Progress
from sparse_rl_lightning.rollout.sampler import RolloutSampler
from sparse_rl_lightning.rollout.session import RolloutSession


@dataclass(frozen=True)
class Unfinished:
    """A group whose samples were not handed out yet."""

    row: dict[str, Any]  # of the data
    sequence_ids: tuple[int, ...]  # which decide the random numbers of its samples


class PartialRollouts:
    """Rollouts that stop after a number of decode steps; unfinished sequences continue with the updated policy.

    As in Kimi k1.5 (arXiv 2501.12599), but on slots of a compressed cache. A prompt's samples are handed out together,
    when the last of them has finished, oldest prompt first. A rollout has at most ``unit`` prompts more than it adds:
    micro-batches stay nearly as small as without partial rollouts, and groups that were left complete are caught up
    with. Decoding continues beyond the limit until every sequence has a slot and there are enough groups for one
    micro-batch each: the unfinished rest never exceeds the slots by more than that. Logged with every rollout:

    ============================ ========= ==========================================================
    key                          unit      meaning
    ============================ ========= ==========================================================
    rollout/unfinished           sequences that continue in the next rollout
    rollout/backlog              groups    complete groups that are left for later rollouts
    rollout/off_policy_tokens    share     tokens of the rollout drawn by older versions of the policy
    rollout/version              number    newest version of the policy that drew a token
    rollout/oldest_version       number    version of the policy that drew the oldest token of the rollout
    ============================ ========= ==========================================================

    A checkpoint holds the rows of the groups that were not handed out yet, and nothing that was drawn of them: a
    resumed run draws all their samples anew, with the random numbers of before.

    Args:
        max_steps: Number of decode steps per rollout.
        unit: Divisor of the number of groups in every rollout, so that they fill whole micro-batches.
    """

    def __init__(self, max_steps: int, unit: int = 1) -> None:
        self.max_steps = max_steps
        self.unit = unit
        self.max_prompt_length = 0
        self.session: RolloutSession | None = None
        self.conversations: Conversations | None = None
        self.rows: dict[int, dict[str, Any]] = {}  # with their prompts, by the prompt's number in the session
        self._groups: dict[int, Unfinished] = {}  # by the same number
        self._resumed: list[Unfinished] = []  # of a checkpoint, until the first rollout begins them

    def begin(self, max_prompt_length: int, conversations: Conversations | None = None) -> None:
        """Start a fit, with a session that is created on first use."""
        self.max_prompt_length, self.session, self.conversations = max_prompt_length, None, conversations
        self.rows, self._groups = {}, {}

    def draw(
        self,
        sampler: RolloutSampler,
        params: SamplingParams,
        rows: Rows,
        sequence_ids: Sequence[int],
        encode: Callable[[Rows], list[list[int]]],
        progress: Callable[[Progress], None] | None = None,
    ) -> tuple[Rollout, Rows, list[Conversation] | None]:
        """Add prompts, decode, and take at least ``unit`` complete groups, and at most ``unit`` more than are added.

        ``rows`` has one for each prompt that ``sampler`` completes, which ``encode`` makes token ids if no environment
        gives it. Other arguments are as in :meth:`~sparse_rl_lightning.rollout.RolloutSampler.generate`, with the same
        sampling parameters in every call; ``progress`` counts from the beginning of this one.
        """
        if self.session is None:
            create = RolloutSession if self.conversations is None else self.conversations.open
            self.session = create(sampler, params, self.max_prompt_length)
        session, conversations, count = self.session, self.conversations, params.num_generations
        ids = [tuple(sequence_ids[first : first + count]) for first in range(0, len(sequence_ids), count)]
        groups = [*self._resumed, *map(Unfinished, rows, ids)]
        flat, data = [number for group in groups for number in group.sequence_ids], [group.row for group in groups]
        opening = Opening(data, encode(data), []) if conversations is None else conversations.begin(data, count)
        numbers = session.add(opening.prompts, flat) if conversations is None else conversations.add(opening, flat)
        self.rows |= dict(zip(numbers, opening.rows, strict=True))
        self._groups |= dict(zip(numbers, groups, strict=True))
        self._resumed = []
        advance = session.advance if conversations is None else conversations.advance
        advance(
            self.max_steps,
            until=lambda: not session.scheduler.waiting and len(session.complete) >= self.unit,
            progress=None if progress is None else _since(session.scheduler.progress, progress),
            new_weights=True,
        )
        complete = session.complete
        taken = complete[: min(len(complete), len(rows) + self.unit) // self.unit * self.unit]
        trained = [self.rows.pop(number) for number in taken]
        for number in taken:
            del self._groups[number]
        rollout, finished = (session.take(taken), None) if conversations is None else conversations.take(taken)
        return rollout, trained, finished

    def metrics(self, rollout: Rollout) -> dict[str, Tensor | float]:
        """Metrics besides the rollout's own; the class docstring has the table of keys."""
        assert self.session is not None
        assert rollout.policy_versions is not None
        versions = rollout.policy_versions[rollout.completion_mask]
        return {
            "rollout/unfinished": float(self.session.num_unfinished),
            "rollout/backlog": float(len(self.session.complete)),
            "rollout/off_policy_tokens": (versions < self.session.version).float().mean(),
            "rollout/version": float(self.session.version),
            "rollout/oldest_version": versions.min().float(),
        }

    # ---------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Any] | None:
        """The groups that were not handed out yet, oldest first, for a checkpoint; None without any."""
        left = [*self._resumed, *self._groups.values()]
        ids = [list(group.sequence_ids) for group in left]
        return {"rows": [group.row for group in left], "sequence_ids": ids} if left else None

    def load_state(self, state: dict[str, Any] | None, num_generations: int) -> int:
        """Begin the groups of a :meth:`state` with the next rollout; returns their number.

        Raises:
            ValueError: If they have another number of samples.
        """
        state = {"rows": [], "sequence_ids": []} if state is None else _rows_alone(state)
        self._resumed = [Unfinished(row, tuple(ids)) for row, ids in zip(*state.values(), strict=True)]
        was = {len(group.sequence_ids) for group in self._resumed} - {num_generations}
        if was:
            raise UserError(
                f"ckpt_path: sampling.num_generations was {was.pop()} and is {num_generations}, and the checkpoint has "
                "unfinished groups of as many samples: resume as it was, or set model.rollout.partial_rollout_steps to "
                "null once, which drops them."
            )
        return len(self._resumed)


def _rows_alone(state: dict[str, Any]) -> dict[str, Any]:
    """A state as it is now; versions before 0.3 stored slots, finished samples and conversations as well."""
    if "session" not in state:
        return state
    count, conversations = state["session"]["settings"]["num_generations"], state.get("conversations", {})
    rows = [
        conversations[number * count]["conversation"]["row"] if conversations else row
        for number, row in state["rows"].items()
    ]
    ids = [list(range(number * count, (number + 1) * count)) for number in state["rows"]]
    return {"rows": rows, "sequence_ids": ids}


def check_storable(rows: Rows) -> None:
    """Refuse rows that do not fit into a checkpoint: only text, numbers, lists and dictionaries do."""
    for row in rows:
        for name, value in row.items():
            if (foreign := _foreign_type(value)) is not None:
                raise UserError(
                    f"partial_rollout_steps keeps rows in checkpoints, but column {name!r} of the training data holds "
                    f"a {foreign}. Make it text, a number, or a list or dictionary of them, or drop the column."
                )


def _foreign_type(value: Any) -> str | None:
    """The name of the first type inside a value that a weights-only checkpoint refuses."""
    if value is None or type(value) in (str, int, float, bool):
        return None
    if type(value) is dict:
        value = [*value, *value.values()]
    if type(value) in (list, tuple):
        return next((name for item in value if (name := _foreign_type(item)) is not None), None)
    return type(value).__name__


def _since(start: Progress, progress: Callable[[Progress], None]) -> Callable[[Progress], None]:
    """The progress since ``start``, for a session that is already under way."""

    def report(now: Progress) -> None:
        progress(replace(
            now, step=now.step - start.step, finished=now.finished - start.finished,
            total=now.total - start.finished, tokens=now.tokens - start.tokens,
        ))  # fmt: skip

    return report
