"""Accuracy on problems: what is measured, stored and shown."""
