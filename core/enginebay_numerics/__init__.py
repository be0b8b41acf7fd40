"""Arithmetic that kernels, models, samplers and the executor share: frequencies of rotary
positions, the batch of a step, the best tokens of rows, random keys, and work on a few rows of a
batch.
"""
