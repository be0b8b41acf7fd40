"""A plugin with nothing wrong in it."""

from enginebay.hooks import Register, hookimpl


@hookimpl
def register_schedulers(register: Register) -> None:
    """Works."""
    register("one_at_a_time", "enginebay_broken.working:OneAtATime", capabilities={"priority": -10})
