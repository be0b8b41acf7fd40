"""vInferenceApiServer: the server's routes over inferences, by its documented names and forms."""

from __future__ import annotations

import logging
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.ports import free_port
from tests.server.in_process_client import HELLO, Asker, error_of, reasons_of, text_of

if TYPE_CHECKING:
    from enginebay import LLM
    from enginebay_vinference import vInference, vInferenceApiServer

END_S = 60
PROMPT = "Once upon a time"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def own() -> Iterator[LLM]:
    from enginebay import LLM
    from tests.pool import few_sizes
    from tests.server.conftest import SIZES

    with few_sizes(), LLM("demo", engine="vinference", **SIZES) as made:
        yield made


@pytest.fixture(scope="module")
def inference(own: LLM) -> vInference:
    from enginebay_vinference import vInference

    return vInference(own, None, inference_name="story")


def server(*args: Any, **named: Any) -> vInferenceApiServer:
    from enginebay_vinference import vInferenceApiServer

    return vInferenceApiServer(*args, **named)


def asking(served: vInferenceApiServer, llm: LLM) -> Asker:
    asker = Asker(llm)
    asker.app, asker.state = served.app, served.app.state.server
    return asker


@pytest.fixture
def asker(own: LLM, inference: vInference) -> Iterator[Asker]:
    yield asking(server(inference), own)
    own.run_on_engine(own.engine.ledger.check)
    counts = own.counts()
    assert (counts.waiting, counts.running) == (0, 0)


# holds V50
def test_inferences_come_as_a_map_alone_or_from_a_call(inference: vInference) -> None:
    assert server(inference).inference_map == {"story": inference}
    assert server({"tale": inference}).inference_map == {"tale": inference}
    assert server(inference_init_call=lambda: inference).inference_map == {"story": inference}
    made = server(inference_init_call=lambda: {"tale": inference})
    assert made.inference_map == {"tale": inference}
    assert (made.max_workers, made.allow_parallel_workload, made.oai_like_processor) == (
        10,
        False,
        True,
    )


def test_wrong_inferences_are_refused(inference: vInference) -> None:
    from enginebay.errors import ConfigError, UnsupportedError
    from enginebay_vinference import vInference

    for nothing in ({}, {"inference_map": {}}, {"inference_init_call": dict}):
        with pytest.raises(AssertionError, match="inference_map or inference_init_call"):
            server(**nothing)
    with pytest.raises(AssertionError, match=r"inference_map\['tale'\] of type str"):
        server({"story": inference, "tale": "demo"})
    with pytest.raises(ConfigError, match="max_workers = 0"):
        server(inference, max_workers=0)
    alone = vInference({"model": "demo", "max_model_len": 64}, None, max_new_tokens=8)
    with pytest.raises(UnsupportedError, match="'story', whose model is not an LLM"):
        server({"story": alone})


def test_two_servers_share_nothing(own: LLM, inference: vInference) -> None:
    one = asking(server({"one": inference}), own)
    other = asking(server({"other": inference}), own)
    assert [made.get("/v1/models").json()["data"][0]["id"] for made in (one, other)] == [
        "one",
        "other",
    ]
    assert one.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}).status_code == 200
    ended = 'finished_reason="length",model_name="{}"}} {}'
    assert ended.format("one", 1.0) in one.get("/metrics").text
    assert ended.format("other", 0.0) in other.get("/metrics").text
    assert 'model_name="one"' not in other.get("/metrics").text
    one.state.is_draining = True
    assert (one.get("/readiness").status_code, other.get("/readiness").status_code) == (503, 200)


