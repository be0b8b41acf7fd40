"""Makes candidates of the registered implementations of an op: each is loaded, or has the reason
why it cannot be used here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from enginebay.config import EngineConfig
from enginebay.config_sections import AUTO
from enginebay.errors import UnsupportedError
from enginebay.ops.caps import Env, Interpretable
from enginebay.ops.select import Candidate
from enginebay.plugins.registry import Entry, Registry

ANY = "any"
"""The entry of a capability about quantisation that stands for every entry."""

QUANTIZED = {
    "quantizations": "weights",
    "activation_quantizations": "activations",
    "storages": "caches",
}
NOTHING: Mapping[str, Collection[str]] = {}


def candidates(
    registry: Registry,
    op: str,
    env: Env,
    *,
    is_sharded: bool = False,
    layout: str | None = None,
    needs: Mapping[str, Collection[str]] = NOTHING,
    interpret: Collection[str] = (),
) -> list[Candidate]:
    """Return a candidate for every registered implementation of an op.

    An implementation is loaded if its declaration allows this platform. Refused are, with
    `is_sharded`, implementations with the capability sharded = False; implementations whose
    capability `layouts` does not contain `layout`; and implementations that lack an entry of
    `needs` (capability -> entries). Implementations for another platform are
    interpreted if their name is in `interpret`.
    """
    kernels = [e for e in registry.entries if e.kind == "kernel" and e.op == op]
    unable = [why_not_declared(e, layout, is_sharded=is_sharded, needs=needs) for e in kernels]
    return [
        _candidate(registry, e, env, interpret=e.name in interpret)
        if reason is None
        else Candidate(e.name, 0, unavailable=reason, built_in=e.built_in)
        for e, reason in zip(kernels, unable, strict=True)
    ]


def why_not_declared(
    entry: Entry,
    layout: str | None,
    *,
    is_sharded: bool,
    needs: Mapping[str, Collection[str]] = NOTHING,
) -> str | None:
    """Return why the declared capabilities of a kernel rule it out here, or None. Its state and
    platforms are not checked.
    """
    layouts = entry.capability("layouts")
    if is_sharded and entry.capability("sharded") is False:
        return "does not support weights split over devices"
    if layout is not None and layouts is not None and layout not in layouts:
        return f"does not support layout {layout} (has {', '.join(layouts)})"
    for capability, needed in needs.items():
        has = entry.capability(capability, ())
        if ANY not in has and (lacking := sorted(set(needed) - set(has))):
            what = f"{', '.join(lacking)} {QUANTIZED[capability]}"
            return f"does not support {what} (has {', '.join(has) or 'none'})"
    return None


def _candidate(registry: Registry, entry: Entry, env: Env, *, interpret: bool) -> Candidate:
    reason = entry.why_not_on(env.platform)
    if reason is not None and (entry.state != "ready" or not interpret):
        return Candidate(entry.name, 0, unavailable=reason)
    try:
        impl = registry.load(entry)
        if reason is not None:
            if not isinstance(impl, Interpretable):
                raise UnsupportedError(f"{reason}, and it cannot be interpreted")
            impl = impl.interpreted()
    except UnsupportedError as error:
        # A module that finds at import that it cannot be used here raises UnsupportedError itself.
        cause = error.__cause__ if isinstance(error.__cause__, UnsupportedError) else error
        return Candidate(entry.name, 0, unavailable=str(cause))
    return Candidate(
        entry.name,
        int(getattr(impl, "priority", entry.priority)),
        impl,
        custom_calls=tuple(entry.capability("custom_calls", ())),
        register_call=entry.capability("register_call"),
        interpreted=reason is not None,
        built_in=entry.built_in,
    )


def interpreted_names(config: EngineConfig, *names: str) -> set[str]:
    """Return which of the chosen names may be interpreted: never "auto", so that a kernel is only
    interpreted when it is chosen by name.
    """
    return set(names) - {AUTO} if config.interpret else set()
