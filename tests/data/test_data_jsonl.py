from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pandas
import pytest

from sparse_rl_lightning.data import JsonlPrompts, Row
from sparse_rl_lightning.rewards import boxed_math_reward

ADVICE = "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


def write(tmp_path: Path, *lines: Any, name: str = "data.jsonl") -> str:
    path = tmp_path / name
    texts = [line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=False).encode() for line in lines]
    path.write_bytes(b"\n".join(texts))
    return str(path)


def rows(path: str, **arguments: Any) -> list[Row]:
    return JsonlPrompts(path, **arguments).train_rows()


def test_columns_are_renamed_and_the_rest_is_passed_on(tmp_path: Path) -> None:
    path = write(tmp_path, {"q": "1+1?", "gold": 2, "level": 3}, {"q": "2+2?", "gold": "4", "source": ["a"]})
    first, second = rows(path, prompt_column="q", answer_column="gold")
    assert first == {"q": "1+1?", "gold": 2, "level": 3, "prompt": "1+1?", "answer": "2"}
    assert (second["prompt"], second["answer"], second["source"]) == ("2+2?", "4", ["a"])


def test_lines_end_at_newlines_only(tmp_path: Path) -> None:
    odd = "a\u2028b\u2029c\x85d\x0be\x1cf"
    path = write(tmp_path, {"prompt": odd, "answer": "1"}, b"", b"  \r", b'{"prompt": "x",\r "answer": "2"}\r')
    assert [row["prompt"] for row in rows(path)] == [odd, "x"]


def test_byte_order_mark_and_lone_surrogates(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        b'\xef\xbb\xbf{"prompt": "a\\ud800b", "answer": "1", "tags": ["\\udfff"]}',
        b'{"prompt": [{"role": "user", "content": "\\ud83d\\ude00 \xed\xa0\x80"}], "answer": "2"}',
    )
    first, second = rows(path)
    assert (first["prompt"], first["tags"]) == ("a\ufffdb", ["\ufffd"])
    assert second["prompt"] == [{"role": "user", "content": "😀 \ufffd"}]


BAD_LINES = [  # the second of a file
    (b'{"prompt": "a"', r"data.jsonl, line 2 is not JSON \(.*\): '\{\"prompt\": \"a\"'"),
    (b"\x1b[31mred", r"line 2 is not JSON .*'\\x1b\[31mred'"),
    (b'{"prompt": "\xff"}', "line 2 is not JSON .*utf-8"),
    (b"[" * 100_000, "line 2 is not JSON"),
    (b'["a"]', "line 2 holds a JSON list; expected an object, with columns by name"),
    ({"prompt": "", "answer": "1"}, "line 2: the prompt in column 'prompt' is empty"),
    ({"prompt": " \n", "answer": "1"}, "line 2: the prompt .* is empty"),
    ({"prompt": [], "answer": "1"}, "line 2: the prompt .* is empty"),
    ({"prompt": [{"role": "user", "content": ""}], "answer": "1"}, "line 2: the prompt .* is empty"),
    ({"prompt": 5, "answer": "1"}, "line 2: the prompt .* must be text or a list of chat messages .* got 5"),
    ({"prompt": ["hi"], "answer": "1"}, "line 2: the prompt .* must be text or a list"),
    ({"prompt": "a", "answer": ["1"]}, "line 2: the answer in column 'answer' must be text or a number"),
    ({"prompt": "a", "answer": True}, "line 2: the answer .* got True"),
    ({"prompt": "a", "gold": "1"}, r"line 2 has no column 'answer' .*. Its columns are: 'prompt', 'gold'"),
    ({"question": "a", "answer": "1"}, r"line 2 has no column 'prompt' \(prompt_column\)"),
    ({"prompt": "a"}, r"line 2 has no column 'answer' \(answer_column\)"),
]
BAD_FILES = [
    ("a.json", '[{"prompt": "1"}, 2]', "a.json, row 1 holds a JSON int; expected an object"),
    ("a.json", '[{"prompt": "1"},', r"a.json begins as a JSON array, and is not JSON \("),
    ("a.json", '["a"]\n["b"]', r"a.json begins as a JSON array, and is not JSON \(Extra data"),
    ("a.json", '{\n "prompt": "1"\n}\n{\n "prompt": "1"\n}', r"line 1 is not JSON .*: '\{'\. Write each object"),
    ("a.json", '{"data": [\n {"prompt": "1"}\n]}', "line 1 is not JSON .*or all as one array"),
    ("a.csv", "prompt,answer\n1,2\n1,2,3\n", r"a.csv, line 3 has 3 cells and the first line 2 names"),
    ("a.csv", "prompt,answer,answer\n1,2,3\n", "more than one column 'answer'"),
    ("a.csv", "prompt;answer\n1;2\n", r"a.csv, line 2 has no column 'prompt' .* Its columns are: 'prompt;answer'"),
    ("a.csv", 'prompt,answer\n"1,2\n', "a.csv is no CSV file in UTF-8: unexpected end of data"),
    ("a.csv", b"prompt,answer\n\xff,2\n", "a.csv is no CSV file in UTF-8: 'utf-8' codec"),
    ("a.tsv", "prompt\tanswer\n", r"a.tsv' is a file of another kind than .*\.csv"),
    *[
        ("data.jsonl", '{"prompt": "1+1=", "answer": "2"}'.encode(encoding),
         rf"data.jsonl is in {encoding.upper()} by its first bytes. Save it in UTF-8")
        for encoding in ("utf-16", "utf-16-le", "utf-32-be")
    ],
    *[(name, None, f"There is no data file '.*{name}'") for name in ("absent.jsonl", "absent.parquet")],
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    path = write(tmp_path, {"prompt": "fine", "answer": "1"}, line)
    with pytest.raises(ValueError, match=message):
        rows(path)


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES)
def test_a_file_that_is_no_table_is_named(name: str, content: str | bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=message):
        rows(str(tmp_path / name))


