"""Prompts from any JSON, CSV or parquet file or hub dataset, with column names as arguments."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from sparse_rl_lightning.data.base import PlacedRows, PromptDataModule, Row, in_order
from sparse_rl_lightning.data.files import is_local, read_table, text_or_number
from sparse_rl_lightning.errors import UserError, check_choice
from sparse_rl_lightning.rewards.math import answer_kind
from sparse_rl_lightning.rollout.prompts import Prompt, content_text, valid_unicode
from sparse_rl_lightning.text import compiled

MARKER = "\0" * 10_000
"""A prompt of which a format would lose something."""
MOST_LEVELS = 50
"""Limit on nested lists and objects in a column, because everything that reads a row recurses into them."""

FinalAssistant: TypeAlias = Literal["continue", "drop", "error"]

GSM8K_PATTERN = r"####\s*(\S.*)"


class JsonlPrompts(PromptDataModule):
    r"""Prompts and answers from JSON, CSV, parquet or the hub; rows with an empty answer are dropped and counted.

    A prompt is text, or a list of chat messages that the training module renders with its tokenizer's template.
    Text counts as already rendered: set ``as_chat`` to make it a user message instead. Of messages that Arrow stores
    as structs (parquet, hub), keys without a value are left out. All other columns are passed on to the reward
    functions, and none is replaced: a file with ``answer`` takes no other ``answer_column``.

    Args:
        path: A ``.jsonl`` or ``.json`` file (an object per line, or an array of objects), a ``.csv`` or ``.parquet``
            file, or the name of a hub dataset.
        val_path: The same for validation; the default is ``path`` if ``val_split`` is given, otherwise no validation.
        prompt_column: Column with the prompt.
        answer_column: Column with the answer, text or a number; null to fill none in: rows keep their
            own ``answer``, if they have one.
        answer_pattern: Regular expression that finds the bare answer in its column: its last match counts, or the first
            group of that match. ``gsm8k`` stands for the text behind ``####`` without commas.
        math_answers: Drop rows whose answer the math checker cannot compare with anything, too.
        solution_column: Column that is also passed on, whole, as ``solution``, for supervised training.
        prompt_template: Text around the prompt, for example
            ``"{prompt}\nPlease reason step by step, and put your final answer within \\boxed{{}}."``. Braces are
            doubled here, never in the data. In a list of chat messages it applies to the user's last.
        as_chat: Turn a text prompt into a chat message of the user.
        system_prompt: System message before prompts that do not begin with one; needs chat messages.
        final_assistant: What to do with chat messages that end with the assistant's: ``continue`` it, as the beginning
            of the answer (a prefill); ``drop`` it, as the answer of a file for supervised training; or ``error``. Null
            goes by the name of the column, as TRL does: ``continue`` for ``prompt``, ``error`` for any other, such as
            ``messages``, which names whole conversations.
        config: Configuration of the hub dataset.
        split: Training split of the hub dataset.
        val_split: Validation split of the hub dataset.
        **blocks: Arguments of PromptDataModule.

    Raises:
        ValueError: If a pattern or template is malformed, or a setting of hub datasets is given for files. Reading
            raises it for a missing file or column, a line that is not JSON, an empty prompt, and a file without any
            answer.
    """

    def __init__(
        self,
        path: str,
        val_path: str | None = None,
        prompt_column: str = "prompt",
        answer_column: str | None = "answer",
        answer_pattern: str | None = None,
        math_answers: bool = False,
        solution_column: str | None = None,
        prompt_template: str | None = None,
        as_chat: bool = False,
        system_prompt: str | None = None,
        final_assistant: FinalAssistant | None = None,
        config: str | None = None,
        split: str = "train",
        val_split: str | None = None,
        **blocks: Any,
    ) -> None:
        super().__init__(**blocks)
        instead = ", and give val_path for rows to validate on" if val_path is None else ""
        _check_of_hub("val_split", val_split, [val_path or path], instead)
        _check_of_hub("split", None if split == "train" else split, [path, None if val_split else val_path])
        _check_of_hub("config", config, [path, val_path])
        self.path = path
        self.val_path = path if val_path is None and val_split is not None else val_path
        self.prompt_column = prompt_column
        self.answer_column = answer_column
        self.answer_pattern = answer_pattern
        self.math_answers = math_answers
        self.solution_column = solution_column
        self.prompt_template = prompt_template
        self.as_chat = as_chat
        self.system_prompt = system_prompt
        check_choice("final_assistant", final_assistant, FinalAssistant, or_none=True)
        self.final_assistant = final_assistant
        self.config = config
        self.split = split
        self.val_split = val_split or split
        pattern = GSM8K_PATTERN if answer_pattern == "gsm8k" else answer_pattern
        self._pattern = None if pattern is None else compiled(pattern, "answer_pattern")
        _check_template(prompt_template)

    def prepare_data(self) -> None:
        """Read the rows once per machine: hub datasets are fetched, and mistakes reported before a policy is loaded."""
        if self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING:
            self._train = self.train_rows()
        self._val = self.val_rows()

    def train_rows(self) -> list[Row]:
        """All rows of ``path`` that have an answer."""
        return self._rows(self.path, self.split)

    def val_rows(self) -> list[Row]:
        """All rows of ``val_path`` that have an answer."""
        return [] if self.val_path is None else self._rows(self.val_path, self.val_split)

    def predict_dataloader(self) -> DataLoader[list[Row]] | list[Any]:
        """The validation rows, or the rows of ``path`` if there are none."""
        held_out = self.val_rows() if self._val is None else self._val
        most = self.max_val_prompts if held_out else None
        rows = self._admitted(held_out or self.train_rows(), "prediction", most)
        return in_order(rows, self.val_batch_size)

    def _rows(self, path: str, split: str) -> list[Row]:
        table = read_table(path, self.config, split)
        rows, dropped = PlacedRows([], []), []
        for where, record in table:
            row = self._row(where, record)
            if self.answer_column is None or self._is_usable(row["answer"]):
                rows.append(row)
                rows.places.append(where)
            else:
                dropped.append(where.removeprefix(f"{path}, "))
        if dropped:
            named = ", ".join(dropped[:10]) + (", ..." if len(dropped) > 10 else "")
            uncheckable = " or one that cannot be checked" if self.math_answers else ""
            how = f"column {self.answer_column!r}, answer_pattern {self.answer_pattern!r}"
            message = f"{path}: dropped {len(dropped)} of {len(table)} rows with an empty answer"
            message += f"{uncheckable} ({how}): {named}"
            if not rows:
                raise UserError(f"{message}. No row is left: check answer_column and answer_pattern.")
            rank_zero_warn(message)
        return rows

    def _row(self, where: str, record: dict[str, Any]) -> Row:
        for filled in ("prompt", "answer", "solution"):
            column: str | None = getattr(self, f"{filled}_column")
            if column is not None and column not in record:
                names = ", ".join(map(repr, record))
                raise UserError(f"{where} has no column {column!r} ({filled}_column). Its columns are: {names}.")
            if column not in (None, filled) and filled in record:
                raise UserError(
                    f"{where} has a column {filled!r}, which {filled}_column={column!r} would replace, since rewards "
                    f"read the {filled} there. Rename or drop it."
                )
        row = {name: _clean(value, f"{where}, column {name!r}") for name, value in record.items()}
        if self.solution_column is not None:
            row["solution"] = row[self.solution_column]
        if self.answer_column is not None:
            row["answer"] = self._answer(where, row[self.answer_column])
        return {"answer": ""} | row | {"prompt": self._prompt(where, row[self.prompt_column])}

    def _is_usable(self, answer: str) -> bool:
        return answer != "" and not (self.math_answers and answer_kind(answer) == "uncheckable")

    def _answer(self, where: str, value: object) -> str:
        value = text_or_number(value, f"{where}: the answer in column {self.answer_column!r}")
        text = str(value + 0.0).removesuffix(".0") if isinstance(value, float) else str(value)  # 2.0 is 2, as is -0.0
        if self._pattern is not None:
            hits = list(self._pattern.finditer(text))
            text = (hits[-1][1 if self._pattern.groups else 0] or "") if hits else ""
        return (text.replace(",", "") if self.answer_pattern == "gsm8k" else text).strip()

    def _prompt(self, where: str, value: object) -> Prompt:
        source = f"{where}: the prompt in column {self.prompt_column!r}"
        if isinstance(value, str):
            messages = [{"role": "user", "content": value}]
        elif isinstance(value, list) and all(content_text(item) is not None for item in value):
            messages = self._to_be_answered(source, [item | {"content": content_text(item)} for item in value])
        else:
            raise UserError(
                f"{source} must be text or a list of chat messages with role and content, which is text or a list of "
                f"text parts, got {ascii(value)[:80]}."
            )
        if not messages or not messages[-1]["content"].strip():
            raise UserError(f"{source} is empty. Fill it in or drop the row.")
        if self.prompt_template is not None:
            last = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=None)
            if last is None:
                raise UserError(f"{source} has no message of the user, which prompt_template is put around.")
            messages[last] |= {"content": self.prompt_template.format(prompt=messages[last]["content"])}
        if isinstance(value, str) and not self.as_chat:
            if self.system_prompt is not None:
                raise UserError(f"{source} is plain text, which takes no system_prompt. Set as_chat, or leave it out.")
            return str(messages[0]["content"])
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        return messages

    def _to_be_answered(self, source: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages up to where the policy goes on.

        Raises:
            ValueError: If they end with the assistant's and nothing says what that is.
        """
        how = self.final_assistant or ("continue" if self.prompt_column == "prompt" else "error")
        if how == "drop" and messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if how != "continue" and messages and messages[-1]["role"] == "assistant":
            raise UserError(
                f"{source} ends with a message of the assistant, {ascii(messages[-1]['content'])[:80]}. If it is the "
                "answer, set data.final_assistant to drop, which takes one off; if it is the beginning of one (a "
                "prefill), to continue."
            )
        return messages


