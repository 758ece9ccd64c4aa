"""Partial rollouts: long sequences continue after the update instead of delaying it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.records import Conversation, Rollout, Rows
from sparse_rl_lightning.rollout.conversations import Conversations, Opening
from sparse_rl_lightning.rollout.engine.sampling import SamplingParams
from sparse_rl_lightning.rollout.engine.scheduler import Progress
from sparse_rl_lightning.rollout.options import PartialCheckpoint
from sparse_rl_lightning.rollout.sampler import RolloutSampler
from sparse_rl_lightning.rollout.session import RolloutSession, drawn_again
from sparse_rl_lightning.rollout.storable import check_storable


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

    Args:
        max_steps: Number of decode steps per rollout.
        checkpoint: Treatment of unfinished sequences: ``store`` their slots, or ``restart`` them after a resume.
        unit: Divisor of the number of groups in every rollout, so that they fill whole micro-batches.
    """

    def __init__(self, max_steps: int, checkpoint: PartialCheckpoint = "store", unit: int = 1) -> None:
        self.max_steps = max_steps
        self.checkpoint = checkpoint
        self.unit = unit
        self.max_prompt_length = 0
        self.session: RolloutSession | None = None
        self.talk: Conversations | None = None
        self.rows: dict[int, dict[str, Any]] = {}  # rows of the prompts in the session, by prompt number
        self._saved: dict[str, Any] | None = None  # state from a checkpoint, until there is a session

    def begin(self, max_prompt_length: int, talk: Conversations | None = None) -> None:
        """Start a fit: with an empty session, created on first use, or with the one of the checkpoint."""
        self.max_prompt_length, self.session, self.talk, self.rows = max_prompt_length, None, talk, {}

    def draw(
        self,
        sampler: RolloutSampler,
        params: SamplingParams,
        opening: Opening,
        sequence_ids: Sequence[int],
        progress: Callable[[Progress], None] | None = None,
    ) -> tuple[Rollout, Rows, list[Conversation] | None]:
        """Add prompts, decode, and take at least ``unit`` complete groups, and at most ``unit`` more than are added.

        ``opening`` has the rows, one for each prompt that ``sampler`` completes. Other arguments are as in
        :meth:`~sparse_rl_lightning.rollout.RolloutSampler.generate`, with the same sampling parameters in every call;
        ``progress`` counts from the beginning of this one.
        """
        session = self._session_for(sampler, params)
        talk, advance = self.talk, session.advance if self.talk is None else self.talk.advance
        if talk is not None:
            check_storable(opening.rows)
        numbers = session.add(opening.prompts, sequence_ids) if talk is None else talk.add(opening, sequence_ids)
        self.rows |= dict(zip(numbers, opening.rows, strict=True))
        advance(
            self.max_steps,
            until=lambda: not session.scheduler.waiting and len(session.complete) >= self.unit,
            progress=None if progress is None else _since(session.scheduler.progress, progress),
            new_weights=True,
        )
        complete = session.complete
        taken = complete[: min(len(complete), len(numbers) + self.unit) // self.unit * self.unit]
        rows = [self.rows.pop(number) for number in taken]
        rollout, conversations = (session.take(taken), None) if talk is None else talk.take(taken)
        return rollout, rows, conversations

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

    @property
    def num_unfinished(self) -> int:
        """Number of sequences that have not finished."""
        return 0 if self.session is None else self.session.num_unfinished

    # ---------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Any] | None:
        """The state for a checkpoint; None if there is nothing to save."""
        if self.session is None:
            return self._saved
        restarts, own = self.checkpoint == "restart", {"rows": dict(self.rows)}
        if self.talk is not None:
            own["conversations"] = self.talk.state(restarts)
        anew = restarts or Conversations.starts_anew(own.get("conversations", {}))
        return {**own, "session": self.session.state(restart=anew)}

    def load_state(self, state: dict[str, Any] | None, anew: bool = False) -> None:
        """Load what :meth:`state` returned, as soon as there is a session; ``anew`` draws all of its samples again."""
        self._saved = _drawn_again(state) if state is not None and anew else state

    def _session_for(self, sampler: RolloutSampler, params: SamplingParams) -> RolloutSession:
        if self.session is None:
            create = RolloutSession if self.talk is None else self.talk.open
            self.session = create(sampler, params, self.max_prompt_length)
            if self._saved is not None:
                self._load(self.session, self._saved)
        return self.session

    def _load(self, session: RolloutSession, saved: dict[str, Any]) -> None:
        if ("conversations" in saved) != (self.talk is not None):
            raise UserError(
                "The checkpoint's unfinished sequences are of a run "
                + ("with an environment, and this one has none" if self.talk is None else "without an environment")
                + ": drop them by resuming with model.rollout.partial_rollout_steps null once, or resume as it was."
            )
        if session.draws_otherwise(saved["session"]):
            saved = _drawn_again(saved)
        session.load_state(saved["session"])
        if self.talk is not None:
            self.talk.load_state(saved["conversations"])
        self.rows, self._saved = dict(saved["rows"]), None


def _drawn_again(saved: dict[str, Any]) -> dict[str, Any]:
    """The state of partial rollouts whose samples are all drawn again: none of other settings is trained on."""
    talks = {name: Conversations.from_prompts(saved[name]) for name in ("conversations",) if name in saved}
    return saved | {"session": drawn_again(saved["session"])} | talks


def state_bytes(state: Any) -> int:
    """The number of bytes of all tensors inside dictionaries and lists."""
    if isinstance(state, Tensor):
        return state.nbytes
    inside = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return sum(map(state_bytes, inside))


def _since(start: Progress, progress: Callable[[Progress], None]) -> Callable[[Progress], None]:
    """The progress since ``start``, for a session that is already under way."""

    def report(now: Progress) -> None:
        progress(replace(
            now, step=now.step - start.step, finished=now.finished - start.finished,
            total=now.total - start.finished, tokens=now.tokens - start.tokens,
        ))  # fmt: skip

    return report
