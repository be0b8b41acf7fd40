"""An example of a plugin for enginebay: a quantised cache layout and its kernels."""
