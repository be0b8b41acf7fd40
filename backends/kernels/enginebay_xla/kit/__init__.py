"""Checks of the built-in ops: their axes, the check of a case, and programs to compile."""
