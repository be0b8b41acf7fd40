"""`python -m enginebay`."""

import sys

from enginebay.cli import main

sys.exit(main())
