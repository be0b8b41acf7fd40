"""A plugin whose hook has a name that the host does not know."""

from enginebay.hooks import Register, hookimpl


@hookimpl
def register_scheduler(register: Register) -> None:
    """The hook is called register_schedulers."""
    register("never_seen", "enginebay_broken.working:OneAtATime")
