"""A plugin whose function lacks @hookimpl."""

from enginebay.plugins.hooks import Register


def register_schedulers(register: Register) -> None:
    """This function has no @hookimpl, so enginebay never calls it."""
    register("never_seen", "enginebay_broken.working:OneAtATime")
