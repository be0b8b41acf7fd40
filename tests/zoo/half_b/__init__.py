"""Half B: faults by authors who have not seen the cases."""

from tests.zoo.faults import Fault

FAULTS: tuple[Fault, ...] = ()
