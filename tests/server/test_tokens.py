"""Token ids over HTTP, the models, the probes, the version and the reasons of the parts."""

from __future__ import annotations

import pytest

from enginebay import LLM, __version__
from tests.server.in_process_client import HELLO, Asker, error_of


def test_a_text_becomes_tokens_and_a_text_again(asker: Asker) -> None:
    found = asker.ok("/tokenize", prompt="Once upon a time", return_token_strs=True)
    assert found["tokens"] == asker.llm.tokenizer.encode("Once upon a time")
    assert found["count"] == len(found["tokens"])
    assert "".join(found["token_strs"]) == "Once upon a time"
    assert asker.ok("/detokenize", tokens=found["tokens"]) == {"prompt": "Once upon a time"}


def test_tokens_of_a_conversation_are_those_of_its_answer(asker: Asker) -> None:
    count = asker.ok("/v1/count_tokens", messages=HELLO)["input_tokens"]
    answer = asker.ok("/v1/chat/completions", messages=HELLO, max_tokens=1)
    assert (
        count == answer["usage"]["prompt_tokens"] == asker.ok("/tokenize", messages=HELLO)["count"]
    )


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": HELLO}])
def test_one_of_prompt_and_messages_is_counted(asker: Asker, body: dict[str, object]) -> None:
    asker.refused("/v1/count_tokens", 400, **body)


def test_an_id_beyond_the_vocabulary_is_refused(asker: Asker) -> None:
    assert asker.refused("/detokenize", 400, tokens=[10**6])["param"] == "tokens"


def test_special_tokens_and_the_chat_template_are_texts(asker: Asker) -> None:
    found = asker.get("/tokenizer_info").json()
    info = asker.llm.plan.checkpoint.token_info
    for name, token_id in (("bos_token", info.bos_token_id), ("pad_token", info.pad_token_id)):
        ids = asker.ok("/tokenize", prompt=found[name], add_special_tokens=False)["tokens"]
        assert ids == [token_id]
    assert found["chat_template"] == asker.llm.tokenizer.inner.chat_template
    assert found["model_max_length"] == 256
    assert asker.get("/tokenizer_info?model=other").status_code == 404


def test_models_are_listed(asker: Asker) -> None:
    [model] = asker.get("/v1/models").json()["data"]
    assert model == asker.get("/v1/models/demo").json()
    assert (model["id"], model["max_model_len"]) == ("demo", 256)


def test_the_server_says_what_it_is(asker: Asker) -> None:
    assert asker.get("/version").json() == {"version": __version__}
    choices = {c["setting"]: c["chosen"] for c in asker.get("/explain").json()["demo"]["choices"]}
    assert choices["engine"] == asker.llm.config.engine.name
    assert "/v1/chat/completions" in asker.get("/openapi.json").json()["paths"]


def test_requests_wait_for_programs_that_are_compiled(asker: Asker) -> None:
    assert asker.get("/readiness").json()["models"]["demo"] == {"ready": True, "warmup": "lazy"}
    asker.model.warmup, asker.model.progress = "compiling", (3, 7)
    readiness = asker.get("/readiness")
    assert readiness.status_code == 503
    assert readiness.json()["models"]["demo"]["compiled"] == 3
    answer = asker.post("/v1/completions", {"prompt": "a"})
    assert error_of(answer, 503)["code"] == "model_not_ready"
    assert answer.headers["retry-after"] == "1"
    assert "3 of 7" in answer.text
    assert asker.get("/health").status_code == asker.get("/liveness").status_code == 200


def test_a_dead_engine_is_reported() -> None:
    from tests.brief import BRIEF

    llm = LLM(BRIEF, max_model_len=64, max_num_seqs=1, max_num_batched_tokens=16)
    asker = Asker(llm)
    assert asker.get("/health").status_code == 200
    llm.close()
    assert asker.get("/health").status_code == 503
    assert asker.get("/readiness").status_code == 503
    assert asker.get("/liveness").status_code == 200
    error = asker.refused("/v1/completions", 503, prompt="a")
    assert error["code"] == "engine_stopped"


def test_a_warm_up_is_followed_to_its_end(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    from enginebay.errors import StoppedError

    def warmup(progress: object, **_: object) -> int:
        assert callable(progress)
        progress("compiling", 2, 2)
        return 2

    monkeypatch.setattr(asker.llm, "warmup", warmup)
    asker.model.compile_in_background().join()
    assert asker.model.status == {"ready": True, "warmup": "ready"}

    def fails(progress: object, **_: object) -> int:
        raise StoppedError("no memory is left")

    monkeypatch.setattr(asker.llm, "warmup", fails)
    asker.model.compile_all()
    assert asker.get("/readiness").json()["models"]["demo"]["error"] == "no memory is left"
    assert "no memory is left" in asker.refused("/v1/completions", 503, prompt="a")["message"]


def test_the_document_has_the_errors_models_and_keys_of_this_server(asker: Asker) -> None:
    open_, guarded = (
        one.get("/openapi.json", headers={"x-api-key": "key-of-the-reader"}).json()
        for one in (asker, Asker(asker.llm, api_keys=("key-of-the-reader",)))
    )
    chat = open_["paths"]["/v1/chat/completions"]["post"]
    assert set(chat["responses"]) == {
        "200", "400", "404", "408", "413", "415", "429", "500", "503", "504",
    }  # fmt: skip
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    body = open_["components"]["schemas"]["ChatBody"]
    assert body["properties"]["model"]["enum"] == ["demo", None]
    assert body["additionalProperties"] is False
    assert "metadata" in body["properties"]
    [example] = chat["requestBody"]["content"]["application/json"]["examples"].values()
    assert asker.ok("/v1/chat/completions", **example["value"])
    assert "HTTPValidationError" not in open_["components"]["schemas"]
    assert "security" not in chat
    assert "401" in guarded["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert guarded["paths"]["/version"]["get"]["security"] == [{"bearer": []}, {"key": []}]
    assert "security" not in guarded["paths"]["/health"]["get"]
