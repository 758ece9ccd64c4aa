"""Callbacks that show or write what a run does."""
