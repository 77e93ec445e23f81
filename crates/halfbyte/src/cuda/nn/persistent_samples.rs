//! Steps in one kernel of a few models, for the record of what kernels take.

use super::Gate;
use super::persistent_model::{Mixture, Steps, Weights};
use super::persistent_plan::{Plan, Sizes};
use crate::cuda::Caps;
use crate::cuda::sources::Instance;
use crate::kernel::{Activation, Heads};
use crate::layout::cuda_wna16::Atom;
use crate::tensor::Float;

pub(super) fn samples() -> Vec<Instance> {
    let heads = |heads, kv_heads, head_size| Heads { heads, kv_heads, head_size };
    let wide = Sizes { hidden: 4096, inner: 14336, heads: heads(32, 8, 128), pairs: 64, ropes: 1 };
    let narrow = Sizes { hidden: 384, inner: 1024, heads: heads(6, 2, 64), pairs: 32, ropes: 1 };
    let phi = Sizes { hidden: 3072, inner: 8192, heads: heads(32, 32, 96), pairs: 48, ropes: 1 };
    let atom = |bits, group, zero, scale| Atom { bits, group, zero, scale, ..Atom::W4_G128 };
    let of = Weights::of;
    let k_types = |forms, values_apart| Weights { forms, values_apart, ..Weights::of(Weights::K_TYPES, false) };
    let two_levels = Atom { factors: true, ..atom(4, 128, false, Float::F16) };
    let models = [
        (wide, of(atom(4, 128, false, Float::F16), false), Float::F16),
        (wide, of(atom(8, 32, true, Float::BF16), false), Float::BF16),
        (narrow, of(atom(4, 32, true, Float::F16), false), Float::F16),
        (wide, of(atom(4, 128, false, Float::F16), true), Float::F16),
        (narrow, of(atom(8, 128, true, Float::BF16), true), Float::BF16),
        (wide, of(two_levels, true), Float::F16),
        (wide, of(atom(8, 0, false, Float::F16), true), Float::F16),
        (narrow, of(atom(4, 0, false, Float::BF16), false), Float::BF16),
        (wide, k_types(0b0110, true), Float::F16),
        (wide, k_types(0b1100, true), Float::BF16),
        (narrow, k_types(0b0011, false), Float::F16),
        (wide, of(atom(2, 64, false, Float::F16), false), Float::F16),
        (narrow, of(atom(3, 32, true, Float::BF16), false), Float::BF16),
        (wide, of(Atom { table: Some(Atom::A_TABLE), ..atom(4, 32, false, Float::F16) }, false), Float::F16),
        (wide, of(atom(5, 32, false, Float::F16), false), Float::F16),
        (phi, of(atom(4, 128, false, Float::F16), false), Float::F16),
        (
            Sizes { heads: heads(24, 2, 80), pairs: 40, ..narrow },
            of(atom(4, 128, false, Float::BF16), false),
            Float::BF16,
        ),
    ];
    let llama =
        Steps { layer_norm: false, alibi: false, capped: false, norms_behind: false, gate: Gate::SWIGLU, beside: true };
    let with = |(sizes, weights, dtype): (Sizes, Weights, Float), steps, mixture| {
        Plan::sized(&Caps::H200, sizes, (weights, steps, mixture), dtype, 32).ok()
    };
    let plan = |model: (Sizes, Weights, Float), mixture: Option<Mixture>| {
        with(model, Steps { beside: model.1.forms == 0 || mixture.is_some(), ..llama }, mixture)
    };
    // As BLOOM's layers.
    let plain = Gate { activation: Activation::GeluTanh, gated: false, clamp: None };
    let bloom = Steps { layer_norm: true, alibi: true, gate: plain, beside: false, ..llama };
    let sizes = |hidden, inner, count| Sizes { hidden, inner, heads: heads(count, count, 128), pairs: 0, ropes: 1 };
    let of_bloom = [(4096, 32, 0), (14336, 112, 0), (1024, 16, 6)]
        .map(|(hidden, heads, weights)| (sizes(hidden, 4 * hidden, heads), models[weights].1))
        .map(|(sizes, weights)| with((sizes, weights, Float::F16), bloom, None));
    let a_quarter =
        with((sizes(14336, 14336, 28), models[0].1, Float::F16), bloom, None).and_then(|plan| plan.among(4).ok());
    // As Gemma 3's, and of Gemma 2's caps.
    let geglu = Gate { activation: Activation::GeluTanh, gated: true, clamp: None };
    let gemma = Steps { norms_behind: true, gate: geglu, ..llama };
    let of_gemma = [(3840, 15360, 16, 8, 0, false), (1152, 6912, 4, 1, 2, true)].map(
        |(hidden, inner, queries, keys, weights, capped)| {
            let sizes = Sizes { hidden, inner, heads: heads(queries, keys, 256), pairs: 128, ropes: 2 };
            with((sizes, models[weights].1, Float::F16), Steps { capped, ..gemma }, None)
        },
    );
    let mixture = |experts, top_k, of_chosen, router| Some(Mixture { experts, top_k, of_chosen, router });
    let experts = [
        plan(models[0], mixture(8, 2, true, Float::F16)),
        plan(models[1], mixture(16, 2, true, Float::BF16)),
        plan(models[2], mixture(200, 8, false, Float::F32)),
    ];
    let alone: Vec<Plan> = models
        .into_iter()
        .filter_map(|model| plan(model, None))
        .chain(experts.into_iter().chain(of_bloom).chain(of_gemma).chain([a_quarter]).flatten())
        .collect();
    let shared = alone.first().and_then(|plan| plan.clone().among(2).ok());
    // Of usual heads and of the longest.
    let long = alone.iter().find(|plan| plan.sizes.heads.head_size == 256);
    let paged = alone.first().into_iter().chain(long).map(|plan| plan.clone().paged());
    alone.iter().cloned().chain(shared).chain(paged).map(|plan| plan.instance()).collect()
}
