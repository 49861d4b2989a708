"""The `manta` command, also as `python -m manta.api.cli`."""

import errno
import os
import sys
from pathlib import Path

from manta.workers.interruption import EXIT_INTERRUPTED, ending_at_once

_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> None:
    """Run the command. What it loads takes a moment, in which it may be interrupted like later on."""
    with ending_at_once():
        from manta.api.cli.overview import overview

        command = overview()
    try:
        command()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:
        if error.errno not in _OF_OUTPUT or error.filename is not None or _output_is_writable():
            raise  # of another file: an error in writing names none
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - otherwise Python writes what is left at the end
        sys.exit(f"the output cannot be written: {error.strerror}; the command itself may have succeeded")


def _output_is_writable() -> bool:
    """Whether stdout and stderr can be written. A line's end is, since of a long text that could not be written nothing
    is left to flush."""
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
        if sys.stdout is not None:
            sys.stdout.flush()
            sys.stdout.write("\n")
            sys.stdout.flush()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
