"""Calibration: what compressors know of queries, the schedule that holds the tail, and what rollouts cost."""

from sparse_rl_lightning.calibration.cost import CostModel, Pages, Work, entries_read
from sparse_rl_lightning.calibration.shapes import H200, SHAPES, Hardware, ModelShape
from sparse_rl_lightning.calibration.statistics import gather_statistics, main, pad, read_texts

__all__ = [
    "H200",
    "SHAPES",
    "CostModel",
    "Hardware",
    "ModelShape",
    "Pages",
    "Work",
    "entries_read",
    "gather_statistics",
    "main",
    "pad",
    "read_texts",
]
