"""How much longer a request takes while a server still compiles.

    python -m tests.benchmarks.start_sweep MODEL.gguf --out sweep.json

Starts `enginebay serve` and, a second after it is ready, sends prompts of many lengths and batches
of many sizes, some guided, with log-probabilities or with an adapter. When every program is there,
it sends the same requests again. A request has waited when it took more than LIMIT_S and more than
LIMIT_RATIO times as long as the last time. The machine should be idle. Flags after `--` are those
of `serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save_file

from enginebay_models.opening import open_stored_model
from tests.ports import free_port

LENGTHS = tuple(round(8 * 1.135**n) for n in range(40))
"""Words of the prompts: 8 to 1,118, about as many tokens."""
BATCHES = (1, 2, 3, 4, 6, 8, 11, 13, 16, 20, 24, 32)
KINDS = ("plain", "guided", "log-probabilities", "adapter", "sampled")
MAX_TOKENS = 16
LIMIT_S, LIMIT_RATIO = 2.0, 1.5
START_DEADLINE_S, POLL_S = 600.0, 0.05
WORDS = ("sun", "moon", "river", "stone", "snail", "garden", "winter", "letter", "green", "seven")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """Requests that are sent at the same time: how many, words of each prompt, and what else they
    need.
    """

    kind: str
    num_words: int
    num_requests: int

    def bodies(self, salt: str) -> list[dict[str, Any]]:
        """The bodies; `salt` keeps the prefixes of one run from another."""
        rng = random.Random(f"{self}")
        return [self._body(rng, salt) for _ in range(self.num_requests)]

    def _body(self, rng: random.Random, salt: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": "tuned" if self.kind == "adapter" else "m",
            "prompt": " ".join(rng.choices(WORDS, k=self.num_words)),
            "max_tokens": MAX_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_salt": salt,
        }
        if self.kind == "guided":
            body |= {"guided_json": SCHEMA, "ignore_eos": False, "max_tokens": 2 * MAX_TOKENS}
        if self.kind == "log-probabilities":
            body |= {"logprobs": 5}
        if self.kind == "sampled":
            body |= {"temperature": 0.8, "top_p": 0.9, "seed": rng.randrange(1000)}
        return body


def sweep() -> list[Asked]:
    """All requests, in an order without a pattern."""
    single = [Asked(KINDS[n % len(KINDS)], words, 1) for n, words in enumerate(LENGTHS)]
    batches = [Asked(KINDS[n % len(KINDS)], 12, count) for n, count in enumerate(BATCHES)]
    asked = single + batches
    random.Random(0).shuffle(asked)
    return asked


def write_adapter(folder: Path, model: str) -> Path:
    """Write a random adapter of rank 8 for the queries and values of a Llama model."""
    config = open_stored_model(model).config
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    outputs = {"q_proj": heads * width, "v_proj": config["num_key_value_heads"] * width}
    rng, tensors = np.random.default_rng(0), {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (8, hidden)), ("B", (size, 8))):
                values = rng.normal(size=shape) / np.sqrt(hidden)
                tensors[f"{prefix}.lora_{part}.weight"] = values.astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    fields = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "bias": "none"}
    fields["target_modules"] = list(outputs)
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


async def send(client: httpx.AsyncClient, asked: Asked, salt: str) -> tuple[float, list[str]]:
    """Send the requests of one place of the sweep. Returns the seconds of the slowest one, and the
    texts.
    """

    async def one(body: dict[str, Any]) -> tuple[float, str]:
        began_s = time.perf_counter()
        answer = await client.post("/v1/completions", json=body)
        answer.raise_for_status()
        return time.perf_counter() - began_s, answer.json()["choices"][0]["text"]

    found = await asyncio.gather(*(one(body) for body in asked.bodies(salt)))
    return max(seconds for seconds, _ in found), [text for _, text in found]


async def coming(client: httpx.AsyncClient) -> int:
    """How many programs are still to be compiled."""
    text = (await client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("enginebay:programs_coming")]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))


async def measure(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """Both runs of the sweep; a row for each place."""
    began_s = time.perf_counter()
    while True:
        with contextlib.suppress(httpx.TransportError):
            if (await client.get("/readiness")).status_code == httpx.codes.OK:
                break
        if time.perf_counter() > began_s + START_DEADLINE_S:
            sys.exit("the server did not become ready")
        await asyncio.sleep(POLL_S)
    print(f"ready after {time.perf_counter() - began_s:.1f} s", flush=True)
    await asyncio.sleep(1.0)
    rows = []
    for asked in sweep():
        left = await coming(client)
        seconds, texts = await send(client, asked, "first")
        rows.append({**dataclasses.asdict(asked), "coming": left, "first_s": seconds})
        rows[-1]["texts"] = texts
    while await coming(client):
        await asyncio.sleep(1.0)
    await asyncio.sleep(3.0)
    print(f"all programs after {time.perf_counter() - began_s:.1f} s", flush=True)
    for salt in ("second", "third"):  # a second time, because a lean program may only now compile
        for row, asked in zip(rows, sweep(), strict=True):
            row["later_s"], texts = await send(client, asked, salt)
            row["equal"] = texts == row["texts"]
    return rows


def report(rows: list[dict[str, Any]]) -> int:
    """Print the rows that waited or whose texts differ, and the count. 1 if there are any."""
    bad = 0
    for row in sorted(rows, key=lambda row: row["later_s"] / row["first_s"]):
        ratio = row["first_s"] / row["later_s"]
        waited = row["first_s"] > LIMIT_S and ratio > LIMIT_RATIO
        marks = ["WAITED"] * waited + ["DIFFERS"] * (not row["equal"])
        bad += bool(marks)
        print(
            f"{row['first_s']:7.2f} s, later {row['later_s']:6.2f} s, {ratio:5.2f} times  "
            f"{row['kind']}, {row['num_words']} words, {row['num_requests']} at once, "
            f"{row['coming']} programs coming",
            *marks,
        )
    longest = max(row["first_s"] for row in rows)
    over = sum(row["first_s"] > LIMIT_RATIO * row["later_s"] for row in rows)
    print(
        f"{len(rows)} places, {bad} waited or differ; longest {longest:.2f} s; "
        f"{over} over {LIMIT_RATIO} times"
    )
    return int(bad > 0)


def main() -> int:
    """Run the sweep against a new server."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.start_sweep", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--cache", type=Path, help="the folder of caches; an empty one without")
    parser.add_argument("flags", nargs="*", help="flags of `enginebay serve`, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        adapter, port = write_adapter(folder / "adapter", args.model), free_port()
        command = [sys.executable, "-m", "enginebay", "serve", args.model]
        command += ["--served-model-name", "m", "--lora", f"tuned={adapter}", "--port", str(port)]
        environment = {**os.environ, "XDG_CACHE_HOME": str(args.cache or folder)}
        with subprocess.Popen([*command, *args.flags], env=environment) as process:
            try:
                rows = asyncio.run(_measured(port))
            finally:
                process.send_signal(signal.SIGTERM)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return report(rows)


async def _measured(port: int) -> list[dict[str, Any]]:
    limits = httpx.Limits(max_connections=max(BATCHES))
    address = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=address, timeout=600.0, limits=limits) as client:
        return await measure(client)


if __name__ == "__main__":
    sys.exit(main())
