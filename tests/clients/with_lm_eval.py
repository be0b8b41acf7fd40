"""Run by the Python of lm-eval's environment: `with_lm_eval.py URL KEY FOLDER`.
Runs the tasks of the folder with `local-completions`, and prints their results and samples as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

URL, KEY, FOLDER = sys.argv[1:]
TASKS = ["chosen", "generated", "scored"]


def main() -> dict[str, Any]:
    manager = TaskManager(include_path=FOLDER, include_defaults=False)
    os.environ["OPENAI_API_KEY"] = KEY
    given = f"model=demo,base_url={URL}/v1/completions,auth_token={KEY},max_length=256"
    found = {}
    for batch_size in (1, 3):
        results = lm_eval.simple_evaluate(
            model="local-completions",
            model_args=given,
            batch_size=batch_size,
            tasks=TASKS,
            task_manager=manager,
            bootstrap_iters=0,
        )
        samples = {
            task: [[one["filtered_resps"], one["arguments"]] for one in results["samples"][task]]
            for task in TASKS
        }
        found[batch_size] = {"results": results["results"], "samples": samples}
    return found


if __name__ == "__main__":
    print(json.dumps(main(), default=str))
