"""`python -m proxy` runs the command line."""

from proxy.cli.main import main

if __name__ == "__main__":
    main()
