"""Tokenizers: bytes, and those of Hugging Face's library `tokenizers`, which is imported only where one is read.

Texts are encoded as they are: the tokens before and after a document (`tokens_around`) are added elsewhere
(`token_process.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from manta.workers.config import BYTE_VOCABULARY, END_OF_TEXT, NO_TOKEN, DataConfig
from manta.workers.data.read_errors import is_there, read_error
from manta.workers.errors import DataError
from manta.workers.system.regular_files import read_regular

if TYPE_CHECKING:
    import tokenizers

FILE_NAME = "tokenizer.json"
CHAT_FILE = "chat.json"
"""Name under which a job stores its chat template next to its tokenizer."""
TEMPLATE = "chat_template.jinja"
SETTINGS = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
TOKENIZER_COMPANIONS = (TEMPLATE, SETTINGS, SPECIAL_TOKENS)
"""Files next to the tokenizer that may contain chat templates and their variables."""
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>", "<|endofdocument|>", "[SEP]")
"""Special tokens that are known to end a document, in order of preference."""
MAX_BYTES = 64 * 2**20
"""Maximum size of a tokenizer.json."""
_OTHER_FORMS = ("tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "vocab.txt")
"""Names of files with tokenizers in forms that are not read."""
_CONVERTED = "transformers' AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes a tokenizer.json"
_SAMPLE_TEXTS = (
    "One line.\nAnother one, of 12 words\n\nand (more\n\n\n#  of\r\nthem\n  indented\n\tand\nso on);\n}\nend\n",
    "Ein Satz über Größe\nétude №5\nДва слова\n日本語の文\n한국어\n\n«quoted» text\n<b>\n123\n456\n\n\n",
)
"""Texts for testing whether a tokenizer may be given a text in pieces."""


Spans = Sequence[tuple[int, int]]
"""Parts of a text, each by its first character and one past its last."""
Marks = npt.NDArray[np.bool_]
"""One for each token."""


class Tokenizer(Protocol):
    """Turns texts into token ids."""

    @property
    def vocabulary(self) -> int:
        """One more than the highest token id."""

    @property
    def digest(self) -> str:
        """SHA-256 of its behaviour: two tokenizers with the same one make the same tokens of any text."""

    @property
    def end_of_document(self) -> int | None:
        """Id of the token that follows each document; None if there is none."""

    @property
    def cuts_are_exact(self) -> bool:
        """Whether splitting a text where `shards.CUT` matches never changes its tokens."""

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Ids of each text's tokens."""

    def encode_marked(self, texts: Sequence[str], spans: Sequence[Spans]) -> Sequence[tuple[Sequence[int], Marks]]:
        """For each text the ids of its tokens, and which of these contain a character of its `spans`."""

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """The text of token ids; that of special tokens only if `special`."""


@dataclass(frozen=True)
class ByteTokenizer:
    """One token for each byte of a text's UTF-8."""

    end_of_document: int | None = None
    vocabulary: int = BYTE_VOCABULARY
    digest: str = "bytes"
    cuts_are_exact: bool = True

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """The bytes."""
        return [text.encode() for text in texts]

    def encode_marked(self, texts: Sequence[str], spans: Sequence[Spans]) -> list[tuple[bytes, Marks]]:
        """The bytes, and which of them belong to characters in `spans`."""
        encoded = []
        for text, own in zip(texts, spans, strict=True):
            marks = np.zeros(len(content := text.encode()), bool)
            for start, stop in own:
                first = len(text[:start].encode())
                marks[first : first + len(text[start:stop].encode())] = True
            encoded.append((content, marks))
        return encoded

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """Invalid UTF-8, such as half a character at the end, is shown as a replacement character."""
        return bytes(token for token in tokens if token < BYTE_VOCABULARY).decode(errors="replace")


