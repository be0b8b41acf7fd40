"""The built-in ops as benchmarks."""
