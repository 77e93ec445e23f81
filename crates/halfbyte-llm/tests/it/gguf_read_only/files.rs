//! Tiny models as GGUF files, in the terms of llama.cpp's converter.

use halfbyte::cpu::Cpu;
use halfbyte_checkpoint::Checkpoint;
use halfbyte_checkpoint::gguf::{GgmlType, TensorSpec, Value, create};
use halfbyte_llm::{Config, LoadOptions, Model, Session};
use std::collections::BTreeMap;
use std::path::Path;

/// A tensor of a GGUF file, in f32.
pub struct Tensor {
    pub name: String,
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

/// Modules of a layer: in Hugging Face's files, in GGUF.
pub const LLAMA: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.o_proj", "attn_output"),
    ("post_attention_layernorm", "ffn_norm"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("mlp.gate", "ffn_gate_inp"),
];
pub const LLAMA_DENSE: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];
pub const GEMMA: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.o_proj", "attn_output"),
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];
pub const PHI3: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];
pub const BLOOM: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attention.query_key_value", "attn_qkv"),
    ("self_attention.dense", "attn_output"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.dense_h_to_4h", "ffn_up"),
    ("mlp.dense_4h_to_h", "ffn_down"),
];
pub const GPT_NEOX: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("attention.query_key_value", "attn_qkv"),
    ("attention.dense", "attn_output"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.dense_h_to_4h", "ffn_up"),
    ("mlp.dense_4h_to_h", "ffn_down"),
];
pub const GPT_OSS: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("post_attention_layernorm", "post_attention_norm"),
    ("mlp.router", "ffn_gate_inp"),
];
pub const OUTER: &[(&str, &str)] = &[
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("transformer.word_embeddings", "token_embd"),
    ("transformer.word_embeddings_layernorm", "token_embd_norm"),
    ("transformer.ln_f", "output_norm"),
    ("gpt_neox.embed_in", "token_embd"),
    ("gpt_neox.final_layer_norm", "output_norm"),
    ("embed_out", "output"),
];
pub const EXPERT: &[(&str, &str)] = &[
    ("gate_proj", "ffn_gate_exps"),
    ("up_proj", "ffn_up_exps"),
    ("down_proj", "ffn_down_exps"),
    ("w1", "ffn_gate_exps"),
    ("w3", "ffn_up_exps"),
    ("w2", "ffn_down_exps"),
];

/// A model, its name in GGUF, its modules, and keys besides those of all.
pub type Case = (&'static str, &'static str, &'static [(&'static str, &'static str)], Vec<(&'static str, Value)>);

/// The tensors of a folder in GGUF's terms.
pub fn tensors(name: &str, modules: &[(&str, &str)]) -> Vec<Tensor> {
    let (from, spec) = (
        Checkpoint::open(crate::architecture(name)).unwrap(),
        Config::from_folder(&crate::architecture(name)).unwrap().spec,
    );
    let (heads, d) = (spec.heads.heads, spec.heads.head_size);
    let find = |table: &[(&str, &str)], module: &str| {
        table.iter().find(|(hf, _)| *hf == module).unwrap_or_else(|| panic!("{module}")).1.to_owned()
    };
    let mut out: BTreeMap<String, Tensor> = BTreeMap::new();
    for info in from.tensors() {
        let (path, kind) = info.name.rsplit_once('.').unwrap();
        let mut values = from.floats(info.name).unwrap().to_f32();
        let in_layer =
            ["model.layers.", "transformer.h.", "gpt_neox.layers."].iter().find_map(|whole| path.strip_prefix(whole));
        let Some((layer, module)) = in_layer.and_then(|rest| rest.split_once('.')) else {
            let name = format!("{}.{kind}", find(OUTER, path));
            if name == "output_norm.weight" && modules == GEMMA {
                values.iter_mut().for_each(|v| *v += 1.0);
            }
            out.insert(name.clone(), Tensor { name, shape: info.shape.to_vec(), values });
            continue;
        };
        if kind == "sinks" {
            let name = format!("blk.{layer}.attn_sinks.weight");
            out.insert(name.clone(), Tensor { name, shape: info.shape.to_vec(), values });
            continue;
        }
        if let Some((_, expert)) = module.split_once(".experts.") {
            let (number, module) = expert.split_once('.').unwrap();
            let name = format!("blk.{layer}.{}.{kind}", find(EXPERT, module));
            let shape = [&[0], info.shape].concat();
            // In the order of files: by number, as text; there are fewer than ten.
            let stack = out.entry(name.clone()).or_insert(Tensor { name, shape, values: Vec::new() });
            assert_eq!(stack.shape[0], number.parse::<usize>().unwrap());
            stack.shape[0] += 1;
            stack.values.extend(values);
            continue;
        }
        let name = format!("blk.{layer}.{}.{kind}", find(modules, module));
        if modules == GEMMA && name.ends_with("norm.weight") {
            values.iter_mut().for_each(|v| *v += 1.0);
        }
        let width = values.len() / info.shape[0];
        let row = |i: usize| values[i * width..(i + 1) * width].to_vec();
        if [BLOOM, GPT_NEOX].contains(&modules) && name.contains("attn_qkv") {
            // From q, k and v of each head to all of q, all of k, all of v.
            let part = |part: usize| (0..heads).flat_map(move |head| (0..d).map(move |j| (head * 3 + part) * d + j));
            values = (0..3).flat_map(part).flat_map(row).collect();
        }
        out.insert(name.clone(), Tensor { name, shape: info.shape.to_vec(), values });
    }
    out.into_values().collect()
}

