"""Kernels that cheat who checks or times them: each is a kernel of rms_norm by import path, and
differs from a right one in one trick, which its docstring says.
"""
