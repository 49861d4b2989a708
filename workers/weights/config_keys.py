"""Reads a config.json key by key, and remembers where it comes from. Pure Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workers.data.read_errors import weights_error
from workers.errors import WeightsError
from workers.system.regular_files import MAX_SETTINGS_BYTES, read_regular

CONFIG = "config.json"


class Keys:
    """An object of a JSON file whose values are checked when they are used."""

    def __init__(self, values: dict[str, Any], where: str):
        """`where`: the file, and the object within it, for messages."""
        self.values, self.where = values, where

    def wrong(self, key: str, rule: str) -> WeightsError:
        """The error for `key`."""
        return WeightsError(f"{self.where}: {key} is {json.dumps(self.values.get(key))}: {rule}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value; null counts as missing."""
        value = self.values.get(key)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1. Raises WeightsError, also if it is missing and has no default."""
        if self.values.get(key) is None and default is not None:
            return default
        if key not in self.values:
            raise WeightsError(f"{self.where}: {key} is missing")
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, "must be a whole number of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0. Raises WeightsError."""
        if self.values.get(key) is None and default is not None:
            return default
        if key not in self.values:
            raise WeightsError(f"{self.where}: {key} is missing")
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.wrong(key, "must be a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false. Raises WeightsError."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value

    def inner(self, key: str) -> Keys | None:
        """The object at `key`; None if there is none. Raises WeightsError if it is not an object."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "must be an object")
        return Keys(value, f"{self.where}: {key}")


def read_config(folder: Path) -> Keys:
    """config.json of `folder`. Raises WeightsError."""
    path = folder / CONFIG
    try:
        if not folder.is_dir():
            raise WeightsError(f"there is no folder {folder}; if it should be there, is it mounted here?")
        values = json.loads(read_regular(path, MAX_SETTINGS_BYTES))
    except FileNotFoundError:
        raise WeightsError(
            f"{folder} has no {CONFIG}: name a folder as transformers' save_pretrained writes it"
        ) from None
    except OSError as error:
        raise weights_error(path, error) from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is not valid JSON: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise WeightsError(f"{path} does not hold an object")
    return Keys(values, str(path))
