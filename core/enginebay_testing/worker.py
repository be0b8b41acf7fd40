"""The process that checks run in: lists the cases of a part, runs one at a time, answers in JSON.

    python -m enginebay_testing.worker READ_FD WRITE_FD

Requests come through the first pipe, answers go through the second; stdout and stderr are left to
the parts. The process ends when the first pipe closes, and may be killed at any time. Only
`workers` talks to it.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

READY = {"ready": True}


class CaseRunner:
    """The cases of the parts that this process was asked for; they are made once."""

    def __init__(self) -> None:
        from enginebay.plugins.registry import load_registry
        from enginebay_testing import trial  # noqa: F401  # what it uses is part of the state
        from enginebay_testing.process_state import ProcessState

        before = ProcessState.now()
        self._registry = load_registry()
        self._loading = before, ProcessState.now()
        self._cases: dict[tuple[str, str, str | None, Any], list[Any]] = {}
        self._changes: dict[tuple[str, str], Any] = {}
        self._turn: Any = None

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request: the list of a part's cases, or the outcome of
        one case.
        """
        if asked["do"] == "list":
            return self._list(asked)
        return self._run(asked)

    def _list(self, asked: dict[str, Any]) -> dict[str, Any]:
        from enginebay_testing.verdicts import describe

        try:
            cases = self._cases_of(asked)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # a part whose cases cannot be made gets one ERROR
            return {"failed": describe(error)}
        return {
            "cases": [
                {
                    "level": case.level,
                    "target": case.target,
                    "name": case.name,
                    "representative": case.representative,
                    "traits": dict(case.traits),
                }
                for case in cases
            ]
        }

    def _run(self, asked: dict[str, Any]) -> dict[str, Any]:
        from enginebay_testing.verdicts import judge

        wanted = (asked["case"]["level"], asked["case"]["target"], asked["case"]["name"])

        def run() -> Any:
            cases = self._cases_of(asked)
            return next(c for c in cases if (c.level, c.target, c.name) == wanted).run()

        return dataclasses.asdict(judge(run))

    def _cases_of(self, asked: dict[str, Any]) -> list[Any]:
        from enginebay_testing.cases import part_cases, with_path
        from enginebay_testing.process_state import OwnChanges
        from enginebay_testing.suites import Choices, label

        choices = Choices(**asked["choices"])
        key = (asked["part"], asked["package"], asked["level"], choices)
        own = self._changes.setdefault(key[:2], OwnChanges(self._loading))
        if own is not self._turn:
            if self._turn is not None:
                self._turn.end()
            own.begin()
            self._turn = own
        if key not in self._cases:
            registry = with_path(self._registry, asked["part"])
            entry = next(e for e in registry.entries if (label(e), e.package) == key[:2])
            before = own.before
            self._cases[key] = part_cases(registry, entry, asked["level"], choices, before)
        return self._cases[key]


def serve_cases(requests: int, answers: int) -> None:
    """Answer requests until they end."""
    from enginebay.jax_start import start_jax

    start_jax()
    from enginebay.jax_config import configure_compile_cache

    for pipe in (requests, answers):
        os.set_inheritable(pipe, False)  # child processes of a check must not keep the pipes open
    configure_compile_cache("auto")
    bench = CaseRunner()
    with (
        os.fdopen(requests, encoding="utf-8") as lines,
        os.fdopen(answers, "w", encoding="utf-8") as out,
    ):
        _send(out, READY)
        for line in lines:
            _send(out, bench.answer(json.loads(line)))


def _send(out: Any, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


def main(argv: Sequence[str]) -> None:
    """Serve requests on the two file descriptors in `argv`."""
    faulthandler.enable()
    requests, answers = map(int, argv)
    serve_cases(requests, answers)


if __name__ == "__main__":
    main(sys.argv[1:])
