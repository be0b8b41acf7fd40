"""The registered implementations of an op as candidates: loaded, or with the reason why they cannot
serve here.
"""

from __future__ import annotations

from collections.abc import Collection

from enginebay.config import NO_QUANTIZATION, EngineConfig
from enginebay.config_sections import AUTO
from enginebay.errors import PluginError, UnsupportedError
from enginebay.ops.caps import Env
from enginebay.ops.select import Candidate
from enginebay.ops.toolchains import Interpretable
from enginebay.registry import Entry, Registry

ANY = "any"
"""In the capability `quantizations`: every method, as QuantizedArray defines the weight."""


def candidates(
    registry: Registry,
    op: str,
    env: Env,
    *,
    is_sharded: bool = False,
    layout: str | None = None,
    quantization: str = NO_QUANTIZATION,
    interpret: Collection[str] = (),
) -> list[Candidate]:
    """Every registered implementation of an op, loaded where its declaration allows this platform.

    With `is_sharded`, implementations that declare the capability sharded = False are refused. So
    are implementations whose capability `layouts` lacks `layout`, or whose capability
    `quantizations` lacks the method of the weights that the op is given. Of the names in
    `interpret`, those that are made for another platform serve this one by interpretation.
    """
    kernels = [e for e in registry.entries if e.kind == "kernel" and e.op == op]
    unable = [
        why_not_declared(e, layout, is_sharded=is_sharded, quantization=quantization)
        for e in kernels
    ]
    return [
        _candidate(registry, e, env, interpret=e.name in interpret)
        if reason is None
        else Candidate(e.name, 0, unavailable=reason, built_in=e.built_in)
        for e, reason in zip(kernels, unable, strict=True)
    ]


def why_not_declared(
    entry: Entry, layout: str | None, *, is_sharded: bool, quantization: str = NO_QUANTIZATION
) -> str | None:
    """Why a kernel cannot serve here by what it declares, or None; whether it is there at all is
    not looked at.
    """
    layouts = entry.capability("layouts")
    if is_sharded and entry.capability("sharded") is False:
        return "does not support weights split over devices"
    if layout is not None and layouts is not None and layout not in layouts:
        return f"does not support layout {layout} (has {', '.join(layouts)})"
    methods = entry.capability("quantizations", ())
    if quantization != NO_QUANTIZATION and not {quantization, ANY} & set(methods):
        return f"does not support {quantization} weights (has {', '.join(methods) or 'none'})"
    return None


def _candidate(registry: Registry, entry: Entry, env: Env, *, interpret: bool) -> Candidate:
    if entry.state != "ready":
        return Candidate(entry.name, 0, unavailable=entry.reason)
    reason = entry.why_not_on(env.platform)
    if reason is not None and not interpret:
        return Candidate(entry.name, 0, unavailable=reason)
    try:
        impl = registry.load(entry)
        if reason is not None:
            if not isinstance(impl, Interpretable):
                return Candidate(
                    entry.name, 0, unavailable=f"{reason}, and it has no way of being interpreted"
                )
            impl = impl.interpreted()
    except PluginError as error:
        # One that finds on import that it cannot serve here says so itself.
        cause = error.__cause__ if isinstance(error.__cause__, UnsupportedError) else error
        return Candidate(entry.name, 0, unavailable=str(cause))
    except UnsupportedError as error:  # its interpreter is not installed
        return Candidate(entry.name, 0, unavailable=str(error))
    return Candidate(
        entry.name,
        int(getattr(impl, "priority", entry.priority)),
        impl,
        custom_calls=tuple(entry.capability("custom_calls", ())),
        interpreted=reason is not None,
        built_in=entry.built_in,
    )


def interpreted_names(config: EngineConfig, *names: str) -> set[str]:
    """Which of the wanted names may be interpreted; "auto" is none, so that it never takes such a
    kernel.
    """
    return set(names) - {AUTO} if config.interpret else set()