class FileTokenizer:
    """A tokenizer.json."""

    def __init__(
        self, path: str | Path, end_of_document: str | None = None, content: bytes | None = None, needs_end: bool = True
    ):
        """`end_of_document`: the token's text, `none`, or None for the first of `ENDS` that is one of its special
        tokens (it may have none unless it `needs_end`); `content`: of the file, if it was already read. Raises
        DataError if the file is invalid, or has no such token."""
        content = content_of(Path(path)) if content is None else content
        self.path = str(path)
        self.digest = hashlib.sha256(content).hexdigest()
        self._tokenizer = _parsed(content, path)
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise DataError(f"{path} has no tokens: it is a tokenizer that was never trained")
        self.vocabulary = 1 + max(ids.values())
        added = self._tokenizer.get_added_tokens_decoder()
        self.vocabulary_of_texts = 1 + max((number for number in ids.values() if number not in added), default=-1)
        """One more than the highest id that does not stand for an added token, such as one for padding."""
        self.end_of_document = self._end(end_of_document, ids, needs_end)

    @property
    def cuts_are_exact(self) -> bool:
        """See `Tokenizer`. Tested on sample texts, since a tokenizer's file may contain any rule."""
        return self._splits_texts and not self.has_tokens_across_cuts

    @cached_property
    def _splits_texts(self) -> bool:
        return all(map(self._survives_cuts, _SAMPLE_TEXTS))

    @cached_property
    def has_tokens_across_cuts(self) -> bool:
        """Whether only an added token, which contains or takes in a line feed, keeps texts from being split there."""
        added = [each.content for each in self._tokenizer.get_added_tokens_decoder().values()]
        sample = "".join(f"a{each}b\n{each}\nc {each} d\n" for each in added)
        return bool(added) and self._splits_texts and not self._survives_cuts(sample)

    @cached_property
    def added_around(self) -> tuple[list[int], list[int]]:
        """Ids that the file's post-processor puts before a text, and after it."""
        encoded = self._tokenizer.encode("a")
        bare = len(self._tokenizer.encode("a", add_special_tokens=False).ids)
        before = list(encoded.special_tokens_mask).index(0) if bare else 0
        return encoded.ids[:before], encoded.ids[before + bare :]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text's tokens, without those that its post-processor would add."""
        return [each.ids for each in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_marked(self, texts: Sequence[str], spans: Sequence[Spans]) -> list[tuple[list[int], Marks]]:
        """Ids of each text's tokens, and which of them contain a character of its `spans`."""
        encoded = []
        for each, own in zip(self._tokenizer.encode_batch(list(texts), add_special_tokens=False), spans, strict=True):
            # Tokens without visible text have positions too, which never decrease.
            bounds = np.maximum.accumulate(np.array(each.offsets, np.int64).reshape(-1, 2), 0)
            marks = np.zeros(len(bounds), bool)
            for start, stop in own:
                first = np.searchsorted(bounds[:, 1], start, "right")
                marks[first : np.searchsorted(bounds[:, 0], stop, "left")] = True
            encoded.append((each.ids, marks))
        return encoded

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """The text of token ids; that of special tokens only if `special`."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def text_of(self, token: int) -> str:
        """The name of a token in the file."""
        return str(self._tokenizer.id_to_token(token))

    def _end(self, wanted: str | None, ids: dict[str, int], needs_end: bool) -> int | None:
        if wanted == NO_TOKEN:
            return None
        if wanted is not None:
            if wanted not in ids:
                raise DataError(f"{self.path} has no token {wanted!r}: set data.end_of_document to one that it has")
            return ids[wanted]
        special = {str(each) for each in self._tokenizer.get_added_tokens_decoder().values() if each.special}
        for known in ENDS:
            if known in special:
                return ids[known]
        if not needs_end:
            return None
        named = f" (its special tokens: {', '.join(sorted(special)[:10])})" if special else ""
        raise DataError(
            f"{self.path} has no special token that is known to end a document{named}: "
            "set data.end_of_document to a token of it, or to none"
        )

    def _survives_cuts(self, text: str) -> bool:
        from manta.workers.data.shards import pieces_of

        pieces = [piece.decode() for piece in pieces_of(text.encode(), 1)]
        whole, *parts = self.encode([text, *pieces])
        return len(pieces) > 1 and whole == [token for part in parts for token in part]


def tokenizer_path(path: str | Path) -> Path:
    """The file that `path` means: itself, or the tokenizer.json of a folder."""
    path = Path(path)
    try:
        is_folder = path.is_dir()
    except OSError:  # whoever reads it finds out what is wrong
        is_folder = False
    return path / FILE_NAME if is_folder else path


def file_tokenizer(data: DataConfig, path: str | Path, content: bytes | None = None) -> FileTokenizer:
    """The tokenizer of `data` whose file is `path`, or holds `content`. Raises DataError."""
    # The end of a conversation is known without a token for it.
    tokenizer = FileTokenizer(path, data.end_of_document, content, needs_end=data.source != "chat")
    if data.special_tokens and not any(tokenizer.added_around):
        raise DataError(f"{path} adds no special tokens to a text: leave data.special_tokens out")
    return tokenizer


def tokens_around(data: DataConfig, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids that are put before a document of `data`, and after it."""
    before, after = tokenizer.added_around if data.special_tokens and isinstance(tokenizer, FileTokenizer) else ([], [])
    end = [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
    return before, after if after[-1:] == end else after + end


def open_tokenizer(data: DataConfig, trained: str | Path | None = None) -> Tokenizer:
    """The tokenizer of `data`; for `bpe` from the `trained` file. Raises DataError, or ValueError for `bpe` without
    one."""
    if data.tokenizer == "bytes":
        if data.end_of_document in (None, NO_TOKEN):
            return ByteTokenizer()
        return ByteTokenizer(BYTE_VOCABULARY, BYTE_VOCABULARY + 1)
    if data.tokenizer_file is not None:
        return file_tokenizer(data, tokenizer_path(data.tokenizer_file))
    if trained is None:
        raise ValueError("a bpe tokenizer is trained before it is opened")
    return file_tokenizer(data, trained)


def library() -> Any:
    """The library `tokenizers`. Raises DataError where it is not installed."""
    try:
        import tokenizers
    except ImportError as error:
        raise DataError("data.tokenizer needs the library tokenizers here: pip install tokenizers") from error
    return tokenizers


def content_of(path: Path) -> bytes:
    """The content of a tokenizer.json. Raises DataError."""
    try:
        return read_regular(path, MAX_BYTES)
    except OSError as error:
        otherwise = (
            f"no tokenizer can be read from {path} ({error.strerror}): name bytes, bpe, a tokenizer.json or a folder "
            "with one, which may have to be mounted here; what a hub has is not looked up there, so download it first"
        )
        if isinstance(error, FileNotFoundError) and path.name == FILE_NAME:
            other = next((name for name in _OTHER_FORMS if is_there(path.with_name(name))), None)
            if other is not None:
                otherwise = f"{path.parent} has {other}, which is not read, and no {FILE_NAME}: {_CONVERTED}"
        raise read_error(path, error, otherwise) from error


def _parsed(content: bytes, path: str | Path) -> tokenizers.Tokenizer:
    try:
        parsed = library().Tokenizer.from_str(content.decode())
    except DataError:
        raise
    except BaseException as error:  # the library's errors have no type of their own; a panic is not an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        why = " ".join(str(error).split())[:200]
        what = f"a tokenizer.json that the library tokenizers {library().__version__} reads"
        what_to_do = _CONVERTED if Path(path).name in _OTHER_FORMS else "a newer release may read it"
        raise DataError(f"{path} is not {what} ({why}): {what_to_do}") from error
    dropout = getattr(parsed.model, "dropout", None)
    if dropout:
        raise DataError(f"{path}: model.dropout is {dropout:.3g}, so a text has other tokens each time: set it to null")
    parsed.no_truncation()
    parsed.no_padding()
    return parsed
