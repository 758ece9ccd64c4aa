"""Cases of data files."""

from __future__ import annotations

import datetime
import gzip
import json
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

from cases.case import TRAINS, Case, json_lines

ROW = {"prompt": "1+1=", "answer": "2"}
REWARDS = "sparse_rl_lightning.rewards"
QUESTION, ANSWERED = [{"role": "user", "content": "1+1="}], {"role": "assistant", "content": "It is 2."}
ROWS = json_lines(ROW, ROW, ROW, ROW)


def columns(**more: Any) -> str:
    """Four rows with further columns."""
    return json_lines(*[ROW | more] * 4)


def prompts(*given: Any) -> str:
    """Rows with these prompts."""
    return json_lines(*[{"prompt": prompt, "answer": "2"} for prompt in given])


def parquet(**tables: list[Any]) -> Any:
    """A parquet file, in the place of p.parquet; names may come twice when they end in an underscore."""

    def write(folder: Path) -> None:
        import pyarrow
        from pyarrow.parquet import write_table

        names = [name.rstrip("_") for name in tables]
        arrays = [pyarrow.array(values, None if values else pyarrow.string()) for values in tables.values()]
        write_table(pyarrow.Table.from_arrays(arrays, names=names), folder / "p.parquet")

    return write


def table(name: str, says: str = TRAINS, status: int = 0, *, slow: bool = True, **tables: list[Any]) -> Case:
    """A case of a parquet file."""
    return Case(name, says, status, file="p.parquet", data={}, prepare=parquet(**tables), slow=slow)


LINES = [
    Case("a line that is not JSON", "p.jsonl, line 2 is not JSON", 1, rows=json_lines(ROW) + "oops\n", slow=True),
    Case("a comma too many", "p.jsonl, line 1 is not JSON", 1, rows='{"prompt": "1", "answer": "2",}\n', slow=True),
    Case("an array", TRAINS, 0, file="p.json", rows=json.dumps([ROW] * 4), slow=True),
    Case("an array over several lines", TRAINS, 0, file="p.json", rows=json.dumps([ROW] * 4, indent=1), slow=True),
    Case("an array with something else in it", "p.json, row 1 holds a JSON int; expected an object", 1, file="p.json",
         rows=json.dumps([ROW, 1])),
    Case("an array that is cut off", "p.json begins as a JSON array, and is not JSON (", 1, file="p.json",
         rows=json.dumps([ROW] * 4, indent=1)[:-3], slow=True),
    Case("objects over several lines", "The object goes on in the next line: write each in a line of its own", 1,
         file="p.json", rows=json.dumps(ROW, indent=1) * 4),
    Case("CSV", TRAINS, 0, file="p.csv", rows="prompt,answer\n" + "1+1=,2\n" * 4, slow=True),
    Case("CSV with a cell too many", "p.csv, line 3 has 3 cells and the first line 2 names", 1, file="p.csv",
         rows="prompt,answer\n1+1=,2\n1+1=,2,3\n", slow=True),
    Case("a text file", "'p.txt' is a file, but not of a kind that is read, which are .jsonl, .json, .csv, .parquet", 1,
         file="p.txt", rows=ROWS, slow=True),
    Case("lines that end with CR", "p.jsonl, line 1 is not JSON (Extra data", 1, rows=ROWS.replace("\n", "\r"),
         slow=True),
    Case("a byte order mark, CRLF and blank lines", TRAINS, 0, rows="\ufeff" + ROWS.replace("\n", "\r\n\r\n"),
         slow=True),
    Case("UTF-16", "p.jsonl is in UTF-16 by its first bytes. Save it in UTF-8.", 1, rows=ROWS.encode("utf-16")),
    Case("zeros at the end", "p.jsonl, line 5 is not JSON", 1, rows=ROWS.encode() + b"\0\0\0", slow=True),
    Case("gzip under the name of JSONL", "p.jsonl, line 1 is not JSON", 1, rows=gzip.compress(ROWS.encode(), mtime=0),
         slow=True),
    Case("a number of 5000 digits", "Exceeds the limit (4300 digits)", 1,
         rows=f'{{"prompt": "1+1=", "answer": {"9" * 5000}}}\n', slow=True),
    Case("an empty file", "JsonlPrompts: the training data has no rows.", 1, rows=""),
    Case("blank lines only", "JsonlPrompts: the training data has no rows.", 1, rows="\n \n", slow=True),
    Case("100,000 brackets in a line", "p.jsonl begins as a JSON array, and is not JSON (", 1,
         rows="[" * 100_000, slow=True),
    Case("900 nested brackets in a column", "column 'x' is nested more than 50 levels deep. Drop it, or store it", 1,
         rows=f'{{"prompt": "1+1=", "answer": "2", "x": {"[" * 900}{"]" * 900}}}\n'),
    Case("the same key twice in a row", TRAINS, 0, slow=True,
         rows='{"prompt": "1+1=", "prompt": "2+2=", "answer": "4"}\n' * 4),
]  # fmt: skip

