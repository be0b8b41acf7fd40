"""What kernels, models, samplers, engines and the executor share: frequencies of rotary positions,
the columns of a step's arrays, the batch of a step, the best tokens of rows, random keys, and work
on a few rows of a batch.
"""