def test_a_missing_hub_dataset_is_named() -> None:
    told = r"datasets could not load 'nobody/nothing' .*split 'train'.*\.jsonl, \.json, \.csv, \.parquet"
    with pytest.raises(ValueError, match=told):
        rows("nobody/nothing")


def test_rows_with_an_empty_answer_are_dropped_and_counted(tmp_path: Path) -> None:
    answers = ["1", "", None, " ", float("nan"), 0, 27.0]
    path = write(tmp_path, *({"prompt": f"q{i}", "answer": answer} for i, answer in enumerate(answers)))
    told = "dropped 4 of 7 rows with an empty answer .*: line 2, line 3, line 4, line 5$"
    with pytest.warns(UserWarning, match=told):
        kept = rows(path)
    assert [(row["prompt"], row["answer"]) for row in kept] == [("q0", "1"), ("q5", "0"), ("q6", "27")]


def test_a_file_without_any_answer(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a", "answer": "no mark"})
    with pytest.raises(ValueError, match=r"dropped 1 of 1 rows .*'gsm8k'.*check answer_column and answer_pattern"):
        rows(path, answer_pattern="gsm8k")


@pytest.mark.parametrize(
    ("pattern", "text", "answer"),
    [
        (None, " 1,000 ", "1,000"),
        ("gsm8k", "so 3\n#### 1,000", "1000"),
        ("gsm8k", "#### 1\n####2 ", "2"),
        (r"= (\d+)", "a = 1, b = 22", "22"),
        (r"\d+", "a = 1, b = 22", "22"),
    ],
)
def test_answer_patterns(tmp_path: Path, pattern: str | None, text: str, answer: str) -> None:
    path = write(tmp_path, {"prompt": "q", "answer": text})
    row = rows(path, answer_pattern=pattern, solution_column="answer")[0]
    assert (row["answer"], row["solution"]) == (answer, text)


def test_template(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "b{c}"}]
    path = write(tmp_path, {"prompt": "a {x} {{}}", "answer": "1"}, {"prompt": chat, "answer": "1"})
    text, messages = (row["prompt"] for row in rows(path, prompt_template=ADVICE))
    tail = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert text == "a {x} {{}}" + tail
    assert messages == [chat[0], {"role": "user", "content": "b{c}" + tail}]


def test_text_as_chat(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "b"}]
    path = write(tmp_path, {"prompt": "a", "answer": "1"}, {"prompt": own, "answer": "1"})
    user = {"role": "user", "content": "a!"}
    arguments = {"as_chat": True, "prompt_template": "{prompt}!"}
    assert rows(path, **arguments)[0]["prompt"] == [user]
    first, second = (row["prompt"] for row in rows(path, system_prompt="Be brief.", **arguments))
    assert first == [{"role": "system", "content": "Be brief."}, user]
    assert second == [own[0], {"role": "user", "content": "b!"}]
    with pytest.raises(ValueError, match=r"line 1: .* plain text, which takes no system_prompt"):
        rows(path, system_prompt="Be brief.")


