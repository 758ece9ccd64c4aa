"""Writes the address of the repository, once there is one, to the places that name it.

    python -m docs.address https://example.org/owner/name

These are the URLs of ``pyproject.toml``, ``CITATION.cff``, a line of the README that clones, and the links of the
site to its sources. What has an address already is changed to the new one.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
URLS = re.compile(r"\[project\.urls\]\n(?:.+\n)+\n")


def project(text: str, address: str) -> str:
    """``pyproject.toml`` with the table of URLs before that of the commands."""
    pages = {
        "Repository": "",
        "Documentation": "/tree/main/docs",
        "Changelog": "/blob/main/CHANGELOG.md",
        "Issues": "/issues",
    }
    table = "[project.urls]\n" + "".join(f'{name} = "{address}{path}"\n' for name, path in pages.items()) + "\n"
    return URLS.sub("", text).replace("[project.scripts]\n", f"{table}[project.scripts]\n")


def citation(text: str, address: str) -> str:
    """``CITATION.cff`` with the repository."""
    return re.sub(r"repository-code: .*\n", "", text).replace("license:", f"repository-code: {address}\nlicense:")


def readme(text: str, address: str) -> str:
    """``README.md`` with a command that clones the repository where it spoke of a checkout."""
    clone = f"git clone {address} sparse-rl-lightning && cd sparse-rl-lightning\n"
    return re.sub(r"# in a checkout of this repository\n|git clone .*\n", clone, text)


def site(text: str, address: str) -> str:
    """``docs/conf.py`` with links to the sources of each page."""
    options = {"source_repository": f"{address}/", "source_branch": "main", "source_directory": "docs/"}
    line = f"html_theme_options = {options}\n".replace("'", '"')
    return re.sub(r"html_theme_options = .*\n", "", text).replace("html_title =", f"{line}html_title =")


WRITERS = {"pyproject.toml": project, "CITATION.cff": citation, "README.md": readme, "docs/conf.py": site}


def main(root: Path, address: str) -> None:
    """Write all of them.

    Raises:
        SystemExit: If it is no address of the web, or a file has no place for it.
    """
    if not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", address):
        sys.exit(
            f"error: {address!r} is not an address like https://example.org/owner/name, without a slash at its end"
        )
    texts = {name: write((root / name).read_text("utf-8"), address) for name, write in WRITERS.items()}
    for name, text in texts.items():
        if address not in text:
            sys.exit(f"error: {name} has no place for the address")
    for name, text in texts.items():
        (root / name).write_text(text, "utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(ROOT, sys.argv[1])
