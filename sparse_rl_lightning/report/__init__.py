"""Reports of a run: from plain numbers to a table, a PNG and a self-contained HTML page; nothing here needs torch."""

from __future__ import annotations

from sparse_rl_lightning.report.charts import picture
from sparse_rl_lightning.report.measures import summary_text
from sparse_rl_lightning.report.page import MARK, comparison, page
from sparse_rl_lightning.report.record import PROGRESS, SUMMARY, RunRecord
from sparse_rl_lightning.report.run_files import read_run

__all__ = ["MARK", "PROGRESS", "SUMMARY", "RunRecord", "comparison", "page", "picture", "read_run", "summary_text"]
