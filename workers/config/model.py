"""`model`: the transformer's shape, and the properties of model families that rules and estimates need (their modules
are in workers/model/)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from manta.workers.config.fields import (
    ENTRYPOINT,
    Count,
    Epsilon,
    FixedMapping,
    Fraction,
    Heads,
    Layers,
    Length,
    NonNegativeFloat,
    PositiveFloat,
    Section,
    StrictBool,
    Vocabulary,
    Width,
)


@dataclass(frozen=True)
class Family:
    """Properties of a family's layers."""

    gated_mlp: bool
    """SwiGLU: an MLP with three matrices (Shazeer 2020, arXiv:2002.05202); otherwise two, with GELU in between."""
    rms_norm: bool
    """RMS norms, which only scale (Zhang & Sennrich 2019, arXiv:1910.07467); otherwise layer norms."""
    rotary: bool
    """Queries and keys are rotated by their positions (Su et al. 2021, arXiv:2104.09864); otherwise positions are
    learned."""
    query_key_norm: bool
    """Queries and keys are normalized per head (Henry et al. 2020, arXiv:2010.04245)."""
    bias: bool
    """Default for biases of linear layers and layer norms."""
    tie_embeddings: bool
    """Default for sharing the token embedding's weight with the output layer."""


_LLAMA = Family(gated_mlp=True, rms_norm=True, rotary=True, query_key_norm=False, bias=False, tie_embeddings=False)
FAMILIES = {
    "gpt": Family(gated_mlp=False, rms_norm=False, rotary=False, query_key_norm=False, bias=True, tie_embeddings=True),
    "llama": _LLAMA,
    "qwen": replace(_LLAMA, query_key_norm=True),
    "deepseek": _LLAMA,
    # The parts that a custom model may use; its layers are unknown.
    "custom": Family(
        gated_mlp=False, rms_norm=False, rotary=True, query_key_norm=False, bias=False, tie_embeddings=False
    ),
}
"""Supported families, by `model.family`."""


class RopeScaling(Section):
    """Scaling of rotary positions for sequences longer than those that a model was pretrained on."""

    type: Literal["linear", "llama3", "yarn"]
    """linear: divides all frequencies by the factor (arXiv:2306.15595); llama3: only low frequencies, as in Llama 3.1;
    yarn: only low frequencies, with sharper attention (arXiv:2309.00071)."""
    factor: Annotated[float, Field(ge=1, strict=True, allow_inf_nan=False)]
    """Ratio of the new to the original sequence length."""
    original_length: Length | None = None
    """Original sequence length, in tokens; required for llama3 and yarn."""
    low_frequency_factor: PositiveFloat = 1.0
    """llama3: frequencies with at most this many rotations in original_length are divided by the factor."""
    high_frequency_factor: PositiveFloat = 4.0
    """llama3: frequencies with at least this many rotations in original_length are kept; those in between are
    interpolated."""
    beta_fast: PositiveFloat = 32.0
    """yarn: frequencies with at least this many rotations in original_length are kept."""
    beta_slow: PositiveFloat = 1.0
    """yarn: frequencies with at most this many rotations in original_length are divided by the factor."""
    attention_factor: PositiveFloat | None = None
    """yarn: factor that queries and keys are multiplied by; default: 0.1 ln(factor) + 1. With latent_attention, of
    their rotated elements only."""
    mscale_all_dim: PositiveFloat | None = None
    """yarn with latent_attention: attention's scores are multiplied by (0.1 mscale_all_dim ln(factor) + 1)^2; default:
    they are not."""


class RopeConfig(Section):
    """Rotary positions (arXiv:2104.09864)."""

    theta: Annotated[float, Field(gt=1, strict=True, allow_inf_nan=False)] = 10_000.0
    """Base of the frequencies: pair i of d/2 rotates by theta^(-2i/d) per token."""
    scaling: RopeScaling | None = None
    """Scaling for longer sequences; default: none."""


class BalanceConfig(Section):
    """How tokens are spread evenly over experts."""

    loss: Literal["sequence", "none"] = "sequence"
    """sequence: a loss for each sequence and layer (DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20), the mean over the
    sequences of the global batch; it does not depend on the layout or on the size of micro-batches."""
    weight: NonNegativeFloat = 0.001
    """Weight of that loss."""
    bias_rate: NonNegativeFloat = 0.0
    """How far each step moves the bias with which a layer chooses an expert, up for experts with fewer tokens than the
    mean and down for those with more (arXiv:2408.15664); 0: there is no such bias, or in deepseek it stays as it
    was read."""


