"""`python -m enginebay`."""

import sys

from enginebay.cli.main import main

sys.exit(main())