def test_validation_file(tmp_path: Path) -> None:
    """A limit on validation is none on predictions, for which all rows stand in where none were held out."""
    train = write(tmp_path, *({"prompt": f"p{i}", "answer": "1"} for i in range(3)), name="train.jsonl")
    val = write(tmp_path, *({"prompt": f"v{i}", "answer": "1"} for i in range(3)), name="val.json")
    data = JsonlPrompts(train, val_path=val, max_val_prompts=2)
    for loader in (data.val_dataloader(), data.predict_dataloader()):
        assert [[row["prompt"] for row in batch] for batch in loader] == [["v0", "v1"]]
    data = JsonlPrompts(train, max_val_prompts=2)
    assert data.val_rows() == []
    assert [row["prompt"] for batch in data.predict_dataloader() for row in batch] == ["p0", "p1", "p2"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"path": "a/b", "config": "main", "split": "all", "val_split": "test"},
        {"path": "a.jsonl", "val_path": "a/b", "config": "main", "val_split": "test"},
        {"path": "a.jsonl", "val_path": "a/b", "split": "test"},  # of which val_split is the same
        {"path": "a/b", "val_path": "b.jsonl", "config": "main", "split": "all"},
        {"path": "a.jsonl", "val_path": "b.jsonl", "split": "train"},
    ],
)
def test_settings_of_hub_datasets_stay_where_one_is_read(arguments: dict[str, str]) -> None:
    data = JsonlPrompts(**arguments)
    assert (data.split, data.config) == (arguments.get("split", "train"), arguments.get("config"))


def test_parquet(tmp_path: Path) -> None:
    import datasets

    path = str(tmp_path / "data.parquet")
    table = {"problem": ["a", "b"], "answer": [1.0, None], "level": [[1], [2]]}
    datasets.Dataset.from_dict(table).to_parquet(path)
    with pytest.warns(UserWarning, match=r"data.parquet: dropped 1 of 2 rows .*: row 1$"):
        kept = rows(path, prompt_column="problem")
    assert kept == [{"problem": "a", "answer": "1", "level": [1], "prompt": "a"}]
    with pytest.raises(ValueError, match="row 0 has no column 'prompt'"):
        rows(path)


@pytest.mark.parametrize(
    "name", ["train[1].parquet", "train*.parquet", "[run]/train.parquet", "year=2020/train.parquet"]
)
def test_a_local_parquet_file_is_read_as_it_is_now(tmp_path: Path, name: str) -> None:
    """Whatever its name could mean as a pattern, and whatever its time says."""
    path = tmp_path / name
    for other in (path, tmp_path / "train1.parquet", tmp_path / "r" / "train.parquet"):
        other.parent.mkdir(exist_ok=True)
        pandas.DataFrame({"prompt": ["another file"], "answer": ["1"]}).to_parquet(other)
    for text in ("old", "new"):
        pandas.DataFrame({"prompt": [text], "answer": ["1"]}).to_parquet(path)
        os.utime(path, (0, 0))
        module = JsonlPrompts(str(path), val_path=str(path))
        assert module.train_rows() == module.val_rows() == [{"prompt": text, "answer": "1"}]


def test_a_folder_of_rows_is_read_as_it_is_now(tmp_path: Path) -> None:
    folder, pattern = tmp_path / "rows", tmp_path / "[rows]"
    for text in ("old", "new"):
        folder.mkdir(exist_ok=True)
        pandas.DataFrame({"prompt": [text], "answer": ["1"]}).to_parquet(folder / "train.parquet")
        os.utime(folder / "train.parquet", (0, 0))
        assert [row["prompt"] for row in rows(str(folder))] == [text]
    folder.rename(pattern)
    with pytest.raises(ValueError, match=r"datasets takes the folder '.*\[rows\]' for a pattern. Rename it"):
        rows(str(pattern))


def called(name: str, arguments: dict[str, Any]) -> Row:
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls},
                {"role": "tool", "content": "ok"}]  # fmt: skip
    return {"prompt": messages, "answer": "1", "more": {"level": 1, "source": None}}


def test_prompts_of_parquet_have_the_nulls_that_were_written(tmp_path: Path) -> None:
    """Arrow gives every struct of a column the keys of all; JSON, in lines or in a column, keeps its own nulls."""
    import datasets

    table = [called("weather", {"city": "X", "day": None}), called("time", {"zone": "Y"}), called("now", {})]
    datasets.Dataset.from_list(table, on_mixed_types="use_json").to_parquet(tmp_path / "json.parquet")
    pandas.DataFrame(table).to_parquet(tmp_path / "structs.parquet")
    (tmp_path / "hub").mkdir()
    pandas.DataFrame(table).to_parquet(tmp_path / "hub" / "train.parquet")
    assert rows(write(tmp_path, *table)) == rows(str(tmp_path / "json.parquet")) == table
    table[0]["prompt"][1]["tool_calls"][0]["function"]["arguments"].pop("day")
    for path in (tmp_path / "structs.parquet", tmp_path / "hub"):
        assert rows(str(path)) == table


