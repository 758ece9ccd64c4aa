"""The documentation as a site: it builds without a warning, its generated pages and pictures are those of the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import matplotlib
import pytest
from matplotlib.image import imread
from pygments.filters import ErrorToken
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound
from test_readme import find_blocks, without_blocks

from docs import docstrings, figures, generate, listing, predictions
from sparse_rl_lightning.learner.block import BlockPlan
from sparse_rl_lightning.planning import Sharding

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PLANNED = ("papers.md", "one_card.md")  # of which a row takes seconds
BY_HAND = ("qwen2.5-1.5b", "qwen2.5-7b")  # recipes of which more is tested
PAGES = sorted(DOCS.rglob("*.md"))
PACKAGES = ("callbacks", "compressors", "data", "modules", "retrievers", "rewards")
LINK = re.compile(r"\]\((https?:[^)]*)\)|<(https?:[^>]*)>")


def build(source: Path, target: Path, builder: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", builder, source, target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


# ---------------------------------------------------------------- the site


@pytest.mark.timeout(900)  # half a minute on an idle core
def test_pages_and_references_give_no_warning(tmp_path: Path) -> None:
    """Everything is read and resolved. Writing takes longer, and only complains of blocks that it cannot highlight."""
    built = build(DOCS, tmp_path / "site", "dummy")
    assert (built.returncode, built.stderr) == (0, "")


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(DOCS).as_posix() for page in PAGES])
def test_blocks_can_be_highlighted(page: Path) -> None:
    for block in find_blocks(page.read_text("utf-8")):
        if block.language and block.language != "math":
            assert unreadable(block.language, block.code) == "", f"line {block.line}"


def unreadable(language: str, code: str) -> str:
    """What a highlighter cannot make of a block."""
    try:
        lexer = get_lexer_by_name(language)
        lexer.add_filter("raiseonerror")
        list(lexer.get_tokens(code))
    except (ClassNotFound, ErrorToken) as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_page_is_written_without_a_warning(tmp_path: Path) -> None:
    built = build(DOCS, tmp_path / "site", "html")
    assert (built.returncode, built.stderr) == (0, "")
    written = {path.relative_to(tmp_path / "site").with_suffix("") for path in (tmp_path / "site").rglob("*.html")}
    assert {page.relative_to(DOCS).with_suffix("") for page in PAGES} <= written


@pytest.mark.timeout(300)
@pytest.mark.parametrize("builder", ["dummy", "html"])
def test_faults_end_the_build(tmp_path: Path, builder: str) -> None:
    faults = {
        "[page](missing.md)": "missing",
        "[part](#no-such-heading)": "no-such-heading",
        "![picture](missing.png)": "missing.png",
        "{py:class}`NoSuchClass`": "NoSuchClass",
    }
    if builder == "html":
        faults |= {"```no-such-lexer\na\n```": "no-such-lexer", "```python\n?\n```": "python"}
    assert unreadable("no-such-lexer", "a")
    assert unreadable("python", "?")
    (tmp_path / "index.md").write_text("# Title\n\n" + "\n\n".join(faults), encoding="utf-8")
    (tmp_path / "conf.py").write_text((DOCS / "conf.py").read_text("utf-8"), encoding="utf-8")
    built = build(tmp_path, tmp_path / "site", builder)
    assert built.returncode != 0
    warnings = [line for line in built.stderr.splitlines() if "WARNING" in line]
    assert [said for said in faults.values() if not any(said in line for line in warnings)] == []


def test_every_page_can_be_reached() -> None:
    lists = [(DOCS / name).read_text("utf-8") for name in ("index.md", "reference.md")]
    named = {line.strip() for text in lists for line in text.splitlines()}
    pages = [page for page in [*DOCS.glob("*.md"), *DOCS.glob("measured/*.md")] if page.name != "index.md"]
    assert [page.name for page in pages if page.relative_to(DOCS).with_suffix("").as_posix() not in named] == []


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(DOCS).as_posix() for page in PAGES])
def test_web_addresses_are_well_formed(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", without_blocks(page.read_text("utf-8")))
    links = ["".join(found) for found in LINK.findall(text)]
    assert [link for link in links if not is_address(link)] == []
    assert re.findall(r"\]\(\s*(?!https?:)\w+://", text) == []


def is_address(link: str) -> bool:
    parts = urlsplit(link)
    host = re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}", parts.netloc)
    return parts.scheme == "https" and host is not None and not re.search(r"\s", link)


def test_addresses_are_judged() -> None:
    assert is_address("https://arxiv.org/abs/2601.10079")
    for wrong in ("http://arxiv.org/a", "https://arxiv/a", "https://arxiv.org /a", "https:/arxiv.org"):
        assert not is_address(wrong)


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(DOCS).as_posix() for page in PAGES])
def test_rows_of_a_table_have_as_many_cells(page: Path) -> None:
    assert ragged(without_blocks(page.read_text("utf-8"))) == []


def ragged(text: str) -> list[str]:
    """Rows that have more or fewer cells than the first row of their table: a bare ``|`` in a cell, mostly."""
    found, cells = [], 0
    for line in text.splitlines():
        number = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        if number and cells and number != cells:
            found.append(line)
        cells = (cells or number) if number else 0
    return found


def test_ragged_rows_are_found() -> None:
    assert ragged("| a | b |\n|---|---|\n| `x \\| y` | 1 |\n\n| c |\n") == []
    assert ragged("| a | b |\n|---|---|\n| `x | y` | 1 |") == ["| `x | y` | 1 |"]


# ---------------------------------------------------------------- generated pages


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page in PLANNED), id=page) for page in generate.PAGES]
)
def test_generated_pages_are_those_of_the_code(page: str) -> None:
    """If this fails: make docs-pages."""
    assert generate.main(["--check", page]) == 0


def test_settings_list_every_class_that_can_be_named() -> None:
    text = (DOCS / "settings.md").read_text("utf-8") + (DOCS / "callbacks.md").read_text("utf-8")
    listed = set(re.findall(r"^### (\w+)$", text, re.MULTILINE))
    python_only = {"LoadedPolicy", "PolicySource", "PromptDataModule", "RepeatedBlockSampler", "QueryStatistics"}
    python_only |= {"CorrectionCallback", "RolloutCallback", "RewardFunction", "Loss", "AdvantageEstimator"}
    packages = [getattr(listing, name) for name in PACKAGES]
    named = {name for package in packages for name in package.__all__ if isinstance(getattr(package, name), type)}
    assert named - listed - python_only == set()


def test_every_recipe_of_a_paper_is_predicted() -> None:
    configs = ROOT / "configs"
    files = [*configs.glob("qwen2.5-*.yaml"), *configs.glob("llama-*.yaml"), *configs.glob("sparrow/qwen3-*.yaml")]
    assert {path.relative_to(configs).with_suffix("").as_posix() for path in files} == set(predictions.RECIPES)


def test_predictions_by_hand() -> None:
    """Qwen2.5-1.5B: 16 bytes per parameter; 28 layers x 2 heads x (512 + 128) x 2 x 128 numbers x 2 bytes per slot."""
    plan = predictions.plan_of("qwen2.5-1.5b")
    assert plan.job.sharding == Sharding(0, 1)
    held = sum(plan.of(name) for name in ("weights", "gradients", "optimizer"))
    assert held == pytest.approx(16 * 1.5437e9, rel=1e-4)
    # compress_prompt: false holds the prompt of 256 tokens, less than the budget
    keys_values = 256 * 28 * 2 * (512 + 128) * 2 * 128 * 2
    assert keys_values < plan.of("cache") < 1.3 * keys_values


def test_sharded_predictions_by_hand() -> None:
    """Qwen2.5-7B in stage 2 on 4 ranks: 2 + 18 / 4 bytes per parameter, a reference of 2."""
    plan = predictions.plan_of("qwen2.5-7b")
    assert plan.job.sharding == Sharding(2, 4)
    held = sum(plan.of(name) for name in ("weights", "gradients", "optimizer"))
    assert held == pytest.approx((2 + 18 / 4) * 7.6156e9, rel=1e-3)
    assert plan.of("reference") == pytest.approx(2 * 7.6156e9, rel=1e-3)
    row = predictions.memory_row(plan, "qwen2.5-7b")
    assert row[1] == "4, stage 2"
    assert row[-1] == f"{(plan.peak - 1.05 * plan.of('reference')) / 80e9:.0%}"


def test_more_machines_draw_and_step_as_the_file_does() -> None:
    """The table of docs/scaling.md: the paper's 128 prompts, 4 optimizer steps and micro-batches of the same size."""
    job = predictions.plan_of("qwen2.5-7b").job
    number = r"[^|]*\| *(\d+) *"
    rows = re.findall(rf"^\| (\d+) machines? of (\d+){number * 3}\|$", (DOCS / "scaling.md").read_text("utf-8"), re.M)
    rows = [tuple(map(int, row)) for row in rows]
    assert [row[:2] for row in rows] == [(1, 4), (2, 8), (4, 8)]
    for machines, gpus, prompts, parts, accumulate in rows:
        plan = BlockPlan(prompts, job.sampling.num_generations, parts, num_iterations=1, accumulate=accumulate)
        assert (machines * gpus * prompts, plan.optimizer_steps, plan.micro_batch) == (128, 4, 8)
    assert rows[0][2:] == (job.block.prompts, job.block.steps_per_generation, job.block.accumulate)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in BY_HAND)) for name in predictions.RECIPES]
)
def test_shipped_recipes_fit_the_card_they_are_for(name: str) -> None:
    assert predictions.plan_of(name).fits


