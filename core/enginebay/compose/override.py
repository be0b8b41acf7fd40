"""Plans with replaced implementations: objects passed in Python, registered or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import jax
import numpy as np

from enginebay.compose.candidates import QUANTIZED, why_not_declared
from enginebay.compose.checked_paths import check_setting, with_reasons
from enginebay.compose.fused import COMPOSED
from enginebay.compose.import_paths import import_path, refuse_uncallable
from enginebay.compose.kernels import refuse_unused
from enginebay.compose.ops import ATTENTION
from enginebay.compose.plan import Plan
from enginebay.compose.quick_check import quick_checked
from enginebay.compose.simple_attention import adapt_attention
from enginebay.config import Reason
from enginebay.config_sections import PHASES, Choice
from enginebay.contracts.sampler import DeviceParams, Sampler, SamplingState
from enginebay.errors import (
    IncorrectError,
    InputError,
    UnsupportedError,
    shown_text,
    unknown_name,
)
from enginebay.ops.select import is_import_path
from enginebay.plugins.registry import Entry
from enginebay.types import ROW_VALUES

SAMPLER = "sampler"
OVERRIDE_REASON = "given to override()"
SWITCH = "check=False"


@dataclasses.dataclass(frozen=True)
class _Override:
    """One implementation for an op, or for some phases of attention. `registered`: it has a
    conformance suite elsewhere, so it gets no quick check.
    """

    op: str
    phases: tuple[str, ...]
    name: str
    impl: Any
    registered: bool
    given: Any

    @property
    def settings(self) -> tuple[str, ...]:
        """Return the settings of a plan that this implementation replaces."""
        return tuple(f"{self.op}.{phase}" for phase in self.phases) or (self.op,)


def by_op(given: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the parts of one op: those of settings such as "attention.decode" by their phase."""
    found: dict[str, Any] = {}
    for setting, part in given.items():
        op, _, phase = setting.partition(".")
        found[op] = {**found.get(op, {}), phase: part} if phase else part
    return found


def overridden_plan(plan: Plan, given: Mapping[str, Any], *, check: bool) -> Plan:
    """Return `plan` with other implementations by op: functions, objects, names, import paths, or
    for attention a mapping from phases to these; None means no implementation. The op "sampler"
    means the sampler.

    The cache keeps its layout, and `plan` is not changed. InputError for a value that cannot be an
    implementation, UnsupportedError for one that cannot serve the model or the layout here,
    IncorrectError for one that fails its quick check.
    """
    given = {op: value for op, value in given.items() if value is not None}
    if not given:
        raise InputError(
            "override() without arguments", "at least one op", "Pass OP=IMPLEMENTATION."
        )
    sampler = given.pop(SAMPLER, None)
    if sampler is not None:
        plan = _with_sampler(plan, sampler, check=check)
    kernels = plan.kernels
    attention, plain, names = dict(kernels.attention), dict(kernels.plain), dict(kernels.names)
    replaced: dict[str, Reason] = {}
    swapped = dict(plan.swapped)
    for one in (one for op, value in given.items() for one in _read(plan, op, value)):
        swapped |= dict.fromkeys(one.settings, one.given)
        why = f"{OVERRIDE_REASON}, {_checked(plan, one, check=check)}"
        for setting in one.settings:
            names[setting] = one.name
            replaced[f"kernels.{setting}"] = Reason(f"kernels.{setting}", one.name, why)
        if one.phases:
            attention |= dict.fromkeys(one.phases, one.impl)
        else:
            plain[one.op] = one.impl
            # A fused op would compute this op in place of the given implementation, so it is not
            # fused.
            ops = kernels.ops.values()
            for fused in {op.name for op in ops if one.op in op.made_of} - set(given):
                plain.pop(fused, None)
                swapped.pop(fused, None)
                names[fused] = COMPOSED
                replaced[f"kernels.{fused}"] = Reason(
                    f"kernels.{fused}",
                    COMPOSED,
                    f"{one.op} is {OVERRIDE_REASON}, and serves wherever it is computed",
                )
    refuse_unused({op: f"{op} is given" for op in given}, kernels.ops, attention)
    changed = dataclasses.replace(kernels, attention=attention, plain=plain, names=names)
    return dataclasses.replace(with_reasons(plan, replaced, changed), swapped=swapped)


def _with_sampler(plan: Plan, given: object, *, check: bool) -> Plan:
    """Return `plan` with another sampler: a registered name, an import path, or a function."""
    name, sampler, choice = str(given), None, plan.config.sampler
    if isinstance(given, str) and not is_import_path(given):
        entry, why = plan.registry.find(SAMPLER, given), f"{OVERRIDE_REASON}, registered"
        before = plan.registry.find(SAMPLER, choice.name)
        reason = entry.why_not_on(plan.platform.env().platform)
        if entry.capability("greedy_only") and not before.capability("greedy_only"):
            reason = f"it is greedy only, but requests to {choice.name} may ask for sampling"
        if reason is not None:
            raise UnsupportedError(
                f"sampler = {given!r} cannot be used here ({reason})",
                "a sampler that serves all requests that the current one serves",
                "Pass another sampler, or make a new LLM with this one.",
            )
        choice = Choice(name=given)
    else:
        sampler = cast("Sampler", import_path(given, SAMPLER) if isinstance(given, str) else given)
        name = given if isinstance(given, str) else getattr(given, "__qualname__", name)
        why = f"{OVERRIDE_REASON}, {'can be traced' if check else 'not checked'}"
        if check:
            _trace(sampler, name, plan.model.info.vocab_size)
    return dataclasses.replace(
        with_reasons(plan, {SAMPLER: Reason(SAMPLER, name, why)}),
        config=plan.config.model_copy(update={SAMPLER: choice}),
        sampler=sampler,
        swapped={**plan.swapped, SAMPLER: given},
    )


