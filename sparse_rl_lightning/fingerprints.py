"""Whether something is the same as before: a value as text that says all of it, and a hash of that text and its code.

One walk answers it for stored results, checkpoints and ranks. What an object prints may omit what counts (a file's
statistics, a private tensor), so objects are identified by what pickle would store of them, numbers are hashed as they
are in memory, with shape and type, and of classes and functions the code counts: an edited score keeps its name.
"""

from __future__ import annotations

import ast
import copyreg
import hashlib
import inspect
import json
import re
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache, cached_property, partial
from inspect import getattr_static
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import whole_file, write_whole

Results = TypeVar("Results")
WHOLE = 2**16
"""Size above which weights are sampled: at least this many numbers and at least one of every row."""
LONGEST = 2_000
"""Characters of a text above which a hash stands in its place, so that what is shared does not multiply it."""
BUILDERS = ("jsonargparse.", "lightning.pytorch.cli._InstantiatorFn")
"""What makes objects of configurations: a class given there comes wrapped into functions that hold the whole parser."""
LIVE = ("random.Random", "numpy.random.", "torch._C.Generator", "lightning.pytorch.trainer.")
"""Objects that every use changes: where a generator of numbers or a trainer stands is no setting."""
PACKAGE = Path(__file__).resolve().parent
ANSWERS = PACKAGE.with_name("exact_answers")
"""The answer checker, which counts as a part of those parts that import it."""
LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()
INSTALLED = {"site-packages", "dist-packages"}
FOUNDATIONS = {"torch", "transformers", "lightning", "peft", "trl", "datasets", "deepspeed"}
"""Packages that count as installed also in a checkout of the user's: nobody's method, and thousands of files."""
PLACE_OF_MODELS = ("_name_or_path", "name_or_path", "transformers_version", "_commit_hash")
"""Entries of a model's configuration that say where it lies and who wrote it."""
NO_SETTINGS = (
    *PLACE_OF_MODELS, "training", "gradient_checkpointing", "hf_device_map", "warnings_issued", "max_seq_len_cached"
)  # fmt: skip
"""Attributes of a model's modules that change nothing they compute, or with what was computed last."""
PLAIN = (str, int, float, type(None), torch.dtype, Tensor, FunctionType, BuiltinFunctionType)


def fingerprint(**settings: Any) -> str:
    """A hash of settings: plain values, tensors, models, and objects by class, sources and all their attributes."""
    walk = _Walk()
    text = walk.text(settings)
    return _hash([text, sorted(map(sources, walk.classes))])


def describe(value: Any, without: Collection[str] = ()) -> str:
    """A value as text that is the same in every process: names and numbers, hashes only of what has no text.

    ``#`` and twelve digits are a hash of content, ``@`` and twelve one of the code of a user's class or function, which
    differs between versions of Python and of what it imports from here.

    Args:
        value: What to describe.
        without: Names of attributes that do not count, at any depth.
    """
    return _Walk(without).text(value)


def without_code(text: str) -> str:
    """A description without the marks of code."""
    return re.sub("@[0-9a-f]{12}", "", text)


def change(name: str, was: Any, now: Any) -> str:
    """What has become of a setting, in words: of an object with many arguments only those that differ."""
    before, after = without_code(str(was)), without_code(str(now))
    if before == after:
        return f"the code of {name}, {after}, has changed"
    arguments = [re.split(r", (?=\w+=)", text.partition("(")[2].removesuffix(")")) for text in (before, after)]
    if min(map(len, arguments)) > 3:
        differing = [[text for text in texts if text not in arguments[1 - i]] for i, texts in enumerate(arguments)]
        before, after = (
            f"{text.partition('(')[0]}({', '.join(texts)}, ...)"
            for text, texts in zip((before, after), differing, strict=True)
        )
    return f"{name} was {before} and is {after}"


