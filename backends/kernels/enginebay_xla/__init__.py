"""Every op in plain JAX. These implementations run everywhere, and fast ones are compared with
them.
"""
