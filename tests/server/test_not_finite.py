"""Over HTTP: a request whose logits have NaN ends with an error that names the step, and others go
on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.in_process_client import HELLO, Asker, error_of, events_of
from tests.server.test_metrics import samples
from tests.unit.test_not_finite import BAD, BROKEN, GOOD, broken_copy

if TYPE_CHECKING:
    from enginebay import LLM

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
COUNT = "enginebay:non_finite_logits_total"
ASKED: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
WRITES_BROKEN: dict[str, Any] = {"logit_bias": {str(BROKEN): 100.0}}
"""The first token is the broken one, so a decode step has NaN logits."""


@pytest.fixture(scope="module")
def broken_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """TINY with a token whose embedding is NaN."""
    from enginebay import LLM
    from tests.pool import few_sizes

    folder = tmp_path_factory.mktemp("nan") / "m"
    broken_copy(folder, "model.embed_tokens.weight", BROKEN, float("nan"))
    sizes: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    with few_sizes(), LLM(str(folder), dtype="float32", **sizes) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "step"),
    [
        (COMPLETIONS, {"prompt": BAD}, "prefill"),
        (COMPLETIONS, {"prompt": GOOD, **WRITES_BROKEN}, "decode"),
        (CHAT, {"messages": HELLO, **WRITES_BROKEN}, "decode"),
    ],
)
def test_a_broken_request_ends_with_an_error_and_the_others_go_on(
    broken_llm: LLM, path: str, body: dict[str, Any], step: str, stream: bool
) -> None:
    asker = Asker(broken_llm, {"chat_template": TEMPLATE})
    good = {"prompt": GOOD, **ASKED}
    alone = asker.ok(COMPLETIONS, **good)["choices"]
    before = samples(asker)[COUNT]
    asked = [("POST", COMPLETIONS, {"json": good})] * 2
    broken = ("POST", path, {"json": {**ASKED, **body, "stream": stream}})
    first, answer, last = asker.all(asked[0], broken, asked[1])
    assert first.json()["choices"] == last.json()["choices"] == alone
    if stream and answer.status_code == 200:
        error = json.loads(events_of(answer.text)[-1])["error"]
    else:
        error = error_of(answer, 500)
    assert error["code"] == "non_finite_logits"
    assert f"{step} step" in error["message"]
    assert samples(asker)[COUNT] == before + 1
    assert asker.ok(COMPLETIONS, **good)["choices"] == alone


def test_an_embedding_that_is_not_finite_is_an_error(broken_llm: LLM) -> None:
    asker = Asker(broken_llm)
    assert asker.refused("/v1/embeddings", 500, input=BAD)["code"] == "non_finite_logits"
    assert asker.ok("/v1/embeddings", input=GOOD)["data"][0]["embedding"]
