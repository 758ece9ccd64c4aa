"""Fingerprints: whether something is the same as when a result was written, judged by its bytes and its sources.

What an object prints may omit what counts (a file's statistics, a private tensor), and sums of weights ignore their
order. So numbers are hashed as they are in memory, with name, shape and type, and classes and functions by their code:
an edited score has the name of the one before.
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
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cache, cached_property, partial
from inspect import getattr_static
from pathlib import Path
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sparse_rl_lightning.errors import UserError

WHOLE = 2**16
"""Size above which weights are sampled: at least this many numbers and at least one of every row."""
LIMIT = 20_000
"""Objects that a setting may consist of; whoever holds more holds a program, of which nobody can say what counts."""
BUILDERS = ("jsonargparse", "lightning.pytorch.cli")
"""What makes objects of configurations: a class given there comes wrapped into functions that hold the whole parser."""
ADDRESS = re.compile(r"^<| at 0x[0-9A-Fa-f]+")
"""The text of an object that says where it lies."""
PACKAGE = Path(__file__).resolve().parent
ANSWERS = PACKAGE.with_name("exact_answers")
"""The answer checker, which counts as a part of those parts that import it."""
LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()
INSTALLED = {"site-packages", "dist-packages"}
FOUNDATIONS = {"torch", "transformers", "lightning", "peft", "trl", "datasets", "deepspeed"}
"""Packages that count as installed also in a checkout of the user's: nobody's method, and thousands of files."""
PLACE_OF_MODELS = ("_name_or_path", "name_or_path", "transformers_version", "_commit_hash")
"""Entries of a model's configuration that say where it lies and who wrote it."""


def fingerprint(**settings: Any) -> str:
    """A hash of settings: plain values, tensors, models, and objects by class, sources and all their attributes.

    Raises:
        ValueError: If one holds more than can be told apart.
    """
    return _hash({name: _Walk(name).content(value) for name, value in settings.items()})


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
    return _hash([_name(type(tokenizer)), tokenizer.get_vocab(), rules, special, chat])


def sources(kind: Any) -> str:
    """A hash of a class's or function's code: its file, and those of its own that the file imports, in turn.

    Of this package these are files of the same folder, and of the answer checker: the version says which the others
    are. Of a user's they are all that lie below the folder it is imported from. A class has the files of its bases too.
    A file is read again when its module is imported again, so that edits during a run are not taken for what runs.
    """
    own = [_code(code) for one in _kinds(kind) for code in _codes(one)]
    return _hash([sorted(hashlib.sha256(content).hexdigest() for content in source_files(kind).values()), own])


def source_files(kind: Any) -> dict[Path, bytes]:
    """The files of ``sources``, and what they hold."""
    return {file: _content(file) for one in _kinds(kind) for file in _files(one)}


