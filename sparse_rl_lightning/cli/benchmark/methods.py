"""Compressors by the names that ``sparse-rl benchmark`` takes: a class of the library or the user's, or a YAML file."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sparse_rl_lightning.cli.classes import argument_names, imported, known_classes
from sparse_rl_lightning.cli.messages import LOOKED_FOR, ClearParser, explain, own_error
from sparse_rl_lightning.compressors import Compressor
from sparse_rl_lightning.errors import UserError
from sparse_rl_lightning.files import whole_file


@dataclass(frozen=True)
class Method:
    """A row of the table: a class by its name, or one with its arguments as in a configuration."""

    name: str
    path: str
    arguments: dict[str, Any] | None = None  # of a file, before those that all methods share

    @classmethod
    def of(cls, given: str) -> Method:
        """The method that ``SnapKV``, ``mine.Method`` or ``method.yaml`` names.

        Raises:
            ValueError: If there is no such class or file, or it is no compressor.
        """
        if not given.endswith((".yaml", ".yml")):
            return cls(given.rpartition(".")[2], _checked_path(given))
        try:
            read = yaml.safe_load(whole_file(given, 2**24))
            path, arguments = read["class_path"], read.get("init_args") or {}
        except (OSError, yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{given!r} does not hold a class_path with init_args, as a compressor in a configuration: {error!r}."
            ) from error
        return cls(Path(given).stem, _checked_path(path), arguments)

    def compressor(self, sizes: dict[str, Any]) -> Compressor:
        """The compressor with these sizes, as far as its class takes them; a file's own go before all but the budget.

        Raises:
            ValueError: If the arguments do not fit.
        """
        taken = {name: value for name, value in sizes.items() if name in argument_names(self.path)}
        config = {"class_path": self.path, "init_args": taken | (self.arguments or {})}
        parser: Any = ClearParser(exit_on_error=False)
        parser.add_subclass_arguments(Compressor, "method")
        try:
            found: Compressor = parser.instantiate(parser.parse_object({"method": config})).method
        except Exception as error:
            raise own_error(error) or UserError(explain(str(error))) from error
        return found if self.arguments is None else found.with_budget(sizes["budget"])


def _checked_path(given: str) -> str:
    """The import path of a compressor's class."""
    try:
        found = imported(given) if "." in given else known_classes()[given]
    except KeyError as error:
        raise UserError(explain(f"Expected a dot import path string: {given}").partition("\n")[2]) from error
    except Exception as error:  # whatever the user's module raises
        hint = f" {LOOKED_FOR}" if isinstance(error, ModuleNotFoundError) else ""
        raise UserError(f"{given!r} cannot be imported: {type(error).__name__}: {error}.{hint}") from error
    if not (inspect.isclass(found) and issubclass(found, Compressor)):
        raise UserError(f"{given!r} is no compressor: derive it from sparse_rl_lightning.compressors.Compressor.")
    return f"{found.__module__}.{found.__qualname__}"
