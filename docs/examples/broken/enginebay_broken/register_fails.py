"""A plugin whose hook raises."""

from enginebay.hooks import Register, hookimpl


@hookimpl
def register_schedulers(register: Register) -> None:
    """Raises after its first part, so that not even that one may be listed as usable."""
    register("half_way", "enginebay_broken.working:OneAtATime")
    raise RuntimeError("the hook went wrong half way")
