"""Half A: faults that were written beside the cases."""

from tests.zoo.faults import Fault
from tests.zoo.half_a.attention import FAULTS as ATTENTION
from tests.zoo.half_a.attention_blocks import FAULTS as BLOCKS
from tests.zoo.half_a.cache_ops import FAULTS as CACHE_OPS
from tests.zoo.half_a.devices import FAULTS as DEVICES
from tests.zoo.half_a.lora import FAULTS as LORA
from tests.zoo.half_a.ops import FAULTS as OPS
from tests.zoo.half_a.quantized import FAULTS as QUANTIZED
from tests.zoo.half_a.scans import FAULTS as SCANS
from tests.zoo.half_a.serving import FAULTS as SERVING

FAULTS: tuple[Fault, ...] = (
    *OPS,
    *QUANTIZED,
    *LORA,
    *SCANS,
    *SERVING,
    *CACHE_OPS,
    *BLOCKS,
    *ATTENTION,
    *DEVICES,
)
