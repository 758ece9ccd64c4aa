"""What the documents say is true: Python blocks run, commands parse, links and the file tree lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from jsonargparse import capture_parser
from markdown_it import MarkdownIt

from sparse_rl_lightning import cli
from sparse_rl_lightning.cli import calibrate, options, training
from sparse_rl_lightning.cli.plan import job_of
from sparse_rl_lightning.planning import card_of

ROOT = Path(__file__).resolve().parents[2]
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))

MAX_EXAMPLE_LINES = 12
SHELLS = {"bash", "console", "sh", "shell"}
TARGET = re.compile(r"\]\(\s*<?([^)\s>]+)|^\[[^\]]+\]:\s*(\S+)|\b(?:src|href|srcset)=\"([^\"]+)\"", re.MULTILINE)
NAMED_FILE = re.compile(r"`([\w.-]+/[\w./-]+\.(?:ipynb|md|png|py|toml|txt|yaml))`")


@dataclass(frozen=True)
class Block:
    """A fenced block of a Markdown file."""

    language: str
    code: str
    line: int  # of its first line of code


def find_blocks(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text, in order; an indented block loses its indent."""
    fences = [token for token in MarkdownIt("commonmark").parse(text) if token.type == "fence"]
    languages = [re.split(r"[^\w+-]", fence.info.strip())[0] for fence in fences]
    return [
        Block(language, textwrap.dedent(fence.content), fence.map[0] + 2)  # type: ignore[index]  # blocks have lines
        for language, fence in zip(languages, fences, strict=True)
    ]


def without_blocks(text: str) -> str:
    """The text around the fenced blocks."""
    lines = text.splitlines()
    for block in find_blocks(text):
        for number in range(block.line - 2, block.line + block.code.count("\n")):
            lines[number] = ""
    return "\n".join(lines)


def read(document: Path) -> str:
    return document.read_text("utf-8")


def named(documents: list[Path]) -> Any:
    return pytest.mark.parametrize("document", documents, ids=[d.relative_to(ROOT).as_posix() for d in documents])


def is_published(path: Path) -> bool:
    """Whether a fresh clone has this file, or a file in this folder: it is there, and git does not ignore it."""
    files = [p for p in (path.rglob("*") if path.is_dir() else [path]) if p.is_file()][:20]
    ignored = ["git", "check-ignore", "-q"]
    return any(subprocess.run([*ignored, file], cwd=ROOT, capture_output=True).returncode != 0 for file in files)


# ---------------------------------------------------------------- Python


def test_readme_begins_with_a_short_example() -> None:
    examples = [block.code for block in find_blocks(read(README)) if block.language == "python"]
    assert examples, "the README has no ```python block"
    assert len([line for line in examples[0].splitlines() if line.strip()]) <= MAX_EXAMPLE_LINES


@named([README, *DOCS])
def test_python_blocks_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other in one namespace, as when they are pasted into a notebook."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in find_blocks(read(document)):
        if block.language == "python":
            source = "\n" * (block.line - 1) + block.code  # tracebacks name the line of the document
            exec(compile(source, str(document), "exec", dont_inherit=True), namespace)


# ---------------------------------------------------------------- commands


class ParsedError(Exception):
    """Raised in place of doing what the command line asks for."""


class ParseOnly(training.SparseRLCLI):
    def before_instantiate_classes(self) -> None:
        raise ParsedError


def find_commands(text: str) -> Iterator[list[str]]:
    """The words of every command in the shell blocks; of console blocks only what stands behind a prompt."""
    for block in find_blocks(text):
        if block.language not in SHELLS:
            continue
        for line in block.code.replace("\\\n", " ").splitlines():
            if block.language == "console" and not line.startswith("$ "):
                continue
            lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="();<>|&")
            lexer.whitespace_split = True
            words: list[str] = []
            for token in [*lexer, ";"]:
                if set(token) <= set(";|&"):
                    yield words
                    words = []
                elif words or not re.match(r"[A-Z_]+=", token):
                    words.append(token)


def own_arguments(words: list[str]) -> list[str] | None:
    """What our command line gets, or None where another program is called."""
    if words and Path(words[0]).name == "sparse-rl":
        return words[1:]
    if words[1:3] == ["-m", "sparse_rl_lightning"] and Path(words[0]).name.startswith("python"):
        return words[3:]
    return None


PLAIN = {
    "benchmark": options.benchmark, "report": options.report, "record": options.record, "doctor": options.doctor,
    "import-gguf": options.import_gguf, "serve": options.serve,
}  # fmt: skip
SIGNATURES = {"calibrate": calibrate.main, "statistics": calibrate.statistics_main}


def parse(arguments: list[str]) -> None:
    """Parse only; wrong arguments end with an exit code."""
    command = arguments[0] if arguments else ""
    try:
        if command in SIGNATURES:
            capture_parser(lambda: SIGNATURES[command](arguments[1:])).parse_args(arguments[1:])
        elif command in PLAIN:
            PLAIN[command]().parse_args(arguments[1:])
        elif command == "plan":
            proposes = "--config" not in arguments
            args, overrides = options.plan(proposes).parse_known_args(arguments[1:])
            card_of(args.card, args.memory)
            assert not proposes or not overrides
            if overrides:
                job_of(overrides)
        else:
            cli.main(arguments)
    except ParsedError:
        return
    except SystemExit as end:
        if end.code:
            pytest.fail(f"sparse-rl {shlex.join(arguments)} does not parse")


