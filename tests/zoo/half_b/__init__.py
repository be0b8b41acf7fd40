"""Half B: faults by authors who saw the contracts of the ops and right kernels, and not the
cases.
"""

from tests.zoo.faults import Fault
from tests.zoo.half_b import attention, ops

FAULTS: tuple[Fault, ...] = (*attention.FAULTS, *ops.FAULTS)
