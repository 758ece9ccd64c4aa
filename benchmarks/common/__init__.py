"""Parts of several benchmarks: tables and pages."""
