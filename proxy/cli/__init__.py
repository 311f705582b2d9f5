"""The command line: `main` defines the commands and options, the other modules implement them."""
