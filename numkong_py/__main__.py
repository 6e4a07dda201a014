"""``python -m numkong_py``: the command line."""

import sys

from .cli import main

sys.exit(main())
