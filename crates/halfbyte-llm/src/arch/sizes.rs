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

impl Sizes {
    /// Reads them; `max_context` is what an absent `max_position_embeddings` means.
    pub fn read(fields: &Fields<'_>, max_context: usize) -> Result<Self> {
        let (hidden, heads) = (fields.size("hidden_size")?, fields.size("num_attention_heads")?);
        let kv_heads = fields.optional_size("num_key_value_heads")?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("a divisor of num_attention_heads, {heads}");
            return Err(fields.refuse("num_key_value_heads", expected, kv_heads));
        }
        let head_size = match fields.optional_size("head_dim")? {
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
        let (vocab, inner) = (fields.size("vocab_size")?, fields.size("intermediate_size")?);
        for (field, rows) in
            [("head_dim", (heads + 2 * kv_heads) * head_size), ("vocab_size", vocab), ("intermediate_size", 2 * inner)]
        {
            if rows.checked_mul(hidden).is_none_or(|elements| elements > LARGEST_MATRIX) {
                return Err(fields.refuse(field, "a matrix of at most 2^40 elements", format!("{rows} × {hidden}")));
            }
        }
        let layers = fields.size("num_hidden_layers")?;
        if layers > MOST_LAYERS {
            return Err(fields.refuse("num_hidden_layers", format!("at most {MOST_LAYERS}"), layers));
        }
        let eps = fields.number("rms_norm_eps")?.unwrap_or(1e-6);
        if !(0.0..1.0).contains(&eps) {
            return Err(fields.refuse("rms_norm_eps", "a number from 0 to 1", eps));
        }
        let heads = Heads { heads, kv_heads, head_size };
        let max_context = fields.optional_size("max_position_embeddings")?.unwrap_or(max_context);
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

/// A linear layer with `n` outputs and `k` inputs.
pub(super) fn linear(name: impl Into<String>, [n, k]: [usize; 2], bias: bool) -> LinearSpec {
    LinearSpec { name: name.into(), shape: Shape { n, k, bias } }
}
