"""`data`: the corpus, and what is held out of it or measured besides it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from workers.config.fields import (
    BUILT_IN_TOKENIZERS,
    BYTE_VOCABULARY,
    CHATML,
    NO_TOKEN,
    PART_OF_A_NAME,
    TRAINED_VOCABULARY,
    Fraction,
    PositiveFloat,
    Section,
    Source,
    Steps,
    Vocabulary,
)


class ValidationSet(Section):
    """A text of its own that is not trained on, and whose loss is measured besides that of the corpus's last part."""

    name: Annotated[str, Field(min_length=1, max_length=40, pattern=PART_OF_A_NAME)]
    """Its loss is called validation_loss_NAME."""
    paths: tuple[str, ...] = ()
    """Files and directories, as in data.paths."""
    source: Source | None = None
    """Kind of the files; default: that of the corpus, text where that is python-stdlib."""
    batches: Steps | None = None
    """Global batches in one validation, at most the whole set; default: train.validation_batches."""


class DataConfig(Section):
    """Where tokens come from."""

    source: Source
    """Kind of corpus. python-stdlib: the .py files of this Python's standard library; text: a file is a document;
    jsonl: a line is one (.jsonl, .jsonl.gz, .jsonl.zst); parquet: a row is one; chat: a line or a row is a
    conversation; megatron: tokens, as Megatron-LM's indexed datasets hold them (.bin and .idx)."""
    paths: tuple[str, ...] = ()
    """Files and directories of the corpus, in order; a directory stands for its files of that kind, sorted by path."""
    weights: tuple[PositiveFloat, ...] | None = None
    """Shares of the paths in the samples, in any unit; default: all paths are one row of tokens."""
    documents: Literal["together", "apart"] = "together"
    """Whether attention looks across documents that share a sample. apart: each token sees its own document alone, and
    nothing is predicted across a boundary. Needs a token that ends documents, but for chat, where it is the default."""
    tokenizer: str = "bytes"
    """bytes (one token a byte, 256 ids), bpe (byte-level byte-pair encoding, trained on this corpus), or the path of a
    tokenizer.json as Hugging Face's library `tokenizers` writes it."""
    tokenizer_vocabulary: Vocabulary | None = None
    """Number of the tokenizer's token ids. bpe: how many are made, by default 8192. Of a file: taken from it when the
    job is submitted."""
    end_of_document: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Token that follows each document, or `none`; default: with bytes none, with bpe <|endoftext|>, with a file the
    first of its special tokens that is known to mean this."""
    text_key: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    """Key of a line's object in jsonl, or column of parquet, that holds the document: its text (default: `text`), or
    with chat its messages (default: `messages`)."""
    template: Annotated[str, Field(min_length=1)] | None = None
    """chat: how a conversation becomes text, as the path of a template in Jinja, or `chatml`, which is built in;
    default: what lies next to the tokenizer's file."""
    loss: Literal["answers", "all"] | None = None
    """Which tokens are learned. answers (default of chat): those of the assistant's messages, with what ends them; all:
    every token."""
    validation_fraction: Fraction = 0.05
    """Last part of the corpus (with weights: of each path), held out for the validation loss; 0: nothing is held
    out."""
    validation: Annotated[tuple[ValidationSet, ...], Field(max_length=32)] = ()
    """More texts whose loss is measured, each by itself, every train.validate_every steps."""

    @model_validator(mode="after")
    def _with_conversations_apart(self) -> DataConfig:
        if self.source == "chat" and "documents" not in self.model_fields_set:
            self.__dict__["documents"] = "apart"  # not as what the user wrote
        return self

    def corpus_of(self, validation: ValidationSet) -> DataConfig:
        """A validation set as a corpus, read as this one."""
        source = validation.source or ("text" if self.source == "python-stdlib" else self.source)
        own = {"source": source, "paths": validation.paths, "weights": None, "validation_fraction": 0.0}
        return self.model_copy(update=own | {"validation": ()})

    @property
    def corpora(self) -> tuple[DataConfig, ...]:
        """This corpus and the validation sets."""
        return self, *(self.corpus_of(each) for each in self.validation)

    @property
    def key(self) -> str:
        """Key or column that holds a document."""
        return self.text_key or ("messages" if self.source == "chat" else "text")

    @property
    def learns_answers(self) -> bool:
        """Whether the assistant's messages alone are learned."""
        return self.source == "chat" and self.loss != "all"

    @property
    def template_file(self) -> str | None:
        """Path of the chat template that is named; None where none is, or one that is built in."""
        return None if self.template == CHATML else self.template

    @property
    def tokenizer_file(self) -> str | None:
        """Path of the tokenizer's file; None for those that need none."""
        return None if self.tokenizer in BUILT_IN_TOKENIZERS else self.tokenizer

    @property
    def is_read_in_place(self) -> bool:
        """Whether the corpus's files are its tokens: then nothing has to be prepared."""
        plain = self.source in ("python-stdlib", "text") and self.tokenizer == "bytes"
        return plain and self.end_of_document in (None, NO_TOKEN)

    @property
    def token_ids(self) -> int | None:
        """Number of the tokenizer's token ids; None where that is not known from the spec alone."""
        if self.tokenizer == "bpe":
            return self.tokenizer_vocabulary or TRAINED_VOCABULARY
        if self.tokenizer == "bytes":
            if self.source == "megatron":
                return None
            return BYTE_VOCABULARY + (self.end_of_document not in (None, NO_TOKEN))
        return self.tokenizer_vocabulary
