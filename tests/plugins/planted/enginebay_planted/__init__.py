"""Kernels with planted faults, and one without, for a device that is nowhere: the checker is tested
with them.
"""