COLUMNS = [
    Case("no column `answer`", "p.jsonl, line 1 has no column 'answer' (answer_column). Its columns are: 'prompt',", 1,
         rows=json_lines({"prompt": "1", "label": "2"})),
    Case("no column that a reward function needs", "does not fit the data: missing a required argument: 'solution'", 1,
         rows=ROWS, edit=lambda v: v["model"]["init_args"].update(reward_funcs=f"{REWARDS}.worked_steps_reward")),
    Case("a reserved column in the last row", "functions get it already (p.jsonl, line 5).", 1, slow=True,
         rows=ROWS + json_lines(ROW | {"completions": 1})),
    Case("a column named `completions`", "The data may not have a column named 'completions'", 1,
         rows=columns(completions=1)),
    Case("a column named `prompts`", "The data may not have a column named 'prompts'", 1, rows=columns(prompts=1),
         slow=True),
    Case("a column named `self`", "The data may not have a column named 'self'", 1, rows=columns(self=1)),
    Case("a column named `reward`", TRAINS, 0, rows=columns(reward=1), slow=True),
    Case("a column whose name is no Python name", TRAINS, 0, rows=columns(**{"a b-c": 1}), slow=True),
    Case("a column that some rows lack", TRAINS, 0, rows=columns(x=1) + ROWS, slow=True),
    Case("a column with an escape sequence in its name", r"Its columns are: '\x1b[31mevil', 'prompt'", 1,
         rows=json_lines({"\x1b[31mevil": "1", "prompt": "1"})),
    Case("answers that are null", "dropped 4 of 4 rows with an empty answer", 1, rows=columns(answer=None)),
    Case("answers that are NaN", "dropped 4 of 4 rows with an empty answer", 1, rows=columns(answer=float("nan")),
         slow=True),
    Case("an answer that is infinite", TRAINS, 0, rows=columns(answer=float("inf")), slow=True),
    Case("the same column for prompt and answer", TRAINS, 0, rows=ROWS, data={"answer_column": "prompt"}, slow=True),
]  # fmt: skip

PROMPTS = [
    Case("an empty prompt", "p.jsonl, line 1: the prompt in column 'prompt' is empty.", 1, rows=prompts("")),
    Case("a prompt of a no-break space", "p.jsonl, line 1: the prompt in column 'prompt' is empty.", 1,
         rows=prompts("\xa0"), slow=True),
    Case("a prompt of a zero-width space", TRAINS, 0, rows=prompts(*["\u200b"] * 4), slow=True),
    Case("a prompt of unknown characters", TRAINS, 0, rows=prompts(*["漢字"] * 4), slow=True),
    Case("a prompt of 100,000 characters", "p.jsonl, line 1: the prompt has 100000 tokens; with max_completion", 1,
         rows=prompts(*["1" * 100_000] * 4),
         slow=True),
    Case("a prompt longer than the context", "p.jsonl, line 1: the prompt has 124 tokens; with", 1,
         rows=prompts(*["1+" * 61 + "1="] * 4)),
    Case("a long prompt in the last row", "p.jsonl, line 5: the prompt has 124 tokens; with max_completion", 1,
         slow=True, rows=ROWS + prompts("1+" * 61 + "1=")),
    Case("a lone surrogate", TRAINS, 0, rows='{"prompt": "1\\ud800", "answer": "2"}\n' * 4, slow=True),
    Case("a chat", TRAINS, 0, rows=prompts(*[[{"role": "user", "content": "1+1="}]] * 4), slow=True),
    Case("a chat that is one message", "must be text or a list of chat messages with role and content", 1,
         rows=prompts({"role": "user", "content": "1"}), slow=True),
    Case("a chat with content in parts", TRAINS, 0, slow=True,
         rows=prompts(*[[{"role": "user", "content": [{"type": "text", "text": "1+1="}]}]] * 4)),
    Case("a chat with an image", "which is text or a list of text parts, got", 1,
         rows=prompts([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]), slow=True),
    Case("a prefill of the assistant", TRAINS, 0, rows=prompts(*[[*QUESTION, ANSWERED]] * 4), slow=True),
    Case("a conversation with its answer under `prompt_column: messages`",
         "p.jsonl, line 1: the prompt in column 'messages' ends with a message of the assistant, 'It is 2.'.", 1,
         rows=json_lines({"messages": [*QUESTION, ANSWERED], "answer": "2"}), data={"prompt_column": "messages"}),
    Case("a chat with content null", "must be text or a list of chat messages with role and content", 1,
         rows=prompts([{"role": "assistant", "content": None}, {"role": "user", "content": "1"}]), slow=True),
    Case("one row for two prompts per rollout", "1 prompts do not fill one block: 2 prompts per rollout", 1,
         rows=json_lines(ROW)),
    Case("`prompt_template: '{prompt.__class__}'`", "prompt_template=", 1, rows=ROWS,
         data={"prompt_template": "{prompt.__class__}"}, slow=True),
    Case("`prompt_template: '{} {prompt}'`", "is malformed", 1, rows=ROWS, data={"prompt_template": "{} {prompt}"},
         slow=True),
    Case("`prompt_template: '{prompt:>2000000000}'`", "is malformed ('prompt' is formatted)", 1, rows=ROWS,
         data={"prompt_template": "{prompt:>2000000000}"}),
    Case("`answer_pattern: '('`", "answer_pattern='(' is not a regular expression", 1, rows=ROWS,
         data={"answer_pattern": "("}, slow=True),
    Case("`answer_pattern: '(a+)+$'` on a text that backtracks for hours",
         "answer_pattern='(a+)+$' took more than 5 seconds on p.jsonl, line 1, column 'answer', a text of 41", 1,
         rows=json_lines({"prompt": "1+1=", "answer": "a" * 40 + "b"}), data={"answer_pattern": "(a+)+$"}, slow=True),
]  # fmt: skip

