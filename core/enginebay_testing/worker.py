"""The process that checks run in: it lists the cases of a part, runs one at a time, and answers in
lines of JSON.

    python -m enginebay_testing.worker READ_FD WRITE_FD

What it is asked comes through the first pipe, what it answers goes through the second: stdout and
stderr belong to the parts. It ends with the first pipe. It may be killed at any time; nobody but
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
    """The cases of the parts that this process was asked about, made once."""

    def __init__(self) -> None:
        from enginebay.registry import load_registry

        self._registry = load_registry()
        self._cases: dict[tuple[str, str, str | None, Any], list[Any]] = {}

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request: the list of a part's cases, or the outcome of one."""
        if asked["do"] == "list":
            return self._list(asked)
        return self._run(asked)

    def _list(self, asked: dict[str, Any]) -> dict[str, Any]:
        from enginebay_testing.verdicts import describe

        try:
            cases = self._cases_of(asked)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # a part whose cases cannot be made is one ERROR
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
        from enginebay_testing.cases import part_cases
        from enginebay_testing.suites import Choices, label

        choices = Choices(**asked["choices"])
        key = (asked["part"], asked["package"], asked["level"], choices)
        if key not in self._cases:
            entry = next(e for e in self._registry.entries if (label(e), e.package) == key[:2])
            self._cases[key] = part_cases(self._registry, entry, asked["level"], choices)
        return self._cases[key]


def serve(requests: int, answers: int) -> None:
    """Answer until the requests end."""
    from enginebay_startup.platforms import start_jax

    start_jax()
    from enginebay_startup.jaxconfig import configure_compile_cache

    for pipe in (requests, answers):
        os.set_inheritable(
            pipe, False
        )  # what a check starts must not keep the pipes open after we are gone
    configure_compile_cache("auto")
    bench = CaseRunner()
    with (
        os.fdopen(requests, encoding="utf-8") as lines,
        os.fdopen(answers, "w", encoding="utf-8") as out,
    ):
        _tell(out, READY)
        for line in lines:
            _tell(out, bench.answer(json.loads(line)))


def _tell(out: Any, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


def main(argv: Sequence[str]) -> None:
    """Serve on the two file descriptors that are named."""
    faulthandler.enable()
    requests, answers = map(int, argv)
    serve(requests, answers)


if __name__ == "__main__":
    main(sys.argv[1:])
