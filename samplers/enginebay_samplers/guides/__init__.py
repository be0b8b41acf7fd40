"""Guided decoding: what a request asks of its output becomes a grammar, whose library runs in
worker processes with limits.
"""
