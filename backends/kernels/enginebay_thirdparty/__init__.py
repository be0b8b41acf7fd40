"""Kernels that others wrote, with the capabilities that checks found them to have."""
