"""Plugins with one fault each, for enginebay's tests."""
