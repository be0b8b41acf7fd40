"""An example of a plugin for enginebay: an engine whose rows keep their cache in rings of
blocks.
"""
