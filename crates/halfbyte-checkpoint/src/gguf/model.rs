//! A model's shape: GGUF's metadata as Hugging Face's `config.json`.

use super::architectures::{self, Architecture};
use super::header::Header;
use super::rope::parameters_of;
use super::types::GgmlType;
use super::value::{Array, Value as Meta};
use crate::error::{Error, Result};
use crate::safetensors::cast;
use serde_json::{Map, Value, json};

/// Keys that change what a model computes and that the configs of the architectures here have no field for.
const CHANGING: &[&str] = &[
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
];

/// The `config.json` of a model with this header; `bytes` is the whole file that it was parsed from.
///
/// `tie_word_embeddings` means that there is no `output.weight`. Factors of rotary frequencies (`rope_freqs.weight`)
/// become the `rope_scaling` of type llama3 that gives them. Errors, naming the key or tensor: another architecture,
/// experts, one part of several, a size that is missing or does not fit the others, scaling of rotary frequencies that
/// cannot be said in a config.
pub fn config_json(header: &Header, bytes: &[u8]) -> Result<Map<String, Value>> {
    let unsupported = |what: String| Error::unsupported(&header.file, what);
    let known = Architecture::of_file(header)?;
    let known =
        known.ok_or_else(|| header.unexpected("general.architecture", &architectures::all(|known| known.gguf)))?;
    if header.number("split.count")?.is_some_and(|count| count > 1) {
        return Err(unsupported("key `split.count`: one part of a model in several files; merge them first".into()));
    }
    let key = |name: &str| known.key(name);
    if header.number(&key("expert_count"))?.is_some_and(|count| count > 0) {
        return Err(unsupported(format!("key `{}`: a mixture of experts", key("expert_count"))));
    }
    for name in CHANGING {
        if header.get(&key(name)).is_some() {
            return Err(unsupported(format!(
                "key `{}`: no {} has it in Hugging Face's terms",
                key(name),
                known.architecture
            )));
        }
    }
    let size = |name: &str| -> Result<u64> {
        let found = header.number(&key(name))?.filter(|&size| size > 0);
        found.ok_or_else(|| header.unexpected(&key(name), "a size above 0"))
    };
    let (hidden, heads) = (size("embedding_length")?, size("attention.head_count")?);
    let kv_heads = match header.get(&key("attention.head_count_kv")) {
        Some(_) => size("attention.head_count_kv")?,
        None => heads,
    };
    let head_dim = match header.get(&key("attention.key_length")) {
        Some(_) => size("attention.key_length")?,
        None if hidden % heads == 0 => hidden / heads,
        None => return Err(header.unexpected(&key("attention.head_count"), "a divisor of the embedding's length")),
    };
    for name in ["attention.value_length", "rope.dimension_count"] {
        if header.number(&key(name))?.is_some_and(|length| length != head_dim) {
            return Err(header.unexpected(&key(name), &format!("{head_dim}, as long as a head's keys")));
        }
    }
    let eps = header.float(&key("attention.layer_norm_rms_epsilon"))?;
    let eps = eps.ok_or_else(|| header.unexpected(&key("attention.layer_norm_rms_epsilon"), "a number"))?;
    let theta = header.float(&key("rope.freq_base"))?.unwrap_or(10_000.0);
    let has = |end: &str| header.tensors.iter().any(|t| t.name.starts_with("blk.") && t.name.ends_with(end));

    let mut config = Map::new();
    let mut set = |field: &str, value: Value| config.insert(field.to_owned(), value);
    set("architectures", json!([known.architecture]));
    if known.attention_bias {
        set("attention_bias", json!(["q", "k", "v", "output"].iter().any(|m| has(&format!(".attn_{m}.bias")))));
    }
    if let Some(id) = token(header, "bos")? {
        set("bos_token_id", json!(id));
    }
    match *end_tokens(header)?.as_slice() {
        [] => None,
        [id] => set("eos_token_id", json!(id)),
        ref ids => set("eos_token_id", json!(ids)),
    };
    set("head_dim", json!(head_dim));
    set("hidden_act", json!("silu"));
    set("hidden_size", json!(hidden));
    set("intermediate_size", json!(size("feed_forward_length")?));
    set("max_position_embeddings", json!(size("context_length")?));
    if known.mlp_bias {
        set("mlp_bias", json!(["gate", "up", "down"].iter().any(|m| has(&format!(".ffn_{m}.bias")))));
    }
    set("model_type", json!(known.model_type));
    set("num_attention_heads", json!(heads));
    set("num_hidden_layers", json!(size("block_count")?));
    set("num_key_value_heads", json!(kv_heads));
    if let Some(id) = token(header, "padding")? {
        set("pad_token_id", json!(id));
    }
    set("rms_norm_eps", json!(eps));
    match header.number(&key(architectures::WINDOW))?.filter(|&window| window > 0) {
        Some(window) if known.window => {
            set("sliding_window", json!(window));
        }
        Some(_) => {
            return Err(unsupported(format!("key `{}`: in some of the layers only", key(architectures::WINDOW))));
        }
        None => {}
    }
    let scaling = scaling(header, known, bytes, (head_dim, theta))?;
    set("rope_scaling", if scaling.is_empty() { Value::Null } else { Value::Object(scaling) });
    set("rope_theta", json!(theta));
    set("tie_word_embeddings", json!(header.tensor("output.weight").is_none()));
    set("vocab_size", json!(vocab_size(header, known)?));
    Ok(config)
}

