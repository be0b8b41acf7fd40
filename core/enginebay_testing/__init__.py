"""The conformance kit: checks that every part of a kind must pass, for plugins and built-in parts.

Each contract has a module of checks, which raise AssertionError and need no test runner. `suites`
finds the checks of a registered part, and `pytest_plugin` runs them under pytest. The package
imports nothing until it is used, so that

    pytest -p enginebay_testing --enginebay-check scheduler:fcfs

leaves the settings of JAX to the caller.
"""

from __future__ import annotations

pytest_plugins = ("enginebay_testing.pytest_plugin",)
