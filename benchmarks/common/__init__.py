"""What several benchmarks use: tables, pages, and lines for whoever waits."""
