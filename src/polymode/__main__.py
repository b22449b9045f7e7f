"""``python -m polymode`` is the command line."""

import sys

from polymode.application.cli import main

sys.exit(main())
