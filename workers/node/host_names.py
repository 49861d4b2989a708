"""Does without host names where the network does not tell them.

TCPStore asks for the name of every address that it connects to, for its log messages, and waits for the answer. Where
the name server does not answer, that is 10 s for each new process; after the first failure a process stops asking. A
process that is forked later knows of that.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from datetime import timedelta

ADDRESS = "127.93.17.2"
"""Of this machine, and in no table of names, so that the name server is asked."""
IMPATIENT = "timeout:1 attempts:1"
"""For resolv.conf(5): the answer of one that works takes milliseconds."""
PATIENCE = timedelta(seconds=5)


def settle() -> None:
    """Find out whether this process should ask for names, within about a second for each name server."""
    before = os.environ.get("RES_OPTIONS")
    os.environ["RES_OPTIONS"] = f"{before} {IMPATIENT}" if before else IMPATIENT
    # The options hold for the thread that read them: whoever looks up names later is as patient as ever.
    asking = threading.Thread(target=_ask, name="host names")
    asking.start()
    asking.join()
    if before is None:
        del os.environ["RES_OPTIONS"]
    else:
        os.environ["RES_OPTIONS"] = before


def _ask() -> None:
    from torch.distributed import TCPStore

    with socket.create_server((ADDRESS, 0)) as listener:
        port, descriptor = listener.getsockname()[1], listener.detach()
    with contextlib.suppress(RuntimeError):  # not even this machine reaches itself there: then nothing is known
        TCPStore(
            ADDRESS,
            port,
            is_master=True,
            timeout=PATIENCE,
            wait_for_workers=False,
            use_libuv=True,
            master_listen_fd=descriptor,
        )
