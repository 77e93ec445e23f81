"""Makes what `manifest.json` lists as made by this script: q2_k, q3_k, and the tiny model.

Needs gguf 0.19.0, numpy, safetensors, tokenizers. Run in this folder with a text file to train the tokenizer on.
"""

import hashlib
import json
import os
import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, trainers

SPACE = "▁"
rng = np.random.default_rng(20260)


def k_blocks(kind, halves_at, count=6):
    """Random blocks whose halves (at these offsets) are ordinary, negative, subnormal and zero."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    values = np.array([0.0371, -0.5, 3e-6, 0.0, -0.0, 121.0], dtype=np.float16)
    for shift, at in enumerate(halves_at):
        blocks[:, at : at + 2] = np.roll(values, shift).view(np.uint8).reshape(count, 2)
    return {"blocks": blocks, "dequant": gguf.quants.dequantize(blocks, kind)}


def permute(weights, heads):
    """As convert_hf_to_gguf.py orders the rows of q and k."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


def train(text):
    """SentencePiece-like tokens, scores and types from a small BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False, max_token_length=12)
    tokenizer.train_from_iterator([line for line in text.splitlines() if line][:4000], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merged = list(dict.fromkeys("".join(pair) for pair in model["merges"]))
    single = [token for token in model["vocab"] if len(token) == 1]
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + merged + single
    types = [2, 3, 3] + [6] * 256 + [1] * (len(merged) + len(single))
    scores = [0.0] * 259 + [-float(i) for i in range(len(merged) + len(single))]
    tokens.append("<|turn|>")
    types.append(4)
    scores.append(-1000.0)
    return tokens, scores, types


def encode(text, tokens, scores, types):
    """SentencePiece's merging by scores, in plain words; user-defined tokens are cut out first."""
    ids = {token: i for i, token in enumerate(tokens)}
    normal = {token for token, kind in zip(tokens, types) if kind == 1}
    out = []
    for i, part in enumerate(text.split("<|turn|>")):
        if i:
            out.append(ids["<|turn|>"])
        if not part:
            continue
        symbols = list(SPACE + part.replace(" ", SPACE))
        while True:
            best = None
            for at in range(len(symbols) - 1):
                whole = symbols[at] + symbols[at + 1]
                if whole in normal and (best is None or scores[ids[whole]] > best[0]):
                    best = (scores[ids[whole]], at)
            if best is None:
                break
            at = best[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        for symbol in symbols:
            if symbol in normal:
                out.append(ids[symbol])
            else:
                out.extend(ids[f"<0x{byte:02X}>"] for byte in symbol.encode())
    return out


def rope_factors(head_dim, theta, factor, low=1.0, high=4.0, context=8192):
    """As convert_hf_to_gguf.py computes them, in singles."""
    freqs = 1.0 / (np.float32(theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)))
    out = []
    for freq in freqs:
        wavelen = 2 * np.pi / freq
        if wavelen < context / high:
            out.append(1)
        elif wavelen > context / low:
            out.append(factor)
        else:
            smooth = (context / wavelen - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, dtype=np.float32)


