"""Every op in plain JAX: always available, and what fast implementations are compared with."""
