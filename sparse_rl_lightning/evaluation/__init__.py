"""The one evaluator behind validation, ``sparse-rl test``, the run's summary and the benchmarks."""
