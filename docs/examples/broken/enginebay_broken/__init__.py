"""Plugins that are wrong in one way each, for enginebay's tests."""
