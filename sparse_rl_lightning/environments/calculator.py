"""Calculator: the tool that the task ``calculator`` of ``ArithmeticTasks`` is solved with."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

from sparse_rl_lightning.environments.base import Environment
from sparse_rl_lightning.errors import UserError, check_number

OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_CALL = re.compile(r"(-?)0*([0-9]{1,18})([-+*])0*([0-9]{1,18})")  # so many digits that any display holds less
_MAX_LENGTH = 64  # characters of a turn that is read at all
NOT_UNDERSTOOD = "!;"


class Calculator(Environment):
    """Answers ``19+25?`` by ``44;`` and ends the conversation at ``#44``, which pays 1 if it is the row's answer.

    A turn is two integers and one of ``+ - *`` between them, or ``#`` and the answer; a question mark at the end is
    left out. Any other turn, and one with a number that the display cannot show, is answered by ``!;``. What a wrong
    call comes to is told like any other, so a policy can try again.

    ``step_share`` also pays for the work. A call counts if it is the solution's first, then its second, and so on, by
    the numbers' values. Their part of the solution's calls, or of those made where these are more, times the share has
    been paid at every moment: a call beyond the solution's number takes back some of it.

    With ``restates`` the answer to such a call says what is left to do, ``19*03;`` to ``07+12?`` of ``07+12*03;``:
    nothing older than the last answer is needed then.

    Args:
        restates: Whether answers to the solution's calls say what is left, for the task ``calculator_restated``.
        step_share: What all the calls of the row's ``solution`` are paid together; at 0 only the answer counts.
        max_digits: Digits of the display, at most 18.

    Raises:
        ValueError: If a number is out of range, or a row lacks ``answer``, or ``solution`` where steps are paid.
    """

    def __init__(self, step_share: float = 0.0, max_digits: int = 12, restates: bool = False) -> None:
        check_number("step_share", step_share, least=0, owner="Calculator")
        check_number("max_digits", max_digits, least=1, most=18, owner="Calculator")
        self.step_share, self.restates = step_share, restates
        self.limit = 10**max_digits
        self.answer = ""
        self.wanted: list[str] = []  # the solution's calls
        self.left: list[str] = []  # what the solution's answers say
        self.num_right = 0
        self.num_calls = 0

    def reset(self, row: dict[str, Any]) -> None:
        """Begin a conversation about a row; its own prompt is the question."""
        is_read = bool(self.step_share) or self.restates
        missing = {"answer", *(["solution"] if is_read else [])} - set(row)
        if missing:
            raise UserError(
                f"Calculator needs the columns {sorted(missing)}, but a row has {sorted(row)}. Take "
                "ArithmeticTasks with tasks: calculator, or data with these columns."
            )
        self.answer = str(row["answer"])
        self.wanted = re.findall(r"([^;?]+)\?", row["solution"]) if is_read else []
        self.left = re.findall(r"\?([^;]*);", row["solution"]) if self.restates else []
        self.num_right = self.num_calls = 0

    def step(self, text: str) -> tuple[str | None, float]:
        """The value of a call and what its step is paid, or None and 1.0 or 0.0 for the answer."""
        text = text.strip().removesuffix("?") if len(text) <= _MAX_LENGTH else ""
        if text.startswith("#"):
            return None, float(text[1:] == self.answer)
        paid = self._paid()
        call = self._read(text)
        self.num_calls += 1
        is_next = self.num_right < len(self.wanted) and call == self._read(self.wanted[self.num_right])
        if call is not None and is_next:
            self.num_right += 1
        reward = self._paid() - paid
        if call is not None and is_next and self.restates:
            return f"{self.left[self.num_right - 1]};", reward
        value = None if call is None else OPERATORS[call[1]](call[0], call[2])
        return (NOT_UNDERSTOOD if value is None or abs(value) >= self.limit else f"{value};"), reward

    def _paid(self) -> float:
        return self.step_share * self.num_right / max(len(self.wanted), self.num_calls, 1)

    def _read(self, text: str) -> tuple[int, str, int] | None:
        match = _CALL.fullmatch(text)
        if match is None:
            return None
        sign, left, symbol, right = match.groups()
        call = int(sign + left), symbol, int(right)
        return call if max(abs(call[0]), call[2]) < self.limit else None
