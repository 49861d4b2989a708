"""`model`: the transformer's shape."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from workers.config.fields import (
    ENTRYPOINT,
    Experts,
    FixedMapping,
    Fraction,
    Heads,
    Layers,
    Length,
    PositiveFloat,
    Section,
    StrictBool,
    Vocabulary,
    Width,
)
from workers.spec.families import FAMILIES, Family


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

    theta: Annotated[float, Field(gt=1, strict=True, allow_inf_nan=False)] = 10_000.0
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
    entrypoint: Annotated[str, Field(max_length=500, pattern=ENTRYPOINT)] | None = None
    """custom: where the model is, `package.module:function`."""
    options: Annotated[
        dict[str, bool | int | float | str], AfterValidator(FixedMapping), Field(default_factory=FixedMapping)
    ]
    """custom: options of the model, besides the keys that all models have."""
    layers: Layers
    """Number of transformer layers (L in the papers)."""
    hidden_size: Width
    """Width of the residual stream, in elements (h)."""
    heads: Heads
    """Number of attention heads (a); divides hidden_size unless head_dim is given."""
    kv_heads: Heads | None = None
    """Number of key-value heads (grouped-query attention, arXiv:2305.13245); divides heads; default: the number of
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
    experts: Experts | None = None
    """Not built: MLPs of a layer between which tokens are shared out (moe)."""

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
