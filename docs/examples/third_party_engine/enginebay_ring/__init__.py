"""An example of a plugin: an engine whose rows keep their cache in rings of blocks."""
