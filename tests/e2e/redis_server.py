"""A Redis server of a test's own: what it holds is gone with it."""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

NOT_FOUND = "no Redis server is installed (Debian: apt-get install redis-server)"
START_SECONDS = 30.0


class RedisServer:
    """A running server at an address of this machine that other machines of its network reach."""

    def __init__(self, host: str):
        """`host`: the address. Look with `is_installed` before."""
        self.host, self.password = host, secrets.token_hex(16)
        with socket.create_server((host, 0)) as free:
            self.port: int = free.getsockname()[1]
        self.folder = Path(tempfile.mkdtemp(prefix="manta-redis-"))
        options = ("--bind", host, "--port", str(self.port), "--save", "", "--appendonly", "no", "--dir", self.folder)
        command = ["setpriv", "--pdeathsig=KILL", "redis-server", *options, "--requirepass", self.password]
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            assert time.monotonic() < deadline and self._process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.02)

    @staticmethod
    def is_installed() -> bool:
        """Whether there is one to run."""
        return shutil.which("redis-server") is not None

    def _answers(self) -> bool:
        try:
            with socket.create_connection((self.host, self.port), 1.0) as connection:
                connection.sendall(f"AUTH {self.password}\r\nPING\r\n".encode())
                return connection.recv(100).startswith(b"+OK")
        except OSError:
            return False

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.folder)
