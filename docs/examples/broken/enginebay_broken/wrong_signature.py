"""A plugin whose hook has a parameter that enginebay does not pass."""

from enginebay.plugins.hooks import Register, hookimpl


@hookimpl
def register_schedulers(register: Register, registry: object) -> None:
    """Hooks have no parameter `registry`."""
    register("never_seen", "enginebay_broken.working:OneAtATime")
