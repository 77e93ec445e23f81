//! The sizes that every `config.json` has, checked against each other.

use super::spec::{LinearSpec, Shape};
use crate::config::Fields;
use crate::error::Result;
use halfbyte::kernel::Heads;

/// No dimension of a matrix comes near this many elements.
const LARGEST_MATRIX: usize = 1 << 40;

/// Nor do layers come near this; each takes a kilobyte of names.
const MOST_LAYERS: usize = 1 << 12;

/// As far as heads may go.
const LARGEST_HEAD: usize = 1 << 16;

/// What is the same in every layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub vocab: usize,
    pub hidden: usize,
    pub inner: usize,
    pub layers: usize,
    pub heads: Heads,
    pub max_context: usize,
    pub eps: f32,
}

/// What absent fields mean, as an architecture's configs have it in Hugging Face transformers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Defaults {
    pub max_context: usize,
    /// Under this name.
    pub eps: (&'static str, f64),
    /// Of rotary positions.
    pub theta: f64,
    /// The vector inside an MLP, in multiples of the one between layers; None: the config must say.
    pub inner: Option<usize>,
    /// None: the heads share the vector between layers, as they do where the field is null.
    pub head_size: Option<usize>,
    /// None: as many as heads of queries, as where the field is null.
    pub kv_heads: Option<usize>,
}

impl Defaults {
    pub const LLAMA: Self = Self {
        max_context: 2048,
        eps: ("rms_norm_eps", 1e-6),
        theta: 10_000.0,
        inner: None,
        head_size: None,
        kv_heads: None,
    };
}

impl Sizes {
    /// Reads them, in the spelling of Llama or that of GPT.
    pub fn read(fields: &Fields<'_>, defaults: &Defaults) -> Result<Self> {
        let or = |field: &str, default: Option<usize>| -> Result<Option<usize>> {
            Ok(fields.optional_size(field)?.or(default.filter(|_| !fields.is_null(field))))
        };
        let hidden = fields.size(fields.spelling(&["hidden_size", "n_embed"]))?;
        let heads = fields.size(fields.spelling(&["num_attention_heads", "n_head"]))?;
        let kv_heads = or("num_key_value_heads", defaults.kv_heads)?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("a divisor of num_attention_heads, {heads}");
            return Err(fields.refuse("num_key_value_heads", expected, kv_heads));
        }
        let head_size = match or("head_dim", defaults.head_size)? {
            Some(d) => d,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                let expected = format!("a divisor of hidden_size, {hidden}, as head_dim is absent");
                return Err(fields.refuse("num_attention_heads", expected, heads));
            }
        };
        if !head_size.is_multiple_of(2) || head_size > LARGEST_HEAD {
            return Err(fields.refuse("head_dim", format!("an even number up to {LARGEST_HEAD}"), head_size));
        }
        let vocab = fields.size("vocab_size")?;
        let inner = match (fields.optional_size("intermediate_size")?, defaults.inner) {
            (None, Some(times)) => times * hidden,
            (Some(inner), _) => inner,
            (None, None) => fields.size("intermediate_size")?,
        };
        for (field, rows) in
            [("head_dim", (heads + 2 * kv_heads) * head_size), ("vocab_size", vocab), ("intermediate_size", 2 * inner)]
        {
            if rows.checked_mul(hidden).is_none_or(|elements| elements > LARGEST_MATRIX) {
                return Err(fields.refuse(field, "a matrix of at most 2^40 elements", format!("{rows} × {hidden}")));
            }
        }
        let of_layers = fields.spelling(&["num_hidden_layers", "n_layer"]);
        let layers = fields.size(of_layers)?;
        if layers > MOST_LAYERS {
            return Err(fields.refuse(of_layers, format!("at most {MOST_LAYERS}"), layers));
        }
        let (of_eps, eps) = defaults.eps;
        let eps = fields.number(of_eps)?.unwrap_or(eps);
        if !(0.0..1.0).contains(&eps) {
            return Err(fields.refuse(of_eps, "a number from 0 to 1", eps));
        }
        let heads = Heads { heads, kv_heads, head_size };
        let of_context = fields.spelling(&["max_position_embeddings", "seq_length"]);
        let max_context = fields.optional_size(of_context)?.unwrap_or(defaults.max_context);
        Ok(Self { vocab, hidden, inner, layers, heads, max_context, eps: eps as f32 })
    }

    /// Elements of all query heads.
    pub fn queries(&self) -> usize {
        self.heads.heads * self.heads.head_size
    }

    /// Elements of all key heads, and of all value heads.
    pub fn keys(&self) -> usize {
        self.heads.kv_heads * self.heads.head_size
    }
}

/// Refuses another function between the layers of an MLP than the architecture has, by the names that configs give it in this field.
pub(super) fn check_activation(fields: &Fields<'_>, field: &str, names: &[&str]) -> Result<()> {
    match fields.string(field)? {
        Some(other) if !names.contains(&other) => {
            Err(fields.refuse(field, format!("\"{}\"", names[0]), format!("\"{other}\"")))
        }
        _ => Ok(()),
    }
}

/// A linear layer with `n` outputs and `k` inputs.
pub(super) fn linear(name: impl Into<String>, [n, k]: [usize; 2], bias: bool) -> LinearSpec {
    LinearSpec { name: name.into(), shape: Shape { n, k, bias } }
}
