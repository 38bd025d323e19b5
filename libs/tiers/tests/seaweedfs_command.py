"""The command `weed` of the environment that this runs in."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    found = [path for entry in sys.path if (path := Path(entry, "bin", "weed")).is_file()]
    if not found:
        sys.exit("seaweedfs_command: no bin/weed beside what is on sys.path")
    os.execv(found[0], [str(found[0]), *sys.argv[1:]])
