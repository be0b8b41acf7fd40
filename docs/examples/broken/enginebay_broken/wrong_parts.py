"""A plugin with four faulty parts and a correct one."""

from enginebay.plugins.hooks import Register, hookimpl

WORKING = "enginebay_broken.working:OneAtATime"


@hookimpl
def register_schedulers(register: Register) -> None:
    """Declare four parts with a fault each, and a correct part."""
    register("from_yesterday", WORKING, interface=0)
    register("fcfs", WORKING, summary="a name that enginebay's own scheduler has")
    register("needs_more", WORKING, requires=("a_module_that_nobody_has",), extra="more")
    register("no_such_target", "enginebay_broken.working:TwoAtATime")
    register("good_among_wrong", WORKING, capabilities={"priority": -10})
