"""``python -m finray``: the command line."""

from finray.cli.main import main

if __name__ == "__main__":
    main()
