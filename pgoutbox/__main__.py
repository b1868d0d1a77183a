"""`python -m pgoutbox` is the command `pgoutbox`."""

import sys

from pgoutbox.cli.main import main

sys.exit(main())
