"""Ops in C++ for the host's processors, compiled for this machine when they are first chosen."""
