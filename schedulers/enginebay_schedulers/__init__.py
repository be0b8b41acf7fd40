"""Which tokens run next: continuous batching in several orders, and static batches. Nothing here
imports JAX.
"""