def test_docstrings_become_markdown() -> None:
    class Thing:
        """One ``line`` for all of :class:`~a.b.Other`.

        More::

            - key: 1

        ==== ===== =======
        key  unit  meaning
        ==== ===== =======
        a/b  bytes of ``it``
        c    s     time
        ==== ===== =======

        Args:
            size: How large,
                in tokens.
            kind: Which.

        Raises:
            ValueError: Never.
        """

        def __init__(self, size: int, kind: str | None = None, **rest: int) -> None: ...

    assert docstrings.summary(Thing) == "One `line` for all of `Other`."
    table = "| key | unit | meaning |\n|---|---|---|\n| a/b | bytes | of `it` |\n| c | s | time |"
    assert docstrings.body(Thing) == f"More:\n\n```yaml\n- key: 1\n```\n\n{table}"
    assert docstrings.rows(Thing.__doc__ or "") == [["a/b", "bytes", "of ``it``"], ["c", "s", "time"]]
    assert docstrings.arguments(Thing) == [
        docstrings.Argument("size", "int", "required", "How large, in tokens."),
        docstrings.Argument("kind", "str | null", "null", "Which."),
    ]


def test_an_argument_without_description_is_an_error() -> None:
    class Silent:
        """Says nothing."""

        def __init__(self, size: int) -> None: ...

    with pytest.raises(ValueError, match="size is not described"):
        docstrings.arguments(Silent)


