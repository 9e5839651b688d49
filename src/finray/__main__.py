"""``python -m finray``: the command line."""

from finray.cli.start import main

if __name__ == "__main__":
    main()
