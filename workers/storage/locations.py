"""Names of durable files and folders: paths, or URLs of an object store such as `s3://bucket/prefix`. Pure Python."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from manta.workers.errors import MantaError

SCHEMES = ("s3",)
"""Object stores that are known to work."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


class InvalidLocation(MantaError):
    """A text does not name a place for files."""


@dataclass(frozen=True)
class ObjectPath:
    """A key, or a prefix of keys, in a bucket; with the methods of a Path that concern names."""

    scheme: str
    """fsspec's name of the store."""
    key: str
    """Bucket and key, without a slash at either end."""

    def __truediv__(self, name: str) -> ObjectPath:
        """The object or prefix `name` in it."""
        return ObjectPath(self.scheme, f"{self.key}/{name}")

    @property
    def name(self) -> str:
        """The part after the last slash."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """The prefix that contains it; of a bucket the bucket itself."""
        return ObjectPath(self.scheme, self.key.rpartition("/")[0] or self.key)

    @property
    def bucket(self) -> str:
        """The part before the first slash."""
        return self.key.partition("/")[0]

    def __str__(self) -> str:
        return f"{self.scheme}://{self.key}"


Location = Path | ObjectPath
"""Where a file or a folder is stored."""


def parse_location(text: str | Location) -> Location:
    """The place that `text` names: a URL of an object store, or a path. Raises InvalidLocation."""
    if not isinstance(text, str):
        return text
    match = _URL.fullmatch(text)
    if match is None:
        scheme = text.partition(":")[0].lower()
        if scheme in SCHEMES and ":" in text:
            raise InvalidLocation(f"{text} is no URL: it begins with {scheme}://, such as {scheme}://bucket/prefix")
        return Path(text)
    scheme, key = match[1].lower(), match[2].rstrip("/")
    if scheme == "file":
        return Path(f"/{key.lstrip('/')}")
    if scheme not in SCHEMES:
        known = ", ".join(f"{each}://" for each in SCHEMES)
        raise InvalidLocation(
            f"{text} is in no store that Manta knows: use a folder, or a URL that begins with {known}"
        )
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise InvalidLocation(f"{text} names no bucket and prefix, such as {scheme}://bucket/prefix")
    return ObjectPath(scheme, key)