PARQUET = [
    table("parquet", prompt=["1+1="] * 4, answer=[2] * 4),
    table("no rows", "JsonlPrompts: the training data has no rows.", 1, slow=False, prompt=[], answer=[]),
    table("twice the same column", "p.parquet has more than one column 'answer'. Rename or drop one.", 1, slow=False,
          prompt=["1"], answer=["1"], answer_=["2"]),
    table("prompts of bytes", "p.parquet, row 0: the prompt in column 'prompt' must be text", 1,
          prompt=[b"1+1="] * 4, answer=["2"] * 4),
    table("answers that are lists", "the answer in column 'answer' must be text or a number, got ['1'].", 1,
          prompt=["1"] * 4, answer=[["1"]] * 4),
    table("answers that are dates", "must be text or a number, got datetime.date(2020, 1, 1).", 1,
          prompt=["1"] * 4, answer=[datetime.date(2020, 1, 1)] * 4),
    table("answers that are decimals", "must be text or a number, got Decimal('1.5').", 1,
          prompt=["1"] * 4, answer=[Decimal("1.5")] * 4),
    table("a column of times", prompt=["1+1="] * 4, answer=["2"] * 4, when=[datetime.datetime(2020, 1, 1)] * 4),
    table("chats", prompt=[[{"role": "user", "content": "1+1="}]] * 4, answer=["2"] * 4),
    Case("an empty parquet file", "p.parquet is no parquet file that can be read: ", 1, file="p.parquet", rows=""),
    Case("JSON under the name of parquet", "p.parquet is no parquet file that can be read: ", 1, file="p.parquet",
         rows=ROWS, slow=True),
]  # fmt: skip

PLACES = [
    Case("no such file", "There is no data file 'nowhere.jsonl'", 1, data={"path": "nowhere.jsonl"}, slow=True),
    Case("no such file in the home folder", "There is no data file '~/now", 1, data={"path": "~/nowhere_at_all.jsonl"},
         slow=True),
    Case("a folder", "There is no data file 'p.jsonl'", 1, data={},
         prepare=lambda folder: (folder / "p.jsonl").mkdir()),
    Case("a pipe", "There is no data file 'p.jsonl'", 1, data={},
         prepare=lambda folder: os.mkfifo(folder / "p.jsonl")),
    Case("/dev/zero", "There is no data file 'p.jsonl'", 1, data={},
         prepare=lambda folder: (folder / "p.jsonl").symlink_to("/dev/zero"), slow=True),
    Case("a name with escape sequences", r"There is no data file '\x1b[31mx\x1b]0;o\x07.jsonl'", 1,
         data={"path": "\x1b[31mx\x1b]0;o\x07.jsonl"}),
    Case("a CSV file with names alone", "JsonlPrompts: the training data has no rows.", 1, file="p.csv", rows="a,b\n",
         slow=True),
    Case("a name in capitals", TRAINS, 0, file="P.JSONL", rows=ROWS, slow=True),
    Case("a compressed file", "is a file, but not of a kind that is read, which are .jsonl, .json, .csv, .parquet", 1,
         file="p.jsonl.gz", rows=gzip.compress(ROWS.encode(), mtime=0), slow=True),
    Case("`val_split` of a file", "val_split='test' is of hub datasets, and 'p.jsonl' is a file, read whole.", 1,
         rows=ROWS, data={"val_split": "test"}),
]  # fmt: skip

TOPICS = {"Lines": LINES, "Columns": COLUMNS, "Prompts": PROMPTS, "Parquet": PARQUET, "Places": PLACES}
