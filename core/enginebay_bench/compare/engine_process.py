"""The process of a variant of ours: makes an LLM from a configuration, and answers runs.

Any program can follow its protocol. The first line of output is {"ready": facts}. Then each line of
input is a run: {"id": a number, "prompts": lists of token ids, "new_tokens": a number for each
prompt, "logprobs": how many per token}, greedy, end-of-sequence ignored. The line of output that
answers it is {"id": the same, "requests": a record for each prompt}, with `token_ids`, `text`, the
times `first_s` and `end_s` in seconds from the start of the run, the numbers of `cached` prompt
tokens and of `drafted` tokens, and `logprobs`, {token id: value} for each token. Lines of text in
`said` beside `requests` are printed with the results, the last run's alone. A program leaves out
what it does not know, but not `end_s` and the tokens or the text; one that only asks a server has
the fact `local`: false. {"error": text} says why it ends, with `input`: true if what it was given
is wrong. The end of the input ends the program.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginebay.serving import LLM


def facts(llm: LLM, compile_s: float) -> dict[str, Any]:
    """What is known of an engine before it runs: versions, sizes, dtypes, and its programs."""
    from enginebay import __version__

    plan = llm.plan
    return {
        "name": f"enginebay {__version__}",
        "platform": plan.platform.name,
        "dtype": llm.config.dtype,
        "weight_format": str(plan.weight_format),
        "num_token_ids": plan.model.info.num_token_ids,
        "max_model_len": llm.config.max_model_len,
        "weights_bytes": llm.engine.memory.weights_bytes,
        "compile_s": compile_s,
        "num_programs": llm.engine.compilations.count,
        "kernels": dict(plan.kernels.names),
    }


def answer_run(llm: LLM, run: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the requests together, and return a record for each."""
    from enginebay import SamplingParams

    params = [
        SamplingParams(
            max_tokens=num, temperature=0.0, ignore_eos=True, logprobs=run.get("logprobs") or None
        )
        for num in run["new_tokens"]
    ]
    start_s = time.monotonic()
    outputs = llm.generate([list(prompt) for prompt in run["prompts"]], params)
    records = []
    for output in outputs:
        [completion], metrics = output.outputs, output.metrics
        record = {
            "token_ids": completion.token_ids,
            "text": completion.text,
            "first_s": metrics.first_token_s - start_s,
            "end_s": metrics.finished_s - start_s,
            "cached": metrics.num_cached_tokens,
            "drafted": metrics.num_draft_tokens,
        }
        if completion.logprobs is not None:
            record["logprobs"] = completion.logprobs
        records.append(record)
    return records


def main() -> None:
    """Answer runs until the input ends. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from enginebay.cli.show import shadow_lines
    from enginebay.config import EngineConfig
    from enginebay.errors import EnginebayError, InputError
    from enginebay.serving import LLM

    def write(record: dict[str, Any]) -> None:
        answers.write(json.dumps(record) + "\n")
        answers.flush()

    try:
        with LLM(config=EngineConfig.model_validate_json(sys.argv[1])) as llm:
            start_s = time.monotonic()
            llm.warmup()
            write({"ready": facts(llm, time.monotonic() - start_s)})
            for line in sys.stdin:
                run = json.loads(line)
                answer = {"id": run["id"], "requests": answer_run(llm, run)}
                shadow = llm.shadow_report()
                write(answer if shadow is None else {**answer, "said": shadow_lines(shadow)})
    except EnginebayError as error:
        write({"error": str(error), "input": isinstance(error, InputError)})
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
