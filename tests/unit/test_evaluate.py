"""Evaluation: figures of a model's logits out of an engine's own steps, against a reference; and
what it refuses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from enginebay import LLM, EngineConfig, SamplingParams
from enginebay.compose.composition import make_plan
from enginebay.compose.stored_bytes import StoredBytes, count_stored_bytes
from enginebay.config import make_config
from enginebay.contracts.prefix_key import PrefixKey
from enginebay.errors import InputError, RequestError
from enginebay_bench.cli.eval import print_tables, reference_config
from enginebay_bench.evaluate import EvalSizes, Passages, compare_scores, evaluate, split
from enginebay_bench.scoring import Scored, scoring
from enginebay_testing.driver import request_of
from enginebay_testing.reference import ReferenceModel
from tests.brief import BRIEF
from tests.unit.serving import SIZES, assert_idle

pytestmark = pytest.mark.xdist_group("llm")
HERE = "tests.unit.unregistered"
BYTES = StoredBytes(1, 1, 1.0, 1.0)
TEXT = "Once upon a time there was a little fox who lived in the wood. " * 5


@pytest.fixture(scope="module")
def paged(pooled_module: None) -> Iterator[LLM]:
    with LLM(BRIEF, engine="oengine", **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def tokens(paged: LLM) -> list[int]:
    """More than a page."""
    found = paged.tokenizer.encode(TEXT)[:70]
    assert len(found) == 70 > paged.engine.geometry.page_size
    return found


@pytest.fixture(scope="module")
def both(paged: LLM, tokens: list[int]) -> tuple[Scored, Scored]:
    """The same tokens twice, and the second time a request has left their pages in the cache."""
    with scoring(paged) as scorer:
        first = scorer.score(tokens, 6)
        paged.generate([tokens], SamplingParams(max_tokens=1))
        known = paged.run_on_engine(
            lambda: paged.engine.ledger.num_cached_tokens(
                np.asarray(tokens, np.int32), PrefixKey(paged.engine.weights_version)
            )
        )
        assert known > 0, "nothing of the prompt is kept, so that the second time shows nothing"
        return first, scorer.score(tokens, 6)


@pytest.fixture(scope="module")
def scored(both: tuple[Scored, Scored]) -> Scored:
    return both[0]


@pytest.fixture(scope="module")
def scored_again(both: tuple[Scored, Scored]) -> Scored:
    return both[1]


@pytest.mark.long
def test_logits_are_the_models_after_every_token(
    paged: LLM, tokens: list[int], scored: Scored
) -> None:
    expected = ReferenceModel(paged.plan).logits([*tokens, *scored.new_token_ids[:-1]])
    assert scored.logits.shape == expected.shape
    assert np.abs(scored.logits - expected).max() < 1e-3
    assert scored.new_token_ids == tuple(expected[len(tokens) - 1 :].argmax(axis=-1))


@pytest.mark.long
def test_a_known_beginning_is_computed_again(scored_again: Scored, scored: Scored) -> None:
    assert np.array_equal(scored_again.logits, scored.logits)


def test_what_does_not_fit_is_refused_and_nothing_stays(paged: LLM) -> None:
    with pytest.raises(RequestError, match="159 tokens and 2 new ones"), scoring(paged) as scorer:
        scorer.score([5] * 159, 2)
    assert_idle(paged)


def test_scoring_is_refused_while_requests_run(paged: LLM) -> None:
    request = request_of([1, 2, 3], SamplingParams(max_tokens=4))
    paged.run_on_engine(lambda: paged.engine.rows.add_request(request))
    with pytest.raises(RequestError, match="1 requests run"), scoring(paged):
        raise AssertionError("not reached")
    paged.run_on_engine(lambda: paged.engine.rows.remove_request(request.request_id))


def test_forbidden_compiling_is_allowed_within_and_comes_back(paged: LLM) -> None:
    paged.engine.compilations.forbidden = True
    with scoring(paged):
        assert not paged.engine.compilations.forbidden
    assert paged.engine.compilations.forbidden
    paged.engine.compilations.forbidden = False


def test_the_figures_are_those_of_their_definitions() -> None:
    """Two tokens, a vocabulary of three, worked out by hand."""
    mine = np.log(np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.1, 0.8, 0.1]], np.float32))
    theirs = np.log(np.array([[0.25, 0.5, 0.25], [0.25, 0.5, 0.25], [0.1, 0.1, 0.8]], np.float32))
    passages = Passages(((0, 1, 2),), (0,), 0, 5)
    found = compare_scores(
        passages,
        [Scored((0, 1, 2), (1,), mine)],
        [Scored((0, 1, 2), (2,), theirs)],
        BYTES,
        BYTES,
    )
    kl = 0.25 * math.log(0.5) + 0.5 * math.log(2)
    assert found.prefill.max == pytest.approx(kl, abs=1e-6)
    assert found.prefill.mean == pytest.approx(kl / 2, abs=1e-6)
    shares = (found.prefill.p50, found.prefill.p90, found.prefill.p99)
    assert shares == pytest.approx((0.5 * kl, 0.9 * kl, 0.99 * kl), abs=1e-6)
    assert found.perplexity == pytest.approx(4.0, rel=1e-6)
    assert found.reference_perplexity == pytest.approx(math.exp(-math.log(0.125) / 2), rel=1e-6)
    assert found.same_argmax == 0.5
    assert found.decode.mean == pytest.approx(
        0.1 * math.log(0.1 / 0.8) + 0.8 * math.log(8), abs=1e-6
    )
    assert (found.num_scored, found.num_text_tokens, found.num_cut_tokens) == (2, 5, 2)
    assert found.passages[0].first_divergence == 0


def test_logits_that_are_not_finite_are_counted_and_kept_out() -> None:
    mine, theirs = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
    mine[0, 1] = np.nan
    passages = Passages(((0, 1),), (0,), 0, 2)
    bad, good = [Scored((0, 1), (0,), mine)], [Scored((0, 1), (0,), theirs)]
    found = compare_scores(passages, bad, good, BYTES, BYTES)
    assert found.num_nonfinite == 1
    assert found.perplexity is None
    assert found.reference_perplexity == pytest.approx(3.0)
    assert found.prefill.mean is None
    assert found.decode.mean == 0.0
    found = compare_scores(passages, good, bad, BYTES, BYTES)
    assert (found.num_nonfinite, found.prefill.mean, found.decode.mean) == (1, None, 0.0)
    assert (found.perplexity, found.reference_perplexity) == (pytest.approx(3.0), None)


def test_a_text_is_cut_into_passages_and_the_rest_is_told(paged: LLM) -> None:
    cut = split(paged, TEXT, EvalSizes(num_tokens=41, passage_len=20, new_tokens=4))
    whole = paged.tokenizer.encode(TEXT)
    assert cut.num_text_tokens == len(whole) - cut.num_known
    assert cut.starts[:2] == (0, 20)
    known, rest = whole[: cut.num_known], whole[cut.num_known :]
    for start, piece in zip(cut.starts, cut.token_ids, strict=True):
        assert list(piece) == known + rest[start : min(start + 20, 41)]
    assert cut.num_taken == (41 if cut.num_known else 40)  # one token alone cannot be scored
    with pytest.raises(InputError, match="at least 2 tokens"):
        split(
            paged,
            TEXT,
            EvalSizes(num_tokens=1 - min(cut.num_known, 1), passage_len=20, new_tokens=4),
        )
    with pytest.raises(
        InputError, match="passages of 158 tokens plus 4 new tokens in a context of 160"
    ):
        split(paged, TEXT, EvalSizes(passage_len=158, new_tokens=4))


@pytest.mark.long
@pytest.mark.usefixtures("pooled")
def test_the_reference_held_against_itself_differs_in_nothing() -> None:
    def make() -> LLM:
        return LLM(BRIEF, **SIZES, kernels={"attention": "xla", "linear": "xla"})

    found = evaluate(make, make, TEXT, EvalSizes(num_tokens=40, passage_len=40, new_tokens=6))
    assert found.prefill.max == found.decode.max == 0.0
    assert found.perplexity == found.reference_perplexity
    assert found.same_argmax == 1.0
    assert found.passages[0].first_divergence is None


@pytest.mark.long
@pytest.mark.usefixtures("pooled")
def test_a_wrong_kernel_is_seen_by_the_command(
    run: Callable[..., tuple[int, str, str]],
    config: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "text").write_text(TEXT)
    flags = ["--config", config, "--num-tokens", "30", "--new-tokens", "6", "--no-verify-kernels"]
    wrong = f"{HERE}:garbage_attention"
    code, out, err = run(
        "eval", "--text", str(tmp_path / "text"), *flags, "--attention", wrong, "--json"
    )
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert record["prefill"]["mean"] > 1e-3
    assert record["decode"]["mean"] > 1e-3
    assert record["perplexity"] != record["reference_perplexity"]
    assert record["passages"][0]["first_divergence"] is not None
    assert record["subject"]["kernels"]["attention"]["decode"] == wrong
    assert record["reference"]["kernels"]["attention"]["decode"] == "xla"
    print_tables(record)
    table = capsys.readouterr().out
    assert f"{record['prefill']['mean']:.4g}" in table
    assert f"{record['num_cut_tokens']} were cut" in table


def test_a_reference_is_in_float32_on_xla_but_for_what_is_said() -> None:
    subject = make_config(
        {"model": BRIEF, "dtype": "bfloat16", "engine": "oengine", "max_model_len": 96}
    )
    plain = reference_config(subject, None)
    assert (plain.model, plain.dtype, plain.engine.name, plain.max_model_len) == (
        BRIEF,
        "float32",
        "auto",
        96,
    )
    assert {choice.mixed for choice in plain.kernels.values()} == {"xla"}
    assert plain.quantization.name == "none"
    changed = reference_config(
        subject,
        "dtype=bfloat16,engine=oengine,max_model_len=64,attention.decode=native,"
        "quantization=int8,kv_cache_dtype=float16",
    )
    assert (changed.quantization.name, changed.kv_cache_dtype) == ("int8", "float16")
    assert (changed.dtype, changed.engine.name, changed.max_model_len) == (
        "bfloat16",
        "oengine",
        64,
    )
    assert (changed.kernels["attention"].decode, changed.kernels["attention"].mixed) == (
        "native",
        "xla",
    )


def test_bytes_are_counted_beside_those_of_plain_weights_and_caches() -> None:
    """Two layers with keys and values of two heads of 32: 4 bytes each plain, 2 in bfloat16."""
    sizes = {"dtype": "float32", "max_model_len": 64}
    plain = count_stored_bytes(make_plan(EngineConfig(model=BRIEF, **sizes)))
    assert plain.weights == plain.plain_weights
    assert plain.cache_of_token == plain.plain_cache_of_token == 2 * 2 * 2 * 32 * 4
    plan = make_plan(
        EngineConfig(model=BRIEF, quantization="int8", kv_cache_dtype="bfloat16", **sizes)
    )
    found = count_stored_bytes(plan)
    assert found.plain_weights == plain.weights
    assert 0.25 < found.weights / found.plain_weights < 0.3
    assert found.cache_of_token == plain.cache_of_token / 2
    assert found.plain_cache_of_token == plain.cache_of_token
    plan = make_plan(EngineConfig(model=BRIEF, kv_cache_dtype="int8", **sizes))
    found = count_stored_bytes(plan)
    assert found.cache_of_token == 2 * 2 * 2 * (32 + 2)  # a scale of 16 bits for each head
    assert found.plain_cache_of_token == plain.cache_of_token


@pytest.mark.slow
@pytest.mark.usefixtures("pooled")
def test_quantised_weights_are_compared_with_plain_ones(
    run: Callable[..., tuple[int, str, str]], config: str, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text(TEXT)
    flags = ["--config", config, "--num-tokens", "60", "--new-tokens", "4", "--json"]
    code, out, err = run("eval", "--text", str(tmp_path / "text"), *flags, "--quantization", "int8")
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert 0 < record["prefill"]["mean"] < 1e-2
    assert record["stored_bytes"]["weights"] < 0.3 * record["reference_stored_bytes"]["weights"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--text", "nowhere"], "a text file"),
        (["--text", "empty"], "which is empty"),
        (["--text", "bytes"], "UTF-8 text"),
        (["--text", "word"], "at least 2 tokens"),
        (["--text", "word", "--new-tokens", "0"], "--new-tokens 0"),
        (["--text", "word", "--reference", "dtype"], "--reference dtype"),
        (
            ["--text", "word", "--reference", "sampler=greedy"],
            "a kernel for add_rms_norm, all_gather, all_reduce, all_to_all, attention",
        ),
        (["--text", "word", "--reference", "dtype=int4"], "dtype"),
    ],
)
def test_wrong_input_is_told(
    flags: list[str],
    told: str,
    run: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "word").write_text("a")
    code, out, err = run(
        "eval", *flags, "--model", BRIEF, "--max-model-len", "160", "--num-tokens", "2"
    )
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err
