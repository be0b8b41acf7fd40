"""Runs llama.cpp for the tests, in an environment that has llama-cpp-python and not enginebay: it
reads a job as JSON, and writes its result as JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp


def tokenize(path: str, texts: list[str]) -> list[list[int]]:
    """Token ids of texts, with special tokens parsed and added."""
    model = llama_cpp.Llama(path, vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=True, special=True) for text in texts]


def logits(path: str, token_ids: list[int]) -> list[list[float]]:
    """Logits at every token."""
    f32 = llama_cpp.GGML_TYPE_F32
    model = llama_cpp.Llama(
        path, n_ctx=512, logits_all=True, verbose=False, n_threads=2, type_k=f32, type_v=f32
    )
    model.eval(token_ids)
    scores: list[list[float]] = model.scores[: len(token_ids)].tolist()
    return scores


def quantize(path: str, made: str, kind: str, *, pure: bool) -> None:
    """Quantise a file with llama.cpp's own tool."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.pure = pure
    params.nthread = 2
    done = llama_cpp.llama_model_quantize(path.encode(), made.encode(), ctypes.byref(params))
    assert done == 0, (path, kind)


def main() -> None:
    job: dict[str, Any] = json.load(sys.stdin)
    does = {"tokenize": tokenize, "logits": logits, "quantize": quantize}[job.pop("do")]
    out = Path(job.pop("out"))
    out.write_text(json.dumps(does(**job)), encoding="utf-8")


if __name__ == "__main__":
    main()
