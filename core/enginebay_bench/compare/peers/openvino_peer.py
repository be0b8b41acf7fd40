"""Answers runs with OpenVINO GenAI: python openvino_peer.py MODEL DTYPE. Needs openvino-genai, and
optimum-intel for a model that is not in OpenVINO's form yet.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def converted(model: str, folder: str) -> str:
    """The model in OpenVINO's form: itself, or written to the folder."""
    if Path(model).is_file() or Path(model, "openvino_model.xml").is_file():
        return model
    from optimum.intel import OVModelForCausalLM

    exported = OVModelForCausalLM.from_pretrained(
        model, export=True, compile=False, load_in_8bit=False
    )
    exported.save_pretrained(folder)
    return folder


def main() -> None:
    """Answer runs until the input ends; see enginebay_bench.compare.engine_process."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import numpy as np
    import openvino
    import openvino_genai

    model, dtype = sys.argv[1:3]
    precision = PRECISIONS[dtype]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = 2  # GB
    settings = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    with tempfile.TemporaryDirectory() as folder:
        source = converted(model, folder)  # once for a model, so it is no part of a start
        start_s = time.monotonic()
        pipeline = openvino_genai.ContinuousBatchingPipeline(source, scheduler, "CPU", settings)

    def write(record: object) -> None:
        answers.write(json.dumps(record) + "\n")
        answers.flush()

    def greedy(num: int) -> openvino_genai.GenerationConfig:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num
        config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
        config.eos_token_id, config.stop_token_ids = -1, set()
        return config

    def run(prompts: list[list[int]], new_tokens: list[int]) -> list[dict[str, object]]:
        tensors = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        begin_s = time.monotonic()
        found = pipeline.generate(tensors, [greedy(num) for num in new_tokens])
        end_s = time.monotonic() - begin_s
        records: list[dict[str, object]] = []
        for one in found:
            record: dict[str, object] = {"token_ids": list(one.m_generation_ids[0]), "end_s": end_s}
            first_ms = one.perf_metrics.get_ttft().mean
            if len(prompts) == 1 and 0 < first_ms < end_s * 1e3:
                record["first_s"] = first_ms / 1e3
            records.append(record)
        return records

    write(
        {
            "ready": {
                "name": f"OpenVINO GenAI {openvino_genai.__version__}",
                "platform": "cpu",
                "dtype": dtype,
                "compile_s": 0.0,
                "load_s": time.monotonic() - start_s,
            }
        }
    )
    for line in sys.stdin:
        asked = json.loads(line)
        found = run(asked["prompts"], asked["new_tokens"])
        write({"id": asked["id"], "requests": found})


if __name__ == "__main__":
    main()
