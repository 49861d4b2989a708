"""The `manta` command, also as `python -m api.cli`."""

import sys

INTERRUPTED = 130
"""Exit status, as that of a command that SIGINT has ended."""


def main() -> None:
    """Run the command. What it loads takes a moment, in which it may be interrupted like later on."""
    try:
        from api.cli.main import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
