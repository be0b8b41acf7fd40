"""A plugin whose hook takes an argument that the host does not have."""

from enginebay.hooks import Register, hookimpl


@hookimpl
def register_schedulers(register: Register, registry: object) -> None:
    """There is no argument `registry`."""
    register("never_seen", "enginebay_broken.working:OneAtATime")
