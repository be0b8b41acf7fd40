"""The built-in cache layouts, by name."""

from __future__ import annotations

from enginebay.contracts.cache import KVLayout
from enginebay_pallas.layout import TpuRpaLayout
from enginebay_triton.layout import NhdLayout
from enginebay_xla.layout import HndLayout

BUILTIN_LAYOUTS: dict[str, type[KVLayout]] = {
    "hnd": HndLayout,
    "nhd": NhdLayout,
    "tpu_rpa": TpuRpaLayout,
}
