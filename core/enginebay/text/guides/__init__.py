"""Guided decoding: the structure that a request asks for becomes a grammar, whose library runs in
worker processes with limits.
"""
