"""One object of S3, uploaded in parts while it is written: several parts at a time, each with a checksum that the store
verifies. The object appears when the upload is completed; until then there is nothing with that name."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PART_BYTES = 16 * 1024 * 1024
"""Size of each part except the last."""
SMALL_PARTS, LARGE = 8000, 16
"""After this many parts, parts are this many times as large: S3 accepts 10,000 parts, which makes 671 GB an object."""
PARTS_AT_ONCE = 4
"""Number of parts in transfer. Together with the one that is being filled they are all the memory that an upload takes:
84 MB, or 1.3 GB for an object of more than 134 GB."""

Call = Callable[..., Any]
"""An operation of S3 by its name and parameters; raises OSError."""


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
    """Receives the bytes of one object. `complete` or `abort` ends it."""

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
