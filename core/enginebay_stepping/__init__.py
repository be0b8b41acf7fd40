"""The engine class that engine plugins share: `StepEngine` turns the plans of steps into commands.

`geometry` has the sizes of steps and of the cache, `buckets` the sizes that are compiled, `memory`
the bytes of an engine, `assemble` the commands.
"""
