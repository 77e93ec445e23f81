//! Names of a model's tensors, and the order of the rows of q and k, in GGUF and in Hugging Face's files.

use rayon::prelude::*;

/// Names of the tensors of an architecture.
#[derive(Debug)]
pub(crate) struct Names {
    /// What the names of layers begin with in Hugging Face's files.
    layers: &'static str,
    /// Tensors outside of the layers: in GGUF, in Hugging Face's files.
    outer: &'static [(&'static str, &'static str)],
    /// Modules of a layer.
    of_layer: &'static [Module],
    /// Modules of each expert of a layer, which GGUF has in one tensor: in GGUF, in Hugging Face's files with the expert's number
    /// between.
    of_expert: &'static [(&'static str, [&'static str; 2])],
    /// Whether experts may have biases.
    expert_biases: bool,
    /// Weights of a layer that Hugging Face's files name without `.weight`.
    bare: &'static [(&'static str, &'static str)],
    /// Whether GGUF holds the weights of norms with 1 added.
    pub norms_hold_1: bool,
}

/// A module in GGUF, in Hugging Face's files, and whether it may have a bias.
type Module = (&'static str, &'static str, bool);

/// What names of layers begin with in GGUF.
const BLOCK: &str = "blk.";

/// Llama, Mistral, Qwen 2 and 3.
pub(crate) const LLAMA: Names = Names {
    layers: "model.layers.",
    outer: &[
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
    ],
    of_layer: &[
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
    ],
    of_expert: &[],
    expert_biases: false,
    bare: &[],
    norms_hold_1: false,
};

pub(crate) const MIXTRAL: Names = Names {
    of_layer: &[
        ("attn_norm", "input_layernorm", false),
        ("attn_q", "self_attn.q_proj", false),
        ("attn_k", "self_attn.k_proj", false),
        ("attn_v", "self_attn.v_proj", false),
        ("attn_output", "self_attn.o_proj", false),
        ("ffn_norm", "post_attention_layernorm", false),
        ("ffn_gate_inp", "block_sparse_moe.gate", false),
    ],
    of_expert: &[
        ("ffn_gate_exps", ["block_sparse_moe.experts", "w1"]),
        ("ffn_up_exps", ["block_sparse_moe.experts", "w3"]),
        ("ffn_down_exps", ["block_sparse_moe.experts", "w2"]),
    ],
    ..LLAMA
};

pub(crate) const QWEN3_MOE: Names = Names {
    of_layer: &[
        ("attn_norm", "input_layernorm", false),
        ("attn_q", "self_attn.q_proj", true),
        ("attn_k", "self_attn.k_proj", true),
        ("attn_v", "self_attn.v_proj", true),
        ("attn_output", "self_attn.o_proj", true),
        ("attn_q_norm", "self_attn.q_norm", false),
        ("attn_k_norm", "self_attn.k_norm", false),
        ("ffn_norm", "post_attention_layernorm", false),
        ("ffn_gate_inp", "mlp.gate", false),
    ],
    of_expert: &[
        ("ffn_gate_exps", ["mlp.experts", "gate_proj"]),
        ("ffn_up_exps", ["mlp.experts", "up_proj"]),
        ("ffn_down_exps", ["mlp.experts", "down_proj"]),
    ],
    ..LLAMA
};

/// Gemma 2 and 3.
pub(crate) const GEMMA: Names = Names {
    of_layer: &[
        ("attn_norm", "input_layernorm", false),
        ("attn_q", "self_attn.q_proj", false),
        ("attn_k", "self_attn.k_proj", false),
        ("attn_v", "self_attn.v_proj", false),
        ("attn_output", "self_attn.o_proj", false),
        ("attn_q_norm", "self_attn.q_norm", false),
        ("attn_k_norm", "self_attn.k_norm", false),
        ("post_attention_norm", "post_attention_layernorm", false),
        ("ffn_norm", "pre_feedforward_layernorm", false),
        ("ffn_gate", "mlp.gate_proj", false),
        ("ffn_up", "mlp.up_proj", false),
        ("ffn_down", "mlp.down_proj", false),
        ("post_ffw_norm", "post_feedforward_layernorm", false),
    ],
    norms_hold_1: true,
    ..LLAMA
};

pub(crate) const PHI3: Names = Names {
    of_layer: &[
        ("attn_norm", "input_layernorm", false),
        ("attn_qkv", "self_attn.qkv_proj", false),
        ("attn_output", "self_attn.o_proj", false),
        ("ffn_norm", "post_attention_layernorm", false),
        ("ffn_up", "mlp.gate_up_proj", false),
        ("ffn_down", "mlp.down_proj", false),
    ],
    ..LLAMA
};

pub(crate) const BLOOM: Names = Names {
    layers: "transformer.h.",
    outer: &[
        ("token_embd.weight", "transformer.word_embeddings.weight"),
        ("token_embd_norm.weight", "transformer.word_embeddings_layernorm.weight"),
        ("token_embd_norm.bias", "transformer.word_embeddings_layernorm.bias"),
        ("output_norm.weight", "transformer.ln_f.weight"),
        ("output_norm.bias", "transformer.ln_f.bias"),
        ("output.weight", "lm_head.weight"),
    ],
    of_layer: &[
        ("attn_norm", "input_layernorm", true),
        ("attn_qkv", "self_attention.query_key_value", true),
        ("attn_output", "self_attention.dense", true),
        ("ffn_norm", "post_attention_layernorm", true),
        ("ffn_up", "mlp.dense_h_to_4h", true),
        ("ffn_down", "mlp.dense_4h_to_h", true),
    ],
    ..LLAMA
};

pub(crate) const GPT_NEOX: Names = Names {
    layers: "gpt_neox.layers.",
    outer: &[
        ("token_embd.weight", "gpt_neox.embed_in.weight"),
        ("output_norm.weight", "gpt_neox.final_layer_norm.weight"),
        ("output_norm.bias", "gpt_neox.final_layer_norm.bias"),
        ("output.weight", "embed_out.weight"),
    ],
    of_layer: &[
        ("attn_norm", "input_layernorm", true),
        ("attn_qkv", "attention.query_key_value", true),
        ("attn_output", "attention.dense", true),
        ("ffn_norm", "post_attention_layernorm", true),
        ("ffn_up", "mlp.dense_h_to_4h", true),
        ("ffn_down", "mlp.dense_4h_to_h", true),
    ],
    ..LLAMA
};

pub(crate) const GPT_OSS: Names = Names {
    of_layer: &[
        ("attn_norm", "input_layernorm", false),
        ("attn_q", "self_attn.q_proj", true),
        ("attn_k", "self_attn.k_proj", true),
        ("attn_v", "self_attn.v_proj", true),
        ("attn_output", "self_attn.o_proj", true),
        ("post_attention_norm", "post_attention_layernorm", false),
        ("ffn_gate_inp", "mlp.router", true),
    ],
    of_expert: &[
        ("ffn_gate_exps", ["mlp.experts", "gate_proj"]),
        ("ffn_up_exps", ["mlp.experts", "up_proj"]),
        ("ffn_down_exps", ["mlp.experts", "down_proj"]),
    ],
    expert_biases: true,
    bare: &[("attn_sinks", "self_attn.sinks")],
    ..LLAMA
};

/// The name that a tensor of a Llama, Mistral or Qwen has in Hugging Face's files, by its name in GGUF; None if it has none there.
///
/// `rope_freqs.weight` has none: what it says is in the config, see [`super::config_json`].
pub fn hf_name(gguf: &str) -> Option<String> {
    LLAMA.hf(gguf)
}

/// The name that a tensor of a Llama, Mistral or Qwen has in GGUF, by its name in Hugging Face's files; None if it has none there.
pub fn gguf_name(hf: &str) -> Option<String> {
    if let Some((gguf, _)) = LLAMA.outer.iter().find(|(_, known)| *known == hf) {
        return Some((*gguf).to_owned());
    }
    let (layer, module, kind) = in_layer(hf, LLAMA.layers)?;
    let (gguf, _, bias) = LLAMA.of_layer.iter().find(|(_, known, _)| *known == module)?;
    is_part(kind, *bias).then(|| format!("{BLOCK}{layer}.{gguf}.{kind}"))
}

impl Names {
    /// The name that a tensor has in Hugging Face's files, by its name in GGUF; None if it has none there.
    pub fn hf(&self, gguf: &str) -> Option<String> {
        if let Some((_, hf)) = self.outer.iter().find(|(known, _)| *known == gguf) {
            return Some((*hf).to_owned());
        }
        if let Some((module, kind)) = gguf.rsplit_once('.').filter(|(_, kind)| SCALES.contains(kind)) {
            let weight = self.hf(&format!("{module}.weight"))?;
            return weight.strip_suffix("weight").map(|module| format!("{module}{kind}"));
        }
        let (layer, module, kind) = in_layer(gguf, BLOCK)?;
        if let Some((_, hf)) = self.bare.iter().find(|(known, _)| *known == module) {
            return (kind == "weight").then(|| format!("{}{layer}.{hf}", self.layers));
        }
        if let Some((_, hf, bias)) = self.of_layer.iter().find(|(known, _, _)| *known == module) {
            return is_part(kind, *bias).then(|| format!("{}{layer}.{hf}.{kind}", self.layers));
        }
        // Files before April 2024 have a tensor for each expert: `ffn_gate.3` for what `ffn_gate_exps` holds now.
        let (stack, number) = module.split_once('.')?;
        let of_stack = |known: &str| known.strip_suffix("_exps") == Some(stack);
        let (_, [experts, last]) = self.of_expert.iter().find(|(known, _)| of_stack(known))?;
        let is_number = number.parse::<u32>().is_ok_and(|expert| expert.to_string() == number);
        (is_number && kind == "weight").then(|| format!("{}{layer}.{experts}.{number}.{last}.{kind}", self.layers))
    }

