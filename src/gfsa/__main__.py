"""``python -m gfsa``, for launchers that start modules."""

from gfsa.cli import main

if __name__ == "__main__":
    main()
