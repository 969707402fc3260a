"""``python -m lineage.cli``: the command line without its script."""

from lineage.cli import main

if __name__ == "__main__":
    main()
