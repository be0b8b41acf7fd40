"""Registers JAX's configuration, which runs before an engine is planned; and has what the
core uses before any plugin is loaded (`enginebay.startup.Startup`).
"""

from __future__ import annotations

from enginebay.config import EngineConfig
from enginebay.findings import described
from enginebay.plugins.blame import please_report
from enginebay.plugins.declarations import check_declaration
from enginebay.plugins.guard import guard
from enginebay.plugins.hooks import Register, hookimpl
from enginebay.toml_file import values_of_toml
from enginebay.waits import waiting

__all__ = [
    "check_declaration",
    "described",
    "guard",
    "please_report",
    "prepare",
    "register_startups",
    "values_of_toml",
    "waiting",
]


@hookimpl
def register_startups(register: Register) -> None:
    """Register jax."""
    register(
        "jax",
        "enginebay.plugins.startup_plugin:prepare",
        summary="compile cache; absent devices are not started",
    )


def prepare(config: EngineConfig) -> None:
    """Set JAX's compilation cache and platforms. ConfigError for a folder that cannot
    be trusted.
    """
    from enginebay.jax_config import configure_compile_cache
    from enginebay.jax_start import settle_platforms

    configure_compile_cache(config.compile_cache)
    settle_platforms()
