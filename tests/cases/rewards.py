"""Cases of reward functions: ``mine.lr`` is the one of the run."""

from __future__ import annotations

from typing import Any

from cases.case import TRAINS, Case


def lr(body: str, arguments: str = "completions, **columns") -> str:
    """A module with a reward function."""
    return f"import asyncio, math, os, sys\nimport numpy, torch\n\n\ndef lr({arguments}):\n    {body}\n"


def case(body: str, says: str = TRAINS, status: int = 0, *, slow: bool = True) -> Case:
    """A function with this body."""
    return Case(f"`{body}`", says, status, reward=lr(body), slow=slow)


ANSWERS = [
    case("return [len(c) for c in completions]"),
    case("return numpy.ones(len(completions))"),
    case("return torch.ones(len(completions), requires_grad=True)"),
    case("return [True for c in completions]"),
    case("return (float(len(c)) for c in completions)"),
    case("print('x' * 1000); return [1.0] * len(completions)"),
    case("torch.manual_seed(0); return [1.0] * len(completions)"),
    case("torch.set_default_dtype(torch.float64); return [1.0] * len(completions)"),
    case(
        "return ['1' for c in completions]",
        "returned '1', not a finite number",
        1,
    ),
    case(
        "return ['yes' for c in completions]",
        "returned 'yes', not a finite number",
        1,
    ),
    case(
        "return [math.nan for c in completions]",
        "returned nan, not a finite number",
        1,
        slow=False,
    ),
    case("return [0.0] * (len(completions) - 1) + [math.nan]"),
    case(
        "return numpy.ones((len(completions), 1))",
        "returned array([1.]), not a finite number",
        1,
    ),
    case("return [1e30 * len(c) for c in completions]"),
    case(
        "return [b'1' for c in completions]",
        "returned b'1', not a finite number",
        1,
    ),
    case(
        "return [[1.0] for c in completions]",
        "returned [1.0], not a finite number",
        1,
    ),
    case(
        "return [1 + 1j for c in completions]",
        "returned (1+1j), not a finite number",
        1,
    ),
    case(
        "return numpy.ones((len(completions), 2))",
        "returned array([1., 1.]), not a finite number",
        1,
    ),
    case(
        "return [1.0] * (len(completions) - 1)",
        "The reward function lr returned 7 rewards for 8 samples.",
        1,
        slow=False,
    ),
    case("os.chdir('/'); return [1.0] * len(completions)"),
    case("return [1.0]", "The reward function lr returned 1 rewards for 8 samples.", 1),
]

ERRORS = [
    case(
        "raise ValueError('x')",
        "RuntimeError: The reward function lr raised ValueError('x') on sample 0",
        1,
        slow=False,
    ),
    case("raise ValueError('\\x1b[2Jx')", r"raised ValueError('\x1b[2Jx') on sample 0", 1),
    case("raise MemoryError", "The reward function lr raised MemoryError() on sample 0", 1),
    case("raise StopIteration", "The reward function lr raised StopIteration() on sample 0", 1),
    case("assert False, 'no'", "The reward function lr raised AssertionError('no') on sample 0", 1),
    case("raise BaseException('x')", "The reward function lr raised BaseException('x') on sample 0", 1),
    case("return [1.0 / (len(c) - 12) for c in completions]"),
    case("return lr(completions)", "raised RecursionError('maximum recursion depth exceeded", 1),
]

FUNCTIONS = [
    Case("without `**columns`", "The reward function lr(completions) does not fit the data: got an unexpected", 1,
         reward=lr("return [1.0] * len(completions)", "completions")),
    Case("with a column that the data lack", "does not fit the data: missing a required argument: 'gold'", 1,
         reward=lr("return [1.0] * len(completions)", "completions, gold, **columns")),
    Case("`async def lr(completions, **columns)`", "The reward function lr is async. Write a plain one", 1,
         reward="async def lr(completions, **columns):\n    return []\n"),
    Case("no function of the name", "module 'mine' has no attribute 'lr'", 2, reward="def other(): pass\n", slow=True),
    Case("a number in place of a function", "Unexpected import object 3", 2, reward="lr = 3\n"),
    Case("a module that is not Python", "invalid syntax (mine.py, line 1)", 2, reward="def lr(:\n", slow=True),
    Case("a module that imports what is not there", "No module named 'nowhere_else'", 2, slow=True,
         reward="import nowhere_else\n"),
    Case("a lambda", TRAINS, 0, reward="lr = lambda completions, **columns: [1.0] * len(completions)\n", slow=True),
    Case("a partial", TRAINS, 0, slow=True, reward=(
        "from functools import partial\ndef f(x, completions, **columns): return [x] * len(completions)\n"
        "lr = partial(f, 1.0)\nlr.__name__ = 'lr'\n"
    )),
]  # fmt: skip

LISTS = [
    case("return None", "returned None, of type NoneType; it must return a list with one number per sample", 1),
    case("return {i: 1.0 for i in range(len(completions))}", "of type dict; it must return a list", 1, slow=False),
    case("return '1' * len(completions)", "returned '11111111', of type str; it must return a list", 1),
    case("return {1.0}", "returned {1.0}, of type set; it must return a list", 1),
    case("return 1.0", "returned 1.0, of type float; it must return a list", 1),
    case("return ''.join(completions)", "of type str; it must return a list", 1),
    case("return iter(lambda: 1.0, 2.0)", "returned more than 8 rewards for 8 samples.", 1),
    case("return [None] * len(completions)"),
    case("completions.sort(); return [1.0] * len(completions)"),
]


def limited(body: str, says: str = TRAINS, status: int = 0, *, slow: bool = True) -> Case:
    """A function with this body and ``reward_timeout: 1``."""

    def limit(values: dict[str, Any]) -> None:
        values["model"]["init_args"].setdefault("rollout", {})["reward_timeout"] = 1.0

    return Case(f"`{body}`, `reward_timeout: 1`", says, status, edit=limit, reward=lr(body), slow=slow)


BACKTRACKS = "import re; re.match('(a+)+$', 'a' * 40 + 'b')"
LIMITS = [
    case("sys.exit()", "The reward function lr raised SystemExit() on sample 0", 1, slow=False),
    limited("sys.exit(3)", "The reward function lr raised SystemExit(3) on sample 0", 1),
    limited("raise KeyboardInterrupt", "The reward function lr raised KeyboardInterrupt on sample 0", 1),
    limited(BACKTRACKS, "The reward function lr gave no answer within 1 seconds on sample 0", 1),
    limited("while True: pass", "The reward function lr gave no answer within 1 seconds on sample 0", 1),
    limited("return (1.0 for _ in iter(int, 1))", "The reward function lr returned more than 8 rewards", 1),
    limited("return [float(len(c)) for c in completions]"),
    limited("completions.clear(); return [1.0] * 8"),
    limited("torch.set_default_dtype(torch.float64); torch.set_grad_enabled(False); return [1.0] * len(completions)"),
    limited("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); return [1.0] * len(completions)"),
    limited("os.close(1); os.close(2); return [1.0] * len(completions)"),
    limited("import multiprocessing as m; m.Process(target=print).start(); return [1.0] * len(completions)"),
    limited("os._exit(0)", "The reward function lr ended its process with status 0 on sample 0", 1),
    limited("os.chdir('/'); return [1.0] * len(completions)"),
]

TOPICS = {"Rewards": ANSWERS, "Errors": ERRORS, "What is no list": LISTS, "Functions": FUNCTIONS, "Limits": LIMITS}
