"""Fixtures of the tests of retrieval."""

from __future__ import annotations

import pytest
from chosen_pages import ChosenPages


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> ChosenPages:
    """The pages that are chosen during a test."""
    return ChosenPages(monkeypatch)
