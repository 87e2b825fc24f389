"""`python -m jzero` is `jzero`."""

import sys

from jzero.cli import main

sys.exit(main())
