"""Chooses the platform: by name, or the one with the highest priority that has devices."""

from __future__ import annotations

import logging

from enginebay.config import EngineConfig
from enginebay.config_sections import AUTO
from enginebay.contracts.platform import Platform
from enginebay.errors import PluginError, error_line
from enginebay.ops.select import Candidate, choose
from enginebay.plugins.guard import guarded
from enginebay.plugins.registry import Entry, Registry

log = logging.getLogger("enginebay.compose")


def find_platform(registry: Registry, config: EngineConfig) -> Platform:
    """Return the platform for a configuration; UnsupportedError when it cannot be used here."""
    return pick_platform(registry, config, make_platforms(registry))


def make_platforms(registry: Registry) -> list[Candidate]:
    """Make all registered platforms. A platform that fails or has no device has the reason."""
    return [_make_platform(registry, e) for e in registry.entries if e.kind == "platform"]


def _make_platform(registry: Registry, entry: Entry) -> Candidate:
    reason: str | None = entry.reason
    if not reason:
        try:
            target = registry.load(entry)
            with guarded(f"plugin {entry.package!r}"):
                platform: Platform = target()
                reason = platform.why_not()
            return Candidate(
                entry.name, platform.priority, platform, reason, built_in=entry.built_in
            )
        except Exception as error:  # noqa: BLE001  # one broken plugin never takes the host down
            reason = error_line(error)
            log.warning("platform %r of plugin %r: %s", entry.name, entry.package, reason)
    return Candidate(entry.name, 0, unavailable=reason, built_in=entry.built_in)


def pick_platform(registry: Registry, config: EngineConfig, platforms: list[Candidate]) -> Platform:
    """Return the platform among `platforms` that a configuration chooses. UnsupportedError when it
    has no device; PluginError when its plugin raised an error.
    """
    if config.platform != AUTO:
        entry = registry.find("platform", config.platform)
        named = next(one for one in platforms if one.name == entry.name)
        if named.impl is None:
            raise PluginError(
                f"platform {entry.name!r} of plugin {entry.package!r} fails: {named.unavailable}",
                "a platform that can be made without arguments, and says whether it has a device",
                "Fix the plugin, or choose another platform with --platform.",
            )
    platform: Platform = choose("platform", config.platform, platforms)[0].impl
    return platform
