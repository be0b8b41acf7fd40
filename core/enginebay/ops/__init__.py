"""Ops: what a kernel is given, what it declares, and how one is chosen.

`spec` holds the static descriptions and the batch record, `rotary` the frequencies of rotary
positions, `caps` what an implementation declares, `select` the choice among implementations,
`levels` how a kernel is checked away from its device, `cost` the ideal cost of an op, `bound` the
record of chosen implementations that a model calls.
"""
