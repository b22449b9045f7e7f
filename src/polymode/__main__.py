"""``python -m polymode`` is the command line."""

import sys

from polymode.cli import main

sys.exit(main())
