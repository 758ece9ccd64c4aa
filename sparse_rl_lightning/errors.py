"""UserError: the one error that the command line shows as a line instead of a traceback."""

from __future__ import annotations


class UserError(ValueError):
    """Input that cannot be used; the message says what was given, what is allowed and what to change.

    ``sparse-rl`` ends with ``error: ...`` and the message. Any other exception is a bug, here or in a user's code, and
    keeps its traceback.
    """
