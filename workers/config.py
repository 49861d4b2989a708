"""JobSpec: what a user asks for. Pure Python, imports in milliseconds, shared by all three rooms.

Documents are read and checked by `workers/spec/reading.py`; rules across fields live in `workers/spec/rules.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from workers.spec.families import FAMILIES, Family

PositiveFloat = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, strict=True, allow_inf_nan=False)]
StrictBool = Annotated[bool, Field(strict=True)]

# Far above anything trainable, and small enough for exact arithmetic everywhere: past them is a slip of the hand.
Layers = Annotated[int, Field(gt=0, le=10_000, strict=True)]
Width = Annotated[int, Field(gt=0, le=1_000_000, strict=True)]
Heads = Annotated[int, Field(gt=0, le=100_000, strict=True)]
Length = Annotated[int, Field(gt=0, le=10_000_000, strict=True)]
Vocabulary = Annotated[int, Field(gt=0, le=100_000_000, strict=True)]
AxisSize = Annotated[int, Field(gt=0, le=100_000, strict=True)]
AcceleratorType = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Chunks = Annotated[int, Field(gt=0, le=1024, strict=True)]
Batch = Annotated[int, Field(gt=0, le=100_000_000, strict=True)]
Steps = Annotated[int, Field(gt=0, le=1_000_000_000, strict=True)]
StepsOrNever = Annotated[int, Field(ge=0, le=1_000_000_000, strict=True)]
Count = Annotated[int, Field(ge=0, le=1_000_000_000, strict=True)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)]
LabelKey = Annotated[
    str,
    Field(
        max_length=317,
        pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$",
    ),
]
"""As Kubernetes has them: at most 63 letters, digits, `-`, `_` and `.`, perhaps after a domain's name and a `/`."""
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$")]
"""At most 63 letters, digits, `-`, `_` and `.`, of which the first and the last are letters or digits; may be empty."""
MOST_LABELS = 64
JobName = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$")]
Priority = Annotated[int, Field(ge=-1000, le=1000, strict=True)]
Threads = Annotated[int, Field(gt=0, le=1024, strict=True)]

T = TypeVar("T")

BYTE_VOCABULARY = 256
TRAINED_VOCABULARY = 8192
"""Token ids of a trained tokenizer, where nothing else is said."""
BUILT_IN_TOKENIZERS = ("bytes", "bpe")
"""Those that are no file."""
NO_TOKEN = "none"
CHATML = "chatml"
"""The template that is built in."""
END_OF_TEXT = "<|endoftext|>"
LEAST_WINDOW = 5
PART_OF_A_NAME = r"^[A-Za-z0-9_]+$"

RecomputeModule = Literal["core_attention", "norm", "mlp_activation"]
Accelerator = Literal["auto", "gpu", "cpu"]
ParameterGroup = Literal["linear", "embedding", "norm", "bias"]
Source = Literal["python-stdlib", "text", "jsonl", "parquet", "chat", "megatron"]


