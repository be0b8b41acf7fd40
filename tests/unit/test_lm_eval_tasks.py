"""Tasks of lm-eval over an LLM: real ones, from files of the test's own. `pip install
"enginebay[eval]"` brings what this needs.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay_bench.evaluate import log_softmax
from enginebay_testing.reference import ReferenceModel
from tests.brief import BRIEF
from tests.unit.serving import SIZES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("llm"),
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None,
        reason='lm-eval is not installed: the extra "eval" has it',
    ),
]
BEGINNINGS = ["Once upon a time, there was a", "The little fox", "One day, a boy"]
CHOICES = [" girl", " telephone", " of", " zebra"]
TEXTS = ["Once upon a time, there was a little fox.", "The sun was warm. " * 40]
NUM_NEW = 6


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BRIEF, **SIZES) as made:
        yield made


def write_task(folder: Path, name: str, documents: list[dict[str, Any]], lines: list[str]) -> None:
    """A task as lm-eval's own are: a YAML file, here over a JSON file."""
    data = folder / f"{name}.json"
    data.write_text("\n".join(map(json.dumps, documents)), encoding="utf-8")
    head = [
        f"task: {name}",
        "dataset_path: json",
        f"dataset_kwargs: {{data_files: {{test: {json.dumps(str(data))}}}}}",
        "test_split: test",
    ]
    (folder / f"{name}.yaml").write_text("\n".join([*head, *lines]), encoding="utf-8")


def results_of(llm: LLM, folder: Path, name: str) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    from enginebay_bench.lm_eval import EnginebayLM

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(model=EnginebayLM(llm), tasks=[name], task_manager=manager)
    assert found is not None
    results: dict[str, Any] = found["results"][name]
    return results


def scored(reference: ReferenceModel, token_ids: list[int], count: int) -> float:
    """Log-probability of the last `count` tokens, by the model without engine and cache."""
    logprobs = log_softmax(reference.logits(token_ids))
    start = len(token_ids) - count
    return float(logprobs[np.arange(start - 1, len(token_ids) - 1), token_ids[start:]].sum())


def sum_of(reference: ReferenceModel, llm: LLM, context: str, continuation: str) -> float:
    """The same of a text after another."""
    special, before = (
        llm.tokenizer.encode(""),
        llm.tokenizer.encode(context, add_special_tokens=False),
    )
    whole = [*special, *llm.tokenizer.encode(context + continuation, add_special_tokens=False)]
    return scored(reference, whole, len(whole) - len(special) - len(before))


def test_a_multiple_choice_task_is_the_models_choice(llm: LLM, tmp_path: Path) -> None:
    reference = ReferenceModel(llm.plan)
    best = [
        int(np.argmax([sum_of(reference, llm, text, choice) for choice in CHOICES]))
        for text in BEGINNINGS
    ]
    gold = [best[0], best[1], (best[2] + 1) % len(CHOICES)]  # the last one is wrong
    documents = [
        {"text": t, "choices": CHOICES, "gold": g} for t, g in zip(BEGINNINGS, gold, strict=True)
    ]
    lines = [
        "output_type: multiple_choice",
        'doc_to_text: "{{text}}"',
        'doc_to_choice: "{{choices}}"',
        "doc_to_target: gold",
        'target_delimiter: ""',
        "metric_list: [{metric: acc}]",
    ]
    write_task(tmp_path, "chosen", documents, lines)
    assert results_of(llm, tmp_path, "chosen")["acc,none"] == pytest.approx(2 / 3)


def test_a_generating_task_gets_the_engines_text(llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=NUM_NEW)
    texts = [output.outputs[0].text for output in llm.generate(BEGINNINGS, params)]
    stop = texts[0].split()[-1]
    targets = [texts[0].partition(stop)[0], texts[1].partition(stop)[0], "something else"]
    assert targets[0] not in (texts[0], "")
    documents = [{"text": t, "target": a} for t, a in zip(BEGINNINGS, targets, strict=True)]
    lines = [
        "output_type: generate_until",
        'doc_to_text: "{{text}}"',
        'doc_to_target: "{{target}}"',
        (
            f"generation_kwargs: {{until: [{json.dumps(stop)}], max_gen_toks: {NUM_NEW}, "
            "do_sample: false, temperature: 0.0}"
        ),
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]",
    ]
    write_task(tmp_path, "generated", documents, lines)
    assert results_of(llm, tmp_path, "generated")["exact_match,none"] == pytest.approx(2 / 3)


def test_a_perplexity_task_scores_every_token_once(llm: LLM, tmp_path: Path) -> None:
    reference = ReferenceModel(llm.plan)
    lines = [
        "output_type: loglikelihood_rolling",
        'doc_to_text: ""',
        'doc_to_target: "{{text}}"',
        "metric_list: [{metric: bits_per_byte}]",
    ]
    write_task(tmp_path, "scored", [{"text": TEXTS[0]}], lines)
    first, most = llm.plan.checkpoint.token_info.bos_token_id, SIZES["max_model_len"] - 2

    def bits(text: str, total: float) -> float:
        return -total / len(text.encode()) / math.log(2)

    short = [first, *llm.tokenizer.encode(TEXTS[0], add_special_tokens=False)]
    expected = bits(TEXTS[0], scored(reference, short, len(short) - 1))
    assert results_of(llm, tmp_path, "scored")["bits_per_byte,none"] == pytest.approx(
        expected, rel=1e-4
    )
    write_task(tmp_path, "long", [{"text": TEXTS[1]}], lines)
    long = [first, *llm.tokenizer.encode(TEXTS[1], add_special_tokens=False)]
    rest = len(long) - 1 - most
    assert 0 < rest < most, "two windows"
    total = scored(reference, long[: most + 1], most) + scored(reference, long[rest:], rest)
    found = results_of(llm, tmp_path, "long")["bits_per_byte,none"]
    assert found == pytest.approx(bits(TEXTS[1], total), rel=1e-4)
