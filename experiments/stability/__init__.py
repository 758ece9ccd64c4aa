"""The papers' claims at laptop scale."""
