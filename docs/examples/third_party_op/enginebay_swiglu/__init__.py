"""An example of a plugin for enginebay: the op swiglu, two kernels for it, and a model family that
calls it.
"""
