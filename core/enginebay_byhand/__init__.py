"""Unregistered implementations: functions passed to `LLM.override`, and kernels by import path.
`quick` checks them with the quick cases of their op, and `simple` adapts the simple form of
attention.
"""
