//! Mixtral: Mistral with experts in the place of every MLP.
//!
//! *Source:* Jiang et al., "Mixtral of Experts", 2024; tensor names as in Hugging Face transformers.

use super::sizes::Defaults;
use super::spec::{Routing, Spec};
use super::{Architecture, experts, llama, mistral};
use crate::config::Fields;
use crate::error::Result;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { architecture: "MixtralForCausalLM", model_type: "mixtral", spec };

const DEFAULTS: Defaults = Defaults { eps: ("rms_norm_eps", 1e-5), theta: 1e6, ..mistral::DEFAULTS };

fn spec(fields: &Fields<'_>) -> Result<Spec> {
    let mut spec = llama::recipe(fields, &DEFAULTS, mistral::NO_BIASES)?;
    mistral::set_window(fields, &mut spec)?;
    let of = experts::Of {
        inner: "intermediate_size",
        router: "block_sparse_moe.gate",
        experts: "block_sparse_moe.experts",
        layers: ["w1", "w3", "w2"],
        bias: false,
        routing: Routing::SoftmaxOfChosen,
        clamp: None,
    };
    experts::set(fields, &mut spec, &of, |_| true)?;
    Ok(spec)
}
