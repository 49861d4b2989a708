"""The tokenizer `bytes` as a tokenizer.json: one token per byte, with the byte as its id, and optionally one that ends
documents. Pure Python."""

from __future__ import annotations

from typing import Any

from workers.config import BYTE_VOCABULARY, END_OF_TEXT


def byte_tokenizer(has_end: bool = False) -> dict[str, Any]:
    """The document that Hugging Face's library `tokenizers` reads: byte-pair encoding over bytes, without any pairs.
    `has_end`: include the token that ends documents."""
    words = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    end = {"id": BYTE_VOCABULARY, "content": END_OF_TEXT, **words, "special": True}
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end] if has_end else [],
        "normalizer": None,
        "pre_tokenizer": by_bytes,
        "post_processor": None,
        "decoder": by_bytes,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {_letter(byte): byte for byte in range(BYTE_VOCABULARY)},
            "merges": [],
        },
    }


def _letter(byte: int) -> str:
    """The character that represents a byte in byte-level encodings (Radford et al. 2019, `bytes_to_unicode` of GPT-2's
    code): the byte's own if it is printable, otherwise the next one from 256 on."""
    return chr(byte) if byte in _PRINTED else chr(256 + sum(1 for other in range(byte) if other not in _PRINTED))


_PRINTED = frozenset([*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)])
