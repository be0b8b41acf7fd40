"""Measures transformers on torch: static cache, compiled forward pass. Each figure is one JSON
line.

python tools/gpu_check/with_torch.py --folder F --model M [--batches 1,8] [--tiny]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import shapes
from lifetime import end_with_parent


class StopAt:
    """A stopping criterion of transformers: every row ends at this length."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, ids: Any, scores: Any, **settings: Any) -> Any:
        return ids.new_full((ids.shape[0],), ids.shape[1] >= self._length).bool()


def main() -> int:
    """Print decode rates for each batch size, or without torch a line that says so."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", required=True, choices=shapes.MODELS)
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        print(
            json.dumps(
                {
                    "figure": f"{args.model}, transformers",
                    "value": None,
                    "unit": "torch is not installed",
                }
            )
        )
        return 0
    end_with_parent()
    measure(args)
    return 0


def measure(args: argparse.Namespace) -> None:
    """Print the rate of each batch size; where torch.compile fails, measure without it
    and say so.
    """
    import torch
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = shapes.config(args.model, tiny=args.tiny)
    folder = shapes.write(args.folder, config, "float32" if args.tiny else "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device).eval()
    model.generation_config.eos_token_id = None
    prompt, new = (8, 24) if args.tiny else (1024, 128)
    settings = {"do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    if args.tiny:
        settings["disable_compile"] = True

    def timed(batch: int, count: int) -> float:
        ids = torch.randint(3, config["vocab_size"], (batch, prompt), device=device)
        # One cache length, and therefore one compiled program, for short and long outputs.
        enough = StopAt(prompt + count)
        start = time.perf_counter()
        mask = torch.ones_like(ids)
        model.generate(
            ids, attention_mask=mask, max_new_tokens=new, stopping_criteria=[enough], **settings
        )
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def rate(batch: int) -> float | None:
        # Compile again for each batch: earlier programs would make the next batch's sizes symbolic.
        torch._dynamo.reset()
        model.__dict__.pop("_compiled_call", None)
        timed(batch, 2)
        timed(batch, new)
        span = statistics.median(timed(batch, new) - timed(batch, 2) for _ in range(3))
        return batch * (new - 2) / span if span > 0 else None

    for batch in (int(part) for part in args.batches.split(",")):
        unit = "tokens/s"
        try:
            value = rate(batch)
        except (TorchDynamoException, InductorError) as error:
            if settings.get("disable_compile"):
                raise
            print(f"torch.compile failed, measuring without it: {error}", file=sys.stderr)
            settings["disable_compile"] = True
            value = rate(batch)
        if settings.get("disable_compile"):
            unit += ", not compiled"
        figure = f"{args.model}, transformers, batch {batch}"
        print(
            json.dumps({"figure": figure, "value": value, "unit": unit, "fraction": None}),
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
