"""Which tokens run next: static batch and first come, first served. Nothing here imports JAX."""
