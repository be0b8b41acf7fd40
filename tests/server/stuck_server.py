"""`enginebay` whose adapters are never read to their end, and whose steps never end while the file
that ENGINEBAY_TESTS_HANG names exists: as with a disk, or a device, that does not answer.

python -m tests.server.stuck_server serve demo
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from enginebay.cli.program import main
from enginebay.serving.steps import StepRunner
from enginebay_lora import peft
from enginebay_server import serving
from tests.pool import few_sizes

END_S = 3.0


def hang(*_: Any, **__: Any) -> Any:
    """Never return."""
    threading.Event().wait()


if __name__ == "__main__":
    launch, flag = StepRunner.launch, Path(os.environ["ENGINEBAY_TESTS_HANG"])
    StepRunner.launch = lambda *args: hang() if flag.exists() else launch(*args)  # type: ignore[method-assign]
    peft.read_regular = hang
    serving.END_S = END_S
    with few_sizes():
        sys.exit(main())
