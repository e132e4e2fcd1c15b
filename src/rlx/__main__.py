"""`python -m rlx` is the command `rlx`."""

import sys

from rlx.cli.main import main

sys.exit(main())
