//! Scaling of rotary frequencies: keys and tensors of GGUF as `rope_scaling` of a config.

use super::architectures::{Architecture, Family};
use super::header::Header;
use super::rope::parameters_of;
use super::types::GgmlType;
use crate::error::{Error, Result};
use crate::safetensors::cast;
use serde_json::{Map, Value, json};

/// The tensor of Llama 3's factors.
pub(super) const FACTORS: &str = "rope_freqs.weight";

/// Those of longrope: for long texts, and for others.
pub(super) const LONG_FACTORS: &str = "rope_factors_long.weight";
pub(super) const SHORT_FACTORS: &str = "rope_factors_short.weight";

/// The config's `rope_scaling`; empty for none. `rotated` elements of a head rotate.
pub(super) fn scaling(
    header: &Header,
    known: &Architecture,
    bytes: &[u8],
    (rotated, theta): (u64, f64),
) -> Result<Map<String, Value>> {
    let key = |name: &str| known.key(&format!("rope.scaling.{name}"));
    let tensors = Factors { header, bytes, pairs: rotated / 2 };
    let (of_type, of_factor, of_cosines) = (key("type"), key("factor"), key("attn_factor"));
    let factor = match header.float(&of_factor)? {
        None => header.float(&known.key("rope.scale_linear"))?,
        factor => factor,
    };
    let cosines = header.float(&of_cosines)?.unwrap_or(1.0);
    let kind = header.text(&of_type)?;
    let [long, short] = [LONG_FACTORS, SHORT_FACTORS].map(|name| tensors.read(name));
    let mut scaling = Map::new();
    let mut set = |field: &str, value: Value| scaling.insert(field.to_owned(), value);
    match (kind, long?, short?) {
        (None | Some("none" | "linear" | "longrope"), Some(long), Some(short)) => {
            if factor.is_some_and(|factor| factor != 1.0) {
                return Err(header.unexpected(&of_factor, "nothing beside factors of longrope"));
            }
            set("rope_type", json!("longrope"));
            set("long_factor", json!(long));
            set("short_factor", json!(short));
            set("attention_factor", json!(cosines));
            set("original_max_position_embeddings", json!(original_context(header, known)?));
        }
        (_, Some(_), _) | (_, _, Some(_)) | (Some("longrope"), None, None) => {
            let what = format!(
                "tensors `{LONG_FACTORS}` and `{SHORT_FACTORS}`: expected both, with `{of_type}` longrope, or none"
            );
            return Err(Error::unsupported(&header.file, what));
        }
        (Some("yarn"), None, None) => {
            let factor = factor.ok_or_else(|| header.unexpected(&of_factor, "a number"))?;
            set("rope_type", json!("yarn"));
            set("factor", json!(factor));
            set("original_max_position_embeddings", json!(original_context(header, known)?));
            for (name, field) in [("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")] {
                header.float(&key(name))?.map(|turns| set(field, json!(turns)));
            }
            let said = header.float(&key("yarn_attn_factor"))?;
            // Without one it follows from the factor, and the other key multiplies it.
            let of_factor = if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 };
            if said.is_some() || cosines != 1.0 {
                set("attention_factor", json!(said.unwrap_or(of_factor) * cosines));
            }
            // Configs of this architecture say so, and no key does.
            if known.family == Family::GptOss {
                set("truncate", json!(false));
            }
            // Below 0 it is not said.
            let mixed = key("yarn_ext_factor");
            if header.float(&mixed)?.is_some_and(|mixed| mixed >= 0.0 && mixed != 1.0) {
                return Err(header.unexpected(&mixed, "1"));
            }
            let logs = key("yarn_log_multiplier");
            if header.float(&logs)?.is_some_and(|factor| factor != 0.0) {
                return Err(header.unexpected(&logs, "0"));
            }
        }
        (None | Some("linear"), None, None) => {
            if kind.is_some() && factor.is_none() {
                return Err(header.unexpected(&of_factor, "a number"));
            }
            if let Some(factor) = factor.filter(|&factor| factor != 1.0) {
                set("rope_type", json!("linear"));
                set("factor", json!(factor));
            }
        }
        (Some("none"), None, None) => {}
        (Some(_), None, None) => {
            return Err(header.unexpected(&of_type, "\"none\", \"linear\", \"yarn\" or \"longrope\""));
        }
    }
    if cosines != 1.0 && !scaling.contains_key("attention_factor") {
        return Err(header.unexpected(&of_cosines, "1, without yarn and longrope"));
    }
    let Some(factors) = tensors.read(FACTORS)? else { return Ok(scaling) };
    let refuse = |what: &str| Err(Error::unsupported(&header.file, format!("tensor `{FACTORS}`: {what}")));
    let llama3 = usize::try_from(rotated).ok().and_then(|rotated| parameters_of(&factors, rotated, theta));
    match llama3 {
        Some(llama3) if scaling.is_empty() => Ok(llama3),
        Some(llama3) if llama3.is_empty() => Ok(scaling),
        _ if !scaling.is_empty() => {
            let kind = scaling.get("rope_type").and_then(Value::as_str).unwrap_or_default();
            refuse(&format!("factors of its own on top of {kind} scaling, which no config can say"))
        }
        _ => refuse(
            "its factors are not those of rope_scaling llama3 with low_freq_factor 1 and high_freq_factor 4, \
             and a config can say no others",
        ),
    }
}

/// The positions that a model was first made for.
fn original_context(header: &Header, known: &Architecture) -> Result<u64> {
    let [original, all] = ["rope.scaling.original_context_length", "context_length"].map(|name| known.key(name));
    let key = if header.get(&original).is_some() { original } else { all };
    let found = header.number(&key)?.filter(|&positions| positions > 0);
    found.ok_or_else(|| header.unexpected(&key, "a size above 0"))
}

/// Tensors of factors of frequencies.
struct Factors<'a> {
    header: &'a Header,
    bytes: &'a [u8],
    /// How many each has.
    pairs: u64,
}

impl Factors<'_> {
    /// None: the file has no such tensor.
    fn read(&self, name: &str) -> Result<Option<Vec<f32>>> {
        let Some(tensor) = self.header.tensor(name) else { return Ok(None) };
        let refuse = |what: String| Error::unsupported(&self.header.file, format!("tensor `{name}`: {what}"));
        let data = self.bytes.get(tensor.range.clone()).filter(|_| tensor.ggml_type == GgmlType::F32);
        let factors = cast::<f32>(data.ok_or_else(|| refuse("expected F32 within the file".into()))?);
        if name != FACTORS && (factors.len() as u64 != self.pairs || !factors.iter().all(|f| f.is_finite() && *f > 0.0))
        {
            return Err(refuse(format!("expected {} numbers above 0", self.pairs)));
        }
        Ok(Some(factors.to_vec()))
    }
}