def test_the_package_imports_the_server_only_for_this_class() -> None:
    code = (
        "import sys, enginebay_vinference as v; v.vInference; "
        "assert not {'fastapi', 'uvicorn', 'enginebay_server'} & set(sys.modules); "
        "v.vInferenceApiServer; assert 'enginebay_server' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=END_S)


# holds V51
def test_chats_are_answered_whole_and_streamed(asker: Asker) -> None:
    body = {"messages": HELLO, "max_tokens": 6, "temperature": 0}
    whole = asker.ok(CHAT, **body)
    [choice] = whole["choices"]
    usage = whole["usage"]
    assert choice["finish_reason"] == "length"
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    assert usage["processing_time"] > 5 / usage["tokens_per_second"], "without the first's wait"
    events = asker.events(CHAT, **body)  # which checks [DONE]
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert reasons_of(events) == ["length"]
    assert text_of(events) == choice["message"]["content"]
    last = asker.events(CHAT, **body, stream_options={"include_usage": True})[-1]
    assert last["usage"].keys() == usage.keys()
    for path, more in ((CHAT, body), ("/v1/completions", {"prompt": PROMPT, "max_tokens": 2})):
        plain = Asker(asker.llm).ok(path, **more)
        assert "processing_time" not in plain["usage"], "OpenAI's answers have no such field"


# holds V52
def test_every_prompt_of_a_list_is_answered_by_the_model(asker: Asker, own: LLM) -> None:
    prompts = [PROMPT, "One day"]
    body = {"prompt": prompts, "max_tokens": 6, "temperature": 0}
    answer = asker.ok("/v1/completions", **body)
    texts = [o.get_text() for o in own.generate(prompts, {"max_tokens": 6, "temperature": 0})]
    assert [choice["text"] for choice in answer["choices"]] == texts
    events = asker.events("/v1/completions", **body)
    assert [text_of(events, index) for index in (0, 1)] == texts


# holds V53
def test_tokens_of_a_text_or_conversation_are_counted(
    own: LLM, asker: Asker, inference: vInference
) -> None:
    path = "/v1/count_tokens"
    count = inference.count_tokens(HELLO)
    assert asker.ok(path, model="story", conversation=HELLO) == {"model": "story", "count": count}
    assert asker.ok(path, conversation=PROMPT)["count"] == inference.count_tokens(PROMPT)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}]
    assert asker.ok(path, conversation=parts)["count"] == count
    plain = asking(server(inference, oai_like_processor=False), own)
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert "no model has vision yet" in asker.refused(path, 400, conversation=image)["message"]
    as_given = inference.count_tokens(image, oai_like=False)
    assert plain.ok(path, conversation=image)["count"] == as_given
    assert plain.ok(path, conversation=HELLO)["count"] == count
    asker.refused(path, 400, model="story")


