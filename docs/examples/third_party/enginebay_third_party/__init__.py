"""An example of a plugin for enginebay: a scheduler and an attention kernel."""
