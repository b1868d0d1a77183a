"""`python -m pgoutbox` is the command `pgoutbox`."""

import sys

from pgoutbox.cli import main

sys.exit(main())
