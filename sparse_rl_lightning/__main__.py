"""``python -m sparse_rl_lightning`` is the same as ``sparse-rl``."""

from sparse_rl_lightning.cli import console

if __name__ == "__main__":
    console()
