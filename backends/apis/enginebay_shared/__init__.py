"""Shared parts of the documented APIs (vInference, oEngine, eSurge): opening a model, its tokenizer
and special tokens, and values stored as JSON.
"""
