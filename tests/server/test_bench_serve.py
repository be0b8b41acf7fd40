"""bench serve over HTTP, against a server without a model: what is counted, in files and on screen.

How long things take is not looked at here: tests/unit/test_serve_*.py hold the figures on clocks
that are known.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from enginebay.cli.program import main
from tests.benchmarks.paced_server import Pace, serve

Bench = Callable[..., tuple[int, dict[str, Any], str]]
HANGS_S = 60.0


@pytest.fixture(scope="module")
def pace() -> Pace:
    return Pace(ttft_s=0.002, token_s=0.0005)


@pytest.fixture(scope="module")
def port(pace: Pace) -> Iterator[int]:
    """The port of a paced server on a thread of its own."""
    ports: list[int] = []
    ready, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def work() -> None:
        server = await serve(pace, 0)
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()
        await stop.wait()
        server.close()
        await asyncio.sleep(0)

    thread = threading.Thread(target=lambda: loop.run_until_complete(work()))
    thread.start()
    assert ready.wait(HANGS_S)
    yield ports[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(HANGS_S)
    loop.close()


@pytest.fixture
def bench(port: int, capsys: pytest.CaptureFixture[str]) -> Bench:
    def run(*arguments: str) -> tuple[int, dict[str, Any], str]:
        url = f"http://127.0.0.1:{port}"
        code = main(["bench", "serve", "--url", url, "--json", *arguments])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else {}, err

    return run


SHORT = ("--prompt-len", "5", "--new-tokens", "6", "--warmup", "3")


def test_an_open_loop_counts_requests_tokens_and_chunks(bench: Bench, tmp_path: Path) -> None:
    out = str(tmp_path)
    code, record, _ = bench("--rates", "300,600", "--num-requests", "30", *SHORT, "--out", out)
    assert code == 0
    assert record["server"]["model"] == "paced"  # the first of /v1/models
    assert record["server"]["version"] == {"version": "paced"}
    assert [load["load"] for load in record["loads"]] == ["300/s", "600/s"]
    for load in record["loads"]:
        assert (load["num_requests"], load["num_answered"], load["num_failed"]) == (30, 30, 0)
        assert (load["num_output_tokens"], load["num_chunks"]) == (180, 180)
        assert (load["tokens_counted_by"], load["finish_reasons"]) == ("usage", {"length": 30})
        assert load["ttft_s"]["p50"] >= 0.002
        assert load["itl_s"]["mean"] > 0
        assert load["client_cpu_s"] > 0
    assert len((tmp_path / "requests.csv").read_text().splitlines()) == 61  # warm-ups are no rows
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_closed_loop_has_so_many_requests_in_flight(bench: Bench, endpoint: str) -> None:
    code, record, _ = bench(
        "--concurrency", "2,5", "--num-requests", "20", *SHORT, "--endpoint", endpoint
    )
    assert code == 0
    assert [load["max_in_flight"] for load in record["loads"]] == [2, 5]
    assert [load["num_output_tokens"] for load in record["loads"]] == [120, 120]


def test_several_tokens_in_a_chunk_are_counted_by_usage(bench: Bench, pace: Pace) -> None:
    pace.tokens_per_chunk = 3
    try:
        _, record, _ = bench("--concurrency", "4", "--num-requests", "10", *SHORT)
    finally:
        pace.tokens_per_chunk = 1
    (load,) = record["loads"]
    assert (load["num_output_tokens"], load["num_chunks"]) == (60, 20)
    assert "a chunk has 3.0 tokens" in record["warnings"][-1]


def test_without_usage_a_tokenizer_counts(bench: Bench, pace: Pace) -> None:
    pace.has_usage = False
    try:
        _, plain, _ = bench("--num-requests", "4", *SHORT)
        _, counted, _ = bench("--num-requests", "4", *SHORT, "--tokenizer", "demo")
    finally:
        pace.has_usage = True
    assert plain["loads"][0]["tokens_counted_by"] == "chunks"
    assert "no usage" in plain["warnings"][-1]
    assert counted["loads"][0]["tokens_counted_by"] == "tokenizer"
    assert counted["loads"][0]["num_output_tokens"] > 0


def test_failures_are_counted_by_their_reason(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    entries = [{"prompt": text, "max_tokens": 4} for text in ("@refuse", "@cut", "@quiet", "fine")]
    path.write_text("\n".join(map(json.dumps, entries)))
    code, record, _ = bench("--requests", str(path), "--num-requests", "8", "--warmup", "0")
    assert code == 0
    (load,) = record["loads"]
    counts = (load["num_answered"], load["num_failed"], load["num_empty"])
    assert counts == (4, 4, 2)
    assert load["errors"]["HTTP 500: refused, as asked"] == 2
    assert sum(load["errors"].values()) == 4
    assert load["num_output_tokens"] == 8  # those of cut answers do not count


def test_a_load_without_any_answer_ends_with_code_1(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "@refuse"}')
    code, record, _ = bench("--requests", str(path), "--num-requests", "2", "--warmup", "0")
    assert (code, record["loads"][0]["ttft_s"]) == (1, None)
    code, _, err = bench("--requests", str(path), "--num-requests", "2")
    assert code == 2
    assert "warm-up request failed: HTTP 500" in err


def test_a_request_that_never_ends_fails(bench: Bench) -> None:
    long = ("--prompt-len", "1", "--new-tokens", "100000", "--warmup", "0", "--timeout", "0.2")
    code, record, _ = bench("--num-requests", "2", *long)
    assert (code, record["loads"][0]["errors"]) == (1, {"no end within 0.2 s": 2})


def test_a_search_reports_what_held(bench: Bench) -> None:
    _, record, _ = bench(
        "--find-rate", "--rates", "90", "--slo", "ttft=1us", "--num-requests", "2", *SHORT
    )
    assert record["found_rate"]["highest_held"] is None
    assert [load["good_share"] for load in record["loads"]] == [0.0, 0.0]
    assert record["loads"][1]["concurrency"] == 1
    assert "No rate holds the bounds" in record["found_rate"]["text"]


def test_an_address_without_a_server_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["bench", "serve", "--url", "http://127.0.0.1:9"])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "the address of a running server" in err