MayBeOff = BeforeValidator(lambda value: "off" if value is False else value)
"""Of a word that may be `off`, which YAML reads as false where it is not in quotes."""


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values never change after parsing."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FixedMapping(dict[str, T]):
    """A mapping that nobody changes, so that specs can be told apart by their hashes."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


class RopeScaling(Section):
    """How rotary positions are stretched for sequences longer than those that a model was first trained on."""

    type: Literal["linear", "llama3", "yarn"]
    """linear: all frequencies by the factor (arXiv:2306.15595); llama3: low ones alone, as Llama 3.1 does; yarn: low
    ones alone, with sharper attention (arXiv:2309.00071)."""
    factor: Annotated[float, Field(ge=1, strict=True, allow_inf_nan=False)]
    """How many times longer the sequences are."""
    original_length: Length | None = None
    """Tokens in the sequences before; needed for llama3 and yarn."""
    low_frequency_factor: PositiveFloat = 1.0
    """llama3: frequencies that turn at most so often in original_length are divided by the factor."""
    high_frequency_factor: PositiveFloat = 4.0
    """llama3: frequencies that turn at least so often in original_length stay; those between are blended."""
    beta_fast: PositiveFloat = 32.0
    """yarn: frequencies that turn at least so often in original_length stay."""
    beta_slow: PositiveFloat = 1.0
    """yarn: frequencies that turn at most so often in original_length are divided by the factor."""
    attention_factor: PositiveFloat | None = None
    """yarn: what queries and keys are multiplied with; default: 0.1 ln(factor) + 1."""


class RopeConfig(Section):
    """Rotary positions (arXiv:2104.09864)."""

    theta: PositiveFloat = 10_000.0
    """Base of the frequencies: pair i of d/2 turns by theta^(-2i/d) a token."""
    scaling: RopeScaling | None = None
    """For longer sequences; default: none."""


class ModelConfig(Section):
    """The transformer's shape. Nothing here depends on the parallel layout."""

    model_config = ConfigDict(serialize_by_alias=True)

    from_: Annotated[str, Field(min_length=1)] | None = Field(default=None, alias="from")
    """Folder of Hugging Face weights (config.json and safetensors) that training begins with. What config.json says
    of the shape need not be said again, and is filled in when the job is submitted. Default: random weights."""
    family: Literal["gpt", "llama", "qwen", "moe", "bert", "custom"] = "gpt"
    """Model family. Built: gpt; llama (Llama 2 and 3, and with sliding_window Mistral); qwen (Qwen 3); custom (a model
    of an installed package, docs/custom_models.md)."""
    entrypoint: Annotated[str, Field(max_length=500, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None = None
    """custom: where the model is, `package.module:function`."""
    options: Annotated[
        dict[str, bool | int | float | str], AfterValidator(FixedMapping), Field(default_factory=FixedMapping)
    ]
    """custom: what the model is told beside the keys that all have."""
    layers: Layers
    """Number of transformer layers (L in the papers)."""
    hidden_size: Width
    """Width of the residual stream, in elements (h)."""
    heads: Heads
    """Number of attention heads (a); divides hidden_size unless head_dim is given."""
    kv_heads: Heads | None = None
    """Number of key-value heads (grouped-query attention, arXiv:2305.13245); divides heads; default: as many as
    heads."""
    head_dim: Width | None = None
    """Width of one attention head, in elements; default: hidden_size / heads."""
    ffn_hidden_size: Width | None = None
    """Inner width of the MLP, in elements; default: 4 * hidden_size, and for llama and qwen, whose MLPs have three
    matrices, 8/3 of hidden_size, rounded up to a multiple of 64."""
    sequence_length: Length
    """Tokens in one training sequence (s)."""
    vocabulary_size: Vocabulary | None = None
    """Number of token ids (v); default: the tokenizer's. Padded inside to a multiple of parallel.tensor."""
    dropout: Fraction = 0.0
    """Probability of zeroing an activation in training: of the embedding, of attention weights, and of what a block
    adds to the residual stream. The same elements under every layout."""
    bias: StrictBool = True
    """Whether linear layers and layer norms carry biases; default: true for gpt, else false."""
    tie_embeddings: StrictBool = True
    """Whether the output layer shares the token embedding's weight; default: true for gpt, else false."""
    activation: Literal["gelu", "gelu_tanh"] = "gelu"
    """Of gpt's MLP. gelu: exact, by erf; gelu_tanh: its approximation by tanh, with which OpenAI trained GPT-2
    (Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2). llama and qwen have SwiGLU."""
    norm_epsilon: PositiveFloat = 1.0e-5
    """Added to the variance, or mean square, in norms."""
    rope: RopeConfig | None = None
    """Rotary positions of llama and qwen; default: theta 10000, no scaling. gpt learns its positions."""
    sliding_window: Length | None = None
    """Tokens that a token attends to, itself included (arXiv:2310.06825); default: all before it."""
    full_attention_every: Layers | None = None
    """With sliding_window: of each so many layers the last one attends to all tokens before; default: none does."""

    @model_validator(mode="after")
    def _with_defaults_of_family(self) -> ModelConfig:
        family = FAMILIES.get(self.family)
        for key in ("bias", "tie_embeddings") if family is not None else ():
            if key not in self.model_fields_set:
                self.__dict__[key] = getattr(family, key)  # not as what the user wrote
        return self

    @property
    def parts(self) -> Family:
        """What the family's layers are made of. Raises KeyError for one that is not built."""
        return FAMILIES[self.family]

    @property
    def is_counted(self) -> bool:
        """Whether arithmetic knows its parameters and FLOPs."""
        return self.family != "custom"

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP, in elements."""
        gated = self.family in FAMILIES and self.parts.gated_mlp
        return self.ffn_hidden_size or (-(-self.hidden_size // 24) * 64 if gated else 4 * self.hidden_size)

    @property
    def key_value_heads(self) -> int:
        """Number of key-value heads."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """Width of one attention head, in elements (d)."""
        return self.head_dim or self.hidden_size // self.heads

    @property
    def rope_or_default(self) -> RopeConfig:
        """Rotary positions, where the family has them."""
        return self.rope or RopeConfig()

    @property
    def attention_width(self) -> int:
        """Width of all attention heads together, in elements."""
        return self.heads * self.head_size

    def window(self, layer: int) -> int | None:
        """Tokens that a token of layer `layer` attends to; None: all before it."""
        if self.sliding_window is None or self.sliding_window >= self.sequence_length:
            return None
        every = self.full_attention_every
        return None if every is not None and (layer + 1) % every == 0 else self.sliding_window


class ValidationSet(Section):
    """A text of its own that is not trained on, and whose loss is measured beside that of the corpus's last part."""

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
    default: what lies beside the tokenizer's file."""
    loss: Literal["answers", "all"] | None = None
    """Which tokens are learned. answers (default of chat): those of the assistant's messages, with what ends them; all:
    every token."""
    validation_fraction: Fraction = 0.05
    """Last part of the corpus (with weights: of each path), held out for the validation loss; 0: none is."""
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


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019), and the learning rate by step."""

    name: Literal["adamw"] = "adamw"
    """Optimizer."""
    learning_rate: PositiveFloat = 1.0e-3
    """Highest learning rate, reached at the end of the warm-up."""
    min_learning_rate: NonNegativeFloat = 1.0e-4
    """Learning rate of the last step; inverse-sqrt falls no lower, constant takes no notice of it."""
    schedule: Literal["cosine", "linear", "wsd", "inverse-sqrt", "constant"] = "cosine"
    """How the learning rate goes on after the warm-up (workers/learning_rate.py has the formulas). cosine, linear: down
    to min_learning_rate at the last step; wsd: it stays until the decay at the end of the job (arXiv:2404.06395);
    inverse-sqrt: with the square root of warmup_steps / step; constant: it stays."""
    decay_steps: Steps | None = None
    """wsd: steps of the decay, the last ones of the job; default: decay_fraction of them."""
    decay_fraction: Annotated[float, Field(gt=0, le=1, strict=True, allow_inf_nan=False)] | None = None
    """wsd: the decay's part of train.steps; default: a tenth, as in arXiv:2404.06395."""
    decay_shape: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """wsd: shape of the decay. 1-sqrt is steep at first, and best in arXiv:2405.18392."""
    warmup_steps: StepsOrNever = 0
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, of the parameters that weight_decay_groups names."""
    weight_decay_groups: tuple[ParameterGroup, ...] = ("linear", "embedding")
    """What is decayed. linear: weights of linear layers, an output layer of its own included; embedding: tables of
    tokens and of positions, the output layer's where that is tied; norm: weights of norms; bias: biases of linear
    layers and of norms."""
    beta1: Fraction = 0.9
    """Decay of the first moment."""
    beta2: Fraction = 0.95
    """Decay of the second moment."""
    epsilon: PositiveFloat = 1.0e-8
    """Added to the square root of the second moment."""
    clip_norm: NonNegativeFloat = 1.0
    """Largest global gradient norm (L2); larger gradients are scaled down to it. 0 turns clipping off."""
    offload: StrictBool = False
    """Whether the state (weights in fp32 and both moments) lies in pinned host memory and comes to the GPU for its
    update, a slice at a time. The same numbers, and 12 bytes a parameter less on the device (8 in fp32), over the
    replicas with parallel.zero: 1; each update takes as long as those bytes take over the GPU's link, which nothing
    hides (docs/parallelism.md). false, since that costs where the state fits. On a CPU there is nothing to save."""


class BatchRamp(Section):
    """A batch that grows in equal steps while the first samples are consumed (arXiv:2201.11990, section 3.2)."""

    start: Batch
    """Sequences in the first step."""
    increment: Batch
    """Sequences by which the batch grows each time."""
    samples: Annotated[int, Field(gt=0, le=10**15, strict=True)]
    """Sequences consumed until the batch has reached train.global_batch_size."""


class TrainConfig(Section):
    """How long, how much at once, how fast."""

    steps: Steps
    """Optimizer steps of the whole job."""
    global_batch_size: Batch = 16
    """Sequences in one step, over all data-parallel replicas."""
    micro_batch_size: Batch = 1
    """Sequences that one replica processes at once; a step accumulates over its micro-batches. The last one of a step
    is smaller where it does not divide."""
    seed: Seed = 1234
    """Seed of initialisation and sample order."""
    deterministic_kernels: bool = False
    """Whether a GPU computes by kernels that give the same bits each time, so that a job that was recovered has the
    very curve that it would have had. false: the fastest, whose attention adds in the order in which its blocks happen
    to come, so that the curve is the same but for rounding. With deterministic: elastic they are always such. CPUs have
    no others."""
    deterministic: Literal["layout", "elastic"] = "layout"
    """What the bits of a job depend on. layout: the same layout gives the same bits. elastic: the number of replicas
    does not matter either, at the same tensor and pipeline size: gradients are added in a fixed tree over the global
    batch's micro-batches, which replicas share as wholes. Takes up to 2 log2(m) more gradient buffers a rank for m
    micro-batches of a replica, and no reduction runs beside backward (docs/parallelism.md)."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of compute. bf16 and fp16 keep fp32 master weights, moments and gradient sums; fp16 also scales
    the loss dynamically."""
    fp8: Annotated[Literal["off", "tensorwise", "rowwise"], MayBeOff] = "off"
    """Whether the products of the linear layers inside of the transformer layers take 8-bit matrices, forward and
    backward; with precision bf16. Embedding, output layer, norms and attention stay as they are, and so do master
    weights, gradient sums and what is kept for backward. tensorwise: each matrix has one scale, gradients are e5m2;
    rowwise: each row has its own, gradients are e4m3, more is computed beside the products. Needs a GPU of compute
    capability 8.9 or above, or a CPU, where it is slow. Takes 2 bytes more for each weight (docs/parallelism.md)."""
    attention: Literal["auto", "sdpa", "explicit"] = "auto"
    """How attention is computed: sdpa: torch's fused kernels, which never hold the s x s scores; explicit: batched
    matrix products that do. auto: sdpa, or explicit with dropout (the fused kernels' dropout depends on the layout)."""
    compile: StrictBool = False
    """Whether each transformer block is compiled by torch.compile."""
    head_tokens: Count = 0
    """Tokens whose logits are in memory at once: output layer, loss and their gradients are computed for so many after
    the other (docs/parallelism.md). 0: those of a whole micro-batch. Fewer take less memory, and one pass more over the
    gradient of the output layer's weight each time, which 1024 or more tokens outweigh on a GPU; on a CPU, and where
    logits are no large part of the memory, there is nothing to gain. Changes roundings of that one gradient."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning rate."""
    frozen: Annotated[tuple[str, ...], Field(max_length=1000)] = ()
    """Parameters that are not trained, as patterns of their names: `embedding`, `layers.0-3`, `*.mlp`
    (docs/training.md). They have no gradient and no moments, and backward ends where nothing before it is trained."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of log(Z)^2 of each token, Z being the sum of exponentials of its logits, in what is minimised: it keeps
    the logits from drifting away (arXiv:2204.02311, section 5, with 1.0e-4). 0: none. `loss` stays the cross-entropy
    alone; `z_loss` in the metrics is what comes on top, as a mean over the same tokens."""
    validate_every: StepsOrNever = 0
    """Steps between two validations; 0: never."""
    validation_batches: Steps = 8
    """Global batches of held-out text in one validation, at most the whole held-out part."""
    batch_ramp: BatchRamp | None = None
    """Growth of the batch at the start of the job; default: global_batch_size from the first step."""
    time_parts_every: StepsOrNever = 10
    """Steps between two measurements of where a step's time goes; 0: never."""

    @property
    def dtype(self) -> str:
        """Name of the torch dtype of compute."""
        return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[self.precision]


class ParallelConfig(Section):
    """The layout: tensor x pipeline x data ranks."""

    tensor: AxisSize = 1
    """Tensor-parallel size (t): ranks that share each layer."""
    pipeline: AxisSize = 1
    """Pipeline-parallel size (p): stages."""
    data: AxisSize = 1
    """Data-parallel size (d): replicas."""
    context: AxisSize = 1
    """Context-parallel size. Built: 1."""
    virtual_stages: Layers = 1
    """Model chunks per stage (v): any number for interleaved, 2 for zb-v, 1 for the others."""
    stage_layers: Annotated[tuple[Layers, ...], Field(max_length=10_000)] | None = None
    """Layers of each virtual stage, in the model's order: pipeline x virtual_stages numbers that add up to
    model.layers. Default: evenly, which also holds where the job goes on with another pipeline size
    (elastic.reshape). With a large vocabulary fewer on the last one, which has the logits (docs/parallelism.md); `auto`
    finds them."""
    stage_accelerators: tuple[AcceleratorType, ...] | None = None
    """For each stage, the type that the GPUs of its nodes must have, as Ray calls it and `manta nodes` shows it, such
    as [A100, A100, V100]; for clusters of unequal nodes (docs/planner.md). null: nodes of any type."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] = "1f1b"
    """Order of forwards and backwards in the pipeline (docs/parallelism.md)."""
    sequence_parallel: StrictBool | None = None
    """Split norms and residuals along the sequence over the tensor group (arXiv:2205.05198, section 4.2.2);
    default: exactly when tensor > 1."""
    forward_chunks: Chunks = 1
    """Chunks along the sequence in which, forward, products run beside their communication over the tensor group: one
    is gathered or summed while another is computed (docs/parallelism.md). Nothing changes with tensor 1. 1: first all
    of one, then all of the other; the default, because smaller products and more messages may cost more than they hide,
    and nobody has measured it on several GPUs."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in backward. selective: those of recompute_modules; full: whole layers, of which only
    the input is kept (arXiv:2205.05198, section 5)."""
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attention",)
    """What selective recomputation drops: core_attention (scores, softmax and dropout), norm (outputs of the layer
    norms), mlp_activation (output of the MLP's activation function)."""
    recompute_every: Layers = 1
    """Full recomputation drops every k-th layer only, beginning with layer 0."""
    recompute_keep: Count = 0
    """Micro-batches in flight on each stage that keep all their activations; only the others are recomputed
    (arXiv:2205.05198, appendix C)."""
    offload_layers: Count = 0
    """Of the layers of each virtual stage, how many, evenly spread, have what they keep for backward in pinned host
    memory meanwhile; with recomputation, what that keeps. The same numbers. Copies run beside the layers between; where
    they take longer than those, the device waits (docs/parallelism.md). 0: none, which is fastest where they fit."""
    zero: Literal[0, 1, 3] = 1
    """ZeRO stage (arXiv:1910.02054). 0: every replica holds the whole optimizer state; 1: it is split over the data
    group. 3 is not built."""
    bucket_megabytes: PositiveFloat | Literal["auto"] = "auto"
    """Size of the buckets in which gradients are reduced over the data group while backward still runs, in 10^6
    bytes. auto: 25 on a CPU; on a GPU 160 or 4 times the replicas, whichever is more, so that each part of a bucket
    keeps a link busy for longer than a message's latency."""

    gather: Literal["after_update", "beside_forward"] = "after_update"
    """When updated parameters come from the other replicas under ZeRO 1. beside_forward: while the next step's forward
    begins, each layer of which waits for its own; in 16 bits, else as after_update. The same bits either way. Off until
    it has been measured on a GPU."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def micro_batch_unit(self) -> int:
        """What the number of a replica's micro-batches is a multiple of: interleaving takes as many as stages at a
        time."""
        return self.pipeline if self.schedule == "interleaved" else 1

    def bucket_bytes(self, on_gpu: bool) -> float:
        """Size of the gradient buckets."""
        if self.bucket_megabytes != "auto":
            return self.bucket_megabytes * 1e6
        return max(160e6, 4e6 * self.data) if on_gpu else 25e6

    @property
    def sequence_parallel_on(self) -> bool:
        """Whether activations between the tensor-parallel blocks are split along the sequence."""
        if self.sequence_parallel is None:
            return self.tensor > 1
        return self.sequence_parallel and self.tensor > 1


class ElasticConfig(Section):
    """How far the layout may move while the job runs."""

    min_data: AxisSize | None = None
    """Fewest replicas the job may go on with; default: parallel.data."""
    max_data: AxisSize | None = None
    """Most replicas the job may grow to; default: parallel.data."""
    reshape: StrictBool = False
    """Whether the job may go on with smaller tensor and pipeline sizes, which divide its own, when min_data replicas do
    not fit; it goes back when they do. Each rank then holds more of the model, and the loss curve is the same to
    rounding only."""


class ResourcesConfig(Section):
    """What a rank runs on."""

    accelerator: Accelerator = "auto"
    """auto: GPUs where the cluster has any, else CPU slots."""
    environment: Annotated[dict[str, str], AfterValidator(FixedMapping)] = Field(default_factory=FixedMapping)
    """Environment variables of the trainers: those of NCCL, gloo and the GPU's allocator that docs/parallelism.md
    lists, such as NCCL_SOCKET_IFNAME."""
    threads: Threads | Literal["auto"] = "auto"
    """Threads that each rank computes with on a CPU. Bits depend on their number, so it is decided once for a job and
    never changes with machine or layout. auto: when the job first starts, the cores of a node, divided by the most
    ranks that the job may ever have there; 1 on GPUs and with train.deterministic: elastic (docs/training.md)."""


class CheckpointConfig(Section):
    """When state is kept, in memory and on disk."""

    every_steps: StepsOrNever = 50
    """Steps between durable checkpoints; the last step is always saved. 0: none but those of a pause. One that is due
    while the one before is still being written waits for that, and the training does not."""
    keep: Steps = 3
    """Newest durable checkpoints kept; older ones are deleted after a newer one is complete. Where a roll back could
    undo all of these, up to two from before are kept too."""
    snapshots: Annotated[Literal["auto", "shared_memory", "node_memory", "off"], MayBeOff] = "auto"
    """Where each rank keeps its last two snapshots, 24 bytes for each parameter whose moments it has, from which a job
    goes on after a failure. shared_memory: /dev/shm of the rank's node; node_memory: memory that the node's daemon
    holds, which no size of /dev/shm limits and which ends with the daemon; auto: shared memory, and where that has no
    room the daemon's, with an event; off: nowhere, so that whatever happens the job goes on from its newest durable
    checkpoint, also after a resize or a drain (docs/recovery.md)."""
    snapshot_every_steps: Steps | Literal["auto"] = "auto"
    """Steps between snapshots; the most that a crash makes a job redo (more only where it has just
    changed: `workers/snapshot/interval.py`). auto: 1, or more where making sure of each would take the training thread
    over 1 ms and over 1% of a step's time; `snapshot_every_steps` in the metrics is what it is at a step."""


class SpikeConfig(Section):
    """Steps whose loss or gradient norm is far above that of the steps before.

    A number is too high when it lies more than so many deviations above the median of the last `window` steps. A
    deviation is 1.4826 times their median distance from that median (as the standard deviation where they are
    normally distributed), and at least 5% of it.
    """

    policy: Literal["ignore", "report", "skip", "roll_back", "fail"] = "ignore"
    """What happens then. report: an event; skip, roll_back, fail: as for recovery.nonfinite, and like there the
    weights have not been touched."""
    window: Annotated[int, Field(ge=LEAST_WINDOW, le=500, strict=True)] = 50
    """Steps that are looked back at; before there are as many, no step is judged."""
    loss_deviations: PositiveFloat = 8.0
    """By how many deviations a loss must stand out."""
    grad_norm_deviations: PositiveFloat | None = 20.0
    """The same for the gradient's norm before clipping, which varies more; null: it is not looked at."""


class RecoveryConfig(Section):
    """What failures cost before the job gives up."""

    nonfinite: Literal["fail", "skip", "roll_back"] = "fail"
    """What happens when a step's loss or gradient is not finite, which is noticed before the weights are touched. fail:
    the job fails and names the samples; skip: the step passes without an update; roll_back: the job goes back
    `roll_back_steps` and skips the step's samples. Each is an event."""

    spike: SpikeConfig = SpikeConfig()
    """Numbers that are finite and still stand out."""

    roll_back_steps: Annotated[int, Field(gt=0, le=10_000, strict=True)] = 10
    """How many committed steps a roll back undoes at least, as far as the process reaches back: up to twice as many
    less one. They are done again with the same samples. With a policy of roll_back each rank keeps two copies of its
    state in host memory, one every so many steps."""

    max_roll_backs: Annotated[int, Field(gt=0, le=100, strict=True)] = 10
    """Roll backs in the life of the job; the next one fails it."""

    check_replicas_every: StepsOrNever = 100
    """Steps between comparisons of all parameters that ought to have the same bits on several ranks: one that differs
    was changed in memory or on its way, and the rank is replaced. 0: never."""

    stragglers: Literal["ignore", "report", "replace"] = "report"
    """What happens with a rank whose own work, without the time it waits for others, takes persistently longer than
    that of its peers in the same stage. report: an event names it with the evidence; replace: its process is also
    ended after the next committed step and replaced like a lost one, each rank at most once in ten minutes. Own work
    is known on CPUs only."""

    max_restarts: Count = 20
    """Failures that are survived within `restart_window_seconds` before the job fails with restarts_exhausted."""
    restart_window_seconds: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 86_400.0
    """How long a failure counts against `max_restarts`, in seconds; 0: forever. A job that runs for months meets more
    failures than any fixed number allows and is still worth going on with; one that fails 20 times a day is not."""

    @property
    def rolls_back(self) -> bool:
        """Whether any policy is to roll back, so that earlier states must be kept."""
        return "roll_back" in (self.nonfinite, self.spike.policy)

    @property
    def needs_history(self) -> bool:
        """Whether what follows from a step depends on the steps before: on their losses or on roll backs."""
        return self.rolls_back or self.spike.policy != "ignore"


class JobSpec(Section):
    """One training job, as submitted."""

    name: JobName = "job"
    """A name for people; need not be unique."""
    labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=MOST_LABELS), AfterValidator(FixedMapping)] = Field(
        default_factory=FixedMapping
    )
    """What lists of jobs can be filtered by, such as `team: vision`; nothing else follows from them."""
    model: ModelConfig
    """The transformer."""
    data: DataConfig
    """The corpus."""
    train: TrainConfig
    """Steps, batches, optimizer."""
    parallel: ParallelConfig | Literal["auto"] = ParallelConfig()
    """The layout. Built: explicit layouts."""
    elastic: ElasticConfig = ElasticConfig()
    """Bounds for changes of size."""
    resources: ResourcesConfig = ResourcesConfig()
    """Accelerators."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Durable checkpoints and snapshots."""
    recovery: RecoveryConfig = RecoveryConfig()
    """Limits of automatic recovery."""
    priority: Priority = 0
    """Higher starts first among queued jobs."""
    max_duration: PositiveFloat | None = None
    """Seconds that the job may take, time in the queue and in a pause aside; when they are over its state is saved as
    for a pause, and it fails with reason max_duration. A retry has as long again. Default: no limit."""

    @property
    def layout(self) -> ParallelConfig:
        """The explicit layout. Raises ValueError while it is still `auto`."""
        if isinstance(self.parallel, str):
            raise ValueError("parallel is still 'auto': plan it first")
        return self.parallel

    @property
    def micro_batches(self) -> int:
        """Most micro-batches that a replica runs in a step (m), once the batch is at its full size."""
        layout, train = self.layout, self.train
        if train.deterministic == "elastic":
            whole = -(-train.global_batch_size // train.micro_batch_size)
            return -(-(whole // layout.micro_batch_unit) // layout.data) * layout.micro_batch_unit
        share = -(-train.global_batch_size // layout.data)
        return -(-share // train.micro_batch_size)

    @property
    def attention_is_explicit(self) -> bool:
        """Whether attention is written out: asked for, or needed by dropout that does not depend on the layout."""
        return self.train.attention == "explicit" or (self.train.attention == "auto" and self.model.dropout > 0)

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids, without padding. Raises ValueError while it has to be taken from the tokenizer's file
        (`workers.data.vocabulary`)."""
        size = self.model.vocabulary_size or self.data.token_ids
        if size is None:
            raise ValueError("the vocabulary's size is not known before the tokenizer's file is read")
        return size
