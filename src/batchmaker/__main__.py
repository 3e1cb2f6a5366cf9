"""`python -m batchmaker`: the command line."""

from batchmaker.cli.main import main

if __name__ == "__main__":
    main()
