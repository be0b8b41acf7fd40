"""Kernels for NVIDIA GPUs, written in Triton and called through jax-triton."""
