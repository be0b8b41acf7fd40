"""Arithmetic that kernels, models, samplers and the executor have in common: frequencies of rotary
positions, the batch of a step, the best tokens of rows, and work on the few rows that need it.
"""
