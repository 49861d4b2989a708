"""Configurations of other libraries, and what the documentation says of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml
from documented import blocks_of, run_blocks
from engine_specs import document
from their_models import KINDS, LLAMA3, YARN

from manta.workers.accounting.flops import parameter_count
from manta.workers.errors import WeightsError
from manta.workers.spec.reading import parse_job_spec
from manta.workers.weights.config import Keys, huggingface_config, read_config, shape_of

LLAMA = {
    "model_type": "llama", "vocab_size": 263, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4,
}  # fmt: skip


MOE = {"experts": 4, "per_token": 2, "ffn_hidden_size": 8}
DEEPSEEK = {
    "family": "deepseek", "latent_attention": {"kv_rank": 8, "rope_size": 4, "nope_size": 4, "value_size": 4},
}  # fmt: skip
PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text())


def section(config: dict) -> dict:
    return shape_of(Keys(config, "config.json")).section


def spec_of(config: dict):
    return parse_job_spec(document(model={"hidden_size": 32, **section(config)}))


@pytest.mark.parametrize("kind", KINDS)
def test_config_of_transformers_survives_a_round_trip(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    name, keys = KINDS[kind]
    theirs = getattr(transformers, f"{name}Config")(**keys)
    theirs.save_pretrained(tmp_path)
    shape = shape_of(read_config(tmp_path))
    spec = parse_job_spec(document(model={**shape.section, "sequence_length": shape.positions}))
    config = huggingface_config(spec, "float32")
    again = type(theirs)(**config)
    unlike = ("pad_token_id", "bos_token_id", "eos_token_id", "dtype", "architectures", "resid_pdrop", "embd_pdrop")
    unlike += ("attn_pdrop", "n_inner", "max_window_layers", "transformers_version")
    before, after = theirs.to_dict(), again.to_dict()
    assert {key: after.get(key) for key in before if key not in unlike} == {
        key: value for key, value in before.items() if key not in unlike
    }
    assert section(config) == shape.section


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"rope_theta": 7e4}, {"rope_theta": 7e4, "rope_type": "default"}),
        ({"rope_scaling": {"type": "linear", "factor": 1.0}}, {"rope_type": "linear", "factor": 1.0}),
        (
            {"rope_theta": 7e4, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_theta": 7e4, "rope_type": "linear", "factor": 2.0},
        ),
        (
            {"rope_theta": 5000.0, "rope_scaling": {key: LLAMA3[key] for key in LLAMA3 if key != "rope_theta"}},
            LLAMA3,
        ),
        ({"rope_theta": 5000.0, "rope_scaling": {**YARN, "attention_factor": 1.2}}, {**YARN, "attention_factor": 1.2}),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": None}, "original_max_position_embeddings": 64},
            YARN,
        ),
    ],
)
def test_rope_is_read_from_configs_of_transformers_4_and_5(older, newer):
    rope = section({**LLAMA, **older})["rope"]
    assert rope == section({**LLAMA, "rope_parameters": newer})["rope"]
    config = huggingface_config(spec_of({**LLAMA, **older}), "float32")
    assert section(config)["rope"] == rope


def test_kimi_k2_is_read_as_a_deepseek_v3():
    published = PUBLISHED["DeepSeek V3"]["config"]
    assert section({**published, "model_type": "kimi_k2"}) == section(published)


def test_exported_mscale_all_dim_without_attention_factor_is_read_again_with_yarns_default():
    yarn = {"type": "yarn", "factor": 4.0, "original_length": 16, "mscale_all_dim": 0.7}
    spec = parse_job_spec(document(model={**DEEPSEEK, "rope": {"scaling": yarn}}))
    scaling = section(huggingface_config(spec, "float32"))["rope"]["scaling"]
    assert scaling["attention_factor"] == pytest.approx(0.1 * math.log(4.0) + 1.0)


def test_exported_yarn_config_has_the_positions_that_give_its_factor():
    yarn = {"type": "yarn", "factor": 4.0, "original_length": 16}
    spec = parse_job_spec(document(model={"family": "llama", "sequence_length": 32, "rope": {"scaling": yarn}}))
    assert huggingface_config(spec, "float32")["max_position_embeddings"] == 4 * 16
    assert huggingface_config(spec, "float32", 48)["max_position_embeddings"] == 48, (
        "of the weights that the job began with"
    )


def test_missing_config_keys_have_the_defaults_of_transformers():
    transformers = pytest.importorskip("transformers")
    for kind, name in (("llama", "Llama"), ("mistral", "Mistral"), ("qwen3", "Qwen3")):
        few = {**LLAMA, "model_type": kind, "num_attention_heads": 32, "hidden_size": 4096}
        config = getattr(transformers, f"{name}Config")(**few)
        said = section(few)
        assert said["kv_heads"] == config.num_key_value_heads
        assert said["head_dim"] == config.head_dim
        assert said["norm_epsilon"] == config.rms_norm_eps
        assert said["sliding_window"] == getattr(config, "sliding_window", None)
        assert shape_of(Keys(few, "")).positions == config.max_position_embeddings
    said, config = section({"model_type": "gpt2"}), transformers.GPT2Config()
    assert (said["layers"], said["hidden_size"], said["heads"]) == (config.n_layer, config.n_embd, config.n_head)
    assert (said["activation"], said["vocabulary_size"]) == ("gelu_tanh", config.vocab_size)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_the_published_number_of_parameters(name):
    config = PUBLISHED[name]["config"]
    shape = shape_of(Keys(config, "config.json"))
    spec = parse_job_spec(document(model={**shape.section, "sequence_length": 4096}))
    assert parameter_count(spec) / 1e9 == pytest.approx(PUBLISHED[name]["billions"], abs=5e-4)
    written = huggingface_config(spec, "bfloat16", shape.positions)
    assert section(written) == shape.section
    unlike = {"num_nextn_predict_layers", "rope_scaling", "bos_token_id", "eos_token_id", "rope_theta"}
    assert {key: config[key] for key in config.keys() & written.keys() - unlike} == {
        key: written[key] for key in config.keys() & written.keys() - unlike
    }


def test_deepseek_moe_of_16_billion_parameters_is_a_llama_with_experts():
    """Its attention is that of Llama (arXiv:2401.06066, table 6)."""
    moe = {"experts": 64, "per_token": 6, "ffn_hidden_size": 1408, "first_dense": 1, "shared": 2, "normalise": False}
    model = {"family": "llama", "layers": 28, "hidden_size": 2048, "heads": 16, "ffn_hidden_size": 10944, "moe": moe}
    spec = parse_job_spec(document(model={**model, "vocabulary_size": 102400}))
    assert parameter_count(spec) / 1e9 == pytest.approx(16.376, abs=5e-4)


def test_qwen_window_needs_its_switch_and_all_layers():
    qwen = {**LLAMA, "model_type": "qwen3", "sliding_window": 16}
    assert section({**qwen, "max_window_layers": 0})["sliding_window"] is None
    assert section({**qwen, "use_sliding_window": True, "max_window_layers": 4})["sliding_window"] is None
    in_all = section({**qwen, "use_sliding_window": True, "max_window_layers": 0})
    assert (in_all["sliding_window"], in_all["full_attention_every"]) == (16, None)


def test_key_value_heads_that_are_null_are_as_many_as_heads():
    transformers = pytest.importorskip("transformers")
    null = {**LLAMA, "model_type": "qwen3", "num_key_value_heads": None}
    assert section(null)["kv_heads"] == transformers.Qwen3Config(**null).num_key_value_heads == 4
    assert section({**null, "model_type": "mistral"})["kv_heads"] == 4


WRONG = [
    ({"model_type": "qwen2"}, "model_type is \"qwen2\": supported: gpt2, llama, mistral, mixtral, qwen3"),
    ({"model_type": None}, "model_type is null"),
    ({"quantization_config": {"bits": 4}}, "quantization_config: quantized weights cannot be trained"),
    ({"vision_config": {}, "text_config": {"a": 1}}, "text_config: models with several parts"),
    ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map: the model needs code from its folder"),
    ({"model_type": "mixtral", "capacity_factor": 1.25}, "capacity_factor: every token goes to all experts chosen"),
    ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise: noise on what the router reads"),
    ({"model_type": "mixtral", "num_local_experts": 0}, "num_local_experts is 0: must be a whole number of at least 1"),
    ({"model_type": "mixtral", "num_experts_per_tok": 1}, "num_experts_per_tok is 1: must be at least 2"),
    ({"model_type": "mixtral", "num_experts_per_tok": None}, "num_experts_per_tok is null: null has no meaning"),
    ({"model_type": "qwen3_moe", "mlp_only_layers": [2]}, "mlp_only_layers is [2]: only the first layers"),
    ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "scoring_func is \"softmax\": only \"sigmoid\""),
    ({"model_type": "deepseek_v3", "moe_layer_freq": 2}, "moe_layer_freq is 2: only 1 is supported"),
    ({"model_type": "deepseek_v3", "rope_interleave": False}, "rope_interleave is false: only true"),
    ({"model_type": "deepseek_v3", "num_key_value_heads": 2}, "num_key_value_heads is 2: must be num_attention_heads"),
    ({"model_type": "deepseek_v3", "n_group": None}, "n_group is null: null has no meaning here: give its value"),
    ({"model_type": "deepseek_v3", "rope_scaling": {**YARN, "mscale": 0.7}}, "mscale is 0.7: without mscale_all_dim"),
    ({"model_type": "deepseek_v3", "rope_scaling": {**YARN, "mscale_all_dim": 1.0}}, "is 1.0: without mscale, its"),
    (
        {"model_type": "deepseek_v3", "rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
        "mscale_all_dim is 1.0: only supported with yarn",
    ),
    (
        {"model_type": "mistral", "layer_types": ["sliding_attention", "full_attention"] * 2},
        "layer_types: with mistral only windows in all layers",
    ),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        "rope_scaling: type is \"linear\": rope_scaling has another rope_type, \"default\"",
    ),
    ({"rope_scaling": YARN, "original_max_position_embeddings": 9}, "rope_scaling has another original_max_position"),
    ({"rope_scaling": {**YARN, "truncate": False}}, "truncate is false: this variant of yarn"),
    ({"hidden_act": "gelu"}, "hidden_act is \"gelu\": only silu"),
    ({"attention_bias": True}, "attention_bias is true: model.bias applies to all linear layers, but mlp_bias is"),
    ({"model_type": "qwen3", "attention_bias": True}, "attention_bias is true: biases in attention only"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling: rope_type is \"dynamic\""),
    ({"rope_scaling": {**YARN, "mscale": 0.7}}, "mscale is 0.7: this variant of yarn is not supported"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}, "mrope_section: not known, so what it"),
    (
        {"rope_scaling": {"factor": 2.0}, "rope_parameters": {"rope_theta": 5e5, "factor": 4.0}},
        "rope_parameters has another factor, 4.0",
    ),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "original_max_position_embeddings is missing"),
    (
        {"model_type": "qwen3", "rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        "rope_parameters: only the same rotary settings in all layers",
    ),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: only 1.0"),
    ({"num_hidden_layers": "four"}, "num_hidden_layers is \"four\": must be a whole number of at least 1"),
    ({"num_hidden_layers": True}, "num_hidden_layers is true"),
    ({"rms_norm_eps": -1}, "rms_norm_eps is -1: must be a number above 0"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings is \"no\": must be true or false"),
    ({"rope_scaling": [1]}, "rope_scaling is [1]: must be an object"),
    (
        {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 2},
        "max_window_layers: the only supported pattern is windows in all layers except every n-th",
    ),
    (
        {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["chunked_attention"] * 4},
        "layer_types has 'chunked_attention'",
    ),
    ({"model_type": "qwen3", "use_sliding_window": True, "layer_types": []}, "layer_types must be a list with one"),
    ({"model_type": "gpt2", "activation_function": "relu"}, "activation_function is \"relu\""),
    ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "only false is supported"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "sentence"), WRONG, ids=[sentence[:40] for _, sentence in WRONG])
def test_unsupported_config_value_is_reported_with_key_and_file(keys, sentence):
    with pytest.raises(WeightsError) as caught:
        section({**LLAMA, **keys})
    assert str(caught.value).startswith("config.json: ")
    assert sentence in str(caught.value)


def test_config_without_a_required_key_is_refused():
    with pytest.raises(WeightsError, match=r"^config.json: hidden_size is missing$"):
        section({key: value for key, value in LLAMA.items() if key != "hidden_size"})


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "has no config.json: name a folder"),
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "is not a JSON object"),
        (json.dumps({"a": "\ud800"}).replace("\\ud800", "\udcff"), "is not valid JSON"),
    ],
)
def test_unreadable_config_is_refused_in_one_sentence(tmp_path, content, sentence):
    if content is not None:
        (tmp_path / "config.json").write_text(content, errors="surrogateescape")
    with pytest.raises(WeightsError) as caught:
        read_config(tmp_path)
    assert sentence in str(caught.value)
    with pytest.raises(WeightsError, match="there is no folder"):
        read_config(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ({"kv_heads": 2}, "model.kv_heads with family gpt"),
        ({"head_dim": 4}, "head_dim"),
        ({"sliding_window": 4}, "model.sliding_window with family gpt"),
        ({"family": "qwen", "bias": True}, "model.bias with Qwen 3"),
        ({"family": "llama", "bias": True, "sliding_window": 4}, "model.bias with Mistral"),
        ({"family": "llama", "full_attention_every": 2, "sliding_window": 4}, "full_attention_every with Mistral"),
        ({"family": "llama", "moe": MOE | {"normalise": False}}, "model.moe.normalise false with Mixtral"),
        (
            {"family": "llama", "moe": MOE | {"balance": {"bias_rate": 1e-3}}},
            "model.moe.balance.bias_rate with Mixtral",
        ),
        ({"family": "qwen", "moe": MOE | {"shared": 1}}, "model.moe.shared 1 with Qwen 3 with moe"),
        ({**DEEPSEEK, "moe": MOE | {"shared": 1}}, 'model.moe.score "softmax" with family deepseek'),
        (
            {**DEEPSEEK, "moe": MOE | {"shared": 1, "score": "sigmoid", "groups": 4, "groups_per_token": 2}},
            "model.moe.groups of one expert each with family deepseek",
        ),
        ({**DEEPSEEK, "sliding_window": 4}, "model.sliding_window with family deepseek"),
    ],
)
def test_model_unknown_to_transformers_is_not_exported_as_another(model, what):
    spec = parse_job_spec(document(model=model))
    with pytest.raises(WeightsError) as caught:
        huggingface_config(spec, "float32")
    assert what in str(caught.value) and "export as dcp or safetensors" in str(caught.value)


def test_file_in_place_of_a_weights_folder_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match="there is no folder"):
        read_config(tmp_path / "file")


def a_link(folder: Path) -> None:
    (folder / "config.json").symlink_to("../blobs/0")


@pytest.mark.parametrize(
    ("there", "sentence"),
    [
        (a_link, "it is a link to ../blobs/0, which is not there; a hub's cache needs its blobs too"),
        ("adapter_config.json", "it holds an adapter; merge that into the weights"),
        ("params.json", "it holds weights in the format of those who made them"),
        ("checkpoint-200/config.json", "there is one in {}/checkpoint-200"),
        ("snapshots/0/config.json", "there is one in {}/snapshots/0"),
    ],
)
def test_folder_without_a_config_is_refused_with_what_to_name(tmp_path, there, sentence):
    if callable(there):
        there(tmp_path)
    else:
        (tmp_path / there).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / there).write_text("{}")
    with pytest.raises(WeightsError, match=f"has no config.json: {sentence.format(tmp_path)}"):
        read_config(tmp_path)


BLOCKS = blocks_of("models.md")


@pytest.mark.parametrize("block", [text for kind, text in BLOCKS if kind == "yaml" and not text.startswith("#")])
def test_the_examples_of_families_are_specs(block):
    spec = parse_job_spec({**document(), **yaml.safe_load(block)})
    assert spec.model.family in block


@pytest.mark.soak
def test_weights_go_in_and_out_as_the_page_says(tmp_path):
    pytest.importorskip("transformers")
    ran = run_blocks(BLOCKS, tmp_path)
    assert "step 4/4" in ran[2]
    assert "exported the weights of" in ran[3]
    assert (tmp_path / "exported" / "model.safetensors").exists()
