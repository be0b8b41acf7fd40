"""Benchmarks of whole engines: several configurations side by side, equal tokens first, then times, interleaved.

`workload` makes the requests, `measure` runs them, `report` prints the figures.
"""
