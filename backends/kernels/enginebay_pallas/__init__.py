"""Kernels for TPUs, written in Pallas."""
