"""What writes and draws the documentation: ``python -m docs.generate``, ``python -m docs.figures``."""
