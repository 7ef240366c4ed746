"""``python -m curvlab``: the same as the console script ``curvlab``."""

import os
import sys
from contextlib import suppress

if __name__ == "__main__":
    with suppress(FileNotFoundError):  # the working folder may have been removed
        if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
            # Python has put it first: at the end its files hide no module that curvlab imports.
            sys.path.append(sys.path.pop(0))

    from curvlab.cli import main

    main()
