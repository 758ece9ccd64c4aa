"""What a decode step runs in a CUDA graph, or a compression event between two, neither waits nor uploads.

A rule in the syntax tree, since no GPU is needed to break it: every function that can be reached from a step by name is
read, and what torch answers with a wait for the device or a copy from host memory (forbidden while capturing) is found
by its form. A step has no exception, an event the list of today. What has no form of its own is found by
``tests/rollout/test_on_gpu.py``.
"""

from __future__ import annotations

import ast
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "sparse_rl_lightning"


@dataclass(frozen=True)
class Rule:
    """Where it holds: everything in these folders that these functions call."""

    folders: tuple[str, ...]
    roots: frozenset[str]  # file:function
    left_out: frozenset[str] = frozenset()  # files, and file:function


STEP = Rule(
    folders=("rollout/engine", "cache", "retrieval", "ops"),
    roots=frozenset({  # what is called by no name of its own
        "rollout/engine/engine.py:Engine.step",
        "rollout/engine/engine.py:DecodeStep.__call__",
        "rollout/engine/mixed_layers.py:MixedPass.__call__",
        "rollout/engine/mixed_layers.py:MixedPass.recur",
        "cache/windows.py:WindowCache.begin_step",
        "rollout/engine/decoders/native.py:NativeDecoder.__call__",
        "rollout/engine/decoders/hf_forward.py:TransformersDecoder.__call__",
        "rollout/engine/decoders/linear_products.py:Projection.__call__",
        "rollout/engine/decoders/linear_products.py:Copied.__call__",
        "rollout/engine/decoders/native.py:AddNorm.__call__",
        "rollout/engine/decoders/native.py:GatedMLP.__call__",
        "ops/draw.py:reference",  # where there is no kernel
    }),
    left_out=frozenset({
        "cache/compression.py", "cache/running_state.py",  # steps with running state run eagerly
        "rollout/engine/scheduler.py", "rollout/engine/memory.py", "rollout/engine/prefill.py",  # between steps
        "rollout/engine/turns.py", "rollout/engine/extend.py", "rollout/engine/expert_log.py:RecordingEngine._slots",
        "rollout/engine/mixed_layers.py:MixedPass._read_pack", "rollout/engine/mixed_layers.py:MixedPass._read_chunk",
        "rollout/engine/mixed_layers.py:MixedPass._extend", "cache/linear_states.py:recur_pieces",
        "ops/summarize_pages.py:write_summaries",  # and retrievers without a kernel
        "retrieval/logprobs.py",  # of the learner
        "ops/library.py",  # passes arguments on
        "ops/draw.py:_by_rows",  # unlike requests where there is no kernel, of which no step draws any
    }),
)  # fmt: skip
EVENT = Rule(
    folders=("cache", "compressors", "budgets", "retrieval", "retrievers", "ops"),
    roots=frozenset({"cache/compression.py:Compression.compress"}),
    left_out=frozenset({"retrieval/logprobs.py", "ops/library.py"}),
)
EXCEPTIONS: dict[str, tuple[int, str]] = {  # of an event: how many, and why; compression on the device empties it
    "cache/compression.py:Compression._plan": (1, "compressors in Python: whether a layer cannot be cut"),
    "cache/compression.py:Compression.compress": (1, "the longest head, if heads differ"),
    "cache/compression.py:native_scores": (1, "on a CPU only"),
    "compressors/base.py:Compressor._refuse": (4, "only after an error"),
    "compressors/base.py:Compressor._refuse_nan": (2, "the same"),
    "ops/summarize_pages.py:write_summaries": (1, "retrievers without a kernel, which run eagerly"),
}
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
        for node in ast.parse(source).body:
            inside = node.body if isinstance(node, ast.ClassDef) else [node]
            prefix = f"{name}:{node.name}." if isinstance(node, ast.ClassDef) else f"{name}:"
            found |= {prefix + f.name: f for f in inside if isinstance(f, Function)}
    return found


def reached(files: list[tuple[str, str]], rule: Rule) -> Functions:
    """What the roots call, by name, and what that calls; a step's `with` and lambdas too."""
    all_functions = {
        name: function for name, function in functions(files).items() if not {name, name.split(":")[0]} & rule.left_out
    }
    by_name: dict[str, list[str]] = {}
    for name in all_functions:
        by_name.setdefault(name.replace(":", ".").split(".")[-1], []).append(name)
    todo, seen = sorted(rule.roots), set[str]()
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


def lists(nodes: Iterable[ast.AST], makers: set[str]) -> set[str]:
    """Names among these arguments, fields and variables that are, or may be, lists of Python.

    Args:
        nodes: Syntax to look at.
        makers: Functions that return lists.
    """
    found = set()
    for node in nodes:
        if isinstance(node, ast.arg) and _is_list(node.annotation):
            found.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and _is_list(node.annotation):
            found.add(ast.unparse(node.target).split(".")[-1])
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            pairs = (
                zip(target.elts, value.elts, strict=False)
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                else [(target, value)]
            )
            found |= {ast.unparse(name) for name, made in pairs if _is_made(made, makers)}
    return found


def _is_made(value: ast.expr, makers: set[str]) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in makers


def _is_list(annotation: ast.expr | None) -> bool:
    kinds = "" if annotation is None else ast.unparse(annotation)
    return any(kind.strip().startswith(("list[", "Sequence[")) for kind in kinds.split("|"))


def is_number(node: ast.expr) -> bool:
    """A literal, or torch.inf and the like."""
    if isinstance(node, ast.UnaryOp):
        return is_number(node.operand)
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Attribute) and node.attr in ("inf", "nan"))


