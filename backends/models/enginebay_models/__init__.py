"""Model families in flax.nnx, loading of checkpoints, and the embedded demo model."""
