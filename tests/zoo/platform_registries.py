"""Registries of a platform "npu" of another distribution: with XLA's kernels, and with changes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Protocol

import jax

from enginebay.ops.caps import Caps
from enginebay.ops.op import Op
from enginebay.plugins.hooks import Declaration, Register
from enginebay.plugins.registry import Entry, Registry, load_registry
from enginebay_xla.attention import XlaAttention, xla_attention
from enginebay_xla.elsewhere import register_xla_kernels

NAME = "npu"
PLUGIN = "external"

Change = Callable[[Declaration], Declaration | None]
"""What becomes of each declaration; None: it is not registered."""

CAPS = dataclasses.replace(xla_attention.caps, platforms=frozenset({NAME}))


def attention(caps: Caps) -> XlaAttention:
    """XLA's attention, registered for the platform."""
    return dataclasses.replace(xla_attention, name=NAME, caps=caps)


RIGHT = attention(CAPS)
OTHER_LAYOUT = attention(dataclasses.replace(CAPS, layouts=("nhd",)))
OTHER_PLATFORM = attention(dataclasses.replace(CAPS, platforms=frozenset({"cpu"})))
OTHER_DTYPE = attention(dataclasses.replace(CAPS, q_dtypes=frozenset({"bfloat16"})))
OTHER_ARCH = attention(dataclasses.replace(CAPS, arch=lambda arch: arch == "npu_2"))
NO_PREFILL = attention(dataclasses.replace(CAPS, modes=frozenset({"decode", "mixed"})))
NO_MIXED = attention(dataclasses.replace(CAPS, modes=frozenset({"decode", "prefill"})))
PLAIN_CACHE = attention(
    dataclasses.replace(CAPS, kv_dtypes=frozenset({"float32", "bfloat16", "float16"}))
)


class NegateOp(Protocol):
    """x of any shape -> -x."""

    def __call__(self, x: jax.Array) -> jax.Array: ...


def negate(x: jax.Array) -> jax.Array:
    """The op of a plugin."""
    return -x


NEGATE: Op[NegateOp] = Op("negate", NegateOp, f"{__name__}:negate", f"{__name__}:negate", {})
EXTERNAL_OP = (
    Declaration("op", "negate", f"{__name__}:NEGATE"),
    Declaration("kernel", "x", f"{__name__}:negate", op="negate", platforms=("cpu",)),
)
"""An op of a plugin, with a kernel for CPUs alone."""


@functools.cache
def declared() -> tuple[Declaration, ...]:
    """The kernels of the platform: XLA's, for each op."""
    found: list[Declaration] = []
    register = Register("kernel", found.append)
    register(NAME, f"{__name__}:RIGHT", op="attention", platforms=(NAME,))
    register_xla_kernels(register, NAME, NAME)
    return tuple(found)


def registry_of(change: Change, more: Iterable[Declaration] = ()) -> Registry:
    """The built-in parts, the kernels of the platform after a change, and other declarations.
    XLA's own registrations are for other platforms, so that the platform needs its kernels.
    """
    kept = [changed for one in declared() if (changed := change(one)) is not None]
    added = [Entry(d.kind, d.name, PLUGIN, "1", PLUGIN, declaration=d) for d in (*kept, *more)]
    return Registry([*map(_elsewhere, load_registry().entries), *added])


def _elsewhere(entry: Entry) -> Entry:
    """Return a kernel of `enginebay_xla`, which serves every platform, as one for the built-in
    platforms alone.
    """
    declaration = entry.declaration
    if (entry.kind, entry.package) != ("kernel", "xla") or declaration is None:
        return entry
    others = dataclasses.replace(declaration, platforms=("cpu", "cuda", "tpu"))
    return dataclasses.replace(entry, declaration=others)


def unchanged(one: Declaration) -> Declaration:
    """All kernels as they are."""
    return one


def without(*ops: str) -> Change:
    """No kernel of some ops."""
    return lambda one: None if one.op in ops else one


def with_attention(target: str) -> Change:
    """Another attention of this module."""
    changed = f"{__name__}:{target}"
    return lambda one: dataclasses.replace(one, target=changed) if one.op == "attention" else one


def with_layouts(op: str, *layouts: str) -> Change:
    """The kernel of an op, for some layouts alone."""
    changed = {"layouts": layouts}
    return lambda one: dataclasses.replace(one, capabilities=changed) if one.op == op else one


def for_platform(op: str, name: str) -> Change:
    """The kernel of an op, for another platform."""
    return lambda one: dataclasses.replace(one, platforms=(name,)) if one.op == op else one


def without_capabilities(one: Declaration) -> Declaration:
    """What the kernels can do is not declared."""
    return dataclasses.replace(one, capabilities={})
