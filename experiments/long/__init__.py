"""Completions of a thousand tokens on a CPU, ten times as long as those of the other studies."""
