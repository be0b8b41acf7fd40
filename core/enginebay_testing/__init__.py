"""The conformance kit: what every part of a kind must do, for plugin authors as for our own tests.

One module per contract, each with checks that raise AssertionError and need no test runner;
`suites` finds those of a registered part, `plugin` makes pytest run them. Nothing is imported until
it is asked for, so that

    pytest -p enginebay_testing --enginebay-check scheduler:fcfs

leaves the settings of JAX to the caller.
"""

from __future__ import annotations

pytest_plugins = ("enginebay_testing.pytest_plugin",)
