"""``python -m stablemask.cli`` is the ``stablemask`` command."""

import sys

from stablemask.cli import main

if __name__ == "__main__":
    sys.exit(main())
