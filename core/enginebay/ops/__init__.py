"""Ops: the operations that models call and kernels implement.

`op` has the record of an op, and there is one file for each built-in op with its signature and its
record. `spec` has the static description of an attention problem and the batch of a step, `caps`
the capabilities of an implementation, `select` the choice among implementations, `bound` the ops
that a model calls, `tuning` the configurations of kernels, `partition_rules` how calls are split
over devices. `rotary`, `kv_storage`, `activations` and `sampling` have shared arithmetic.
"""
