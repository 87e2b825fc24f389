"""Run the command `jzero` as `python -m jzero`."""

import sys

from jzero.cli import main

sys.exit(main())