class MoeConfig(Section):
    """Mixture of experts: in place of its MLP, a layer has experts, of which a router chooses some for each token.
    Every token goes to all experts chosen for it: there is no capacity, and none is dropped."""

    experts: Heads
    """Number of experts of a layer (E)."""
    per_token: Heads
    """Number of experts that each token goes to (k)."""
    ffn_hidden_size: Width
    """Inner width of an expert, in elements."""
    first_dense: Count = 0
    """Number of first layers that have an MLP instead, of inner width model.ffn_hidden_size."""
    every: Layers = 1
    """Of the layers after these, those whose number, counted from 1 for the model's first layer, is a multiple of this
    have experts, the others an MLP."""
    shared: Count = 0
    """Number of experts that every token goes to, in addition to those chosen for it."""
    shared_ffn_hidden_size: Width | None = None
    """Inner width of all shared experts together, which are computed as one MLP; default: shared x ffn_hidden_size."""
    shared_gate: StrictBool = False
    """Whether the shared experts' output is multiplied by a sigmoid of a linear function of the token."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's outputs become scores."""
    normalise: StrictBool = True
    """Whether the scores of the chosen experts are divided by their sum before they weight the experts' outputs."""
    scale: PositiveFloat = 1.0
    """Factor on these weights."""
    groups: Heads = 1
    """Number of equal groups that experts are divided into; with more than one, a token first chooses groups, by the
    sum of each group's two best scores, and then experts within these (arXiv:2412.19437, section 2.1.2)."""
    groups_per_token: Heads = 1
    """Number of groups that a token may choose experts from."""
    balance: BalanceConfig = BalanceConfig()
    """How tokens are spread evenly over experts."""
    router_z_loss: NonNegativeFloat = 0.0
    """Weight of the mean over tokens of log(sum of exp)^2 of the router's outputs, for each layer (arXiv:2202.08906,
    eq. 5)."""

    @property
    def shared_size(self) -> int:
        """Inner width of all shared experts together; 0 without."""
        return self.shared_ffn_hidden_size or self.shared * self.ffn_hidden_size if self.shared else 0


class LatentAttentionConfig(Section):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values of all heads are made
    from one short vector of each token."""

    q_rank: Width | None = None
    """Width of the vector that queries are made from; default: they are made from the layer's input."""
    kv_rank: Width
    """Width of the vector that keys and values are made from."""
    rope_size: Width
    """Elements of each head's query and key that positions rotate; those of the key are the same for all heads."""
    nope_size: Width
    """Elements of each head's query and key that positions do not rotate."""
    value_size: Width
    """Elements of each head's value."""

    @property
    def query_size(self) -> int:
        """Elements of each head's query and key."""
        return self.nope_size + self.rope_size


