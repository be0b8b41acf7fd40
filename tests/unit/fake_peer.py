"""A program that answers runs of a comparison: python fake_peer.py [FAULT...].

Its tokens follow from the prompt. `dies` and `stops` are faults of the third run; `slow` takes 30
times as long for each token, `near` and `wrong` change a token, `short` leaves out the last one.
`cheats` is wrong only where nobody asks for log-probabilities, `sleeps` takes 0.8 s more for a run,
`boasts` tells wrong times, `ahead` answers twice, and a NAME=VALUE is a field of each answer.
`says` says a line with each answer, and `refuses` ends with an error about its input.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

TOKEN_S = 0.0005


def tokens(prompt: list[int], num: int) -> list[int]:
    """What a right program answers."""
    return [(sum(prompt) + place) % 97 for place in range(num)]


def answered(prompt: list[int], num: int, faults: set[str], begin_s: float) -> dict[str, Any]:
    """The record of a request, after the time that its tokens take."""
    found = tokens(prompt, num - ("short" in faults and num > 1))
    logprobs = [{token: -0.1, token + 1: -0.1001, token + 2: -3.0} for token in found]
    found[-1] += 1 if "near" in faults else 2 if "wrong" in faults else 0
    first_s = time.monotonic() - begin_s + TOKEN_S
    time.sleep(TOKEN_S * num * (30 if "slow" in faults else 1))
    fields = dict(fault.split("=", 1) for fault in faults if "=" in fault)
    record = {"token_ids": found, "text": " ".join(map(str, found)), "logprobs": logprobs}
    record |= {"first_s": first_s, "end_s": time.monotonic() - begin_s}
    return record | {name: json.loads(value) for name, value in fields.items()}


def main() -> None:
    """Answer runs until the input ends."""
    faults = set(sys.argv[1:])
    platform = "cuda" if "cuda" in faults else "cpu"
    facts = {"name": "a fake", "num_token_ids": 500, "dtype": "float32", "platform": platform}
    if "bfloat16" in faults:
        facts["dtype"] = "bfloat16"
    if "refuses" in faults:
        print(json.dumps({"error": "no such setting", "input": True}), flush=True)
        return
    print(json.dumps({"ready": facts}), flush=True)
    for number, line in enumerate(sys.stdin):
        run, begin_s = json.loads(line), time.monotonic()
        if number == 2 and "dies" in faults:
            print("no more memory", file=sys.stderr)
            raise SystemExit(3)
        if number == 2 and "stops" in faults:
            time.sleep(600)
        each = zip(run["prompts"], run["new_tokens"], strict=True)
        requests = [answered(prompt, num, faults, begin_s) for prompt, num in each]
        if "cheats" in faults and not run["logprobs"]:
            for request in requests:
                request["token_ids"] = [*request["token_ids"][:-1], 0]
        time.sleep(0.8 * ("sleeps" in faults))
        if "boasts" in faults:
            requests = [request | {"first_s": 1e-6, "end_s": 2e-6} for request in requests]
        said = [f"run {number} is done"] if "says" in faults else []
        print(json.dumps({"id": run["id"], "requests": requests, "said": said}), flush=True)
        if "ahead" in faults:
            print(json.dumps({"id": run["id"], "requests": requests}), flush=True)


if __name__ == "__main__":
    main()
