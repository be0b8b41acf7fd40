"""Comparison of engines and of other programs on the same requests, each in a process of its own.

`session` runs them in turn and writes `records`, of which `comparison` makes figures and verdicts,
and `table` and `page` make reports.
"""
