"""YAML as people write it in job files."""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-3 as a number, as people mean it (YAML 1.1 asks for a dot and a sign)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def read_yaml(text: str) -> Any:
    """Parse one document. Raises yaml.YAMLError, or ValueError for a date that is none."""
    return yaml.load(text, Loader=_Loader)
