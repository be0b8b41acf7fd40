"""Choosing the platform: by name, or of those that have devices the one of the highest priority."""

from __future__ import annotations

import logging

from enginebay.config import EngineConfig
from enginebay.config_sections import AUTO
from enginebay.errors import PluginError, UnsupportedError
from enginebay.platform import Platform
from enginebay.registry import Entry, Registry

log = logging.getLogger("enginebay.compose")


def find_platform(registry: Registry, config: EngineConfig) -> Platform:
    """The platform that a configuration chooses, with a reason where it cannot be used."""
    return pick_platform(registry, config, make_platforms(registry))


def make_platforms(registry: Registry) -> dict[str, Platform]:
    """Every platform that can be made; one that cannot is refused when it is asked for by name."""
    found: dict[str, Platform] = {}
    for entry in registry.entries:
        if entry.kind == "platform" and entry.state == "ready":
            try:
                found[entry.name] = registry.load(entry)()
            except Exception as error:  # noqa: BLE001  # one broken plugin never takes the host down
                log.warning(
                    "platform %s of plugin %s cannot be made: %s", entry.name, entry.package, error
                )
    return found


def _make_platform(registry: Registry, entry: Entry) -> Platform:
    """The platform that was asked for by name; PluginError when it cannot be made."""
    target = registry.load(entry)
    try:
        platform: Platform = target()
    except Exception as error:
        raise PluginError(
            f"platform {entry.name!r} of plugin {entry.package!r} cannot be made: "
            f"{' '.join(f'{type(error).__name__}: {error}'.split())}",
            "one that can be made without arguments",
            "Mend the plugin or choose another platform.",
        ) from error
    return platform


def pick_platform(
    registry: Registry, config: EngineConfig, platforms: dict[str, Platform]
) -> Platform:
    """The platform of `platforms` that a configuration chooses. UnsupportedError when it has no
    device.
    """
    if config.platform == AUTO:
        able = {name: p for name, p in platforms.items() if p.why_not() is None}
        if not able:
            raise UnsupportedError(
                "no platform has a device",
                ", ".join(platforms) or "none is installed",
                "Install one that fits this machine.",
            )
        best = max(
            able, key=lambda name: (able[name].priority, registry.find("platform", name).built_in)
        )
        return able[best]
    entry = registry.find("platform", config.platform)
    platform = platforms.get(config.platform) or _make_platform(registry, entry)
    reason = platform.why_not()
    if reason is not None:
        able_names = [n for n, p in platforms.items() if p.why_not() is None]
        raise UnsupportedError(
            f"platform = {config.platform!r}: {reason}",
            ", ".join(able_names) or "none here",
            "Choose one of these, or auto.",
        )
    return platform
