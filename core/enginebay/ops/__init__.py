"""Ops: the contracts of operations and of kernels, which implement them.

`op` has the record of an op, `spec` the static description of a problem and the batch of a step,
`caps` the capabilities of an implementation, `select` the choice among implementations, `bound` the
ops that a model calls, `tuning` the configurations of kernels, and `shadow` the results of shadow
mode.
"""
