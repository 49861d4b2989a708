"""The `manta` command, also as `python -m api.cli`."""

import sys

from workers.interruption import EXIT_INTERRUPTED, ending_at_once


def main() -> None:
    """Run the command. What it loads takes a moment, in which it may be interrupted like later on."""
    with ending_at_once():
        from api.cli.main import command_line

        command = command_line(sys.argv[1] if len(sys.argv) > 1 else None)
    try:
        command()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
