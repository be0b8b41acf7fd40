"""The paged engine."""
