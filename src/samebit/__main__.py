"""`python -m samebit` is the `samebit` command."""

import sys

from samebit.cli import main

if __name__ == "__main__":
    sys.exit(main())
