"""What transformers takes from configs that say less, more or something else than it writes: python oracles/config_fields.py FOLDER.

expected.json is written to FOLDER: each config with what its layers are computed by, rotary frequencies and their factor, windows and
scale of scores, and eps, caps and context. Needs transformers, of which requirements.txt names the version.
"""

import json
import pathlib
import sys
import tempfile

import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

BASE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
NAMES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM", "gpt_oss": "GptOssForCausalLM", "gpt_neox": "GPTNeoXForCausalLM",
}
FLAT = [name for name in NAMES if name not in ("gemma3_text", "phi3", "gpt_neox")]
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.5 + i for i in range(8)]}
ORIGINAL = "original_max_position_embeddings"


def cases():
    for name in NAMES:
        # Every field that has a default in all of them is absent.
        yield name, {"head_dim": None, "num_key_value_heads": None, "max_position_embeddings": None, "num_attention_heads": None}
    for name in FLAT:
        yield name, {"rope_parameters": DEFAULT, "rope_scaling": YARN | {ORIGINAL: 32}, "rope_theta": 10000.0}
        yield name, {"rope_parameters": DEFAULT, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 10000.0}
        yield name, {"rope_theta": 500.0, "rope_scaling": YARN, ORIGINAL: 16}
        yield name, {"rope_theta": 500.0, "rope_scaling": YARN | {ORIGINAL: 64}, ORIGINAL: 16}
        yield name, {"rope_theta": 500.0, "rope_scaling": LLAMA3 | {ORIGINAL: 64}, ORIGINAL: 16}
    yield "llama", {"rope_parameters": {}, "rope_theta": 500.0}
    yield "llama", {"rope_scaling": {}, "rope_theta": 500.0}
    yield "llama", {"rope_scaling": LLAMA3, "rope_theta": 500.0}
    yield "llama", {"rope_scaling": YARN | {"truncate": None}, "rope_theta": 500.0}
    yield "llama", {"rope_scaling": {"rope_type": "longrope"} | LONG, "rope_theta": 500.0, ORIGINAL: 16}
    yield "llama", {"rope_scaling": {"rope_type": "longrope", ORIGINAL: 32} | LONG, "rope_theta": 500.0}
    yield "gpt_oss", {"rope_theta": 500.0, "rope_scaling": None, "keeps_null": True}
    yield "gpt_oss", {"rope_parameters": DEFAULT}
    yield "mistral", {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 5}
    yield "mistral", {"sliding_window": 5}
    for layers in ({}, {"max_window_layers": 2}, {"max_window_layers": 0}):
        yield "qwen3_moe", {"use_sliding_window": True, "sliding_window": 5} | layers
        yield "qwen3", {"use_sliding_window": True, "sliding_window": 5} | layers
    yield "gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "keeps_null": True}
    full = {"rope_type": "linear", "factor": 8.0}
    yield "gemma3_text", {"rope_theta": 500.0, "rope_local_base_freq": 70.0, "rope_scaling": full}
    yield "gemma3_text", {"rope_parameters": {"full_attention": {"rope_type": "default"}}, "rope_scaling": full}
    yield "gemma3_text", {"rope_parameters": {"full_attention": DEFAULT | {"rope_type": "yarn", "factor": 4.0}}, ORIGINAL: 16}
    yield "gemma3_text", {"sliding_window_pattern": 2, "_sliding_window_pattern": 3}
    for kind in ("longrope", "su", "yarn"):
        yield "phi3", {"rope_scaling": {"type": kind, ORIGINAL: 32} | LONG, "rope_theta": 500.0, ORIGINAL: 16}
    yield "phi3", {"rope_scaling": {"type": "yarn", "factor": 4.0, ORIGINAL: 64} | LONG, ORIGINAL: 16}
    yield "gpt_neox", {"rotary_pct": 1.0, "rotary_emb_base": 500}
    yield "gpt_neox", {"rotary_pct": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}}


def config_of(name, changes):
    config = {"architectures": [NAMES[name]], "model_type": name} | BASE | EXPERTS
    if name in ("gemma3_text", "gemma2"):
        config["num_hidden_layers"] = 7 if name == "gemma3_text" else 2
    changes = dict(changes)
    if changes.get("num_attention_heads", 0) is None:
        # As many as make the default of the key heads fit.
        changes["num_attention_heads"] = 32
        config["hidden_size"] = 512
    keeps_null = changes.pop("keeps_null", False)
    for field, value in changes.items():
        if value is None and not keeps_null:
            config.pop(field, None)
        else:
            config[field] = value
    return config


def single(values):
    """As many digits as tell singles apart."""
    return [float(f"{value:.8g}") for value in values]


def taken(config):
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
        read = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(read)
    body = model.gpt_neox if config["model_type"] == "gpt_neox" else model.model
    rotary = body.rotary_emb
    layers = []
    for i, layer in enumerate(body.layers):
        attention = layer.attention if hasattr(layer, "attention") else layer.self_attn
        kind = read.layer_types[i] if config["model_type"] == "gemma3_text" else None
        prefix = f"{kind}_" if kind else ""
        scaling = getattr(rotary, f"{prefix}attention_scaling")
        window = getattr(attention, "sliding_window", None)
        if read.model_type in ("mistral", "mixtral", "phi3", "qwen3_moe"):
            window = read.sliding_window
        taken = {"frequencies": single(getattr(rotary, f"{prefix}inv_freq").tolist()), "window": window, "scale": attention.scaling * scaling**2}
        if rotary.rope_type == "longrope":
            taken["beyond"] = read.rope_parameters[ORIGINAL]
            long = ROPE_INIT_FUNCTIONS["longrope"](read, None, seq_len=taken["beyond"] + 1)[0]
            taken["long_frequencies"] = single(long.tolist())
        layers.append(taken)
    norm = body.layers[0].input_layernorm
    eps = [getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name)][0]
    caps = [getattr(read, f"{name}_logit_softcapping", None) for name in ("final", "attn")]
    kinds = [layer for i, layer in enumerate(layers) if layer not in layers[:i]]
    layers = [kinds.index(layer) for layer in layers]
    return {"kinds": kinds, "layers": layers, "eps": eps, "caps": caps, "max_context": read.max_position_embeddings}


def main(folder):
    written = []
    for name, changes in cases():
        config = config_of(name, changes)
        written.append({"config": config} | taken(config))
    lines = ",\n".join(json.dumps(case) for case in written)
    (folder / "expected.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{len(written)} configs")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
