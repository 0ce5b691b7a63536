"""``python -m evenhand.simulation.vtc``."""

import sys

from evenhand.simulation.vtc.main import main

if __name__ == "__main__":
    sys.exit(main())
