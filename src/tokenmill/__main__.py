"""`python -m tokenmill`: the command, where its script is not on the path."""

from tokenmill.cli.main import main

if __name__ == "__main__":
    main()