def violations(function: Function, list_fields: set[str], makers: set[str]) -> Iterator[str]:
    """What a captured function must not do, with the line."""
    list_names = lists(ast.walk(function), makers)
    for node in ast.walk(function):
        what = ""
        if isinstance(node, ast.Assign | ast.AugAssign):
            what = wrong_write(node)
        elif isinstance(node, ast.Subscript) and not ast.unparse(node.value).startswith("Callable"):
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
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    named = {getattr(part, "attr", "") for part in parts} & list_fields
    is_list = named or any(
        getattr(part, "id", "") in list_names or isinstance(part, ast.List | ast.ListComp) for part in parts
    )
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


def broken(files: list[tuple[str, str]], rule: Rule) -> list[str]:
    """What breaks the rule: file and function, line, and why."""
    nodes = [node for _, source in files for node in ast.walk(ast.parse(source))]
    makers = {node.name for node in nodes if isinstance(node, Function) and _is_list(node.returns)}
    fields = lists(nodes, makers)
    return [
        f"{name}, {what}"
        for name, function in reached(files, rule).items()
        for what in violations(function, fields, makers)
    ]


def sources(rule: Rule) -> list[tuple[str, str]]:
    paths = sorted(path for folder in rule.folders for path in (PACKAGE / folder).rglob("*.py"))
    return [(path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def test_a_decode_step_can_be_captured() -> None:
    assert broken(sources(STEP), STEP) == []


def test_a_compression_event_waits_where_it_is_known_to() -> None:
    found = broken(sources(EVENT), EVENT)
    counts = Counter(what.partition(",")[0] for what in found)
    assert counts == {name: count for name, (count, _) in EXCEPTIONS.items()}, "\n".join(found)


def test_the_rules_read_all_of_a_step_and_of_an_event() -> None:
    captured = {name.split(":")[1] for name in reached(sources(STEP), STEP)}
    assert captured >= {
        "Engine.draw", "draw", "truncate", "keyed_uniform", "hash_bits", "SequenceLogs.record", "note_first",
        "penalize", "SlotCache.append_and_attend", "SlotCache.entries_held", "append", "append_attend",
        "decode_attention",
        "page_attention", "select_pages", "summarize_pages", "PagedCache._attend", "PagedCache.begin_step",
        "PagedCache._refresh", "Decoder.logits", "rms_norm", "silu_mul", "Joined._product", "list_pages",
    }  # fmt: skip
    events = {name.split(":")[1] for name in reached(sources(EVENT), EVENT)}
    assert events >= {
        "block_state", "SlotCache.compact", "PagedCache.compact", "Compressor.propose_eviction", "RKV.score",
        "Adaptive.head_budgets", "evict", "key_redundancy", "window_importance", "Arenas.move",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "line", "instead"),
    [
        ("cache/slots.py", "self.seen[-1:].zero_()", "self.seen[-1] = 0"),
        ("ops/draw.py", "forbidden.index_fill_(0, end_ids, True)", "forbidden[end_ids] = True"),
        ("rollout/engine/engine.py", "cache.prompt_lengths[places]", "cache.prompt_lengths[rows.used]"),
        ("rollout/engine/engine.py", "cache.prompt_lengths[places]", "cache.prompt_lengths[[1, 2]]"),
        (
            "rollout/engine/sequences.py", "note_first(self.broken, slots, at, drawn.logprobs.isnan())",
            "bool(at.any()) and note_first(self.broken, slots, at, drawn.logprobs.isnan())",
        ),
        ("rollout/engine/sampling.py", "is_before = torch.arange(", "is_before = torch.tensor([1]) + torch.arange("),
        (
            "cache/slots.py", "projected, transform = transform.rounded(projected, g.num_kv_heads, g.query_dtype)",
            "projected, transform = transform.rounded(projected, slots.max().item(), g.query_dtype)",
        ),
    ],
)  # fmt: skip
def test_the_rule_finds_what_it_is_made_for(file: str, line: str, instead: str) -> None:
    """Put back: what once kept every step from being captured, and its kin."""
    good = dict(sources(STEP))
    assert line in good[file]
    spoiled = list((good | {file: good[file].replace(line, instead)}).items())
    (found,) = broken(spoiled, STEP)
    assert found.startswith(file)


SMALL = Rule((), frozenset({"a.py:run"}))


@pytest.mark.parametrize(
    "line", ["t[0] = 1", "t[i] = -torch.inf", "t[mask] = False", "t[0] += 1", "x = t[[0, 1]]", "x = t[names]",
             "x = t[0, names]", "own = rows(i)\nx = t[own]", "x, own = i, rows(i)\ny = t[own]", "x = t.sum().item()",
             "x = int(t.max())", "x = bool(t.any() | u)", "x = float(t[0])", "x = t.cpu()", "x = torch.tensor(names)",
             "x = torch.as_tensor(3, device=t.device)", 'x = t.to("cpu")'],
)  # fmt: skip
def test_forms_that_are_found(line: str) -> None:
    head = "def rows(i) -> slice | list[int]: ...\ndef run(t, i, u, mask, names: list[int]):\n"
    source = head + textwrap.indent(line, "    ")
    assert len(broken([("a.py", source)], SMALL)) == 1


@pytest.mark.parametrize(
    "line", ["t[-1:].zero_()", "t[i] = u", "t.index_fill_(0, i, True)", "x = t[..., :3]", "x = int(len(names))",
             "table[3] = names", "x = torch.zeros((), dtype=torch.int64)", "x = t.to(torch.float32)"],
)  # fmt: skip
def test_forms_that_are_fine(line: str) -> None:
    source = f"def run(t, i, u, table, names: list[int]):\n    {line}\n"
    assert broken([("a.py", source)], SMALL) == []
