"""LLM: the engine as a Python object, with its requests, streams and conversations."""

from enginebay.llm.llm import LLM

__all__ = ["LLM"]
