"""``python -m curvlab``: the same as the console script ``curvlab``."""

from curvlab.cli import main

if __name__ == "__main__":
    main()
