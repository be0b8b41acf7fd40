"""A plugin whose hook raises an exception."""

from enginebay.plugins.hooks import Register, hookimpl


@hookimpl
def register_schedulers(register: Register) -> None:
    """Raise after the first part is declared. That part must not be listed as usable either."""
    register("half_way", "enginebay_broken.working:OneAtATime")
    raise RuntimeError("the hook went wrong half way")
