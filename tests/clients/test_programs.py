"""The command-line program `llm`, and tasks of lm-eval with `local-completions`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.clients.conftest import KEY, program, run, run_script
from tests.server.process import ServerProcess

if TYPE_CHECKING:
    from enginebay import LLM

MODELS = """\
- model_id: demo
  model_name: demo
  api_base: "URL/v1"
  api_key_name: enginebay
  supports_tools: true
  supports_schema: true
- model_id: demo-text
  model_name: demo
  api_base: "URL/v1"
  api_key_name: enginebay
  completion: true
"""
BRIEF = ("-o", "max_tokens", "8")
BEGINNINGS = ["Once upon a time, there was a", "The little fox", "One day, a boy"]
CHOICES = [" girl", " telephone", " of"]
TEXT = "Once upon a time, there was a little fox."
UNTIL, NUM_NEW = ".", 12


@pytest.fixture
def ask(server: ServerProcess, tmp_path: Path) -> Callable[..., str]:
    """Runs `llm` with a folder of its own, which names the server's model."""
    models = MODELS.replace("URL", server.url)
    (tmp_path / "extra-openai-models.yaml").write_text(models, encoding="utf-8")
    (tmp_path / "keys.json").write_text(json.dumps({"enginebay": KEY}), encoding="utf-8")
    return lambda *words: run(program("llm", "llm"), *words, LLM_USER_PATH=str(tmp_path)).strip()


def test_llm_prompts_and_continues_a_conversation(
    ask: Callable[..., str], answer: Callable[..., Any], llm: LLM
) -> None:
    expected = answer().choices[0].message.content
    assert ask("-m", "demo", "Hello!", *BRIEF) == expected.strip()
    assert ask("-m", "demo", "Hello!", "--no-stream", *BRIEF) == expected.strip()
    [logged] = json.loads(ask("logs", "--json", "-n", "1"))
    usage = answer().usage
    assert logged["input_tokens"] == usage.prompt_tokens
    assert logged["output_tokens"] == usage.completion_tokens
    messages = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": expected},
        {"role": "user", "content": "Why?"},
    ]
    continued = answer(messages=messages).choices[0].message.content
    assert ask("-c", "Why?", *BRIEF) == continued.strip()
    completed = llm.generate("One day", {"max_tokens": 8})[0].outputs[0].text
    assert ask("-m", "demo-text", "One day", *BRIEF) == completed.strip()


def test_llm_gets_objects_of_a_schema_and_offers_tools(ask: Callable[..., str]) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["sun", "rain"]}},
        "required": ["kind"],
        "additionalProperties": False,
    }
    found = json.loads(ask("-m", "demo", "--schema", json.dumps(schema), "The weather?"))
    assert found["kind"] in ("sun", "rain")
    assert ask("-m", "demo", "-T", "llm_version", "Hello!", *BRIEF)


def write_task(folder: Path, name: str, documents: Sequence[Any], lines: Sequence[str]) -> None:
    """Write a task as lm-eval's own are: a YAML file, here over a JSON file."""
    data = folder / f"{name}.json"
    data.write_text("\n".join(map(json.dumps, documents)), encoding="utf-8")
    head = [
        f"task: {name}",
        "dataset_path: json",
        f"dataset_kwargs: {{data_files: {{test: {json.dumps(str(data))}}}}}",
        "test_split: test",
    ]
    (folder / f"{name}.yaml").write_text("\n".join([*head, *lines]), encoding="utf-8")


@pytest.fixture(scope="module")
def evaluated(
    server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Results and samples of three tasks, by their batch size."""
    folder = tmp_path_factory.mktemp("tasks")
    asked = ['doc_to_text: "{{text}}"', 'doc_to_target: "{{target}}"', 'target_delimiter: ""']
    chosen = ["output_type: multiple_choice", f"doc_to_choice: {json.dumps(CHOICES)}", *asked]
    write_task(
        folder,
        "chosen",
        [{"text": one, "target": 0} for one in BEGINNINGS],
        [*chosen, "metric_list: [{metric: acc}]"],
    )
    limits = f"until: [{json.dumps(UNTIL)}], max_gen_toks: {NUM_NEW}, temperature: 0.0"
    write_task(
        folder,
        "generated",
        [{"text": one, "target": "x"} for one in BEGINNINGS],
        [
            "output_type: generate_until",
            *asked,
            f"generation_kwargs: {{{limits}}}",
            "metric_list: [{metric: exact_match, aggregation: mean}]",
        ],
    )
    write_task(
        folder,
        "scored",
        [{"target": TEXT}],
        [
            "output_type: loglikelihood_rolling",
            'doc_to_text: ""',
            'doc_to_target: "{{target}}"',
            "metric_list: [{metric: bits_per_byte}]",
        ],
    )
    return run_script("lm-eval", server.url, KEY, str(folder))


def scored(llm: LLM, text: str, before: str | None) -> float:
    """Log-probability of a text after another, or after the first token of every text."""
    encode = llm.tokenizer.encode
    ids = encode((before or "") + text, add_special_tokens=False)
    if before is None:
        ids = [llm.plan.checkpoint.token_info.bos_token_id, *ids]
    first = 1 if before is None else len(encode(before, add_special_tokens=False))
    [output] = llm.generate([ids], {"max_tokens": 1, "prompt_logprobs": 0})
    pairs = list(zip(ids, output.prompt_logprobs, strict=True))[first:]
    return sum(best[token_id] for token_id, best in pairs)


@pytest.mark.parametrize("batch_size", ["1", "3"])
def test_lm_evals_likelihoods_are_the_models(
    evaluated: dict[str, Any], llm: LLM, batch_size: str
) -> None:
    found = evaluated[batch_size]
    right = 0
    for text, [responses, _] in zip(BEGINNINGS, found["samples"]["chosen"], strict=True):
        expected = [scored(llm, choice, text) for choice in CHOICES]
        assert [value for value, _ in responses] == pytest.approx(expected, abs=1e-3)
        right += expected.index(max(expected)) == 0
    assert found["results"]["chosen"]["acc,none"] == pytest.approx(right / len(BEGINNINGS))
    bits = -scored(llm, TEXT, None) / len(TEXT.encode()) / math.log(2)
    assert found["results"]["scored"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-4)


@pytest.mark.parametrize("batch_size", ["1", "3"])
def test_lm_eval_generates_the_models_text(
    evaluated: dict[str, Any], llm: LLM, batch_size: str
) -> None:
    samples = evaluated[batch_size]["samples"]["generated"]
    params = {"max_tokens": NUM_NEW, "stop": [UNTIL]}
    expected = [output.outputs[0].text for output in llm.generate(BEGINNINGS, params)]
    assert [responses[0] for responses, _ in samples] == expected
