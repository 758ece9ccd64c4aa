"""Callbacks that keep a run safe: they watch steps, ranks, files and signals."""
