"""The serving loop: a thread that admits requests, schedules and launches steps, and returns
tokens.

`loop` is the thread, `messages` the records that other threads exchange with it, `request_table`
the state of each request, `admission` rows and cache leases of running requests, `steps` launching
and reading engine steps, `observer` the interface for metrics.
"""
