"""The serving loop: one thread that admits, schedules, launches and commits; requests go in, tokens
come out.

`messages` are what crosses the thread border, `request_table` what the loop remembers of each
request, `admission` the rows and cache that it has given them, `steps` what it does with the
engine, `observer` what it tells of that, `loop` the thread.
"""
