//! Names of a model's tensors, and the order of the rows of q and k, in GGUF and in Hugging Face's files.

use rayon::prelude::*;

/// Tensors outside of the layers: in GGUF, in Hugging Face's files.
const OUTER: &[(&str, &str)] = &[
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
];

/// Modules of a layer: in GGUF, in Hugging Face's files, and whether they may have a bias.
const OF_LAYER: &[(&str, &str, bool)] = &[
    ("attn_norm", "input_layernorm", false),
    ("attn_q", "self_attn.q_proj", true),
    ("attn_k", "self_attn.k_proj", true),
    ("attn_v", "self_attn.v_proj", true),
    ("attn_output", "self_attn.o_proj", true),
    ("attn_q_norm", "self_attn.q_norm", false),
    ("attn_k_norm", "self_attn.k_norm", false),
    ("ffn_norm", "post_attention_layernorm", false),
    ("ffn_gate", "mlp.gate_proj", true),
    ("ffn_up", "mlp.up_proj", true),
    ("ffn_down", "mlp.down_proj", true),
];

/// The name that a tensor has in Hugging Face's files, by its name in GGUF; None if it has none there.
///
/// `rope_freqs.weight` has none: what it says is in the config, see [`super::config_json`].
pub fn hf_name(gguf: &str) -> Option<String> {
    translate(gguf, ["blk.", "model.layers."], |(gguf, hf)| (gguf, hf), |&(gguf, hf, bias)| (gguf, hf, bias))
}

/// The name that a tensor has in GGUF, by its name in Hugging Face's files; None if it has none there.
pub fn gguf_name(hf: &str) -> Option<String> {
    translate(hf, ["model.layers.", "blk."], |(gguf, hf)| (hf, gguf), |&(gguf, hf, bias)| (hf, gguf, bias))
}

type Module = (&'static str, &'static str, bool);

fn translate(
    name: &str,
    [from, to]: [&str; 2],
    outer: impl Fn((&'static str, &'static str)) -> (&'static str, &'static str),
    of_layer: impl Fn(&Module) -> Module,
) -> Option<String> {
    if let Some((_, other)) = OUTER.iter().map(|&pair| outer(pair)).find(|(this, _)| *this == name) {
        return Some(other.to_owned());
    }
    let (layer, rest) = name.strip_prefix(from)?.split_once('.')?;
    // Only the spelling that is written, so that no two names become one.
    if layer.parse::<u32>().ok()?.to_string() != layer {
        return None;
    }
    let (module, kind) = rest.rsplit_once('.')?;
    let (_, other, bias) = OF_LAYER.iter().map(of_layer).find(|(this, _, _)| *this == module)?;
    (kind == "weight" || (kind == "bias" && bias)).then(|| format!("{to}{layer}.{other}.{kind}"))
}

/// Whether GGUF keeps the rows of this tensor (by its name there) of a Llama or Mistral in another order than Hugging Face:
/// weights and biases of q and k, see [`hf_row`]. Of other architectures it keeps none so.
pub fn has_paired_rows(gguf: &str) -> bool {
    gguf.starts_with("blk.")
        && [".attn_q.weight", ".attn_k.weight", ".attn_q.bias", ".attn_k.bias"].iter().any(|end| gguf.ends_with(end))
}

/// The row of Hugging Face's tensor that is row `row` of GGUF's, for q and k. `head_dim` is even.
///
/// The two elements of a head that rotate together are neighbours in GGUF, `[heads, head_dim/2, 2]`, and half a head
/// apart in Hugging Face's files, `[heads, 2, head_dim/2]`.
///
/// Source: `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py.
pub fn hf_row(row: usize, head_dim: usize) -> usize {
    let (head, at) = (row / head_dim, row % head_dim);
    head * head_dim + at % 2 * (head_dim / 2) + at / 2
}

/// The row of GGUF's tensor that is row `row` of Hugging Face's, for q and k: the inverse of [`hf_row`].
pub fn gguf_row(row: usize, head_dim: usize) -> usize {
    let (head, at) = (row / head_dim, row % head_dim);
    head * head_dim + at % (head_dim / 2) * 2 + at / (head_dim / 2)
}

/// The rows of a tensor in another order: row `i` of the result is row `from(i)`.
pub(crate) fn reordered(bytes: &[u8], rows: usize, from: impl Fn(usize) -> usize + Sync) -> Vec<u8> {
    let row_bytes = bytes.len() / rows.max(1);
    let mut result = vec![0; row_bytes * rows];
    let lines = result.par_chunks_exact_mut(row_bytes.max(1)).enumerate();
    lines.for_each(|(row, line)| line.copy_from_slice(&bytes[from(row) * row_bytes..][..row_bytes]));
    result
}
