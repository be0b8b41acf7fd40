"""The `enginebay` program: finds the command, runs it, and turns errors into messages and exit
codes.
"""

from enginebay.cli.main import main

__all__ = ["main"]
