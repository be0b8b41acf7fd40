"""A plugin whose hook has a name that enginebay does not know."""

from enginebay.plugins.hooks import Register, hookimpl


@hookimpl
def register_scheduler(register: Register) -> None:
    """The correct name is register_schedulers."""
    register("never_seen", "enginebay_broken.working:OneAtATime")
