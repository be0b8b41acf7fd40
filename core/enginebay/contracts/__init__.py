"""The contracts of the parts, one file each: read one of them before you write a part of that kind.

`engine`, `cache`, `scheduler`, `sampler`, `processor`, `proposer`, `model`, `platform`, `executor`
and `text` are the main ones. The contract of kernels is `enginebay.ops`.
"""
