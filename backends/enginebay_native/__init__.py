"""Ops for the host's processors in C++, compiled for the machine at hand when they are first
chosen.
"""
