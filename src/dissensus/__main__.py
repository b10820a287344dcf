"""``python -m dissensus`` is the command ``dissensus``."""

from dissensus.cli import main

if __name__ == "__main__":
    main()
