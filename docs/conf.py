"""How Sphinx builds the documentation: ``make docs``, every warning an error."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package beside this folder, installed or not

from sphinx.application import Sphinx

from docs.notebook_pages import markdown_of
from sparse_rl_lightning import __version__

project = "Sparse-RL Lightning"
author = "the Sparse-RL Lightning developers"
copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
html_theme = "furo"
html_title = f"{project} {release}"
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["site.css"]

# Pages are Markdown that a code host shows too, so headings get the anchors that it gives them.
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
myst_fence_as_directive = ["math"]  # a code host draws these blocks too

autodoc_default_options = {"members": True, "show-inheritance": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# Other packages' pages are not fetched, so names of theirs in signatures lead nowhere; nor do private base classes
# and annotations that Sphinx cuts at a comma.
nitpicky = True
OTHERS = (
    "torch|torchdata|torchmetrics|lightning|transformers|trl|jsonargparse|"
    "collections|concurrent|contextlib|datetime|fractions|functools|pathlib|abc"
)
nitpick_ignore_regex = [
    ("py:class", rf"({OTHERS})\..*|ArgsType|LightningCLI"),
    ("py:class", r"Tensor|nn\.Module|PreTrainedModel|Callback|Axes|AxesImage|[a-z.]*(list|tuple|dict|Mapping)\[.*"),
    ("py:class", r"sparse_rl_lightning\..*\._\w+"),
    ("py:obj", r"typing\.Literal\[.*"),
    # what parts hand over, and bases
    ("py:class", r"sparse_rl_lightning\..*\.(SlotSelection|EvictionPlan|LearnerBytes|MicroBatch|Rewards)"),
    ("py:class", r"sparse_rl_lightning\..*\.Versioned(Request)?Logs"),
    ("py:class", r"sparse_rl_lightning\..*\.(Pass|Results?)"),  # type variables
    (
        "py:class",
        r"sparse_rl_lightning\..*\.(ModelSizes|OwnPass|Projection|QKTransform|ReadsCandidates|RowParams|ScoreNetwork|StorageKind|Wrapped)",
    ),
    ("py:class", r"sparse_rl_lightning\..*\.ShardedStrategy"),
]

linkcheck_timeout = 20
linkcheck_retries = 2


def keep_colons(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Napoleon takes what a property's docstring says before a colon for its type; put it back."""
    kept, prefix = [line for line in lines if not line.startswith(":type: ")], ":type: "
    if len(kept) < len(lines):
        type_text = next(line for line in lines if line.startswith(prefix)).removeprefix(prefix)
        lines[:] = [f"{type_text}: {kept[0]}", *kept[1:]]


def read_source(app: Sphinx, page: str, source: list[str]) -> None:
    """Turn notebooks into Markdown; name Markdown files above this folder, which are not pages, in place of links."""
    if page.startswith("notebooks/"):
        source[0] = markdown_of(source[0])
    source[0] = re.sub(r"\[([^\]]+)\]\(\.\./([\w/]+\.md)\)", outside, source[0])
    source[0] = source[0].replace("](../notebooks/", "](notebooks/")


def outside(match: re.Match[str]) -> str:
    """The name of a file in place of a link to it, unless it is a page after all."""
    text, path = match.groups()
    if (Path(__file__).parent / path).exists():
        return match[0]
    return f"`{path}`" if text == path else f"{text} (`{path}`)"


def copy_notebooks() -> None:
    """Copy them below this folder, since a site has no pages from elsewhere."""
    here = Path(__file__).parent
    (here / "notebooks").mkdir(exist_ok=True)
    for path in (here.parent / "notebooks").glob("*.ipynb"):
        shutil.copy(path, here / "notebooks")


def setup(app: Sphinx) -> None:
    """Napoleon's own priority is 500."""
    copy_notebooks()
    app.connect("autodoc-process-docstring", keep_colons, priority=600)
    app.connect("source-read", read_source)
