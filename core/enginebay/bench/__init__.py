"""Benchmarks of whole engines: several configurations side by side, equal tokens first, then times, interleaved.

`workload` makes the requests, `measure` runs them; `enginebay.cli.bench` prints the figures.
"""
