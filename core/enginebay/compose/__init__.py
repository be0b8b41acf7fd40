"""The composition root: from a configuration to an engine, every choice made by name and recorded.

`resolve` replaces each "auto" and keeps the reasons, `kernels` chooses and binds implementations of
ops, `compose` puts the parts together and is the one place that touches jax.config.
"""