def _check_of_hub(setting: str, chosen: str | None, paths: list[str | None], instead: str = "") -> None:
    """Refuse a setting of hub datasets if all that it is about are files, which have no parts to choose from."""
    files = [path for path in paths if path is not None]
    if chosen is not None and all(map(is_local, files)):
        named = f"{' and '.join(map(repr, files))} {'is a file' if len(files) == 1 else 'are files'}"
        raise UserError(
            f"{setting}={chosen!r} is of hub datasets, and {named}, read whole. Leave {setting} out{instead}."
        )


def _check_template(template: str | None) -> None:
    if template is None:
        return
    try:
        complete = MARKER in template.format(prompt=MARKER)
    except (LookupError, ValueError, AttributeError) as error:
        raise UserError(
            f"prompt_template={template!r} is malformed ({error}). Only {{prompt}} is filled in; double all other "
            "braces."
        ) from error
    if not complete:
        raise UserError(f"prompt_template={template!r} does not contain {{prompt}}, or not all of it as it is.")


def _clean(value: Any, where: str, level: int = 0) -> Any:
    """The value with every text inside it made valid Unicode, so that it can be tokenized and printed."""
    if level > MOST_LEVELS:
        raise UserError(f"{where} is nested more than {MOST_LEVELS} levels deep. Drop it, or store it as text.")
    if isinstance(value, str):
        return valid_unicode(value)
    if isinstance(value, list):
        return [_clean(item, where, level + 1) for item in value]
    if isinstance(value, dict):
        return {name: _clean(item, where, level + 1) for name, item in value.items()}
    return value