    /// Of a tensor that holds a layer's experts, by its name in GGUF, what comes before an expert's number in Hugging Face's files,
    /// and after it.
    pub fn experts(&self, gguf: &str) -> Option<[String; 2]> {
        let (layer, module, kind) = in_layer(gguf, BLOCK)?;
        let (_, [experts, last]) = self.of_expert.iter().find(|(known, _)| *known == module)?;
        (is_part(kind, self.expert_biases) || SCALES.contains(&kind))
            .then(|| [format!("{}{layer}.{experts}", self.layers), format!("{last}.{kind}")])
    }
}

/// Parts of a module of NVFP4: what its scales, and those of activations, are multiplied by.
const SCALES: [&str; 2] = ["scale", "input_scale"];

fn is_part(kind: &str, bias: bool) -> bool {
    kind == "weight" || (kind == "bias" && bias)
}

/// The number of a tensor's layer, its module there, and which part of the module it is.
fn in_layer<'a>(name: &'a str, layers: &str) -> Option<(&'a str, &'a str, &'a str)> {
    let (layer, rest) = name.strip_prefix(layers)?.split_once('.')?;
    // Only the spelling that is written, so that no two names become one.
    if layer.parse::<u32>().ok()?.to_string() != layer {
        return None;
    }
    let (module, kind) = rest.rsplit_once('.')?;
    Some((layer, module, kind))
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

/// Whether GGUF keeps the rows of this tensor (by its name there) of a BLOOM or GPT-NeoX in another order than Hugging Face.
pub(super) fn has_fused_rows(gguf: &str) -> bool {
    gguf.starts_with(BLOCK) && [".attn_qkv.weight", ".attn_qkv.bias"].iter().any(|end| gguf.ends_with(end))
}

/// An order of rows in GGUF that is not that of Hugging Face's tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// Pairs of elements that rotate together, in heads of this length: [`gguf_row`].
    Paired(usize),
    /// All queries, all keys, all values, of heads of this length, where Hugging Face has them head by head.
    Fused { heads: usize, head_dim: usize },
}

impl RowOrder {
    /// The row of GGUF's tensor that is row `row` of Hugging Face's.
    pub fn gguf_row(self, row: usize) -> usize {
        match self {
            Self::Paired(head_dim) => gguf_row(row, head_dim),
            Self::Fused { heads, head_dim } => {
                let (head, at) = (row / (3 * head_dim), row % (3 * head_dim));
                (at / head_dim * heads + head) * head_dim + at % head_dim
            }
        }
    }

    /// Rows that belong together, of which there must be whole ones.
    pub fn unit(self) -> usize {
        match self {
            Self::Paired(head_dim) => head_dim,
            Self::Fused { heads, head_dim } => 3 * heads * head_dim,
        }
    }
}

/// The rows of a tensor in another order: row `i` of the result is row `from(i)`.
pub(crate) fn reordered(bytes: &[u8], rows: usize, from: impl Fn(usize) -> usize + Sync) -> Vec<u8> {
    let row_bytes = bytes.len() / rows.max(1);
    let mut result = vec![0; row_bytes * rows];
    let lines = result.par_chunks_exact_mut(row_bytes.max(1)).enumerate();
    lines.for_each(|(row, line)| line.copy_from_slice(&bytes[from(row) * row_bytes..][..row_bytes]));
    result
}
