"""Makes the records of half B's faults: where the right kernels of the ops are."""

from __future__ import annotations

from tests.zoo.faults import Fault, Kind, More

_PLACES = {
    "attention": "attention:xla_attention",
    "rms_norm": "norm:rms_norm",
    "add_rms_norm": "norm:add_rms_norm",
    "embedding": "linear:embedding",
    "all_reduce": "collectives:all_reduce",
    "all_gather": "collectives:all_gather",
    "all_to_all": "collectives:all_to_all",
}


def plain(op: str, module: str, name: str, kind: Kind | More, old: str, new: str) -> Fault:
    """A fault in a module of enginebay_xla; kernels of attention have another name in it."""
    kernel = f"enginebay_xla.{_PLACES.get(op, f'{op}:{op}')}"
    label = f"b_xla_{name}" if op == "attention" else f"b_{op}_{name}"
    return Fault(label, op, kind, kernel, f"enginebay_xla.{module}", old, new, "B")


def split(name: str, kind: Kind | More, old: str, new: str) -> Fault:
    """A fault of attention by splits of the context."""
    source = "right.split_attention"
    return Fault(f"b_split_{name}", "attention", kind, f"{source}:attention", source, old, new, "B")


def lora(name: str, kind: Kind | More, old: str, new: str) -> Fault:
    """A fault of the op lora in plain JAX."""
    source = "enginebay_lora.xla"
    return Fault(f"b_lora_{name}", "lora", kind, f"{source}:lora", source, old, new, "B")
