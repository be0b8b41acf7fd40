"""Guards this process while plugins are imported, and starts JAX: its platforms, and the cache of
compiled programs. Packages that store compiled programs in a private folder, or start JAX
themselves, import this package.
"""
