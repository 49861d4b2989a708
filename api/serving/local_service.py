"""What commands know about the service of the same home: its address, its process, its key; and the locks that keep a
second service from a home, or from an SQLite file."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import ssl
from pathlib import Path
from typing import IO, Self
from urllib.parse import urlsplit

from manta.service.cluster.processes import same_process, start_of, started_in
from manta.service.own_files import OwnFileUnusable, read_key, read_own, writing_in
from manta.service.settings import DEFAULT_HOST, DEFAULT_PORT, Settings
from manta.workers.errors import MantaError
from manta.workers.system.regular_files import MAX_SETTINGS_BYTES, read_regular

log = logging.getLogger(__name__)
DEFAULT_URL = f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"
"""The address of a service unless another one is given."""
ANSWER_SECONDS = 5.0
LOCK = "service.lock"
"""In the home: locked by the service as long as it runs, from before it starts anything."""


class LockedFile:
    """A file that is locked until it is closed, and made again if somebody removes it meanwhile."""

    def __init__(self, path: Path):
        """Raises OSError, BlockingIOError if another process has locked it."""
        self._path, self._text = path, ""
        self._file = _locked(path)
        self._is_taken = False

    def write(self, text: str) -> None:
        """Replace the content. Raises OSError."""
        self._text = text
        self._file.seek(0)
        self._file.truncate()
        self._file.write(text)
        self._file.flush()

    def keep(self) -> None:
        """Lock a new file if this one was removed or replaced. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                return
        try:
            new = _locked(self._path)
        except BlockingIOError:
            if not self._is_taken:
                log.error("%s was removed, then created and locked by another process: stop one of the two", self._path)
            self._is_taken = True
            return
        self._file.close()
        self._file = new
        self.write(self._text)

    def close(self) -> None:
        """Unlock it."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _locked(path: Path) -> IO[str]:
    file = path.open("a")  # leaves what whoever has locked it has written
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


class CertificateUnreadable(MantaError):
    """The certificate of the service of this home is not where the service has found it."""


def announce(service_file: Path, url: str, database: str, certificate: Path | None = None) -> None:
    """Publish the service's address, database and certificate for the commands of the same home, unless that is what
    the file says. Raises HomeUnusable."""
    words = {"url": url, **_this_process(), "database": database}
    if certificate is not None:
        words["certificate"] = str(certificate)
    if _document_in(service_file) != words:
        write_atomically(service_file, json.dumps(words))


def sign(lock: LockedFile) -> None:
    """Write into the locked file of the home which process is its service. Raises OSError."""
    lock.write(json.dumps(_this_process()))


def _this_process() -> dict[str, object]:
    me = os.getpid()
    return {"pid": me, "started": start_of(me)}


def write_atomically(file: Path, text: str) -> None:
    """Write a file of the home atomically: if the disk is full or the process dies, the old content stays. Raises
    HomeUnusable."""
    with writing_in(file.parent):
        part = file.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.rename(file)


def running_service(home: Path) -> dict[str, object] | None:
    """What the service of `home` has published (`url`, `pid`, `started`, `database`), or None if none is running."""
    announced = _living(_document_in(Settings(home).service_file))
    return announced if announced is not None and isinstance(announced.get("url"), str) else None


def service_process(home: Path) -> int | None:
    """Process id of the service of `home`, which may have published nothing yet, or not any more; None if none is
    running."""
    found = _living(_document_in(Settings(home).service_file)) or _living(_document_in(home / LOCK))
    return None if found is None else int(str(found["pid"]))


def _document_in(file: Path) -> dict[str, object] | None:
    try:
        document = json.loads(read_own(file) or "")
    except (OwnFileUnusable, ValueError):
        return None
    return document if isinstance(document, dict) else None


def _living(document: dict[str, object] | None) -> dict[str, object] | None:
    """`document`, if it names a process that runs."""
    try:
        alive = document is not None and same_process(int(str(document["pid"])), started_in(document))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return document if alive else None


def closes_without_answer(url: str) -> bool:
    """Whether a service at `url` does nothing at all about a request. The kernel accepts connections even for a process
    that is stopped; a refusal, or an end of the connection, is an answer too."""
    address = urlsplit(url)
    try:
        with socket.create_connection((address.hostname, address.port), ANSWER_SECONDS) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            connection.recv(1)
    except TimeoutError:
        return True
    except OSError:
        return False
    return False


def find_url(settings: Settings) -> str:
    """The service's address: MANTA_URL, or that of the service running in MANTA_HOME, or the default."""
    if settings.url is not None:
        return settings.url
    url = (_document_in(settings.service_file) or {}).get("url")  # none: not running, or just being written
    return url if isinstance(url, str) else DEFAULT_URL


def find_key(settings: Settings, url: str) -> str | None:
    """The key for the service at `url`: MANTA_API_KEY, or the automatic one if that service runs in MANTA_HOME; no
    other server is sent that. Raises KeyFileUnsafe."""
    if settings.api_key is not None:
        return settings.api_key
    return read_key(settings.home) if _runs_here(settings.home, url) is not None else None


def ssl_verification(settings: Settings, url: str) -> ssl.SSLContext | bool:
    """Which certificate the service at `url` must have. If it runs in MANTA_HOME: its own one, for any name; otherwise
    one that the machine trusts, for that name. Without TLS there is none, since loading the machine's certificates
    would take longer than most calls. Raises CertificateUnreadable."""
    if not url.startswith("https:"):
        return False
    announced = _runs_here(settings.home, url) or {}
    if not isinstance(announced.get("certificate"), str):
        return True
    file = Path(str(announced["certificate"]))
    try:
        certificate = read_regular(file, MAX_SETTINGS_BYTES).decode("ascii", "ignore")
        trust = ssl.create_default_context(
            cadata=certificate or "nothing"
        )  # for "" it would trust what the machine does
    except OSError as error:  # SSLError is one
        raise CertificateUnreadable(
            f"{file}, the certificate of the service at {url}, cannot be read ({error.strerror or error}): put it back"
        ) from error
    trust.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trust.check_hostname = False
    return trust


def _runs_here(home: Path, url: str) -> dict[str, object] | None:
    announced = running_service(home)
    return announced if announced is not None and str(announced["url"]).rstrip("/") == url.rstrip("/") else None