def weights_digest(model: nn.Module) -> str:
    """A hash of parameters and buffers: any training step changes it, and so does another order of rows."""
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {_bytes_of(tensor, _step(tensor))}".encode())
    return digest.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """A hash of what a tokenizer of transformers makes of a text or a chat, wherever it lies."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str()) if hasattr(tokenizer, "backend_tokenizer") else {}
    rules |= {"padding": None, "truncation": None}  # of the last call
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    chat = getattr(tokenizer, "chat_template", None)
    return _hash([full_name(type(tokenizer)), tokenizer.get_vocab(), rules, special, chat])


def sources(definition: Any) -> str:
    """A hash of a class's or function's code: its file, and those of its own that the file imports, in turn.

    Of this package these are files of the same folder, and of the answer checker: the version says which the others
    are. Of a user's they are all that lie below the folder it is imported from. A class has the files of its bases too.
    A file is read again when its module is imported again, so that edits during a run are not taken for what runs.
    """
    codes = [code for each in _bases(definition) for code in _codes(each)]
    contents = sorted(hashlib.sha256(content).hexdigest() for content in source_files(definition).values())
    return _hash([contents, _Walk().text(codes)])


def source_files(definition: Any) -> dict[Path, bytes]:
    """The files of ``sources``, and what they hold."""
    starts = ((file, each.__module__) for each in _bases(definition) if (file := _file(each)))
    return {file: _content(file) for start in starts for file in _with_imports(*start)}


def full_name(definition: Any) -> str:
    """Module and name of a class or function; of this library's the name alone."""
    module = str(getattr(definition, "__module__", None) or "builtins")
    is_plain = module.partition(".")[0] in (PACKAGE.name, "builtins")
    return str(definition.__qualname__) if is_plain else f"{module}.{definition.__qualname__}"


# ---------------------------------------------------------------- stored results


def write_results(path: Path, settings: Mapping[str, str], content: Mapping[str, Any]) -> None:
    """Write results, and what they are of."""
    write_whole(path, json.dumps({"settings": settings, **content}, indent=1) + "\n")