/// q and k as llama.cpp permutes those of Llama.
pub fn paired(tensors: &mut [Tensor], head_size: usize) {
    for tensor in tensors.iter_mut().filter(|t| t.name.ends_with("attn_q.weight") || t.name.ends_with("attn_k.weight"))
    {
        let k = tensor.shape[1];
        let order = (0..tensor.shape[0]).map(|row| {
            let (head, at) = (row / head_size, row % head_size);
            head * head_size + at % 2 * (head_size / 2) + at / 2
        });
        tensor.values = order.flat_map(|row| tensor.values[row * k..(row + 1) * k].to_vec()).collect();
    }
}

pub fn write(path: &Path, metadata: &[(String, Value)], tensors: &[&Tensor]) {
    let spec = |t: &&Tensor| TensorSpec { name: t.name.clone(), ggml_type: GgmlType::F32, shape: t.shape.clone() };
    // Files are not replaced.
    let _ = std::fs::remove_file(path);
    let mut writer = create(path, metadata, &tensors.iter().map(spec).collect::<Vec<_>>()).unwrap();
    for tensor in tensors {
        writer.write(&tensor.name, bytemuck::cast_slice(&tensor.values)).unwrap();
    }
    writer.finish().unwrap();
}

pub fn metadata(name: &str, gguf: &str, more: &[(&str, Value)]) -> Vec<(String, Value)> {
    let spec = Config::from_folder(&crate::architecture(name)).unwrap().spec;
    let number = |n: usize| Value::U32(n as u32);
    let eps = if ["bloom", "gptneox"].contains(&gguf) {
        "attention.layer_norm_epsilon"
    } else {
        "attention.layer_norm_rms_epsilon"
    };
    let keys = [
        ("block_count", number(spec.layers.len())),
        ("context_length", number(spec.max_context)),
        ("embedding_length", number(spec.hidden)),
        ("attention.head_count", number(spec.heads.heads)),
        ("attention.head_count_kv", number(spec.heads.kv_heads)),
        (eps, Value::F32(spec.norm.eps)),
    ];
    let mut metadata = vec![("general.architecture".to_owned(), Value::String(gguf.to_owned()))];
    let keys = keys.into_iter().chain(more.iter().cloned());
    metadata.extend(keys.map(|(key, value)| (format!("{gguf}.{key}"), value)));
    metadata
}

pub fn logits(path: &Path) -> Vec<f32> {
    logits_with_room(path, 40)
}

/// Of a text with room for so many tokens.
pub fn logits_with_room(path: &Path, room: usize) -> Vec<f32> {
    let (cpu, model) = (Cpu::new(1).unwrap(), Model::load(path, &LoadOptions::default()).unwrap());
    let tokens: Vec<u32> = (0..40).map(|i| (i * 37 + 5) % 320).collect();
    Session::new(&model, &cpu, room).unwrap().prefill(&tokens).unwrap().to_vec()
}

/// The folder's logits; of Qwen3-MoE with the shares of the chosen experts normed, as GGUF has it.
pub fn expected(name: &str) -> Vec<f32> {
    let dir = tempfile::tempdir().unwrap();
    let config = std::fs::read_to_string(crate::architecture(name).join("config.json")).unwrap();
    let config = config.replace("\"norm_topk_prob\": false", "\"norm_topk_prob\": true");
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    std::fs::copy(crate::architecture(name).join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    logits(dir.path())
}

pub fn assert_near(name: &str, got: &[f32], want: &[f32]) {
    let most = want.iter().fold(0.0f32, |most, l| most.max(l.abs()));
    let error = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    // Weights are f32 here and halves there, which other kernels multiply by.
    assert!(got.len() == want.len() && error <= 2e-5 * most, "{name}: {error} of {most}");
}