def test_long_conversations_are_refused_before_they_are_counted(
    asker: Asker, inference: vInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /v1/count_tokens of `enginebay serve` refuses them."""

    def never(*_: object) -> int:
        raise AssertionError("the tokens were counted")

    monkeypatch.setattr(type(inference), "count_tokens", never)
    path, text, message = "/v1/count_tokens", "a " * 2_000_000, {"role": "user", "content": "a"}
    in_parts = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    for long in (text, [{"role": "user", "content": text}], in_parts):
        reason = asker.refused(path, 400, conversation=long)["message"]
        assert "characters in conversation" in reason
    for many in ([message] * 20_000, [{"role": "user", "content": [message] * 20_000}]):
        assert "at most 16384 items" in asker.refused(path, 400, conversation=many)["message"]
    described = asker.get("/openapi.json").json()["paths"][path]["post"]["requestBody"]
    assert "ConversationBody" in str(described)
    for where, body in ((path, {"conversation": PROMPT}), (CHAT, {"messages": HELLO})):
        assert "story" in asker.refused(where, 404, model="tale", **body)["message"]


# holds V54, V55, V56
def test_models_and_probes_have_their_documented_forms(asker: Asker, own: LLM) -> None:
    listed = asker.get("/v1/models").json()
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert (model["id"], model["object"], model["permission"]) == ("story", "model", [])
    assert model["owned_by"]
    assert asker.get("/liveness").json() == {"status": "alive"}
    assert asker.get("/readiness").json() == {"status": "ready"}
    assert own is asker.llm
    asker.state.models.find("story").warmup = "waiting"
    assert asker.get("/readiness").status_code == 503
    error_of(asker.post(CHAT, {"messages": HELLO}), 503)


@contextmanager
def fired(served: vInferenceApiServer, **named: Any) -> Iterator[tuple[int, int]]:
    """The port and the metrics port of a server that answers on a thread of its own."""
    port, metrics = free_ports()
    named = {"host": "127.0.0.1", "port": port, "log_level": "warning", **named}
    thread = threading.Thread(target=served.fire, kwargs=named)
    thread.start()
    try:
        wait_for(port)
        yield port, metrics
    finally:
        served.stop()
        thread.join(END_S)
        assert not thread.is_alive()


def free_ports() -> tuple[int, int]:
    """Two ports, one after the other, that are free."""
    port = free_port(1)
    return port, port + 1


def wait_for(port: int) -> None:
    end_s = time.monotonic() + END_S
    while time.monotonic() < end_s:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.02)
    raise AssertionError("the server did not start")


# holds V57
def test_it_serves_https_and_the_figures_on_the_next_port(
    inference: vInference, tmp_path: Path
) -> None:
    import httpx

    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 2 "
        "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1",
        shell=True, check=True, capture_output=True, timeout=END_S,
    )  # fmt: skip
    trust = ssl.create_default_context(cafile=str(cert))
    files = {"ssl_keyfile": str(key), "ssl_certfile": str(cert)}
    with fired(server(inference), **files) as (port, metrics):
        url = f"https://127.0.0.1:{port}"
        assert httpx.get(f"{url}/readiness", verify=trust).json() == {"status": "ready"}
        figures = httpx.get(f"http://127.0.0.1:{metrics}/metrics").text
        assert 'enginebay:num_requests_running{model_name="story"} 0.0' in figures


def test_two_answer_at_once_and_each_ends_by_itself(own: LLM, inference: vInference) -> None:
    import httpx

    one, other = server({"one": inference}), server({"other": inference})
    with fired(one, metrics_port=-1) as (first, metrics):
        with fired(other, metrics_port=-1) as (second, _):
            for port, name in ((first, "one"), (second, "other")):
                listed = httpx.get(f"http://127.0.0.1:{port}/v1/models").json()
                assert [model["id"] for model in listed["data"]] == [name]
        assert httpx.get(f"http://127.0.0.1:{first}/liveness").json() == {"status": "alive"}
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{metrics}/metrics")
    assert not own.loop.is_closed


def test_without_prometheus_client_there_is_one_warning(
    inference: vInference, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import httpx

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with (
        caplog.at_level(logging.WARNING, "enginebay.server"),
        fired(server(inference)) as (port, _),
    ):
        assert httpx.get(f"http://127.0.0.1:{port}/liveness").status_code == 200
    warnings = [one.message for one in caplog.records if "prometheus_client" in one.message]
    assert len(warnings) == 1


def test_wrong_arguments_of_fire_are_refused(inference: vInference) -> None:
    from enginebay.errors import ConfigError, InputError

    served = server(inference)
    with pytest.raises(ConfigError, match="ssl_keyfile alone"):
        served.fire(ssl_keyfile="key.pem")
    with pytest.raises(InputError, match=r"--tls-cert missing\.pem with --tls-key key\.pem"):
        served.fire("127.0.0.1", 0, ssl_keyfile="key.pem", ssl_certfile="missing.pem")
    with pytest.raises(ConfigError, match="log_level = 'loud'"):
        served.fire(log_level="loud")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"metrics_port = {port}"):
            served.fire("127.0.0.1", 0, metrics_port=port)


# holds V58
@pytest.mark.parametrize(("parallel", "most"), [(True, 2), (False, 1)])
def test_max_workers_bounds_how_many_run(
    own: LLM, inference: vInference, parallel: bool, most: int
) -> None:

    from enginebay_server.limits import ConcurrencyLimit

    served = server(inference, max_workers=2, allow_parallel_workload=parallel)
    asker = asking(served, own)
    limit: ConcurrencyLimit = asker.state.limit
    seen, running = [], 0
    enter, leave = limit.enter, limit.leave

    async def entering() -> None:
        nonlocal running
        await enter()
        running += 1
        seen.append(running)

    def leaving() -> None:
        nonlocal running
        running -= 1
        leave()

    limit.enter, limit.leave = entering, leaving  # type: ignore[method-assign]
    request = ("POST", "/v1/completions", {"json": {"prompt": PROMPT, "max_tokens": 4}})
    answers = asker.all(*[request] * 5)
    assert [answer.status_code for answer in answers] == [200] * 5
    assert len(seen) == 5
    assert max(seen) == most


def test_a_client_that_leaves_ends_its_generation(own: LLM, inference: vInference) -> None:
    import httpx

    with fired(server(inference), metrics_port=-1) as (port, _):
        body = {"prompt": PROMPT, "max_tokens": 200, "stream": True, "ignore_eos": True}
        url = f"http://127.0.0.1:{port}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=120) as answer:
            next(answer.iter_lines())
        end_s = time.monotonic() + END_S
        while (counts := own.counts()).running + counts.waiting and time.monotonic() < end_s:
            time.sleep(0.01)
        assert counts.running + counts.waiting == 0
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert 'finished_reason="abort",model_name="story"} 1.0' in metrics
