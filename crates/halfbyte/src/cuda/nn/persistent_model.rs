//! What the persistent kernel is told of a model besides sizes: what layers do, experts, forms of weights.

use super::Gate;
use super::persistent_layers::{StepExperts, StepLayer, StepMlp};
use crate::cuda::matmul::Packed;
use crate::layout::cuda_wna16::Atom;
use crate::tensor::Float;

/// What layers do beside their products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Steps {
    /// Norms take off the mean and have biases.
    pub(super) layer_norm: bool,
    /// Scores fall with the distance.
    pub(super) alibi: bool,
    /// Scores have a cap.
    pub(super) capped: bool,
    /// What output and down give is normed before it is added.
    pub(super) norms_behind: bool,
    pub(super) gate: Gate,
    /// Rows of gates and of what they let through take turns, eight at a time; those of experts always do.
    pub(super) beside: bool,
}

impl Steps {
    /// None: some norms have biases, and some have none; weights are packed with another gate.
    pub(super) fn of(layer: &StepLayer<'_>) -> Option<Self> {
        let StepLayer { norms, norms_behind, alibi, cap, gate, mlp, .. } = layer;
        let layer_norm = norms[0].bias.is_some();
        let packed_with = match mlp {
            StepMlp::Dense([(up, _), _]) => up.gate(),
            StepMlp::Experts(_) => Some(*gate),
        };
        let alike = norms.iter().chain(norms_behind.iter().flatten()).all(|norm| norm.bias.is_some() == layer_norm)
            && packed_with.is_none_or(|packed_with| packed_with == *gate);
        alike.then_some(Self {
            layer_norm,
            alibi: alibi.is_some(),
            capped: cap.is_some(),
            norms_behind: norms_behind.is_some(),
            gate: *gate,
            beside: packed_with.is_some(),
        })
    }
}

/// What the MLPs of a model are, if they consist of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mixture {
    pub(super) experts: usize,
    /// Experts of a token.
    pub(super) top_k: usize,
    /// Whether their shares are a softmax of these alone.
    pub(super) of_chosen: bool,
    /// The type of the router.
    pub(super) router: Float,
}

impl Mixture {
    pub(super) fn of(StepExperts { experts, router, top_k, of_chosen }: &StepExperts<'_>) -> Self {
        Self { experts: experts.len(), top_k: *top_k, of_chosen: *of_chosen, router: router.dtype() }
    }
}

/// The forms that a model's weights have, and whether activations are quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Weights {
    /// Of all; of those whose scales are multiples of halves one for all: what each is, its [`form`] says.
    pub(super) atom: Atom,
    pub(super) quantized: bool,
    /// A bit for each [`form`] of multiples of halves; 0: there are none such.
    pub(super) forms: u32,
    /// Whether values may be another tensor than queries and keys.
    pub(super) values_apart: bool,
}

impl Weights {
    pub(super) const K_TYPES: Atom =
        Atom { group: 32, offset: true, scale: Float::F32, multiples: true, ..Atom::W4_G128 };

    pub(super) fn of(atom: Atom, quantized: bool) -> Self {
        match form(atom) {
            Some(form) => Self { atom: Self::K_TYPES, quantized, forms: 1 << form, values_apart: false },
            None => Self { atom, quantized, forms: 0, values_apart: false },
        }
    }

    /// Both together, if one kernel takes both.
    pub(super) fn with(self, other: Self) -> Option<Self> {
        (self.atom == other.atom).then_some(Self { forms: self.forms | other.forms, ..self })
    }
}

/// The forms of atoms whose scales are multiples of halves, as the source counts them, each after the bits of its codes: those of Q3_K, Q4_K, Q6_K
/// and Q5_K.
const FORMS: [u32; 4] = [3, 4, 6, 5];

/// That of an atom, if it is one of these.
pub(super) fn form(atom: Atom) -> Option<u32> {
    FORMS.iter().position(|&bits| atom.multiples && bits == atom.bits).map(|form| form as u32)
}

/// Bits of the codes of the longest of some forms, a bit for each.
pub(super) fn most_bits(forms: u32) -> u32 {
    FORMS.iter().enumerate().filter(|(form, _)| forms >> form & 1 == 1).map(|(_, &bits)| bits).max().unwrap_or(0)
}

/// The form of atoms, of weights that have such.
pub(super) fn atom_of(w: &Packed) -> Option<Atom> {
    if let Packed::Wna16(w) = w { Some(w.atom()) } else { None }
}