@pytest.mark.parametrize("column", ["prompt", "answer", "solution"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet", "hub/train.csv"])
def test_a_column_of_the_file_is_never_replaced(tmp_path: Path, column: str, name: str) -> None:
    table = pandas.DataFrame([{"prompt": "a", "answer": "1", "solution": "s", "text": "b"}])
    (tmp_path / "hub").mkdir()
    writers = {"jsonl": partial(table.to_json, orient="records", lines=True), "csv": partial(table.to_csv, index=False)}
    writers.get(name.rpartition(".")[2], table.to_parquet)(tmp_path / name)
    path = str((tmp_path / name).parent if "/" in name else tmp_path / name)
    with pytest.raises(ValueError, match=f"row|line .* has a column '{column}', which {column}_column='text' would re"):
        rows(path, **{f"{column}_column": "text"})
    assert rows(path, **{f"{column}_column": column}) == table.to_dict("records")


@pytest.mark.parametrize("answer", [["2", "two"], {"value": 2}, None, "2"])
def test_without_an_answer_column_the_answer_of_the_file_is_handed_on(tmp_path: Path, answer: Any) -> None:
    path = write(tmp_path, {"prompt": "1+1=", "answer": answer}, {"prompt": "1+2="})
    first, second = rows(path, answer_column=None, math_answers=True)
    assert (first["answer"], second["answer"]) == (answer, "")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("file", "count"), [("gsm8k_train.jsonl", 7473), ("gsm8k_test.jsonl", 1319)])
def test_gsm8k(data_dir: Path, file: str, count: int) -> None:
    columns = {"prompt_column": "question", "answer_pattern": "gsm8k"}
    data = rows(str(data_dir / file), **columns, prompt_template=ADVICE, as_chat=True)
    assert len(data) == count
    assert all(row["answer"].removeprefix("-").replace(".", "", 1).isdigit() for row in data)
    assert all(row["prompt"][0]["content"].endswith("within \\boxed{}.") for row in data)


@pytest.mark.parametrize("file", ["simplelr_level3to5.sample.jsonl", "simplelr_qwen_level3to5.sample.jsonl"])
def test_simplerl(data_dir: Path, file: str) -> None:
    with pytest.warns(UserWarning, match="dropped 2 of 408 rows with an empty answer .*: line 405, line 406$"):
        data = rows(str(data_dir / file), answer_column="label")
    assert len(data) == 406
    chat = "qwen" not in file
    texts = [row["prompt"][-1]["content"] if chat else row["prompt"] for row in data]
    end = "within \\boxed{{}}." + ("" if chat else "<|im_end|>\n<|im_start|>assistant\n")
    assert all(text.endswith(end) for text in texts)
    completions = [f"\\boxed{{{row['label']}}}" for row in data]
    assert set(boxed_math_reward([], completions, [], answer=[row["answer"] for row in data])) == {1.0}


def test_answers_that_cannot_be_checked_are_dropped_where_asked(tmp_path: Path) -> None:
    path = write(tmp_path, *({"prompt": "p", "answer": answer} for answer in ["5", "", "}{", "1" * 600, r"\sqrt2"]))
    with pytest.warns(UserWarning, match=r"dropped 1 of 5 rows with an empty answer \(column.*line 2$"):
        assert len(rows(path)) == 4
    with pytest.warns(UserWarning, match=r"dropped 3 of 5 rows with an empty answer or one that cannot be checked"):
        assert [row["answer"] for row in rows(path, math_answers=True)] == ["5", r"\sqrt2"]


# ---------------------------------------------------------------- chats that end with the assistant

USER = {"role": "user", "content": "6*7?"}
ANSWER = {"role": "assistant", "content": "It is 42."}


def chat(tmp_path: Path, *messages: dict[str, Any], column: str = "prompt") -> str:
    return write(tmp_path, {column: list(messages), "answer": "42"})


def test_a_prefill_in_the_prompt_stays_and_the_template_goes_around_the_question(tmp_path: Path) -> None:
    (row,) = rows(chat(tmp_path, USER, ANSWER), prompt_template="Solve {prompt}", system_prompt="Be brief.")
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Solve 6*7?"}, ANSWER]
    assert row["prompt"] == asked


def test_a_whole_conversation_is_refused_by_file_and_line(tmp_path: Path) -> None:
    path = chat(tmp_path, USER, ANSWER, column="messages")
    message = r"data.jsonl, line 1: the prompt in column 'messages' ends with a message of the assistant, 'It is 42.'"
    with pytest.raises(ValueError, match=message):
        rows(path, prompt_column="messages")
    assert rows(chat(tmp_path, USER, column="messages"), prompt_column="messages")[0]["prompt"] == [USER]


def test_its_answer_is_taken_off_by_a_key(tmp_path: Path) -> None:
    path = chat(tmp_path, USER, ANSWER, USER, ANSWER, column="messages")
    (row,) = rows(path, prompt_column="messages", final_assistant="drop", prompt_template="Solve {prompt}")
    assert row["prompt"] == [USER, ANSWER, {"role": "user", "content": "Solve 6*7?"}]
    (row,) = rows(path, prompt_column="messages", final_assistant="continue")
    assert row["prompt"] == [USER, ANSWER, USER, ANSWER]
    assert rows(chat(tmp_path, USER), final_assistant="drop")[0]["prompt"] == [USER]  # nothing to take off


@pytest.mark.parametrize(
    ("messages", "arguments", "message"),
    [
        ([ANSWER], {"final_assistant": "drop"}, "line 1: the prompt in column 'prompt' is empty"),
        ([USER, ANSWER], {"final_assistant": "error"}, r"set data\.final_assistant to drop"),
        ([USER, ANSWER, ANSWER], {"final_assistant": "drop"}, "ends with a message of the assistant"),
        ([{"role": "system", "content": "x"}], {"prompt_template": "{prompt}!"}, "has no message of the user, which"),
        ([USER, {"role": "assistant", "content": " "}], {}, "line 1: the prompt in column 'prompt' is empty"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "which is text or a list of text parts, got"),
    ],
)
def test_chats_that_cannot_be_prompts(tmp_path: Path, messages: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows(chat(tmp_path, *messages), **arguments)


def test_text_parts_become_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "6*"}, {"type": "text", "text": "7?"}]
    (row,) = rows(chat(tmp_path, {"role": "user", "content": parts}), prompt_template="Solve {prompt}")
    assert row["prompt"] == [{"role": "user", "content": "Solve 6*7?"}]


