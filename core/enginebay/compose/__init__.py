"""Composition: makes an engine from a configuration. Every part is chosen by name, and the reason
of every choice is recorded.

`resolve` replaces each "auto" of the configuration, `kernels` chooses implementations of ops,
`negotiate` attention kernels and the cache layout, and `composition` makes the plan and the engine.
`override` replaces parts of a running engine, `import_paths` has kernels by import path, and
`quick_check` checks implementations that are not registered.
"""
