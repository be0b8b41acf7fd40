"""An example of a plugin for enginebay: the op swiglu, two kernels of it, and a model family that
calls it.
"""
