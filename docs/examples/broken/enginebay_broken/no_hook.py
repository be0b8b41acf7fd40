"""A plugin that forgot to mark its function with @hookimpl."""

from enginebay.hooks import Register


def register_schedulers(register: Register) -> None:
    """Not marked."""
    register("never_seen", "enginebay_broken.working:OneAtATime")
