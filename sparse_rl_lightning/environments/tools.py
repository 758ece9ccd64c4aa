"""Tools: an environment that calls functions, and methods of objects with the signature of TRL's environments."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from sparse_rl_lightning.environments.base import Environment, EnvironmentFactory
from sparse_rl_lightning.errors import UserError

_REGIONS = re.compile(r"<think>.*?(?:</think>|\Z)|<tool_call>(.*?)(?:</tool_call>|\Z)|</think>", re.DOTALL)
_NOT_TOOLS = ("reset", "get_reward")  # public methods that are no tools


@dataclass(frozen=True)
class ToolCall:
    """A call that a policy has written.

    Args:
        name: Name of the tool.
        arguments: Arguments by name.
        id: What a chat template wants back as ``tool_call_id``, such as Mistral's; null for none.
        error: What is wrong with a call that cannot be read, and is not made.
    """

    name: str
    arguments: Any = None
    id: str | None = None
    error: str | None = None


class ToolEnvironment(Environment):
    """Calls the tools that a turn asks for, and answers with what they return; a turn without calls is the last.

    Tools are functions, and the public methods of an object as for ``environment_factory`` of TRL's GRPOTrainer (static
    ones too, class methods not). Their
    names, type hints and Google docstrings describe them to the policy; they may be ``async``. ``reset(**row)`` of the
    object returns None, or text that is appended to the prompt's last message. What its ``get_reward()`` returns, if it
    has one, is the conversation's reward; it may be ``async``. What is wrong with a call, and what a tool raises,
    is an answer too. Answers come in the order of the calls.

    Args:
        environment: Creates the object, such as its class; null for functions alone.
        tools: Functions.

    Raises:
        ValueError: If two tools have the same name.
    """

    def __init__(
        self,
        environment: type | Callable[[], Any] | None = None,  # a type first: jsonargparse wants no more of it
        tools: Sequence[Callable[..., Any]] = (),
    ) -> None:
        self.environment = None if environment is None else environment()
        if not isinstance(tools, Sequence) or any(not hasattr(tool, "__name__") for tool in tools):
            # what functools.partial makes has no name
            raise UserError(f"tools must be a list of functions with names, got {tools!r:.200}.")
        self.tools = [*tools, *_methods(self.environment)]
        self._by_name = {tool.__name__: tool for tool in self.tools}
        if len(self._by_name) < len(self.tools):
            names = sorted(tool.__name__ for tool in self.tools)
            raise UserError(f"tools must have different names, got {', '.join(names)}: rename one.")

    def reset(self, row: dict[str, Any]) -> Any:
        """Reset the object; the prompt is the row's, with the text that the object returns behind it."""
        reply = None if self.environment is None else self.environment.reset(**row)
        return _then(reply, partial(_opening, row))

    def step(self, text: str) -> Any:
        """Answer the turn's calls. Functions run here; those that are ``async`` are left to what is returned."""
        calls = self.parse(text)
        if not calls:
            return _then(self.cut(), lambda reward: (None, reward))
        results = [self._call(call) for call in calls]
        if any(map(inspect.isawaitable, results)):
            return _then(_all(results), partial(_answer, calls))
        return _answer(calls, results)

    def cut(self) -> Any:
        """The object's reward: as in TRL it is asked for whatever ended the conversation."""
        get_reward = getattr(self.environment, "get_reward", None)
        return None if get_reward is None else get_reward()

    def parse(self, text: str) -> list[ToolCall]:
        """The calls of a turn, without those in its thoughts; to override for other formats.

        This one reads JSON with ``name`` and ``arguments`` between ``<tool_call>`` and ``</tool_call>``, as Hermes,
        Qwen2.5 and Qwen3 write it.
        """
        return [call for call, _ in found_calls(text)]

    def _call(self, call: ToolCall) -> Any:
        """What the tool returns, or an error."""
        tool = self._by_name.get(call.name)
        if call.error is not None or tool is None:
            return {"error": call.error or f"Tool {call.name} not found."}
        try:
            return tool(**call.arguments)
        except (Exception, SystemExit) as error:
            return {"error": str(error)}


