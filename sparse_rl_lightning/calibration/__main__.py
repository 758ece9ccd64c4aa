"""``python -m sparse_rl_lightning.calibration``: statistics of queries for compressors that need them."""

from sparse_rl_lightning.calibration.query_statistics import main

if __name__ == "__main__":
    main()
