"""Benchmarks: engines or kernels, measured in turn in one process, after a check of their results.

Engines: `workload` makes the requests, `measure` runs them. Kernels: `shapes` names steps of real
models, the `problem.OpBench` of an op turns them into problems, `timing` and `roofline` measure,
`kernels` compares implementations, and `tune` searches for the fastest configurations. The
commands `bench` and `tune` print the results.
"""
