"""Runs the command line as `python -m ultraattn.cli`, which torchrun can start with `-m`."""

from ultraattn.cli.app import main

if __name__ == "__main__":
    main()
