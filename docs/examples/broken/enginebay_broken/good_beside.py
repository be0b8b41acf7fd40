"""A plugin without a fault."""

from enginebay.plugins.hooks import Register, hookimpl


@hookimpl
def register_schedulers(register: Register) -> None:
    """Declare a part that works."""
    register("one_at_a_time", "enginebay_broken.working:OneAtATime", capabilities={"priority": -10})