# ---------------------------------------------------------------- other files

TWO = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4", "level": 1}]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "A.JSON"])
def test_an_array_is_read_like_lines(tmp_path: Path, indent: int | None, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf \n" + json.dumps(TWO, indent=indent).encode())
    assert rows(str(path)) == TWO
    path.write_text(json.dumps([*TWO, {"prompt": "", "answer": "1"}], indent=indent))
    with pytest.raises(ValueError, match=rf"{name}, row 2: the prompt in column 'prompt' is empty"):
        rows(str(path))


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    long = "1+" * 100_000
    path.write_text(f'\ufeffprompt,answer,note\r\n"a ""b"", c\nd",2.0,\r\n\r\n{long},3,x\r\n')
    assert rows(str(path)) == [
        {"prompt": 'a "b", c\nd', "answer": "2.0", "note": ""},
        {"prompt": long, "answer": "3", "note": "x"},
    ]


def test_a_folder_of_save_to_disk_is_named_by_datasets(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list(TWO[:1]).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"could not load .* saved using `save_to_disk`"):
        rows(str(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("value", "answer"),
    [(2.0, "2"), (-3.0, "-3"), (-0.0, "0"), (2.5, "2.5"), (1e22, "1e+22"), (1e15, "1000000000000000"), ("2.0", "2.0"),
     (2**70, str(2**70))],
)  # fmt: skip
def test_whole_numbers_have_no_point(tmp_path: Path, value: Any, answer: str) -> None:
    assert rows(write(tmp_path, {"prompt": "1", "answer": value}))[0]["answer"] == answer


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"a": inner}])
def test_columns_are_at_most_fifty_levels_deep(wrap: Any, tmp_path: Path) -> None:
    for levels, fits in ((50, True), (51, False)):
        value: Any = "x"
        for _ in range(levels):
            value = wrap(value)
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "p", "answer": "1", "extra": value}) + "\n")
        data = JsonlPrompts(str(tmp_path / "rows.jsonl"), prompts_per_rollout=1)
        if fits:
            assert data.train_rows()[0]["extra"] == value
            continue
        with pytest.raises(ValueError, match="'extra' is nested more than 50 levels deep"):
            data.train_rows()