def tiny_llama(text):
    hidden, heads, kv_heads, head_dim, inner, layers, theta = 64, 4, 2, 16, 96, 2, 500000.0
    tokens, scores, types = train(text)
    w = gguf.GGUFWriter("tiny_llama.gguf", "llama")
    w.add_type("model")
    w.add_name("Tiny Llama")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    w.add_quantization_version(2)
    w.add_block_count(layers)
    w.add_context_length(131072)
    w.add_embedding_length(hidden)
    w.add_feed_forward_length(inner)
    w.add_head_count(heads)
    w.add_head_count_kv(kv_heads)
    w.add_key_length(head_dim)
    w.add_value_length(head_dim)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(head_dim)
    w.add_rope_freq_base(theta)
    w.add_vocab_size(len(tokens))
    w.add_tokenizer_model("llama")
    w.add_tokenizer_pre("default")
    w.add_token_list(tokens)
    w.add_token_scores(scores)
    w.add_token_types(types)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_eot_token_id(len(tokens) - 1)
    w.add_unk_token_id(0)
    w.add_add_bos_token(True)
    w.add_add_space_prefix(True)
    w.add_chat_template("{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}")
    # One value of each type that a Llama does not have.
    w.add_uint8("test.u8", 200)
    w.add_int8("test.i8", -100)
    w.add_uint16("test.u16", 60000)
    w.add_int16("test.i16", -30000)
    w.add_int32("test.i32", -2000000000)
    w.add_uint64("test.u64", 1 << 63)
    w.add_int64("test.i64", -(1 << 62))
    w.add_float64("test.f64", 0.1)
    w.add_array("test.bools", [True, False])
    w.add_array("test.texts", ["", "ä"])

    expected = {}

    def add(name, array, kind):
        if kind in (T.F32, T.F16):
            data = array.astype(np.float32 if kind == T.F32 else np.float16)
            w.add_tensor(name, data)
            expected[name] = data.astype(np.float32)
        else:
            blocks = gguf.quants.quantize(array.astype(np.float32), kind)
            w.add_tensor(name, blocks, raw_dtype=kind)
            expected[name] = gguf.quants.dequantize(blocks, kind)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32) / 8

    add("token_embd.weight", normal(len(tokens), hidden), T.Q8_0)
    add("rope_freqs.weight", rope_factors(head_dim, theta, 8.0), T.F32)
    for n in range(layers):
        blk = f"blk.{n}."
        add(blk + "attn_norm.weight", 1 + normal(hidden), T.F32)
        # Hugging Face's row number as weight and bias: what the order of rows is shows in them.
        rows = np.arange(heads * head_dim, dtype=np.float32)
        add(blk + "attn_q.weight", permute(np.repeat(rows[:, None], hidden, 1), heads), T.F16)
        add(blk + "attn_q.bias", permute(rows, heads), T.F32)
        rows = np.arange(kv_heads * head_dim, dtype=np.float32)
        add(blk + "attn_k.weight", permute(np.repeat(rows[:, None], hidden, 1), kv_heads), T.F16)
        add(blk + "attn_v.weight", normal(kv_heads * head_dim, hidden), T.Q8_0)
        add(blk + "attn_output.weight", normal(hidden, heads * head_dim), T.Q4_0)
        add(blk + "ffn_norm.weight", 1 + normal(hidden), T.F32)
        add(blk + "ffn_gate.weight", normal(inner, hidden), T.Q4_1)
        add(blk + "ffn_up.weight", normal(inner, hidden), T.Q4_0)
        add(blk + "ffn_down.weight", normal(hidden, inner), T.Q5_1)
    add("output_norm.weight", 1 + normal(hidden), T.F32)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    del expected["token_embd.weight"]  # The largest, and of a type that another tensor has too.
    save_file(expected, "tiny_llama.safetensors")
    texts = ["Hello world", " two  spaces", "def f(x):\n\treturn x + 1\n", "naïve café 🙂 日本", "a<|turn|>b c<|turn|>",
             "aaaaaaaaaaaa bbbb", "self.assertEqual(self.self, None)", "▁▁", "x"]
    cases = [{"text": t, "ids": encode(t, tokens, scores, types)} for t in texts]
    with open("tiny_llama_tokens.json", "w") as out:
        json.dump(cases, out, ensure_ascii=False, indent=1)


save_file(k_blocks(T.Q2_K, [80, 82]), "q2_k.safetensors")
save_file(k_blocks(T.Q3_K, [108]), "q3_k.safetensors")
tiny_llama(open(sys.argv[1], encoding="utf-8").read())
for name in ["q2_k.safetensors", "q3_k.safetensors", "tiny_llama.gguf", "tiny_llama.safetensors", "tiny_llama_tokens.json"]:
    os.chmod(name, 0o644)
    data = open(name, "rb").read()
    print(name, len(data), hashlib.sha256(data).hexdigest())
