"""Implementations that nobody registered: functions given to `LLM.override`, and kernels by
import path. `quick` checks them with their op's own quick cases, `simple` has the simple form of
attention.
"""
