"""Benchmarks, one command per claim: ``python -m benchmarks.rollout`` and its like, from the root of a checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REAL = ROOT / "runs" / "models" / "smollm2-135m-instruct"  # of make real-model
CODER = ROOT / "runs" / "models" / "qwen2.5-coder-0.5b-instruct"  # of make math-model
