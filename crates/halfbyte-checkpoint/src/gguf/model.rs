//! A model's shape: GGUF's metadata as Hugging Face's `config.json`.

use super::architectures::{self, Architecture, Family, Window};
use super::header::Header;
use super::scaling::scaling;
use super::value::{Array, Value as Meta};
use crate::error::{Error, Result};
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

/// Those of them that Gemma 2 has, by the same names as in its config: what scores and logits are capped to.
const GEMMA_2: &[&str] = &["attn_logit_softcapping", "final_logit_softcapping"];

/// The `config.json` of a model with this header; `bytes` is the whole file that it was parsed from.
///
/// `tie_word_embeddings` means that there is no `output.weight`. Factors of rotary frequencies (`rope_freqs.weight`)
/// become the `rope_scaling` of type llama3 that gives them. Errors, naming the key or tensor: another architecture,
/// experts where it has none, one part of several without the others, a size that is missing or does not fit the others, scaling of
/// rotary frequencies that cannot be said in a config.
pub fn config_json(header: &Header, bytes: &[u8]) -> Result<Map<String, Value>> {
    let unsupported = |what: String| Error::unsupported(&header.file, what);
    let known = Architecture::of_file(header)?;
    let known = known.ok_or_else(|| match header.unexpected("general.architecture", &architectures::read()) {
        Error::Malformed { what, .. } => unsupported(what),
        other => other,
    })?;
    if header.number("split.count")?.is_some_and(|count| count > 1) {
        let what = "key `split.count`: one part of a model in several files; open the first, beside the others";
        return Err(unsupported(what.into()));
    }
    let key = |name: &str| known.key(name);
    let experts = header.number(&key("expert_count"))?.filter(|&count| count > 0);
    if experts.is_some() != known.experts {
        let what = if known.experts { "no experts" } else { "a mixture of experts" };
        return Err(unsupported(format!("key `{}`: {what}", key("expert_count"))));
    }
    let read = if known.family == Family::Gemma2 { GEMMA_2 } else { &[] };
    for name in CHANGING.iter().filter(|name| !read.contains(name)) {
        if header.get(&key(name)).is_some() {
            return Err(unsupported(format!(
                "key `{}`: no {} has it in Hugging Face's terms",
                key(name),
                known.architecture
            )));
        }
    }
    let sizes = Sizes::read(header, known)?;
    let (of_eps, eps_field) = match known.family {
        Family::Bloom => ("attention.layer_norm_epsilon", "layer_norm_epsilon"),
        Family::GptNeox => ("attention.layer_norm_epsilon", "layer_norm_eps"),
        _ => ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    };
    let eps = header.float(&key(of_eps))?.ok_or_else(|| header.unexpected(&key(of_eps), "a number"))?;
    let has = |end: &str| header.tensors.iter().any(|t| t.name.starts_with("blk.") && t.name.ends_with(end));

    let mut config = Map::new();
    let mut set = |field: &str, value: Value| config.insert(field.to_owned(), value);
    set("architectures", json!([known.architecture]));
    if known.attention_bias {
        set("attention_bias", json!(["q", "k", "v", "qkv", "output"].iter().any(|m| has(&format!(".attn_{m}.bias")))));
    }
    if let Some(id) = token(header, "bos")? {
        set("bos_token_id", json!(id));
    }
    match *end_tokens(header)?.as_slice() {
        [] => None,
        [id] => set("eos_token_id", json!(id)),
        ref ids => set("eos_token_id", json!(ids)),
    };
    set("head_dim", json!(sizes.head_dim));
    match known.family {
        Family::Llama | Family::Phi3 | Family::GptOss => drop(set("hidden_act", json!("silu"))),
        // Files do not say; published models have it.
        Family::GptNeox => drop(set("hidden_act", json!("gelu"))),
        Family::Gemma2 | Family::Gemma3 => drop(set("hidden_activation", json!("gelu_pytorch_tanh"))),
        Family::Bloom => {}
    }
    set("hidden_size", json!(sizes.hidden));
    set("intermediate_size", json!(size(header, &key("feed_forward_length"))?));
    set("max_position_embeddings", json!(size(header, &key("context_length"))?));
    if known.mlp_bias {
        set("mlp_bias", json!(["gate", "up", "down"].iter().any(|m| has(&format!(".ffn_{m}.bias")))));
    }
    set("model_type", json!(known.model_type));
    set("num_attention_heads", json!(sizes.heads));
    set("num_hidden_layers", json!(size(header, &key("block_count"))?));
    set("num_key_value_heads", json!(sizes.kv_heads));
    if let Some(id) = token(header, "padding")? {
        set("pad_token_id", json!(id));
    }
    set(eps_field, json!(eps));
    if let Some(experts) = experts {
        set("num_local_experts", json!(experts));
        set("num_experts_per_tok", json!(size(header, &key("expert_used_count"))?));
        let of_expert = key("expert_feed_forward_length");
        let inner = header.get(&of_expert).map(|_| size(header, &of_expert)).transpose()?;
        if known.family == Family::GptOss {
            inner.map(|inner| set("intermediate_size", json!(inner)));
        } else {
            inner.map(|inner| set("moe_intermediate_size", json!(inner)));
            // What llama.cpp computes with them.
            set("norm_topk_prob", json!(true));
        }
    }
    let window = header.number(&key(architectures::WINDOW))?.filter(|&window| window > 0);
    match (window, known.window) {
        (Some(_), Window::None) => {
            return Err(unsupported(format!("key `{}`: in some of the layers only", key(architectures::WINDOW))));
        }
        (Some(window), _) => drop(set("sliding_window", json!(window))),
        (None, Window::None | Window::Always) => {}
        (None, _) => drop(set("sliding_window", Value::Null)),
    }
    if known.family != Family::Bloom {
        let theta = header.float(&key("rope.freq_base"))?.unwrap_or(10_000.0);
        let mut scaling = scaling(header, known, bytes, (sizes.rotated, theta))?;
        match known.family {
            // Configs of this one have it outside.
            Family::Phi3 => {
                const ORIGINAL: &str = "original_max_position_embeddings";
                scaling.remove(ORIGINAL).map(|original| set(ORIGINAL, original));
            }
            // Here none, or a null, would mean YaRN.
            Family::GptOss if scaling.is_empty() => drop(scaling.insert("rope_type".to_owned(), json!("default"))),
            _ => {}
        }
        set("rope_scaling", if scaling.is_empty() { Value::Null } else { Value::Object(scaling) });
        set(if known.family == Family::GptNeox { "rotary_emb_base" } else { "rope_theta" }, json!(theta));
    }
    let rotated = sizes.rotated as f64 / sizes.head_dim as f64;
    match known.family {
        // An absent one would mean a quarter.
        Family::GptNeox => drop(set("rotary_pct", json!(rotated))),
        _ if rotated != 1.0 => drop(set("partial_rotary_factor", json!(rotated))),
        _ => {}
    }
    set("tie_word_embeddings", json!(header.tensor("output.weight").is_none()));
    set("vocab_size", json!(vocab_size(header, known)?));
    match known.family {
        Family::Gemma2 | Family::Gemma3 => gemma(header, known, &sizes, &mut config)?,
        Family::GptNeox => {
            let parallel = header.flag(&key("use_parallel_residual"))?.unwrap_or(true);
            config.insert("use_parallel_residual".to_owned(), json!(parallel));
        }
        Family::GptOss => {
            let (field, value) = window_pattern(header, known, 2)?;
            config.insert(field.to_owned(), value);
        }
        Family::Llama | Family::Phi3 | Family::Bloom => {}
    }
    Ok(config)
}

