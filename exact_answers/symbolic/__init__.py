"""Sums, integrals and limits, which math-verify compares in processes of its own."""
