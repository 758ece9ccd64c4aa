"""Callbacks that measure and change nothing."""
