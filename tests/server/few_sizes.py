"""`enginebay` whose engines pad every step to one size, so that a server compiles four programs.

python -m tests.server.few_sizes serve demo
"""

from __future__ import annotations

import sys

from enginebay.cli.program import main
from tests.pool import few_sizes

if __name__ == "__main__":
    with few_sizes():
        sys.exit(main())