class ModelConfig(Section):
    """The transformer's shape. Nothing here depends on the parallel layout."""

    model_config = ConfigDict(serialize_by_alias=True)

    from_: Annotated[str, Field(min_length=1)] | None = Field(default=None, alias="from")
    """Folder of Hugging Face weights (config.json and safetensors) to start from. The shape is read from config.json
    and need not be given here. Default: random weights."""
    family: Literal["gpt", "llama", "qwen", "deepseek", "custom"] = "gpt"
    """Model family. Supported: gpt; llama (Llama 2 and 3, Mistral with sliding_window, and Mixtral with moe); qwen
    (Qwen 3, with moe its models of experts); deepseek (DeepSeek V3); custom (a model of an installed package,
    docs/custom_models.md)."""
    entrypoint: Annotated[str, Field(max_length=500, pattern=ENTRYPOINT)] | None = None
    """custom: the model's location, `package.module:function`."""
    options: Annotated[
        dict[str, bool | int | float | str], AfterValidator(FixedMapping), Field(default_factory=FixedMapping)
    ]
    """custom: additional options passed to the model."""
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
    """Inner width of the MLP, in elements; default: 4 * hidden_size, and for families other than gpt, whose MLPs have
    three matrices, 8/3 of hidden_size, rounded up to a multiple of 64."""
    sequence_length: Length
    """Number of tokens in a training sequence (s)."""
    vocabulary_size: Vocabulary | None = None
    """Number of token ids (v); default: the tokenizer's. Padded internally to a multiple of parallel.tensor."""
    dropout: Fraction = 0.0
    """Probability of zeroing an activation during training: of the embedding, attention weights, and each block's
    output. The same elements are zeroed under every layout."""
    bias: StrictBool = True
    """Whether linear layers and layer norms have biases; default: true for gpt, else false."""
    tie_embeddings: StrictBool = True
    """Whether the output layer shares the token embedding's weight; default: true for gpt, else false."""
    activation: Literal["gelu", "gelu_tanh"] = "gelu"
    """Activation function of gpt's MLP. gelu: exact, with erf; gelu_tanh: its tanh approximation, which GPT-2 uses
    (Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2). The others use SwiGLU."""
    norm_epsilon: Epsilon = 1.0e-5
    """Added to the variance or mean square in norms; at least 1e-30."""
    rope: RopeConfig | None = None
    """Rotary positions of llama, qwen and deepseek; default: theta 10000, no scaling. gpt has learned positions."""
    sliding_window: Length | None = None
    """Number of tokens that a token attends to, including itself (arXiv:2310.06825); default: all preceding tokens."""
    full_attention_every: Layers | None = None
    """With sliding_window: every k-th layer attends to all preceding tokens; default: no layer does."""
    moe: MoeConfig | None = None
    """Mixture of experts; default: every layer has an MLP."""
    latent_attention: LatentAttentionConfig | None = None
    """deepseek: the shape of its attention."""

    @model_validator(mode="after")
    def _with_defaults_of_family(self) -> ModelConfig:
        for key in ("bias", "tie_embeddings"):
            if key not in self.model_fields_set:
                self.__dict__[key] = getattr(self.parts, key)  # not recorded as set by the user
        return self

    @property
    def parts(self) -> Family:
        """The components of the family's layers."""
        return FAMILIES[self.family]

    @property
    def is_counted(self) -> bool:
        """Whether its parameters and FLOPs can be computed from the shape."""
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
        """Width of one attention head, in elements (d). With latent attention that of core attention, in which queries
        and keys are as wide as values."""
        latent = self.latent_attention
        if latent is not None:
            return max(latent.query_size, latent.value_size)
        return self.head_dim or self.hidden_size // self.heads

    @property
    def has_head_size(self) -> bool:
        """Whether heads have a width: it is given, or their number divides hidden_size."""
        return bool(self.head_dim or self.latent_attention) or self.hidden_size % self.heads == 0

    @property
    def value_size(self) -> int:
        """Width of one head's value, in elements."""
        return self.head_size if self.latent_attention is None else self.latent_attention.value_size

    @property
    def rotated_size(self) -> int:
        """Elements of one head that rotary positions rotate."""
        return self.head_size if self.latent_attention is None else self.latent_attention.rope_size

    @property
    def score_factor(self) -> float:
        """Factor on attention's scores, besides 1 / sqrt(width of a query)."""
        scaling = self.rope_or_default.scaling
        if scaling is None or scaling.mscale_all_dim is None:
            return 1.0
        return (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2

    @property
    def rope_or_default(self) -> RopeConfig:
        """Rotary positions, for families that use them."""
        return self.rope or RopeConfig()

    @property
    def attention_width(self) -> int:
        """Width of the values of all attention heads together, in elements."""
        return self.heads * self.value_size

    @property
    def has_router_bias(self) -> bool:
        """Whether the choice of experts adds a bias to their scores, which is a part of the state: always in DeepSeek's
        layers, where it may stay as it is."""
        return self.moe is not None and (self.moe.balance.bias_rate > 0 or self.family == "deepseek")

    def has_experts(self, layer: int) -> bool:
        """Whether layer `layer`, from 0, has experts instead of an MLP."""
        moe = self.moe
        return moe is not None and layer >= moe.first_dense and (layer + 1) % moe.every == 0

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return tuple(layer for layer in range(self.layers) if self.has_experts(layer))

    def window(self, layer: int) -> int | None:
        """Number of tokens that a token attends to in layer `layer`; None: all preceding tokens."""
        if self.sliding_window is None or self.sliding_window >= self.sequence_length:
            return None
        every = self.full_attention_every
        return None if every is not None and (layer + 1) % every == 0 else self.sliding_window
