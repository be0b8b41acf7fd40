"""Schedulers choose the tokens that run next: continuous batching in several orders, and static
batches. This package does not import JAX.
"""
