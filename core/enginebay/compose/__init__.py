"""Composition: makes an engine from a configuration. Every part is chosen by name, and the reason
of every choice is recorded.

`resolve` replaces each "auto" of the configuration, `kernels` chooses implementations of ops,
`binding` binds them for a step, and `composition` makes the plan and the engine.
"""
