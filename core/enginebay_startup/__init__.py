"""Starting JAX: its platforms, and the cache of compiled programs. Packages that need a folder of
the user's own for what is compiled, or start JAX themselves, import this one.
"""
