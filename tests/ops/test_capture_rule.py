"""What a decode step runs inside a CUDA graph neither waits for the device nor copies numbers to it.

A rule in the syntax tree, since no GPU is needed to break it: every function that can be reached from a step by name is
read, and what torch answers with a wait or an upload from host memory (forbidden while capturing) is found by its form.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "sparse_rl_lightning"
FILES = sorted(
    path for room in ("rollout/engine", "cache", "retrieval", "ops") for path in (PACKAGE / room).rglob("*.py")
)
ROOTS = {  # what is called by no name of its own
    "engine.py:Engine.step",
    "decoder.py:Decoder.__call__",
    "decoder.py:Projection.__call__",
    "decoder.py:_Copied.__call__",
}
NOT_CAPTURED = {
    "compression.py", "running_state.py",  # steps with running state run eagerly
    "scheduler.py", "memory.py", "prefill.py",  # what the host does between steps
    "summarize_pages.py:write_summaries",  # and retrievers without a kernel
    "attention.py", "logprobs.py",  # of the learner
    "library.py",  # passes arguments on
}  # fmt: skip
WAITS = {"item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "repeat_interleave", "synchronize"}
MAKES = {"tensor", "as_tensor", "from_numpy"}
ON_THE_HOST = {"bool", "int", "float"}
REDUCTIONS = {"any", "all", "equal", "max", "min", "sum"}

Function = ast.FunctionDef
Functions = dict[str, Function]


def functions(files: list[tuple[str, str]]) -> Functions:
    """Every function of these (name, source), by file and qualified name; nested ones belong to what holds them."""
    found: Functions = {}
    for name, source in files:
        if name in NOT_CAPTURED:
            continue
        for node in ast.parse(source).body:
            inside = node.body if isinstance(node, ast.ClassDef) else [node]
            prefix = f"{name}:{node.name}." if isinstance(node, ast.ClassDef) else f"{name}:"
            found |= {prefix + f.name: f for f in inside if isinstance(f, Function)}
    return {name: function for name, function in found.items() if name not in NOT_CAPTURED}


def reached(all_functions: Functions, roots: set[str]) -> Functions:
    """What the roots call, by name, and what that calls; a step's `with` and lambdas too."""
    by_name: dict[str, list[str]] = {}
    for name in all_functions:
        by_name.setdefault(name.replace(":", ".").split(".")[-1], []).append(name)
    todo, seen = sorted(roots), set[str]()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for node in ast.walk(all_functions[name]):
            called = node.func if isinstance(node, ast.Call) else None
            # an argument check of an op runs only when the op has failed
            short = getattr(called, "attr", getattr(called, "id", ""))
            todo += [] if short.startswith("_check") or short.startswith("check") else by_name.get(short, [])
    return {name: all_functions[name] for name in sorted(seen)}


