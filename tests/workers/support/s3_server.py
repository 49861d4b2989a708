"""An S3 server as a process, and a wire to it that can be cut, slow, or answered by somebody else."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

HOST = "127.0.0.1"
START_SECONDS = 60.0
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}  # fmt: skip
"""Of the environment: nothing of it is a setting of ours."""


def environment_of(url: str) -> dict[str, str]:
    """What a process needs to find the server at `url`."""
    return {**CREDENTIALS, "AWS_ENDPOINT_URL_S3": url}


MIN_PART = 2**16
"""Bytes of a part that is not an upload's last; S3 asks for 5 MiB, which would all have to pass through Python."""


SERVE = """
import sys
from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

host, listener, app = sys.argv[1], int(sys.argv[2]), DomainDispatcherApplication(create_backend_app)
make_server(host, 0, app, threaded=True, request_handler=MotoRequestHandler, fd=listener).serve_forever()
"""
"""As `python -m moto.server`, but at a socket that listens already: no port that was free can be taken meanwhile."""


class S3Server:
    """Keeps what is stored in memory."""

    def __init__(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._starts(deadline):  # its port became somebody else's meanwhile
            assert time.monotonic() < deadline, "the S3 server did not start"

    def _starts(self, deadline: float) -> bool:
        """Whether it answers, on a port that was free a moment ago; False if it has ended."""
        keeps = {"S3_UPLOAD_PART_MIN_SIZE": str(MIN_PART), "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(2**23)}
        with socket.create_server((HOST, 0)) as listener:
            port, number = listener.getsockname()[1], listener.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVE, HOST, str(number)], pass_fds=[number], stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, env={**os.environ, **keeps, "MOTO_PORT": str(port)},
            )  # fmt: skip
        self.url = f"http://{HOST}:{port}"
        while not self._answers():
            assert time.monotonic() < deadline, "the S3 server did not start"
            if self.process.poll() is not None:
                return False
            time.sleep(0.05)
        return self.process.poll() is None  # otherwise somebody else has answered

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/moto-api/", timeout=5).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    def make_bucket(self, name: str) -> None:
        """An empty one."""
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{name}", method="PUT"), timeout=10).close()

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


class Wire:
    """Stands between a client and the server. `meddle(head)` is asked for each request whose head has arrived: None
    lets it pass, bytes are answered in the server's place, "cut" ends the connection there and then, and "answer lost"
    does so once the server has answered. `pace`: bytes a second that get through, to the server; None: all."""

    def __init__(self, server: S3Server):
        self._server = server
        self._listener = socket.create_server((HOST, 0))
        self.url = f"http://{HOST}:{self._listener.getsockname()[1]}"
        self.meddle: Callable[[bytes], Any] = lambda head: None
        self.pace: float | None = None
        self.requests: list[str] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody is listened to any more. A thread that still waited could take the calls of the next wire, whose
        listener may have the same descriptor."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """One request a connection: every answer says that it ends with it."""
        with contextlib.suppress(OSError), client:
            head, body = _head(client)
            if not head:
                return
            self.requests.append(head.split(b"\r\n", 1)[0].decode())
            said = self.meddle(head)
            if said == "cut":
                return
            if isinstance(said, bytes):
                client.sendall(said)
                return
            port = int(self._server.url.rpartition(":")[2])
            with socket.create_connection((HOST, port)) as server:
                if b"expect: 100-continue" in head.lower():
                    client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                lines = head.split(b"\r\n")
                kept = [line for line in lines if not line.lower().startswith((b"connection:", b"expect:"))]
                server.sendall(b"\r\n".join([kept[0], b"Connection: close", *kept[1:]]) + b"\r\n\r\n" + body)
                upstream = threading.Thread(target=self._pump, args=(client, server), daemon=True)
                upstream.start()
                while chunk := server.recv(1 << 16):
                    if said != "answer lost":
                        client.sendall(chunk)
                client.shutdown(socket.SHUT_RDWR)  # closing does not tell the client while another thread reads

    def _pump(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := client.recv(1 << 16):
                if self.pace is not None:
                    time.sleep(len(chunk) / self.pace)
                server.sendall(chunk)


def _head(client: socket.socket) -> tuple[bytes, bytes]:
    received = b""
    while b"\r\n\r\n" not in received:
        chunk = client.recv(1 << 16)
        if not chunk:
            return b"", b""
        received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    return head, body


def answer(status: str, code: str = "SlowDown", headers: str = "") -> bytes:
    """An S3 error as bytes on the wire."""
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
    about = f"Content-Length: {len(body)}\r\nContent-Type: application/xml\r\nConnection: close\r\n{headers}"
    return f"HTTP/1.1 {status}\r\n{about}\r\n{body}".encode()


@cache
def _descriptions() -> Callable[[str], Any]:
    """Reads once what botocore reads for each client, a description of all of S3."""
    from botocore.loaders import JSONFileLoader

    return cache(JSONFileLoader().load_file)


@contextlib.contextmanager
def reached_at(url: str) -> Iterator[None]:
    """This process finds the server at `url`, with nothing known of others, and is not as patient as usual."""
    import s3fs
    from botocore.loaders import JSONFileLoader

    from manta.workers.storage import object_files

    read = _descriptions()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3fs.S3FileSystem, "retries", 1)
        patch.setitem(
            object_files.OPTIONS, "s3", {"config_kwargs": {"retries": {"max_attempts": 2, "mode": "standard"}}}
        )
        patch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda backoff, context: 0.01)
        patch.setattr(JSONFileLoader, "load_file", lambda loader, path: read(path))
        for name, value in environment_of(url).items():
            patch.setenv(name, value)
        object_files._object_files.cache_clear()
        yield
    object_files._object_files.cache_clear()
