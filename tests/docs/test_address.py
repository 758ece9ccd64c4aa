"""The address of the repository is invented nowhere, and is written where it belongs once there is one."""

from __future__ import annotations

import runpy
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

from docs import address

ROOT = Path(__file__).parents[2]


def test_an_address_is_written_once_and_changed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in address.WRITERS:
        shutil.copy(ROOT / name, tmp_path / name)
    for one in ("https://example.org/some/name", "https://example.com/other"):
        address.main(tmp_path, one)
        project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
        assert project["urls"]["Issues"] == f"{one}/issues"
        assert project["scripts"].keys() == {"sparse-rl"}
        assert yaml.safe_load((tmp_path / "CITATION.cff").read_text())["repository-code"] == one
        assert all((tmp_path / name).read_text().count(one) >= 1 for name in address.WRITERS)
        site = runpy.run_path(str(tmp_path / "docs" / "conf.py"))
        assert site["html_theme_options"]["source_repository"] == f"{one}/"
    assert "example.org" not in "".join((tmp_path / name).read_text() for name in address.WRITERS)


@pytest.mark.parametrize(
    "wrong", ["example.org/name", "https://example.org", "https://example.org/name/", "https://a b/c"]
)
def test_what_is_no_address_is_refused(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is not an address"):
        address.main(tmp_path, wrong)


def test_templates_and_citation_can_be_read() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) == 3
    for form in forms:
        read = yaml.safe_load(form.read_text())
        assert {"name", "description", "body"} <= read.keys()
        assert all(part["attributes"]["label"] for part in read["body"])
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