@pytest.fixture
def parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(training, "SparseRLCLI", ParseOnly)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # Lightning sets it while parsing; this takes it back afterwards


@pytest.mark.usefixtures("parse_only")
@named([README, CONTRIBUTING, *DOCS])
def test_commands_parse(document: Path) -> None:
    for words in find_commands(read(document)):
        arguments = own_arguments(words)
        if arguments is not None:
            parse(arguments)


@pytest.mark.usefixtures("parse_only")
def test_wrong_commands_do_not_parse() -> None:
    for wrong in (
        "fit --config configs/no_such.yaml",
        "fit --config configs/dense.yaml --model.num_generation=4",
        "calibrate --config configs/calibrate.yaml --bins=8",
        "calibrate --hardware hardware.json --binning.bin_size=8",
        "report",
        "report runs/a --out=x.html",
        "record check a.safetensors",
    ):
        with pytest.raises(pytest.fail.Exception, match="does not parse"):
            parse(wrong.split())


@named([README, CONTRIBUTING, *DOCS])
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.MULTILINE))
    calls = [words[1:] for words in find_commands(read(document)) if words[:1] == ["make"]]
    wanted = {word for words in calls for word in words if not re.search(r"^-|=", word)}
    assert wanted - targets == set()
    assert document != README or {"quickstart", "test"} <= wanted


# ---------------------------------------------------------------- links and paths


def find_targets(text: str) -> list[str]:
    """Targets of links and pictures that are no web addresses."""
    prose = re.sub(r"`[^`\n]*`", "", without_blocks(text))
    targets = [next(filter(None, groups)) for groups in TARGET.findall(prose)]
    return [target for target in targets if urlsplit(target).scheme not in ("http", "https", "mailto")]


def anchors(text: str) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#{1,6} +(.+?) *#*$", without_blocks(text), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@named([README, CONTRIBUTING, *DOCS])
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for target in find_targets(read(document)):
        link = urlsplit(unquote(target))
        base = ROOT if link.path.startswith("/") else document.parent
        path = base / link.path.lstrip("/") if link.path else document
        if not is_published(path) or (link.fragment and link.fragment not in anchors(read(path))):
            broken.append(target)
    assert broken == []


def tree_paths(text: str) -> list[str]:
    """The paths of a file tree: names, then two spaces or ``#`` and a description; a deeper line is inside a folder."""
    paths: list[str] = []
    folders: list[tuple[int, str]] = []  # indent and path of the folders that are open
    last = 0
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip(" │├└─|`-"))
        names = re.split(r" {2,}| #", line[indent:])[0].replace(",", " ").split()
        if not names or indent > last + 6:  # nothing, or a description that goes on
            continue
        last = indent
        while folders and folders[-1][0] >= indent:
            folders.pop()
        parent = folders[-1][1] if folders else ""
        paths += [parent + name for name in names]
        if names[-1].endswith("/"):
            folders.append((indent, paths[-1]))
    return paths


def test_file_tree_exists() -> None:
    blocks = [b.code for b in find_blocks(read(CONTRIBUTING)) if b.language in ("", "text")]
    trees = [code for code in blocks if "sparse_rl_lightning/" in code]
    assert len(trees) == 1
    paths = tree_paths(trees[0])
    assert {"sparse_rl_lightning/", "sparse_rl_lightning/rollout/", "configs/"} <= set(paths)
    assert [path for path in paths if not any(map(is_published, ROOT.glob(path.rstrip("/"))))] == []


@named([README, CONTRIBUTING])
def test_files_that_are_named_exist(document: Path) -> None:
    files = [name for name in NAMED_FILE.findall(read(document)) if not name.startswith("runs/")]
    homes = (ROOT, ROOT / "sparse_rl_lightning")
    assert [name for name in files if not any(is_published(home / name) for home in homes)] == []


# ---------------------------------------------------------------- the readers above

MARKDOWN = """# A `title`, twice

[one](a.md#x) and ![two](<b c.png>), `[no](c.md)`, [web](https://d.org/e.md)
```python
x = 1  # [no](f.md)
```
1. list
   ~~~console
   $ A=1 sparse-rl fit \\
       --config "a b.yaml" && make test  # why
   sparse-rl output
   ~~~
"""


def test_commands_are_found() -> None:
    assert list(find_commands(MARKDOWN)) == [["sparse-rl", "fit", "--config", "a b.yaml"], ["make", "test"]]
    assert own_arguments([".venv/bin/sparse-rl", "fit"]) == ["fit"]
    assert own_arguments(["python3", "-m", "sparse_rl_lightning", "test"]) == ["test"]
    assert own_arguments(["pip", "install", "sparse-rl"]) is own_arguments([]) is None


def test_targets_and_anchors_are_found() -> None:
    assert find_targets(MARKDOWN.replace("b c", "b%20c")) == ["a.md#x", "b%20c.png"]
    assert find_targets('<img width="3" src="g.svg">\n[h]: i.md') == ["g.svg", "i.md"]
    assert anchors(MARKDOWN) == {"a-title-twice"}
