"""Installation entry: all metadata stands in pyproject.toml, the native extension is built from here."""

from setuptools import setup

setup()