/// The id of a token that has a role, if the file names one.
pub(super) fn token(header: &Header, role: &str) -> Result<Option<u64>> {
    header.number(&format!("tokenizer.ggml.{role}_token_id"))
}

/// Tokens that end a text, a turn or a message, the first of them first; none twice.
fn end_tokens(header: &Header) -> Result<Vec<u64>> {
    let mut ids = Vec::new();
    for role in ["eos", "eot", "eom"] {
        ids.extend(token(header, role)?.filter(|id| !ids.contains(id)));
    }
    Ok(ids)
}

/// Rows of the embedding; without one, what the metadata says.
fn vocab_size(header: &Header, known: &Architecture) -> Result<u64> {
    let key = known.key("vocab_size");
    const TOKENS: &str = "tokenizer.ggml.tokens";
    let said = header.number(&key)?;
    let tokens = match header.get(TOKENS) {
        Some(Meta::Array(Array::String(tokens))) => Some(tokens.len() as u64),
        _ => None,
    };
    if let Some(embedding) = header.tensor("token_embd.weight") {
        let &[rows, _] = embedding.shape.as_slice() else {
            let what = format!("tensor `{}`: expected 2 dimensions, got {:?}", embedding.name, embedding.shape);
            return Err(Error::malformed(&header.file, what));
        };
        let rows = rows as u64;
        if said.is_some_and(|said| said != rows) {
            return Err(header.unexpected(&key, &format!("{rows}, as `{}` has rows", embedding.name)));
        }
        if tokens.is_some_and(|tokens| tokens > rows) {
            return Err(header.unexpected(TOKENS, &format!("at most {rows}, as `{}` has rows", embedding.name)));
        }
        return Ok(rows);
    }
    said.or(tokens).ok_or_else(|| header.unexpected(&key, "the number of tokens"))
}

/// The config's `rope_scaling`; empty for none.
fn scaling(
    header: &Header,
    known: &Architecture,
    bytes: &[u8],
    (head_dim, theta): (u64, f64),
) -> Result<Map<String, Value>> {
    const TENSOR: &str = "rope_freqs.weight";
    let [key, linear, factor] =
        ["scaling.type", "scale_linear", "scaling.factor"].map(|name| known.key(&format!("rope.{name}")));
    let of_type = match header.text(&key)? {
        None => header.float(&linear)?.filter(|&factor| factor != 1.0),
        Some("none") => None,
        Some("linear") => Some(header.float(&factor)?.ok_or_else(|| header.unexpected(&factor, "a number"))?),
        Some(_) => return Err(header.unexpected(&key, "\"none\" or \"linear\"")),
    };
    let linear = of_type.map(|factor| {
        Map::from_iter([("rope_type".to_owned(), json!("linear")), ("factor".to_owned(), json!(factor))])
    });
    let Some(tensor) = header.tensor(TENSOR) else { return Ok(linear.unwrap_or_default()) };
    let refuse = |what: &str| Error::unsupported(&header.file, format!("tensor `{TENSOR}`: {what}"));
    let data = bytes.get(tensor.range.clone()).filter(|_| tensor.ggml_type == GgmlType::F32);
    let data = data.ok_or_else(|| refuse("expected F32 within the file"))?;
    let llama3 = usize::try_from(head_dim).ok().and_then(|dim| parameters_of(&cast::<f32>(data), dim, theta));
    match (linear, llama3) {
        (None, Some(llama3)) => Ok(llama3),
        (Some(linear), Some(llama3)) if llama3.is_empty() => Ok(linear),
        (Some(_), _) => Err(refuse("factors of its own on top of linear scaling, which no config can say")),
        (None, None) => Err(refuse(
            "its factors are not those of rope_scaling llama3 with low_freq_factor 1 and high_freq_factor 4, \
             and a config can say no others",
        )),
    }
}
