"""The command `lmcache` of the environment that this runs in."""

import sys

if __name__ == "__main__":
    from lmcache.cli.main import main

    sys.exit(main())
