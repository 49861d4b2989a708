"""What tests of several kinds of data use."""

from pathlib import Path

import pytest
from tokenizer_files import byte_level


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer of 400 tokens."""
    return byte_level(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