def _trace(sampler: Sampler, name: str, vocab_size: int) -> None:
    """Raise IncorrectError for a sampler that does not return token ids int32 [S]."""
    rows = {f: jax.ShapeDtypeStruct((2,), one.dtype) for f, one in ROW_VALUES.items()}
    counts, keys = jax.ShapeDtypeStruct((2,), np.int32), jax.ShapeDtypeStruct((2, 2), np.uint32)
    history = jax.ShapeDtypeStruct((2, 8), np.int32)
    state = SamplingState(keys, counts, DeviceParams(**rows), history, counts)  # type: ignore[arg-type]
    try:
        found = jax.eval_shape(sampler, jax.ShapeDtypeStruct((2, vocab_size), np.float32), state)
        if (found.shape, found.dtype) != ((2,), np.int32):
            raise TypeError(f"it returns {found}")
    except Exception as error:  # the function may raise anything
        raise IncorrectError(
            f"sampler {name}, which cannot be traced ({shown_text(str(error))})",
            "a function (logits f32 [S, vocab], SamplingState) that returns token ids int32 [S]",
            f"Fix the function, or pass {SWITCH}.",
        ) from error


def _read(plan: Plan, op: str, value: Any) -> list[_Override]:
    """Return the implementations given for an op; phases with the same one are grouped."""
    if op != ATTENTION:
        if op not in plan.kernels.plain:
            ops = [ATTENTION, SAMPLER, *plan.kernels.plain]
            raise unknown_name("op", op, ops, "Override one of these.")
        return [_one(plan, op, (), value)]
    if not isinstance(value, Mapping):
        return [_one(plan, op, PHASES, value)]
    for phase in value:
        if phase not in PHASES:
            raise unknown_name("phase of attention", str(phase), PHASES)
    together: dict[int, list[str]] = {}
    for phase, impl in value.items():
        together.setdefault(id(impl), []).append(phase)
    return [_one(plan, op, tuple(phases), value[phases[0]]) for phases in together.values()]


def _one(plan: Plan, op: str, phases: tuple[str, ...], value: Any) -> _Override:
    name, impl, entry = _named(plan, op, value)
    if op == ATTENTION:
        # check the current layout first: the cache keeps it
        layouts = dict.fromkeys([plan.kernels.layout, *plan.registry.names("layout")])
        impl = adapt_attention(impl, name, tuple(layouts))
    else:
        refuse_uncallable(plan.kernels.ops[op], impl, f"{op} = {name}")
    needed = [each for each in plan.kernels.needs_of(op).items() if each[1]]
    if entry is None and needed:
        capability, methods = needed[0]
        raise UnsupportedError(
            f"{op} = {name} cannot be used with {' and '.join(methods)} {QUANTIZED[capability]}",
            f"a registered kernel whose capability `{capability}` names the method",
            "Register the kernel, or make the LLM without quantization.",
        )
    one = _Override(op, phases, name, impl, entry is not None, value)
    if op == ATTENTION:
        _refuse(plan, one)
    return one


def _named(plan: Plan, op: str, value: Any) -> tuple[str, Any, Entry | None]:
    """Return a name for reports, the implementation, and its entry if it is registered."""
    if not isinstance(value, str):
        own = getattr(value, "name", None)
        return str(own or getattr(value, "__qualname__", type(value).__name__)), value, None
    if is_import_path(value):
        return value, import_path(value, f"kernel of op {op}"), None
    entry = plan.registry.find("kernel", value, op)
    is_sharded = plan.kernels.is_sharded and not plan.kernels.ops[op].partition
    reason = why_not_declared(
        entry, plan.kernels.layout, is_sharded=is_sharded, needs=plan.kernels.needs_of(op)
    )
    if reason is not None:
        raise UnsupportedError(
            f"{op} = {value} cannot be used here ({reason})",
            "a kernel that declares support for this model and platform",
            f"Choose another implementation of {op}; `enginebay plugins` lists them.",
        )
    return value, plan.registry.load(entry), entry


def _refuse(plan: Plan, one: _Override) -> None:
    """Raise UnsupportedError when an attention implementation cannot serve its phases here."""
    kernels = plan.kernels
    problems = kernels.problems(one.impl if "decode" in one.phases else None)
    for phase in PHASES:
        reason = kernels.why_not(one.impl, phase, problems) if phase in one.phases else None
        if reason is not None:
            raise UnsupportedError(
                f"attention.{phase} = {one.name} cannot be used here ({reason})",
                f"a kernel that serves this model on layout {kernels.layout}",
                "Pass another kernel, or make the LLM with a layout of this one.",
            )


def _checked(plan: Plan, one: _Override, *, check: bool) -> str:
    if one.registered or not check:
        return "registered" if one.registered else "not checked"
    what = f"{', '.join(one.settings)} = {one.name}"
    phases = [phase for phase in PHASES if phase in one.phases]
    setting = check_setting(plan.kernels, phases)
    return quick_checked(plan.kernels.ops[one.op], one.impl, setting, what, SWITCH)