/// Sizes of attention.
struct Sizes {
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    /// Elements of a head that are rotated.
    rotated: u64,
}

impl Sizes {
    fn read(header: &Header, known: &Architecture) -> Result<Self> {
        let key = |name: &str| known.key(name);
        let size = |name: &str| size(header, &key(name));
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
        let as_long = format!("{head_dim}, as long as a head's keys");
        if header.number(&key("attention.value_length"))?.is_some_and(|length| length != head_dim) {
            return Err(header.unexpected(&key("attention.value_length"), &as_long));
        }
        let of_rotated = key("rope.dimension_count");
        let rotated = match header.number(&of_rotated)? {
            None => head_dim,
            Some(rotated) if rotated == head_dim => rotated,
            Some(part) if matches!(known.family, Family::Phi3 | Family::GptNeox) && (1..head_dim).contains(&part) => {
                part
            }
            Some(_) => return Err(header.unexpected(&of_rotated, &as_long)),
        };
        Ok(Self { hidden, heads, kv_heads, head_dim, rotated })
    }
}

fn size(header: &Header, key: &str) -> Result<u64> {
    let found = header.number(key)?.filter(|&size| size > 0);
    found.ok_or_else(|| header.unexpected(key, "a size above 0"))
}

/// What Gemma has and GGUF leaves to the program: as llama.cpp has it.
fn gemma(header: &Header, known: &Architecture, sizes: &Sizes, config: &mut Map<String, Value>) -> Result<()> {
    let (gemma2, key) = (known.family == Family::Gemma2, |name: &str| known.key(name));
    let mut set = |field: &str, value: Value| config.insert(field.to_owned(), value);
    // Scores are divided by the root of a head's length, in the largest models by that of the stream's share of a head.
    let largest = if gemma2 { 46 } else { 62 };
    let per = match size(header, &key("block_count"))? {
        layers if layers == largest => sizes.hidden / sizes.heads,
        _ => sizes.head_dim,
    };
    set("query_pre_attn_scalar", json!(per));
    if gemma2 {
        for (name, absent) in GEMMA_2.iter().zip([50.0, 30.0]) {
            set(name, json!(header.float(&key(name))?.unwrap_or(absent)));
        }
        return Ok(());
    }
    set("rope_local_base_freq", json!(header.float(&key("rope.freq_base_swa"))?.unwrap_or(10_000.0)));
    let (field, value) = window_pattern(header, known, 6)?;
    set(field, value);
    Ok(())
}

/// Which layers have a window, as a field of a config: those that the file lists, or all but the last of this many.
fn window_pattern(header: &Header, known: &Architecture, otherwise: u64) -> Result<(&'static str, Value)> {
    let key = known.key("attention.sliding_window_pattern");
    let every = match header.get(&key) {
        Some(Meta::Array(Array::Bool(slides))) => {
            let kinds = slides.iter().map(|&slides| if slides { "sliding_attention" } else { "full_attention" });
            return Ok(("layer_types", kinds.collect()));
        }
        Some(_) => size(header, &key)?,
        None => otherwise,
    };
    // Only Gemma's configs can say another number.
    if known.family == Family::GptOss && every != otherwise {
        return Err(header.unexpected(&key, &format!("{otherwise}, or a list")));
    }
    Ok(("sliding_window_pattern", json!(every)))
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
