"""Scores passages and answers chats with llama.cpp, for tools/format_table.py, in an environment
that has llama-cpp-python and not enginebay: reads a job as JSON, writes the logits of all tokens as
f32 .npy, and prints the answers' token ids as JSON. A job that names a type of weights converts the
file first, by llama.cpp's own quantisation.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np


def main() -> None:
    """Run the job on stdin."""
    job: dict[str, Any] = json.load(sys.stdin)
    leave_out_extra_buffers()
    kind = getattr(llama_cpp, f"GGML_TYPE_{job['kind'].upper()}")
    if job["weights"]:
        convert(job["gguf"], job["model"], job["weights"])
    model = llama_cpp.Llama(
        job["model"],
        n_ctx=1024,
        n_batch=512,
        logits_all=True,
        verbose=False,
        n_threads=2,
        type_k=kind,
        type_v=kind,
        flash_attn=True,  # without it values are not quantised
    )
    scores = []
    for ids in job["passages"]:
        model.reset()
        model.eval(ids)
        scores.append(model.scores[: len(ids)].astype(np.float32))
    np.save(job["out"], np.concatenate(scores))
    answers = []
    for ids in job["prompts"]:
        model.reset()
        model.eval(ids)
        answer: list[int] = []
        while len(answer) < job["new_tokens"]:
            answer.append(int(model.scores[model.n_tokens - 1].argmax()))
            model.eval(answer[-1:])
        answers.append(answer)
    print(json.dumps(answers))


def leave_out_extra_buffers() -> None:
    """Load models without the buffers of a processor's own: those for AMX crash in 0.3.36."""
    library = llama_cpp.llama_cpp
    defaults = library.llama_model_default_params

    def plain() -> Any:
        params = defaults()
        params.use_extra_bufts = False
        return params

    library.llama_model_default_params = plain


def convert(source: str, target: str, weights: str) -> None:
    """Write a file's model with weights of another type, unless it has been written.

    Args:
        source: path of the GGUF file.
        target: path of the new one.
        weights: a name of llama.cpp's, such as "ALL_F32".
    """
    if Path(target).exists():
        return
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{weights}")
    params.allow_requantize = True
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp cannot write {target}")


if __name__ == "__main__":
    main()
