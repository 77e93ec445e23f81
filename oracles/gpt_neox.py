"""A tiny GPT-NeoX model and its logits, from the formulas of the paper and of Hugging Face transformers, in float64.

python oracles/gpt_neox.py FOLDER writes config.json, generation_config.json, model.safetensors (float16) and
expected.safetensors (input_ids, logits, greedy_new_ids) as the other models of testdata/architectures have them. Needs numpy.
"""

import json
import math
import struct
import sys
from pathlib import Path

import numpy as np

VOCAB, HIDDEN, INNER, LAYERS, HEADS, EPS = 320, 64, 160, 2, 4, 1e-5
HEAD = HIDDEN // HEADS
ROTATED = HEAD // 4
END = 1
CONFIG = {
    "architectures": ["GPTNeoXForCausalLM"],
    "attention_bias": True,
    "bos_token_id": 0,
    "eos_token_id": END,
    "hidden_act": "gelu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "layer_norm_eps": EPS,
    "max_position_embeddings": 256,
    "model_type": "gpt_neox",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_parallel_residual": True,
    "vocab_size": VOCAB,
}


def random_weights(rng):
    def matrix(n, k):
        return rng.normal(size=(n, k)) * 1.4 / math.sqrt(k)

    weights = {"gpt_neox.embed_in.weight": rng.normal(size=(VOCAB, HIDDEN)), "embed_out.weight": matrix(VOCAB, HIDDEN)}

    def linear(name, n, k):
        weights[f"{name}.weight"] = matrix(n, k)
        weights[f"{name}.bias"] = rng.normal(size=n) * 0.1

    def norm(name):
        weights[f"{name}.weight"] = 1 + rng.normal(size=HIDDEN) * 0.1
        weights[f"{name}.bias"] = rng.normal(size=HIDDEN) * 0.1

    for i in range(LAYERS):
        at = f"gpt_neox.layers.{i}"
        norm(f"{at}.input_layernorm")
        norm(f"{at}.post_attention_layernorm")
        linear(f"{at}.attention.query_key_value", 3 * HIDDEN, HIDDEN)
        linear(f"{at}.attention.dense", HIDDEN, HIDDEN)
        linear(f"{at}.mlp.dense_h_to_4h", INNER, HIDDEN)
        linear(f"{at}.mlp.dense_4h_to_h", HIDDEN, INNER)
    norm("gpt_neox.final_layer_norm")
    return {name: values.astype(np.float16) for name, values in weights.items()}


class Model:
    def __init__(self, weights):
        self.weights = {name: values.astype(np.float64) for name, values in weights.items()}

    def linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, name, x):
        centred = x - x.mean(-1, keepdims=True)
        normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPS)
        return normed * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    @staticmethod
    def rotated(heads):
        """heads [tokens, heads, HEAD]: the first ROTATED elements of each, in pairs half of that apart."""
        half = ROTATED // 2
        angles = np.arange(len(heads))[:, None] * 10000.0 ** (-np.arange(half) * 2 / ROTATED)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b, rest = heads[..., :half], heads[..., half:ROTATED], heads[..., ROTATED:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def attention(self, at, x):
        # Of each head its query, its key, its value.
        qkv = self.linear(f"{at}.query_key_value", x).reshape(len(x), HEADS, 3, HEAD)
        q, k, v = self.rotated(qkv[:, :, 0]), self.rotated(qkv[:, :, 1]), qkv[:, :, 2]
        scores = np.einsum("ihd,jhd->hij", q, k) / math.sqrt(HEAD)
        scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        return self.linear(f"{at}.dense", np.einsum("hij,jhd->ihd", shares, v).reshape(len(x), HIDDEN))

    def mlp(self, at, x):
        up = self.linear(f"{at}.dense_h_to_4h", x)
        gelu = 0.5 * up * (1 + np.vectorize(math.erf)(up / math.sqrt(2)))
        return self.linear(f"{at}.dense_4h_to_h", gelu)

    def logits(self, ids):
        stream = self.weights["gpt_neox.embed_in.weight"][ids]
        for i in range(LAYERS):
            at = f"gpt_neox.layers.{i}"
            attended = self.attention(f"{at}.attention", self.norm(f"{at}.input_layernorm", stream))
            stream = stream + attended + self.mlp(f"{at}.mlp", self.norm(f"{at}.post_attention_layernorm", stream))
        return self.norm("gpt_neox.final_layer_norm", stream) @ self.weights["embed_out.weight"].T

    def greedy(self, ids, count):
        """The most likely tokens that do not end the text."""
        ids = list(ids)
        for _ in range(count):
            last = self.logits(np.array(ids))[-1]
            last[END] = -np.inf
            ids.append(int(last.argmax()))
        return ids[-count:]


def save(path, tensors):
    kinds = {np.dtype(np.float16): "F16", np.dtype(np.float32): "F32", np.dtype(np.int32): "I32"}
    header, data = {}, b""
    for name, values in tensors.items():
        raw = values.tobytes()
        header[name] = {"dtype": kinds[values.dtype], "shape": values.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def main(folder):
    rng = np.random.default_rng(17)
    weights = random_weights(rng)
    model, ids = Model(weights), rng.integers(2, VOCAB, size=(2, 40))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": END}, indent=2) + "\n")
    save(folder / "model.safetensors", weights)
    save(
        folder / "expected.safetensors",
        {
            "input_ids": ids.astype(np.int32),
            "logits": np.stack([model.logits(row) for row in ids]).astype(np.float32),
            "greedy_prompt_len": np.array([12], np.int32),
            "greedy_new_ids": np.array([model.greedy(ids[0][:12], 24)], np.int32),
        },
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