def lists(nodes: Iterable[ast.AST]) -> set[str]:
    """Names among these arguments and fields that are lists of Python."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.arg) and _is_list(node.annotation):
            found.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and _is_list(node.annotation):
            found.add(ast.unparse(node.target).split(".")[-1])
    return found


def _is_list(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation).startswith(("list[", "Sequence["))


def is_number(node: ast.expr) -> bool:
    """A literal, or torch.inf and the like."""
    if isinstance(node, ast.UnaryOp):
        return is_number(node.operand)
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Attribute) and node.attr in ("inf", "nan"))


def violations(function: Function, list_fields: set[str]) -> Iterator[str]:
    """What a captured function must not do, with the line."""
    list_names = lists(ast.walk(function))
    for node in ast.walk(function):
        what = ""
        if isinstance(node, ast.Assign | ast.AugAssign):
            what = wrong_write(node)
        elif isinstance(node, ast.Subscript):
            what = wrong_index(node.slice, list_names, list_fields)
        elif isinstance(node, ast.Call):
            what = wrong_call(node, list_names)
        if what:
            yield f"line {node.lineno}: {ast.unparse(node)}: {what}"  # type: ignore[attr-defined]  # one of the three


def wrong_write(node: ast.Assign | ast.AugAssign) -> str:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    if is_number(node.value) and any(isinstance(target, ast.Subscript) for target in targets):
        return "writes a number of the host; use zero_, fill_, index_fill_ or masked_fill"
    return ""


def wrong_index(index: ast.expr, list_names: set[str], list_fields: set[str]) -> str:
    named = getattr(index, "attr", "") in list_fields or getattr(index, "id", "") in list_names
    is_list = named or isinstance(index, ast.List | ast.ListComp)
    return "uploads a list as an index; keep the index on the device" if is_list else ""


def wrong_call(node: ast.Call, list_names: set[str]) -> str:
    function, first = node.func, node.args[0] if node.args else None
    if isinstance(function, ast.Name):
        inner = getattr(getattr(first, "func", None), "attr", "")
        is_number_of_a_tensor = inner in REDUCTIONS or isinstance(first, ast.BinOp | ast.Subscript)
        return "waits for a number" if function.id in ON_THE_HOST and is_number_of_a_tensor else ""
    name = getattr(function, "attr", "")
    to_cpu = name == "to" and isinstance(first, ast.Constant) and first.value == "cpu"
    if name in WAITS or to_cpu:
        return "waits for the device"
    is_list = isinstance(first, ast.List | ast.ListComp) or getattr(first, "id", "") in list_names
    uploads = is_list or any(keyword.arg == "device" for keyword in node.keywords)
    return "uploads from the host" if name in MAKES and uploads else ""


def broken(files: list[tuple[str, str]], roots: set[str]) -> list[str]:
    fields = lists(node for _, source in files for node in ast.walk(ast.parse(source)))
    captured = reached(functions(files), roots)
    return [f"{name}, {what}" for name, function in captured.items() for what in violations(function, fields)]


def sources() -> list[tuple[str, str]]:
    return [(path.name, path.read_text()) for path in FILES]


def test_a_decode_step_can_be_captured() -> None:
    assert broken(sources(), ROOTS) == []


def test_the_rule_reads_all_of_a_step() -> None:
    captured = {name.split(":")[1] for name in reached(functions(sources()), ROOTS)}
    assert captured >= {
        "Engine.draw", "draw", "truncate", "hash_uniform", "hash_bits", "SequenceLogs.note_end",
        "SlotCache.append_and_attend", "SlotCache.entries_held", "append", "decode_attention",
        "page_attention", "select_pages", "summarize_pages", "PagedCache._attend", "PagedCache.begin_step",
        "PagedCache._refresh", "Decoder.logits",
        "Decoder._rotation", "list_pages",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "line", "instead"),
    [
        ("slots.py", "self.seen[-1:].zero_()", "self.seen[-1] = 0"),
        ("sampling.py", "is_end.index_fill_(0, end_ids, True)", "is_end[end_ids] = True"),
        ("engine.py", "at = cache.seen[places]", "at = cache.seen[rows.used]"),
        ("engine.py", "at = cache.seen[places]", "at = cache.seen[[1, 2]]"),
        ("sequences.py", "before = self.ends[slots]", "before = self.ends[slots] if bool(is_end.any()) else at"),
        ("sampling.py", "vocabulary = torch.arange(", "vocabulary = torch.tensor([1]) + torch.arange("),
        ("slots.py", "own = query.to(kind,", "own = query.to(kind, non_blocking=slots.max().item(),"),
    ],
)  # fmt: skip
def test_the_rule_finds_what_it_is_made_for(file: str, line: str, instead: str) -> None:
    """Put back: what once kept every step from being captured, and its kin."""
    good = dict(sources())
    assert line in good[file]
    spoiled = list((good | {file: good[file].replace(line, instead)}).items())
    (found,) = broken(spoiled, ROOTS)
    assert found.startswith(file)


@pytest.mark.parametrize(
    "line", ["t[0] = 1", "t[i] = -torch.inf", "t[mask] = False", "t[0] += 1", "x = t[[0, 1]]", "x = t[names]",
             "x = t.sum().item()", "x = int(t.max())", "x = bool(t.any() | u)", "x = float(t[0])", "x = t.cpu()",
             "x = torch.tensor(names)", "x = torch.as_tensor(3, device=t.device)", 'x = t.to("cpu")'],
)  # fmt: skip
def test_forms_that_are_found(line: str) -> None:
    source = f"def run(t, i, u, mask, names: list[int]):\n{textwrap.indent(line, '    ')}\n"
    assert len(broken([("a.py", source)], {"a.py:run"})) == 1


@pytest.mark.parametrize(
    "line", ["t[-1:].zero_()", "t[i] = u", "t.index_fill_(0, i, True)", "x = t[..., :3]", "x = int(len(names))",
             "table[3] = names", "x = torch.zeros((), dtype=torch.int64)", "x = t.to(torch.float32)"],
)  # fmt: skip
def test_forms_that_are_fine(line: str) -> None:
    source = f"def run(t, i, u, table, names: list[int]):\n    {line}\n"
    assert broken([("a.py", source)], {"a.py:run"}) == []
