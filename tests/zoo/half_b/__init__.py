"""Half B: faults by authors who saw the contracts of the ops and right kernels, and not the
cases.
"""

from tests.zoo.faults import Fault
from tests.zoo.half_b import (
    attention,
    attention_more,
    attention_ways,
    ops,
    sampling,
    sizes,
    states,
    storages,
    values,
)

FAULTS: tuple[Fault, ...] = (
    *attention.FAULTS,
    *ops.FAULTS,
    *attention_more.FAULTS,
    *attention_ways.FAULTS,
    *sampling.FAULTS,
    *sizes.FAULTS,
    *states.FAULTS,
    *storages.FAULTS,
    *values.FAULTS,
)