def read_results(
    path: Path, settings: Mapping[str, str], parse: Callable[[dict[str, Any]], Results], advice: str
) -> Results | None:
    """Results of the same settings, None if nothing is stored.

    Args:
        path: The file.
        settings: What the results are of now.
        parse: Function from the file's content to the results; any error in it means that the file is damaged.
        advice: What to do about a file that cannot be used, for the message.

    Raises:
        ValueError: If the file is of other settings, or damaged.
    """
    if not path.exists():
        return None
    try:
        content = json.loads(whole_file(path, 2**30))
        before = content.pop("settings")
        changed = [name for name, text in settings.items() if before.get(name) != text]
        results = None if changed else parse(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is damaged, or of something else. {advice}") from error
    if changed:
        raise UserError(f"{path} is of another {', '.join(changed)}. {advice}")
    return results


# ---------------------------------------------------------------- values


class _Walk:
    """Goes through what a value consists of, every object once, and writes it down.

    Args:
        without: Names of attributes that do not count.
    """

    def __init__(self, without: Collection[str] = ()) -> None:
        self.classes: dict[Any, str] = {}  # and functions, that were met: the marks of their code
        self._without = without
        self._texts: dict[int, str] = {}
        self._alive: list[Any] = []  # whose ids may not be given to others

    def text(self, value: Any) -> str:
        """The value as text; within itself it is three dots."""
        value = value.item() if isinstance(value, np.generic) else value
        if value is None or isinstance(value, (str, int, float, torch.dtype, torch.device)):
            return repr(value)
        if id(value) not in self._texts:
            self._texts[id(value)] = "..."
            self._alive.append(value)
            text = self._write(value)
            self._texts[id(value)] = text if len(text) <= LONGEST else f"{text[:40]}... #{_hash(text)[:12]}"
        return self._texts[id(value)]

    def _write(self, value: Any) -> str:
        for types, write in self._WRITERS:
            if isinstance(value, types):
                return write(self, value)
        if hasattr(value, "get_vocab"):
            return f"{full_name(type(value))}(#{tokenizer_digest(value)[:12]})"
        return self._function(value) if hasattr(value, "__qualname__") else self._object(value)

    def _array(self, array: np.ndarray) -> str:
        """Its bytes; those of an array of objects are addresses."""
        inside = self.text(array.tolist()) if array.dtype.hasobject else hashlib.sha256(array.tobytes()).hexdigest()
        return f"{array.shape} {array.dtype} {inside}"

    def _mapping(self, mapping: Mapping[Any, Any]) -> str:
        items = {str(key): self.text(item) for key, item in mapping.items()}
        return f"{{{', '.join(f'{key}: {items[key]}' for key in sorted(items))}}}"

    def _network(self, model: nn.Module) -> str:
        """Weights, attributes and classes of a model, and its configuration, which decides what is done with them."""
        self.classes |= dict.fromkeys(map(type, model.modules()), "")
        attributes = {name: _attributes(module) for name, module in model.named_modules()}
        config: Any = getattr(model, "config", None)
        settings = _without_places(config.to_dict()) if hasattr(config, "to_dict") else {}
        content = _hash([weights_digest(model), self.text(attributes), self.text(settings)])
        return f"{full_name(type(model))}(#{content[:12]})"

    def _call(self, call: partial[Any]) -> str:
        """A function with arguments, defaults included; without what a parser of configurations has put around it."""
        function, *values = (each for each in (call.func, *call.args) if not _is_builder(each))
        try:
            bound = inspect.signature(function).bind_partial(*values, **call.keywords)
        except (TypeError, ValueError):  # of a built-in function
            return self._join("partial", [function, *values], call.keywords)
        bound.apply_defaults()
        return self._join("partial", [function, *bound.args], bound.kwargs)

    def _function(self, function: Any) -> str:
        """A function, method or class: its name, what it holds, and its code where it is the user's."""
        if _is_builder(function):
            return full_name(function)
        contents = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        contents += [
            *(getattr(function, "__defaults__", None) or ()),
            *(getattr(function, "__kwdefaults__", None) or {}).items(),
        ]
        contents += [function.__self__] if isinstance(function, MethodType) else []
        contents += [function.__wrapped__] if hasattr(function, "__wrapped__") else []
        name = self._name(function)
        return self._join(name, contents, {}) if contents else name

    def _object(self, value: Any) -> str:
        """An object by what pickle would make it from: arguments and attributes."""
        cls = type(value)
        if _is_builder(cls):
            return ""
        if f"{cls.__module__}.{cls.__qualname__}".startswith(LIVE):
            return full_name(cls)
        reduce = copyreg.dispatch_table.get(cls)
        reduced: Any
        try:
            reduced = reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception:  # foreign code; or a lock, a stream, which are no settings
            return self._name(cls)
        if isinstance(reduced, str):
            return reduced
        function, arguments, state = (*reduced, None)[:3]
        if function is not cls:
            arguments = arguments[1:] if arguments and arguments[0] is cls else (function, *arguments)
        attributes: dict[str, Any] = {}
        for some in state if isinstance(state, tuple) else (state,):  # those in slots apart
            if isinstance(some, Mapping):
                attributes |= {
                    str(name): attribute for name, attribute in some.items() if not _is_cache(cls, str(name))
                }
            elif some is not None:
                arguments = (*arguments, some)
        named = {name: attribute for name, attribute in attributes.items() if name not in self._without}
        return self._join(
            self._name(cls),
            arguments,
            {name: named[name] for name in sorted(named, key=lambda name: (name.startswith("_"), name))},
        )

    def _name(self, definition: Any) -> str:
        """Module and name of a class or function, and a hash of the code of a user's: versions name the rest."""
        if definition not in self.classes:
            files = [file for each in _bases(definition) if (file := _file(each))]
            is_theirs = any(not is_own(file) and not is_installed(file) for file in files) or (
                not files and any(_codes(definition))
            )
            self.classes[definition] = f"@{sources(definition)[:12]}" if is_theirs else ""
        return full_name(definition) + self.classes[definition]

    _WRITERS: ClassVar[Sequence[tuple[Any, Callable[[_Walk, Any], str]]]] = (
        (Tensor, lambda walk, value: _bytes_of(value)),
        (np.ndarray, _array),
        (Mapping, _mapping),
        (Set, lambda walk, value: f"{{{', '.join(sorted(map(walk.text, value)))}}}"),
        ((bytes, range), lambda walk, value: repr(value)),
        (Sequence, lambda walk, value: f"[{', '.join(map(walk.text, value))}]"),
        (CodeType, lambda walk, value: walk.text([value.co_code, value.co_names, value.co_consts])),
        (ModuleType, lambda walk, value: value.__name__),
        (nn.Module, _network),
        (partial, _call),
    )
    """How values of these types are written, the first that fits."""

    def _join(self, name: str, values: Iterable[Any], named: Mapping[str, Any]) -> str:
        return f"{name}({', '.join([*map(self.text, values), *(f'{key}={self.text(named[key])}' for key in named)])})"


def _is_cache(cls: type, name: str) -> bool:
    """Whether an attribute is what a cached property has stored since it was first read."""
    return isinstance(getattr_static(cls, name, None), cached_property)


# ---------------------------------------------------------------- numbers


def _step(tensor: Tensor) -> int:
    """The distance between sampled numbers: less than a row, so that every row and changing columns are sampled."""
    rows_met = tensor.shape[-1] - 1 if tensor.dim() else 1
    return max(1, min(tensor.numel() // WHOLE, rows_met))


def _bytes_of(tensor: Tensor, step: int = 1) -> str:
    if isinstance(tensor, DTensor):
        return "sharded"  # every rank has another part
    numbers = tensor.detach().reshape(-1)[::step].contiguous().cpu()
    content = hashlib.sha256(numbers.view(torch.uint8).numpy().tobytes()).hexdigest()
    return f"{tuple(tensor.shape)} {tensor.dtype} {content}"


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Plain values and functions that a module keeps as attributes, without those that change nothing it computes."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in NO_SETTINGS and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
    return isinstance(value, PLAIN) if items is None else all(map(_is_plain, items))


def _without_places(config: Any) -> Any:
    """A model's configuration, and those inside, without the entries that name their places."""
    if not isinstance(config, dict):
        return config
    return {name: _without_places(value) for name, value in config.items() if name not in PLACE_OF_MODELS}


# ---------------------------------------------------------------- code


def _is_builder(value: Any) -> bool:
    definition = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(definition, '__module__', '')}.{definition.__qualname__}".startswith(BUILDERS)


def _bases(definition: Any) -> tuple[Any, ...]:
    """A class with its bases, or a function."""
    return inspect.getmro(definition) if isinstance(definition, type) else (definition,)


def _codes(definition: Any) -> Iterator[CodeType]:
    """The code of a function, or of a class's own: of what was typed into a notebook there is no file."""
    members = vars(definition).values() if isinstance(definition, type) else [definition]
    for member in members:
        parts = [member.fget, member.fset] if isinstance(member, property) else [getattr(member, "__func__", member)]
        yield from (function.__code__ for function in parts if isinstance(function, FunctionType))


def _file(definition: Any) -> Path | None:
    """The file of a class or function, if there is one."""
    try:
        file = Path(inspect.getfile(definition)).resolve()
    except (TypeError, OSError):  # built in
        return None
    return file if file.is_file() else None  # cells of a notebook have names of files that nobody writes


def _with_imports(file: Path, module: str) -> set[Path]:
    """A file and what it imports, in turn: of the same part of this package, or below where a user imports it from."""
    depth = module.count(".") + (file.name == "__init__.py")
    root = file.parents[min(depth, len(file.parents) - 1)]
    subpackage = PACKAGE / file.relative_to(PACKAGE).parts[0] if file.is_relative_to(PACKAGE) else ANSWERS
    within = (subpackage, ANSWERS) if is_own(file) else (root,)
    files, waiting = set[Path](), [file]
    while waiting:
        importer = waiting.pop()
        if importer not in files:
            files.add(importer)
            waiting += _imported(importer, _content(importer), root, within)
    return files


@cache
def is_own(path: Path) -> bool:
    """Whether a file is of this library, the answer checker's among them."""
    return path.is_relative_to(PACKAGE) or path.is_relative_to(ANSWERS)


def is_installed(path: Path) -> bool:
    """Whether a file is of Python's library or of an installed package, and not of a user's own code."""
    if not INSTALLED.isdisjoint(path.parts) or path.is_relative_to(LIBRARY):
        return True
    named = FOUNDATIONS.intersection(path.parts)
    origins = (Path(getattr(sys.modules.get(name), "__file__", None) or "none.py") for name in named)
    return any(path.is_relative_to(origin.resolve().parent) for origin in origins if origin.name == "__init__.py")


@cache  # every function asks for all its files; which imports exist is looked up once for each content
def _imported(file: Path, content: bytes, root: Path, within: tuple[Path, ...]) -> list[Path]:
    """Files below ``within`` that a file with this content imports from ``root``, in functions too."""
    if file.suffix != ".py" or is_installed(file):
        return []
    starts = ((file.parents[level - 1] if level else root, name.split(".")) for level, name in _import_lines(content))
    paths = [start.joinpath(*filter(None, parts)) for start, parts in starts]
    candidates = (candidate for path in paths for candidate in (path.with_suffix(".py"), path / "__init__.py"))
    near = (path for path in candidates if any(map(path.is_relative_to, within)) and path.is_file())
    return [path for path in near if is_own(path) or not is_installed(path)]


@cache
def _import_lines(content: bytes) -> list[tuple[int, str]]:
    """What a file's text imports, as leading dots and a name; of ``from a import b`` both ``a`` and ``a.b``."""
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError):  # nobody has imported it yet
        return []
    lines = [(0, alias.name) for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in (node for node in nodes if isinstance(node, ast.ImportFrom)):
        names = [node.module or "", *(f"{node.module or ''}.{alias.name}" for alias in node.names)]
        lines += [(node.level, name) for name in names]
    return lines


_READ: dict[Path, tuple[str, object, bytes]] = {}
"""Files that were read: the module, its specification, which is another at each import, and the content."""


def _content(file: Path) -> bytes:
    """A file as it was when its module was imported, or rather at the first call after that."""
    name, spec, content = _READ.get(file, ("", None, b""))
    if spec is None or getattr(sys.modules.get(name), "__spec__", None) is not spec:
        content = file.read_bytes()
        specs = ((name, getattr(module, "__spec__", None)) for name, module in list(sys.modules.items()))
        named = next((each for each in specs if getattr(each[1], "origin", None) == str(file)), None)
        if named:  # else what runs is not imported yet
            _READ[file] = (*named, content)
    return content


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
