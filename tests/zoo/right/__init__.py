"""Right kernels in plain JAX, written as device kernels are: what faults are planted into, beside
the packages of ours.
"""