def as_factory(environment: Any) -> EnvironmentFactory:
    """Make what a user gives as environment create one for each sample; one is created to look at.

    Args:
        environment: Creates an :class:`~sparse_rl_lightning.environments.Environment`, or an object as TRL's
            ``environment_factory`` does, for :class:`~sparse_rl_lightning.environments.ToolEnvironment`.

    Raises:
        ValueError: If it does not, or a tool lacks type hints or a docstring.
    """
    if not callable(environment):
        raise UserError(f"environment is {environment!r:.200}: {_ALLOWED}")
    example = environment()
    tools = example.tools if isinstance(example, Environment) else _methods(example)
    if not isinstance(example, Environment):
        if not callable(getattr(example, "reset", None)) or not (tools or hasattr(example, "get_reward")):
            raise UserError(f"environment creates {example!r:.200}: {_ALLOWED}")
        environment = partial(ToolEnvironment, environment)
    for tool in tools:
        try:
            get_json_schema(tool)
        except Exception as error:  # of the types of others' annotations
            raise UserError(
                f"tool {getattr(tool, '__name__', tool)!r} cannot be described to the policy: {error} "
                "Give each argument a type hint and a line under Args: of a Google docstring."
            ) from error
    created: EnvironmentFactory = environment
    return created


# -------------------------------------------------------------------- what users give

_ALLOWED = (
    "give a class, or a function without arguments, that creates an Environment, or an object with reset(**row) and "
    "public methods that are tools (TRL's environment_factory). Functions alone: partial(ToolEnvironment, tools=[...])."
)


def _methods(instance: Any) -> list[Callable[..., Any]]:
    """Public methods of an object's class but for class methods, as in TRL, without evaluating its properties."""
    names = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction)]
    return [getattr(instance, name) for name in names if not name.startswith("_") and name not in _NOT_TOOLS]


def _opening(row: dict[str, Any], more: Any) -> list[dict[str, Any]] | None:
    """The prompt with text behind its last message; None for the row's own."""
    prompt = row.get("prompt") or [{"role": "user", "content": ""}]
    if isinstance(prompt, str):
        raise UserError("tools need prompts that are chat messages, got text: set as_chat of JsonlPrompts.")
    if more is None:
        return None
    if not isinstance(more, str):
        raise UserError(f"reset() of an environment with tools returned {more!r:.200}: return text, or None.")
    return [*prompt[:-1], prompt[-1] | {"content": prompt[-1]["content"] + more}]


# -------------------------------------------------------------------- calls and answers


def found_calls(text: str) -> list[tuple[ToolCall, tuple[int, int]]]:
    """The calls of a text as Hermes, Qwen2.5 and Qwen3 write them, without those in thoughts, and where they stand."""
    calls: list[tuple[ToolCall, tuple[int, int]]] = []
    for region in _REGIONS.finditer(text):
        if region[0] == "</think>":  # of thoughts that the prompt began
            calls = []
        elif region[1] is not None:
            calls.append((_read(region[1]), region.span()))
    return calls


def _read(text: str) -> ToolCall:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall("unknown", error=f"The call is not valid JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("unknown", error="A call is a JSON object with name and arguments.")
    arguments = call.get("arguments")
    return ToolCall(call["name"], {} if arguments is None else arguments)


def _answer(calls: Sequence[ToolCall], results: Sequence[Any]) -> tuple[list[dict[str, Any]], None]:
    messages = []
    for call, result in zip(calls, results, strict=True):
        message = {"role": "tool", "name": call.name, "content": str(result)}
        messages.append(message if call.id is None else message | {"tool_call_id": call.id})
    return messages, None


def _then(reply: Any, function: Callable[[Any], Any]) -> Any:
    """The function of a reply, which may have to be awaited."""

    async def later() -> Any:
        return function(await reply)

    return later() if inspect.isawaitable(reply) else function(reply)


async def _all(results: Sequence[Any]) -> list[Any]:
    """Results in their order, those that must be waited for together."""
    return await asyncio.gather(*map(_outcome, results))


async def _outcome(result: Any) -> Any:
    try:
        return await result if inspect.isawaitable(result) else result
    except (Exception, SystemExit) as error:
        return {"error": str(error)}
