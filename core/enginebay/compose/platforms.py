"""Chooses the platform: by name, or the one with the highest priority that has devices."""

from __future__ import annotations

import logging

from enginebay.config import EngineConfig
from enginebay.config_sections import AUTO
from enginebay.errors import PluginError, UnsupportedError, error_line
from enginebay.importing import guarded
from enginebay.platform import Platform
from enginebay.registry import Entry, Registry

log = logging.getLogger("enginebay.compose")


def find_platform(registry: Registry, config: EngineConfig) -> Platform:
    """Return the platform for a configuration; UnsupportedError when it cannot be used here."""
    return pick_platform(registry, config, make_platforms(registry))


def make_platforms(registry: Registry) -> dict[str, Platform]:
    """Make all registered platforms. A platform that fails is logged and left out; choosing it by
    name raises its error.
    """
    found: dict[str, Platform] = {}
    for entry in registry.entries:
        if entry.kind == "platform" and entry.state == "ready":
            try:
                found[entry.name] = _make_platform(registry, entry)
            except PluginError as error:  # one broken plugin never takes the host down
                log.warning("%s", error)
    return found


def _make_platform(registry: Registry, entry: Entry) -> Platform:
    """Make the platform of an entry; PluginError when this fails."""
    target = registry.load(entry)
    try:
        with guarded(f"plugin {entry.package!r}"):
            platform: Platform = target()
    except Exception as error:
        raise PluginError(
            f"platform {entry.name!r} of plugin {entry.package!r} cannot be made: "
            f"{error_line(error)}",
            "a platform that can be made without arguments",
            "Fix the plugin, or choose another platform with --platform.",
        ) from error
    return platform


def why_not_platform(platform: Platform) -> str | None:
    """Return why a platform cannot be used, or None. An error that its code raises is a reason."""
    try:
        return platform.why_not()
    except Exception as error:  # noqa: BLE001  # one broken plugin never takes the host down
        return error_line(error)


def pick_platform(
    registry: Registry, config: EngineConfig, platforms: dict[str, Platform]
) -> Platform:
    """Return the platform among `platforms` that a configuration chooses. UnsupportedError when it
    has no device.
    """
    if config.platform == AUTO:
        able = {name: p for name, p in platforms.items() if why_not_platform(p) is None}
        if not able:
            raise UnsupportedError(
                "no platform has a device",
                ", ".join(platforms) or "none is installed",
                "Install a plugin whose platform supports this machine.",
            )
        best = max(
            able, key=lambda name: (able[name].priority, registry.find("platform", name).built_in)
        )
        return able[best]
    entry = registry.find("platform", config.platform)
    platform = platforms.get(config.platform) or _make_platform(registry, entry)
    reason = why_not_platform(platform)
    if reason is not None:
        able_names = [n for n, p in platforms.items() if why_not_platform(p) is None]
        raise UnsupportedError(
            f"platform = {config.platform!r}: {reason}",
            ", ".join(able_names) or "none here",
            "Choose one of these, or auto.",
        )
    return platform
