"""Benchmarks, side by side in one process and in turn, right first and then timed.

Of whole engines: `workload` makes the requests, `measure` runs them. Of kernels: `shapes` names
steps of real models, of which the `problem.OpBench` of an op makes problems, `timing` and
`roofline` measure, `kernels` compares implementations and `tune` searches their configurations. The
commands `bench` and `tune` print what comes of it.
"""