# ---------------------------------------------------------------- pictures


def test_pictures_are_those_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails: make docs-pages."""
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    figures.main()
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (DOCS / "figures").glob("*.png")}
    pages = [(DOCS / page).read_text("utf-8") for page in ("concepts.md", "design.md")]
    shown = re.findall(r"!\[[^\]]+\]\(figures/([\w.]+)\)", "".join(pages))
    assert set(shown) == {path.name for path in (DOCS / "figures").iterdir()}
    if f"matplotlib=={matplotlib.__version__}" not in (ROOT / "constraints.txt").read_text("utf-8").split():
        pytest.skip("another matplotlib draws other pixels")
    assert [name for name in sorted(drawn) if not same_picture(tmp_path / name, DOCS / "figures" / name)] == []


def same_picture(path: Path, stored: Path) -> bool:
    """Whether fewer than one pixel in 20,000 differs visibly: another processor may round a curve by a pixel."""
    first, second = imread(path), imread(stored)
    return first.shape == second.shape and bool((abs(first - second).max(-1) > 0.25).mean() < 5e-5)


def test_a_stale_picture_is_found(tmp_path: Path) -> None:
    for name, label in (("a", "tokens"), ("b", "tokens"), ("c", "token")):
        figure = figures.schedule()
        figure.axes[0].set_xlabel(label)
        figure.savefig(tmp_path / f"{name}.png", dpi=figures.STYLE["savefig.dpi"])
    assert same_picture(tmp_path / "a.png", tmp_path / "b.png")
    assert not same_picture(tmp_path / "a.png", tmp_path / "c.png")


def test_files_on_the_picture_of_the_engine_exist() -> None:
    files = re.findall(r"[\w/]+\.py", (DOCS / "figures" / "engine.svg").read_text("utf-8"))
    assert len(files) == 9
    assert [file for file in files if not (ROOT / "sparse_rl_lightning" / file).is_file()] == []
