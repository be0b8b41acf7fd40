"""The contiguous-cache engine."""
