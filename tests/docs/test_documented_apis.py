"""Each difference between the documented APIs and ours has a reason.
The class that needs the server's extras is in tests/server.
"""

from __future__ import annotations

from typing import Any

import pytest

from tools.documented_apis import apis, page, rows_of, unexplained
from tools.generated_pages import LINK, ROOT

SERVER = "vInferenceApiServer"
LEVELS = "host_tracer_level=None, python_tracer_level=None"


def without_server() -> dict[str, Any]:
    """The data without the declarations of the server's class."""
    data = apis()
    for api in data.values():
        lines = api["declared"].strip().splitlines()
        api["declared"] = "\n".join(line for line in lines if SERVER not in line)
        api["why"] = {key: why for key, why in api["why"].items() if SERVER not in key}
    return data


def test_every_difference_has_a_reason_and_every_reason_a_difference() -> None:
    assert unexplained(without_server()) == []


def test_the_page_has_the_line_of_every_name_and_links_to_guides() -> None:
    data = without_server()
    text = page(data)
    assert {row.line for api in data.values() for row in rows_of(api)} <= set(text.splitlines())
    guides = LINK.findall(text)
    assert len(guides) == len(data)
    assert not [to for to in guides if not (ROOT / "docs" / to).exists()]


@pytest.mark.parametrize(
    ("declared", "found"),
    [
        ("eSurge.shout(text)", "eSurge.shout: callable is missing"),
        ("eSurge.esurge_name()", "eSurge.esurge_name: callable is attribute"),
        ("eSurge.terminate", "eSurge.terminate: attribute is callable"),
        ("async eSurge.terminate()", "eSurge.terminate: async is callable"),
        ("class eSurge.terminate()", "eSurge.terminate: class is callable"),
        ("eSurge.terminate(wait=True)", "eSurge.terminate.wait: `True` is missing"),
        ("eSurge.abort_request()", "eSurge.abort_request.+request_id: missing is required"),
        (
            f"eSurge.start_profiling(output_dir, num_batches=11, {LEVELS})",
            "eSurge.start_profiling.num_batches: `11` is `10`",
        ),
        (
            f"eSurge.start_profiling(num_batches=10, output_dir=None, {LEVELS})",
            "eSurge.start_profiling.num_batches: `10` is `10`, in place 2",
        ),
        (
            "eSurge.update_model_weights(_1, graphdef=None)",
            "graphdef: `None` is `None`, by keyword",
        ),
        ("RequestOutput.colour", "RequestOutput.colour: attribute is missing"),
    ],
)
def test_a_difference_is_found(declared: str, found: str) -> None:
    data = {"esurge": {"module": "enginebay_esurge", "declared": declared, "why": {}}}
    assert any(found in one for one in unexplained(data)), unexplained(data)


def test_a_reason_without_a_difference_is_found() -> None:
    why = {"eSurge.terminate": "it is so"}
    declared = "eSurge.terminate()\neSurge.esurge_name\nRequestOutput.text"
    data = {"esurge": {"module": "enginebay_esurge", "declared": declared, "why": why}}
    assert unexplained(data) == [
        "esurge: RequestOutput.text: attribute is missing, without a reason",
        "esurge: eSurge.terminate: a reason without a difference",
    ]
