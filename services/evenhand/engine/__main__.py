"""``python -m evenhand.engine``."""

import sys

from evenhand.engine.main import run_module

if __name__ == "__main__":
    sys.exit(run_module())
