"""Files in object stores, implementing `files.Files` with fsspec. A folder is a prefix: it exists while anything is in
it.

An object appears with its last byte or not at all, so nothing needs a temporary name. The client repeats what a store
does not answer, refuses or breaks off; a remaining failure is an OSError, and never FileNotFoundError.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy

from manta.workers.errors import MantaError, first_line_of
from manta.workers.storage.files import Reader, Writer
from manta.workers.storage.locations import Location, ObjectPath

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

P = ParamSpec("P")
T = TypeVar("T")

AHEAD = 8
"""Number of pieces that are fetched before they are requested."""
PACKAGES = {"s3": "s3fs"}
# A server that cannot be reached is given up after about a minute: s3fs waits 5 s for a connection, and tries a request
# five times itself.
OPTIONS: dict[str, dict[str, Any]] = {"s3": {"config_kwargs": {"retries": {"max_attempts": 3, "mode": "standard"}}}}

PART_BYTES = 16 * 1024 * 1024
"""Size of each part except the last."""
SMALL_PARTS, LARGE = 8000, 16
"""After this many parts, parts are this many times as large: S3 accepts 10,000 parts, which makes 671 GB an object."""
PARTS_AT_ONCE = 4
"""Number of parts in transfer. Together with the one that is being filled they are all the memory that an upload takes:
84 MB, or 1.3 GB for an object of more than 134 GB."""

Call = Callable[..., Any]
"""An operation of S3 by its name and parameters; raises OSError."""


class StoreNotInstalled(MantaError):
    """The package that accesses an object store is missing."""


def object_files(scheme: str) -> ObjectFiles:
    """The files of the store `scheme`, with the credentials of the environment. Raises StoreNotInstalled."""
    return _object_files(scheme, os.getpid())  # a forked process cannot use its parent's connections


@cache
def _object_files(scheme: str, pid: int) -> ObjectFiles:
    try:
        import fsspec

        store = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True, **OPTIONS[scheme])
    except ImportError as error:
        package = PACKAGES[scheme]
        raise StoreNotInstalled(
            f"{scheme}:// needs the package {package}, which is not installed here: pip install 'manta-train[{scheme}]'"
        ) from error
    return ObjectFiles(store, OPTIONS[scheme]["config_kwargs"])


class ObjectFiles:
    """Objects in the buckets of one store. See `Files` for what each method raises."""

    def __init__(self, store: Any, settings: dict[str, Any]):
        """`store`: a file system of fsspec. `settings` for the client that uploads are those of botocore's Config."""
        self._store, self._settings = store, settings

    @cached_property
    def _call_s3(self) -> Callable[..., Any]:
        """Calls an operation of S3, from several threads. s3fs could be used instead, but its event loop copies each
        part several times while it keeps the interpreter from all other threads; here threads send without that."""
        import botocore.session
        from botocore.config import Config
        from s3fs.errors import translate_boto_error

        client = botocore.session.get_session().create_client("s3", config=Config(**self._settings))

        def call(operation: str, **parameters: Any) -> Any:
            try:
                return getattr(client, operation)(**parameters)
            except Exception as error:
                raise translate_boto_error(error) from error

        return call

    def names(self, folder: Location) -> list[str]:
        """Names of everything under the prefix, up to the next slash."""
        key = _key(folder)
        paths = self._request(folder, self._store.ls, key, detail=False)
        return sorted({path.rstrip("/").rpartition("/")[2] for path in paths if path.rstrip("/") != key})

    def check_folder(self, folder: Location) -> None:
        """Raises FileNotFoundError unless anything is under the prefix, or has that name."""
        if not self.is_there(folder):
            raise FileNotFoundError(f"there is nothing under {folder}")

    def is_there(self, folder: Location) -> bool:
        """Whether anything is under the prefix, or has that name."""
        if self._request(folder, self._store.exists, _key(folder)):
            return True
        self._refuse_bucket(folder)
        return False

    def bytes_in(self, folder: Location) -> int:
        """Size of all objects under the prefix."""
        try:
            sizes = self._request(folder, self._store.find, _key(folder), detail=True)
        except FileNotFoundError:
            return 0
        return sum(int(size["size"]) for size in sizes.values())

    def newest(self, folder: Location) -> float | None:
        """See `Files`; by the store's clock."""
        try:
            details = self._request(folder, self._store.find, _key(folder), detail=True)
        except FileNotFoundError:
            return None
        if not details:
            self._refuse_bucket(folder)
        return max((detail["LastModified"].timestamp() for detail in details.values()), default=None)

    def make_folder(self, folder: Location) -> None:
        """A prefix need not be created."""

    def read(self, file: Location) -> bytes:
        """The whole contents."""
        content: bytes = self._request(file, self._store.cat_file, _key(file))
        return content

    def sizes(self, folder: Location, names: Iterable[str]) -> Iterator[tuple[str, int | OSError]]:
        """From a single listing of the folder."""
        listed: dict[str, int] | OSError
        try:
            listed = {
                each["name"].rpartition("/")[2]: int(each["size"])
                for each in self._request(folder, self._store.ls, _key(folder), detail=True)
            }
        except OSError as error:
            listed = error
        for name in names:
            if isinstance(listed, OSError):
                yield name, listed
            else:
                yield name, listed.get(name, FileNotFoundError(f"there is no {folder / name}"))

    @contextmanager
    def reader(self, file: Location) -> Iterator[Reader]:
        """Reads ranges, several at once."""
        size = int(self._request(file, self._store.info, _key(file))["size"])

        def fetch(at: int, count: int) -> bytes:
            content: bytes = self._request(file, self._store.cat_file, _key(file), start=at, end=at + count)
            return content

        reader = _ObjectReader(size, fetch)
        try:
            yield reader
        finally:
            reader.close()

    @contextmanager
    def writer(self, file: Location) -> Iterator[Writer]:
        """Uploaded in parts while it is written; the object does not exist before the block has ended."""
        bucket, _, key = _key(file).partition("/")
        upload = S3Upload(partial(self._request, file, self._call_s3), bucket, key)
        try:
            yield upload
            upload.complete()
        except BaseException:
            with suppress(OSError):
                upload.abort()
            raise

    def write_atomically(self, file: Location, content: bytes) -> None:
        """One request."""
        self._request(file, self._store.pipe_file, _key(file), content)

    def remove(self, file: Location) -> None:
        """Remove one object."""
        with suppress(FileNotFoundError):
            self._request(file, self._store.rm_file, _key(file))

    def remove_folder(self, folder: Location) -> None:
        """Remove all objects under the prefix."""
        with suppress(OSError):
            self._request(folder, self._store.rm, _key(folder), recursive=True)

    def _refuse_bucket(self, location: Location) -> None:
        """Raise OSError if there is no such bucket: its emptiness would say nothing about what was stored."""
        bucket = ObjectPath(_object(location).scheme, _object(location).bucket)
        if not self._request(bucket, self._store.exists, bucket.key):
            raise OSError(f"there is no bucket {bucket}")

    def _request(self, location: Location, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """The store's answer. Raises OSError for whatever goes wrong, FileNotFoundError only for a missing key."""
        try:
            return call(*arguments, **named)
        except FileNotFoundError:
            if _object(location).key != _object(location).bucket:
                self._refuse_bucket(location)
            raise
        except OSError:
            raise
        except Exception as error:  # each store's client has its own kinds
            raise OSError(f"{location}: {first_line_of(error)}") from error


class _ObjectReader:
    """Fetches what is expected ahead of time, on its own threads."""

    def __init__(self, size: int, fetch: Callable[[int, int], bytes]):
        self.size, self._fetch = size, fetch
        self._pool = ThreadPoolExecutor(AHEAD, thread_name_prefix="object reader")
        self._expected: Iterator[tuple[int, int]] = iter(())
        self._under_way: OrderedDict[tuple[int, int], Future[bytes]] = OrderedDict()

    def expect(self, pieces: Iterable[tuple[int, int]]) -> None:
        self._under_way.clear()
        self._expected = iter(pieces)
        self._go_ahead()

    def read_into(self, buffer: memoryview, at: int) -> int:
        wanted = (at, min(len(buffer), max(0, self.size - at)))
        while self._under_way and wanted in self._under_way and next(iter(self._under_way)) != wanted:
            self._under_way.popitem(last=False)  # expected earlier, and skipped
        piece = self._under_way.pop(wanted, None)
        content = self._fetch(*wanted) if piece is None else piece.result()
        self._go_ahead()
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _go_ahead(self) -> None:
        while len(self._under_way) < AHEAD and (piece := next(self._expected, None)) is not None:
            self._under_way[piece] = self._pool.submit(self._fetch, *piece)


def _object(location: Location) -> ObjectPath:
    assert isinstance(location, ObjectPath)
    return location


def _key(location: Location) -> str:
    return _object(location).key


class _Part:
    """The memory of one part, which is reused: getting new pages takes longer than filling them."""

    def __init__(self, size: int) -> None:
        self.size, self._memory = size, bytearray(size)
        self._bytes = numpy.frombuffer(self._memory, numpy.uint8)
        self.filled = 0
        """Number of bytes, from the first on."""

    def take(self, content: memoryview) -> int:
        """Copies as much of `content` as there is room for; returns how many bytes. Done by numpy, without the
        interpreter's lock."""
        count = min(self.size - self.filled, len(content))
        self._bytes[self.filled : self.filled + count] = numpy.frombuffer(content[:count], numpy.uint8)
        self.filled += count
        return count

    @property
    def is_full(self) -> bool:
        """Whether there is no more room."""
        return self.filled == self.size

    @property
    def body(self) -> bytes | bytearray:
        """Contents of the part; not copied if it is full."""
        return self._memory if self.is_full else bytes(memoryview(self._memory)[: self.filled])


class S3Upload:
    """Receives the bytes of one object of S3, and uploads them in parts meanwhile: several at a time, each with a
    checksum that the store verifies. `complete` or `abort` ends it; until it is complete there is nothing with that
    name."""

    def __init__(self, call: Call, bucket: str, key: str):
        """`call` is used by several threads."""
        self._call, self._object = call, {"Bucket": bucket, "Key": key}
        self._pool = ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="upload")
        self._part = _Part(PART_BYTES)
        self._free: list[_Part] = []
        self._upload: str | None = None
        self._sent = 0
        self._under_way: deque[tuple[_Part, Future[dict[str, Any]]]] = deque()
        self._stored: list[dict[str, Any]] = []

    def write(self, data: ReadableBuffer, /) -> int:
        """Accept all of `data`; waits while too many parts are in transfer. Raises OSError."""
        content = memoryview(data).cast("B")
        taken = 0
        while taken < len(content):
            taken += self._part.take(content[taken:])
            if self._part.is_full:
                self._send()
        return taken

    def complete(self) -> None:
        """Create the object. Raises OSError; then there is none, or the one that was there before."""
        if self._upload is None:
            self._call("put_object", **self._object, Body=self._part.body)
        else:
            if self._part.filled:
                self._send()
            while self._under_way:
                self._await_part()
            parts = {"Parts": self._stored}
            try:
                self._call("complete_multipart_upload", **self._object, UploadId=self._upload, MultipartUpload=parts)
            except OSError:
                # If the request is repeated after a lost or late answer, a store says that it knows no such upload.
                if not self._is_there():
                    raise
        self._pool.shutdown()

    def abort(self) -> None:
        """Discard the upload. Raises OSError if the store cannot be told."""
        self._pool.shutdown(cancel_futures=True)
        if self._upload is not None:
            self._call("abort_multipart_upload", **self._object, UploadId=self._upload)

    def _is_there(self) -> bool:
        """Whether the object consists of these parts, according to its ETag."""
        try:
            sums = b"".join(bytes.fromhex(part["ETag"].strip('"')) for part in self._stored)
            tag = self._call("head_object", **self._object)["ETag"]
        except (OSError, ValueError):
            return False
        whole = f"{hashlib.md5(sums, usedforsecurity=False).hexdigest()}-{len(self._stored)}"
        return bool(tag.strip('"') == whole)

    def _send(self) -> None:
        if self._upload is None:
            self._upload = str(self._call("create_multipart_upload", **self._object)["UploadId"])
        while len(self._under_way) >= PARTS_AT_ONCE:
            self._await_part()
        self._sent += 1
        self._under_way.append((self._part, self._pool.submit(self._send_part, self._sent, self._part.body)))
        size = PART_BYTES * (1 if self._sent < SMALL_PARTS else LARGE)
        self._free = [each for each in self._free if each.size == size]
        self._part = self._free.pop() if self._free else _Part(size)

    def _await_part(self) -> None:
        part, sent = self._under_way.popleft()
        self._stored.append(sent.result())
        part.filled = 0
        self._free.append(part)

    def _send_part(self, number: int, body: bytes | bytearray) -> dict[str, Any]:
        answer = self._call("upload_part", **self._object, UploadId=self._upload, PartNumber=number, Body=body)
        checksums = {name: value for name, value in answer.items() if name.startswith("Checksum") and name.isalnum()}
        checksums.pop("ChecksumType", None)
        return {"PartNumber": number, "ETag": answer["ETag"], **checksums}