class _Walk:
    """What a setting consists of: every object once, as what is inside it; shared ones count wherever they are met.

    Args:
        setting: Its name.
    """

    def __init__(self, setting: str) -> None:
        self.setting = setting
        self._done: dict[int, str] = {}  # by id
        self._alive: list[Any] = []  # whose ids may not be given to others
        self._sources: dict[Any, str] = {}  # by class, and by the code that functions share
        self._num_objects = 0

    def content(self, value: Any) -> Any:
        """The value if JSON can write it, otherwise a hash.

        Raises:
            ValueError: If it consists of too many objects.
        """
        try:
            return self._content(value)
        except RecursionError:
            self._refuse(value)

    def _content(self, value: Any) -> Any:
        if value is None or isinstance(value, (str, int, float)):
            return value
        if isinstance(value, DTensor):
            return "sharded"  # every rank has another part
        if isinstance(value, Tensor):
            return _bytes_of(value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:  # object arrays' bytes would be addresses
            return f"{value.shape} {value.dtype} {hashlib.sha256(value.tobytes()).hexdigest()}"
        if id(value) not in self._done:
            self._done[id(value)] = "itself"  # as it is seen from its own parts
            self._alive.append(value)
            self._done[id(value)] = _hash(self._parts(value))
        return self._done[id(value)]

    def _parts(self, value: Any) -> Any:
        """What a value has inside, each as its own content."""
        if isinstance(value, np.ndarray):
            return [str(value.dtype), self._content(value.tolist())]
        if isinstance(value, Mapping):
            return {str(key): self._content(item) for key, item in value.items()}
        if isinstance(value, Set):
            return sorted(json.dumps(self._content(item)) for item in value)
        if isinstance(value, Sequence) and not isinstance(value, (bytes, range)):
            return [self._content(item) for item in value]
        if isinstance(value, ModuleType):
            return value.__name__
        if isinstance(value, np.generic):
            return [str(value.dtype), str(value)]
        self._num_objects += hasattr(value, "__dict__")
        if self._num_objects > LIMIT:
            self._refuse(value)
        kind = type(value)
        if _is_builder(kind):
            return _name(kind)
        return {"class": _name(kind), "sources": self._sources_of(kind, kind), **self._inside(value)}

    def _sources_of(self, kind: Any, key: Any) -> str:
        if key not in self._sources:
            self._sources[key] = sources(kind)
        return self._sources[key]

    def _inside(self, value: Any) -> dict[str, Any]:
        """The contents that distinguish an object from others of its class."""
        if isinstance(value, nn.Module):
            return self._network(value)
        if hasattr(value, "__qualname__"):  # functions, methods and classes
            if _is_builder(value):
                return {"name": _name(value)}
            held = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
            held += [getattr(value, "__defaults__", None), getattr(value, "__kwdefaults__", None)]
            held += [value.__self__] if isinstance(value, MethodType) else []
            held += [value.__wrapped__] if hasattr(value, "__wrapped__") else []
            code = self._sources_of(value, getattr(value, "__code__", id(value)))
            return {"name": _name(value), "sources": code, "held": self._content(held)}
        if isinstance(value, partial):
            return {"call": [self._content(one) for one in (value.func, value.args, value.keywords)]}
        if hasattr(value, "get_vocab"):
            return {"tokenizer": tokenizer_digest(value)}
        if hasattr(value, "__dict__") or _slots(value):
            return {"attributes": self._content(_slots(value) | _own(value))}
        shown = repr(value)
        if ADDRESS.search(shown):  # it means nothing, and where a generator of numbers stands changes with every use
            return {}
        return {"shown": shown, "parts": self._content(_reduced(value))}  # the text may be cut

    def _network(self, model: nn.Module) -> dict[str, Any]:
        """Weights, numbers and classes of a model, and its configuration, which decides what is done with them."""
        numbers = {name: self._content(_numbers(module)) for name, module in model.named_modules()}
        own: Any = getattr(model, "config", None)
        config = own.to_dict() if hasattr(own, "to_dict") else {}
        return {
            "weights": weights_digest(model), "numbers": numbers, "config": self._content(_without_places(config)),
            "kinds": sorted(map(sources, {type(module) for module in model.modules()})),
        }  # fmt: skip

    def _refuse(self, value: Any) -> NoReturn:
        raise UserError(
            f"{self.setting} holds too much to tell whether stored results are of the same: more than {LIMIT:,} "
            f"objects, or a chain of them without end, in the end of {_name(type(value))}. Give a class or a function "
            "that keeps only its settings."
        )


def _own(value: Any) -> dict[str, Any]:
    """Attributes of an object, without what a cached property has stored among them since it was first read."""
    held = getattr(value, "__dict__", {})
    return {n: one for n, one in held.items() if not isinstance(getattr_static(type(value), n, None), cached_property)}


def _slots(value: Any) -> dict[str, Any]:
    """Attributes that a class declares with ``__slots__``; one that says what it is made of may keep a cache there."""
    own_kind: Any = type(value)
    if own_kind.__reduce__ is not object.__reduce__:
        return {}
    kinds = [vars(kind) for kind in own_kind.__mro__ if "__slots__" in vars(kind)]
    names = [name for own in kinds for name, member in own.items() if isinstance(member, MemberDescriptorType)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _reduced(value: Any) -> Any:
    """What a value without attributes is made again from, as pickle is told; None where that is not known."""
    if isinstance(value, bytes):
        return None  # its text is whole, and it would be told to be made from itself
    reduce: Any = copyreg.dispatch_table.get(type(value))
    try:
        return reduce(value) if reduce else value.__reduce_ex__(4)
    except Exception:  # foreign code
        return None


# ---------------------------------------------------------------- numbers


def _step(tensor: Tensor) -> int:
    """The distance between sampled numbers: less than a row, so that every row and changing columns are sampled."""
    rows_met = tensor.shape[-1] - 1 if tensor.dim() else 1
    return max(1, min(tensor.numel() // WHOLE, rows_met))


def _bytes_of(tensor: Tensor, step: int = 1) -> str:
    own = tensor.detach().reshape(-1)[::step].contiguous().cpu()
    content = hashlib.sha256(own.view(torch.uint8).numpy().tobytes()).hexdigest()
    return f"{tuple(tensor.shape)} {tensor.dtype} {content}"


def _numbers(module: nn.Module) -> dict[str, Any]:
    """Numeric settings that a module keeps as attributes, alone or by adapter, without flags such as ``training``."""
    kinds = (int, float)
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    single = {name: value for name, value in own.items() if type(value) in kinds}
    named = {name: value for name, value in own.items() if type(value) is dict and value}
    return single | {name: value for name, value in named.items() if all(type(v) in kinds for v in value.values())}


def _without_places(config: Any) -> Any:
    """A model's configuration, and those inside, without what says where they lie."""
    if not isinstance(config, dict):
        return config
    return {name: _without_places(value) for name, value in config.items() if name not in PLACE_OF_MODELS}


# ---------------------------------------------------------------- code


def _is_builder(thing: Any) -> bool:
    module = f"{getattr(thing, '__module__', '')}."
    return any(module.startswith(f"{name}.") for name in BUILDERS)


def _kinds(kind: Any) -> tuple[Any, ...]:
    """A class with its bases, or a function."""
    return inspect.getmro(kind) if isinstance(kind, type) else (kind,)


def _codes(kind: Any) -> Iterator[CodeType]:
    """The code of a function, or of a class's own: of what was typed into a notebook there is no file."""
    own = vars(kind).values() if isinstance(kind, type) else [kind]
    for one in own:
        parts = [one.fget, one.fset] if isinstance(one, property) else [getattr(one, "__func__", one)]
        yield from (part.__code__ for part in parts if isinstance(part, FunctionType))


def _code(code: CodeType) -> list[Any]:
    """Instructions, names and constants, those of inner functions too."""
    constants = [_code(one) if isinstance(one, CodeType) else _constant(one) for one in code.co_consts]
    return [code.co_code.hex(), code.co_names, constants]


def _constant(value: Any) -> str:
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def _files(kind: Any) -> set[Path]:
    """The file of a class or function and those of its own that are imported there; none where there is no file."""
    try:
        file = Path(inspect.getfile(kind)).resolve()
    except (TypeError, OSError):  # built in, or typed into a notebook
        return set()
    depth = kind.__module__.count(".") + (file.name == "__init__.py")
    return _with_imports(file, file.parents[min(depth, len(file.parents) - 1)])


def _with_imports(file: Path, root: Path) -> set[Path]:
    """A file and what it imports, in turn, of the same part of this package, or of the user's below ``root``."""
    ours = is_own(file)
    part = PACKAGE / file.relative_to(PACKAGE).parts[0] if file.is_relative_to(PACKAGE) else ANSWERS
    within = (part, ANSWERS) if ours else (root,)
    found, waiting = set[Path](), [file]
    while waiting and len(found) < LIMIT:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            near = (path for path in _imported(one, root) if any(map(path.is_relative_to, within)))
            waiting += [path for path in near if ours or not is_installed(path)]
    return found


def is_own(path: Path) -> bool:
    """Whether a file is of this library, the answer checker's among them."""
    return path.is_relative_to(PACKAGE) or path.is_relative_to(ANSWERS)


def is_installed(path: Path) -> bool:
    """Whether a file is of Python's library or of an installed package, and not of a user's own code."""
    if not INSTALLED.isdisjoint(path.parts) or path.is_relative_to(LIBRARY):
        return True
    named = FOUNDATIONS.intersection(path.parts)
    origins = (Path(getattr(sys.modules.get(name), "__file__", None) or "none.py") for name in named)
    return any(path.is_relative_to(one.resolve().parent) for one in origins if one.name == "__init__.py")


def _imported(file: Path, root: Path) -> Iterator[Path]:
    """Files below ``root`` that a file imports, in functions too."""
    if file.suffix != ".py" or is_installed(file):
        return
    for level, name in _import_lines(_content(file)):
        path = (file.parents[level - 1] if level else root).joinpath(*filter(None, name.split(".")))
        yield from (one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file())


@cache
def _import_lines(content: bytes) -> list[tuple[int, str]]:
    """What a file's text imports, as leading dots and a name; of ``from a import b`` both ``a`` and ``a.b``."""
    found = list[tuple[int, str]]()
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError):  # nobody has imported it yet
        return found
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            found += [(node.level, name) for name in (base, *(f"{base}.{alias.name}" for alias in node.names))]
    return found


class _Read(NamedTuple):
    """What a file held when its module was imported."""

    module: str
    spec: object  # another at each import
    content: bytes


_READ: dict[Path, _Read] = {}


def _content(file: Path) -> bytes:
    """A file as it was when its module was imported, or rather when this was asked first after it."""
    read = _READ.get(file)
    if read is not None and getattr(sys.modules.get(read.module), "__spec__", None) is read.spec:
        return read.content
    specs = [(name, getattr(module, "__spec__", None)) for name, module in list(sys.modules.items())]
    named = next((one for one in specs if getattr(one[1], "origin", None) == str(file)), None)
    if named is None:  # what runs is not imported yet
        return file.read_bytes()
    _READ[file] = _Read(*named, file.read_bytes())
    return _READ[file].content


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{thing.__qualname__}"
