"""Checks that a platform has the kernels that every plan needs, and reports whether its kernels
read quantised weights and caches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import typing
import unittest
from collections.abc import Collection, Mapping

from enginebay.compose.candidates import NOTHING, candidates
from enginebay.compose.ops import ATTENTION, usable_ops
from enginebay.config import EngineConfig
from enginebay.config_sections import AUTO, PHASES
from enginebay.contracts.cache import KVLayout
from enginebay.contracts.platform import Platform
from enginebay.errors import PluginError
from enginebay.ops.caps import Caps, Env
from enginebay.ops.op import Op
from enginebay.plugins.registry import Entry, Registry
from enginebay.weights import Quantization, WeightSpec
from enginebay_testing.verdicts import Check

DTYPES = ("float32", "bfloat16", "float16")

WEIGHTS = (
    WeightSpec((128, 256), (None, None), 1),
    WeightSpec((512, 256), ("vocab", None), 1),
)
"""Weights of a linear layer and of an embedding. A quantisation may store them in other forms."""


@dataclasses.dataclass(frozen=True)
class PlatformUnderTest:
    """A platform, and the registry that it is used with."""

    platform: Platform
    registry: Registry

    @property
    def name(self) -> str:
        """Name of the platform."""
        return self.platform.name

    @functools.cached_property
    def ops(self) -> Mapping[str, Op[typing.Any]]:
        """The usable ops, by name."""
        return usable_ops(self.registry)[0]

    @functools.cached_property
    def arch(self) -> str | None:
        """The architecture of the devices; None without one."""
        if self.platform.why_not() is not None or not self.platform.devices():
            return None
        return self.platform.env().arch

    @property
    def layout(self) -> type[KVLayout] | None:
        """The default layout; None when it is not registered."""
        if self.platform.default_layout not in self.registry.names("layout"):
            return None
        found: type[KVLayout] = self.registry.load(
            self.registry.find("layout", self.platform.default_layout)
        )
        return found

    def why_optional(self, op: Op[typing.Any]) -> str | None:
        """Return why a plan needs no kernel of an op; None for an op that every plan needs.

        This is the rule by which the core makes plans: a fused op is composed of its parts, and the
        op of a plugin is left out, so that only the models that call it are refused.
        """
        if op.made_of:
            return f"its parts, {' and '.join(op.made_of)}, compute it"
        entry = self.registry.find("op", op.name)
        if not entry.built_in:
            return f"only models that call this op of plugin {entry.package!r} need one"
        return None

    def refusals(
        self, op: str, needs: Mapping[str, Collection[str]] = NOTHING
    ) -> Mapping[str, str] | None:
        """Return why each kernel of an op without phases cannot be used on the platform with its
        default layout, by name; None when one of them can.
        """
        found = candidates(
            self.registry,
            op,
            Env(self.name),
            layout=self.platform.default_layout,
            needs=needs,
        )
        if any(candidate.unavailable is None for candidate in found):
            return None
        return {candidate.name: str(candidate.unavailable) for candidate in found}

    def attention_refusals(self, storage: str | None = None) -> Mapping[str, str] | None:
        """Return why each kernel of attention cannot serve the defaults in the first phase that
        none can serve, by name; None when every phase has a kernel. `storage`: of the cache.
        """
        kernels = [e for e in self.registry.entries if (e.kind, e.op) == ("kernel", ATTENTION)]
        for phase in PHASES:
            refused = {e.name: self._why_no_attention(e, phase, storage) for e in kernels}
            if None not in refused.values():
                return {name: str(reason) for name, reason in refused.items()}
        return None

    def _why_no_attention(self, entry: Entry, phase: str, storage: str | None) -> str | None:
        reason = entry.why_not_on(self.name)
        if reason is not None:
            return reason
        caps: Caps = self.registry.load(entry).caps
        platform, dtype = self.platform, self.platform.default_dtype
        if not caps.serves_platform(self.name):
            names = ", ".join(sorted(caps.platforms))
            return f"is registered for {self.name}, but its Caps.platforms has {names} alone"
        wrong = [
            what
            for holds, what in (
                (
                    platform.default_layout in caps.layouts,
                    f"layout {platform.default_layout} (has {', '.join(caps.layouts)})",
                ),
                (self.arch is None or caps.arch(self.arch), f"architecture {self.arch}"),
                (phase in caps.modes, f"mode {phase}"),
                (dtype in caps.q_dtypes, f"dtype {dtype}"),
                (dtype in caps.kv_dtypes, f"cache dtype {dtype}"),
                (storage is None or storage in caps.kv_dtypes, f"cache dtype {storage}"),
            )
            if not holds
        ]
        return f"does not support {', '.join(wrong)}" if wrong else None


def kernel_checks(platform: Platform, registry: Registry) -> list[Check]:
    """Return the checks of the kernels of a platform: one for its defaults, and one for each op and
    each form of quantised weights, activations and caches that is known.
    """
    subject = PlatformUnderTest(platform, registry)
    checks: list[Check] = [
        ("defaults_are_served", functools.partial(_defaults_are_served, subject)),
    ]
    for name, op in sorted(subject.ops.items()):
        if name != ATTENTION:
            checks.append((f"op_is_served[{name}]", functools.partial(_op_is_served, subject, op)))
    for entry in registry.ready("quantization"):
        served = functools.partial(_weights_are_served, subject, entry)
        checks.append((f"{entry.name}_weights_are_served", served))
    for form in _activations():
        served = functools.partial(_activations_are_served, subject, form)
        checks.append((f"{form}_activations_are_served", served))
    storages: Collection[str] = ()
    with contextlib.suppress(PluginError):  # defaults_are_served reports the error
        storages = () if subject.layout is None else subject.layout.storages
    for storage in sorted(storages):
        served = functools.partial(_caches_are_served, subject, storage)
        checks.append((f"{storage}_caches_are_served", served))
    return checks


def _activations() -> list[str]:
    """Return the forms to which a configuration can round activations."""
    allowed = typing.get_args(EngineConfig.model_fields["activation_quantization"].annotation)
    return sorted(set(allowed) - {AUTO, "none"})


def _defaults_are_served(subject: PlatformUnderTest) -> None:
    """Check that the default layout is registered, and that attention serves it in the default
    dtype in every phase.
    """
    platform = subject.platform
    assert subject.layout is not None, f"layout {platform.default_layout!r} is not registered"
    assert platform.default_dtype in DTYPES, (
        f"default_dtype is {platform.default_dtype!r}, not {', '.join(DTYPES)}"
    )
    refused = subject.attention_refusals()
    assert refused is None, _no_kernel(subject, ATTENTION, refused or {})


def _op_is_served(subject: PlatformUnderTest, op: Op[typing.Any]) -> None:
    """Check that an op that every plan needs has a kernel on the platform."""
    refused = subject.refusals(op.name)
    if refused is None:
        return
    text, why_optional = _no_kernel(subject, op.name, refused), subject.why_optional(op)
    if why_optional is not None:
        raise unittest.SkipTest(f"{text}; {why_optional}")
    raise AssertionError(
        f"{text}. Every plan needs one: register a kernel of {op.name} with platforms="
        f"({subject.name!r},)"
    )


def _weights_are_served(subject: PlatformUnderTest, entry: Entry) -> None:
    """Check that weights can be quantised by a registered method while they are loaded."""
    options = subject.registry.options(entry, {})
    target = subject.registry.load(entry)
    quantization: Quantization = target() if options is None else target(options)
    arrays = [quantization.arrays(spec) for spec in WEIGHTS]
    methods = {one.method for one in arrays if one is not None}
    _expect_readers(subject, {"quantizations": methods}, f"{entry.name} weights")


def _activations_are_served(subject: PlatformUnderTest, form: str) -> None:
    """Check that inputs of products can be rounded to a form."""
    _expect_readers(subject, {"activation_quantizations": {form}}, f"{form} activations")


def _expect_readers(
    subject: PlatformUnderTest, needs: Mapping[str, Collection[str]], what: str
) -> None:
    """Skip unless every op that reads weights, and that a plan needs, has a kernel with `needs`."""
    for op in subject.ops.values():
        if op.reads_weights and subject.why_optional(op) is None:
            _skip_if(subject, op.name, subject.refusals(op.name, needs), what)


def _caches_are_served(subject: PlatformUnderTest, storage: str) -> None:
    """Check that keys and values can be stored in a quantised form of the default layout."""
    what = f"{storage} caches"
    _skip_if(subject, ATTENTION, subject.attention_refusals(storage), what)
    attention = subject.ops.get(ATTENTION)
    for name in () if attention is None else attention.writers:
        if name in subject.ops and subject.why_optional(subject.ops[name]) is None:
            _skip_if(subject, name, subject.refusals(name, {"storages": {storage}}), what)


def _skip_if(
    subject: PlatformUnderTest, op: str, refused: Mapping[str, str] | None, what: str
) -> None:
    if refused is not None:
        raise unittest.SkipTest(f"{what} are refused: {_no_kernel(subject, op, refused)}")


def _no_kernel(subject: PlatformUnderTest, op: str, refused: Mapping[str, str]) -> str:
    kernels = [e for e in subject.registry.entries if (e.kind, e.op) == ("kernel", op)]
    elsewhere = sorted({e.name for e in kernels if _is_elsewhere(e, subject.name)})
    refusals = [f"{name}: {reason}" for name, reason in refused.items() if name not in elsewhere]
    if elsewhere:
        refusals.append(f"{', '.join(elsewhere)}: for other platforms")
    reasons = "; ".join(refusals)
    return (
        f"no kernel of {op} can be used on {subject.name} with layout "
        f"{subject.platform.default_layout} and dtype {subject.platform.default_dtype} "
        f"({reasons or 'none is registered'})"
    )


def _is_elsewhere(entry: Entry, platform: str) -> bool:
    """Return whether the declaration of a kernel names other platforms alone."""
    declared = entry.declaration.platforms if entry.declaration is not None else ()
    return bool(declared) and platform not in declared
