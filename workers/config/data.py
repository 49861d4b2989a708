"""`data`: the corpus, its held-out part, and separate validation sets."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from manta.workers.config.fields import (
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
    """A separate text that is not trained on; its loss is measured in addition to that of the corpus's held-out
    part."""

    name: Annotated[str, Field(min_length=1, max_length=40, pattern=PART_OF_A_NAME)]
    """Name of the set: its loss is reported as validation_loss_NAME."""
    paths: tuple[str, ...] = ()
    """Files and directories, as in data.paths."""
    source: Source | None = None
    """Format of the files; default: that of the corpus, or text if that is python-stdlib."""
    batches: Steps | None = None
    """Global batches per validation, at most the whole set; default: train.validation_batches."""


class DataConfig(Section):
    """Where tokens come from."""

    source: Source
    """Format of the corpus. python-stdlib: the .py files of this Python's standard library; text: one document per
    file; jsonl: one per line (.jsonl, .jsonl.gz, .jsonl.zst); parquet: one per row; chat: one conversation per line or
    row; megatron: tokens in Megatron-LM's indexed datasets (.bin and .idx)."""
    paths: tuple[str, ...] = ()
    """Files and directories of the corpus, in order; a directory stands for its files of that format, sorted by
    path."""
    weights: tuple[PositiveFloat, ...] | None = None
    """Relative weights of the paths in the samples; default: the tokens of all paths are concatenated."""
    documents: Literal["together", "apart"] = "together"
    """Whether attention crosses the boundaries of documents in a sample. apart: each token attends only to its own
    document, and nothing is predicted across a boundary. Requires a token that ends documents, except with chat, where
    apart is the default."""
    tokenizer: str = "bytes"
    """bytes (one token per byte, 256 ids), bpe (byte-level byte-pair encoding, trained on this corpus), or the path of
    a tokenizer.json of Hugging Face's `tokenizers` library."""
    tokenizer_vocabulary: Vocabulary | None = None
    """Number of the tokenizer's token ids. bpe: vocabulary size to train, by default 8192. Tokenizer from a file: read
    from it when the job is submitted."""
    end_of_document: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Token appended to each document, or `none`; default: none for bytes, <|endoftext|> for bpe, and for a file the
    first of its special tokens that is known to have this meaning."""
    special_tokens: bool = False
    """Whether each document also gets the tokens that the tokenizer's file adds to a text by itself, such as <bos>
    before it. Requires a tokenizer from a file that adds some."""
    text_key: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    """Key of the objects in jsonl, or column in parquet, that holds the document: its text (default: `text`), or with
    chat its messages (default: `messages`)."""
    template: Annotated[str, Field(min_length=1)] | None = None
    """chat: the template that renders a conversation as text: the path of a Jinja template, or the built-in `chatml`;
    default: the template next to the tokenizer's file."""
    loss: Literal["answers", "all"] | None = None
    """Which tokens contribute to the loss. answers (default of chat): those of the assistant's messages, including the
    token that ends each; all: every token."""
    validation_fraction: Fraction = 0.05
    """Fraction of the corpus (with weights: of each path), taken from its end, that is held out for the validation
    loss; 0: none."""
    validation: Annotated[tuple[ValidationSet, ...], Field(max_length=32)] = ()
    """Additional texts whose losses are measured separately every train.validate_every steps."""

    @model_validator(mode="after")
    def _with_separate_conversations(self) -> DataConfig:
        if self.source == "chat" and "documents" not in self.model_fields_set:
            self.__dict__["documents"] = "apart"  # not recorded as set by the user
        return self

    def corpus_of(self, validation: ValidationSet) -> DataConfig:
        """A validation set as a corpus with this corpus's other settings."""
        source = validation.source or ("text" if self.source == "python-stdlib" else self.source)
        own = {"source": source, "paths": validation.paths, "weights": None, "validation_fraction": 0.0}
        return self.model_copy(update=own | {"validation": ()})

    @property
    def corpora(self) -> tuple[DataConfig, ...]:
        """This corpus and the validation sets."""
        return self, *(self.corpus_of(each) for each in self.validation)

    @property
    def key(self) -> str:
        """Key or column of a document."""
        return self.text_key or ("messages" if self.source == "chat" else "text")

    @property
    def learns_answers(self) -> bool:
        """Whether only the assistant's messages contribute to the loss."""
        return self.source == "chat" and self.loss != "all"

    @property
    def template_file(self) -> str | None:
        """Path of the chat template; None if none is given or it is built in."""
        return None if self.template == CHATML else self.template

    @property
    def tokenizer_file(self) -> str | None:
        """Path of the tokenizer's file; None for built-in tokenizers."""
        return None if self.tokenizer in BUILT_IN_TOKENIZERS else self.tokenizer

    @property
    def is_read_in_place(self) -> bool:
        """Whether the bytes of the corpus's files are its tokens, so that no preparation is needed."""
        plain = self.source in ("python-stdlib", "text") and self.tokenizer == "bytes"
        return plain and self.end_of_document in (None, NO_TOKEN)

    @property
    def token_ids(self) -> int | None:
        """Number of the tokenizer's token ids; None if it is not known from the spec alone."""
        if self.tokenizer == "bpe":
            return self.tokenizer_vocabulary or TRAINED_VOCABULARY
        if self.tokenizer == "bytes":
            if self.source == "megatron":
                return None
            return BYTE_VOCABULARY + (self.end_of_document not in (None, NO_TOKEN))
        return self.tokenizer_vocabulary
