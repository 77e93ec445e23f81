//! What a launch of a GEMM reads and writes, and how sources have that.

use super::super::folded_norm;
use super::super::quantize_activations::Form as QuantizedForm;
use super::super::wna16::Weights;
use crate::cuda::Workspace;
use crate::cuda::driver::{FloatView, View};
use crate::cuda::parameters::parameters;
use crate::layout::cuda_wna16::Atom;

/// Activations as a kernel reads them.
#[derive(Clone, Copy)]
pub(in crate::cuda::matmul) enum X<'a> {
    /// Floats where they lie.
    Floats(FloatView<'a>),
    /// Codes, the address of their terms, and how both lie.
    Codes(View<'a, u8>, u64, QuantizedForm),
}

/// What a launch reads and writes.
#[derive(Clone, Copy)]
pub(in crate::cuda::matmul) struct Operands<'a> {
    /// Activations, of which some rows are multiplied.
    pub x: X<'a>,
    /// The first of these rows.
    pub first: usize,
    /// Rows.
    pub m: usize,
    /// Columns.
    pub k: usize,
    /// Elements from row to row of x.
    pub pitch: usize,
    /// Address of the first row of y.
    pub y: u64,
    /// Address of the bias; 0: none.
    pub bias: u64,
    /// Address of the workspace: counters, then sums of cut tiles.
    pub workspace: u64,
    /// Address of the sums of these rows of x; 0: none.
    pub sums: u64,
    /// Its part of a norm, if it has one.
    pub norm: Option<folded_norm::NormOperands>,
}

impl Operands<'_> {
    /// Address of the first row of x.
    pub fn x_at(&self) -> u64 {
        match self.x {
            X::Floats(x) => x.pointer() + (self.first * self.pitch * x.dtype().size_bytes()) as u64,
            X::Codes(codes, ..) => codes.pointer() + (self.first * self.pitch) as u64,
        }
    }

    /// Address of the first row's terms. Rows at once are a multiple of four: those of the next ones begin at 16 bytes again.
    pub fn terms_at(&self) -> u64 {
        if let X::Codes(_, terms, _) = self.x { terms + (self.first * 4) as u64 } else { 0 }
    }

    /// How the codes of all rows lie; of floats as if they were codes of which each row is a group.
    pub fn codes(&self) -> QuantizedForm {
        let (m, k) = (self.m, self.k);
        match self.x {
            X::Codes(.., form) => form,
            X::Floats(_) => QuantizedForm { m, k, group: k, piece: k, sums: false, offsets: false, pixels: false },
        }
    }
}

parameters! {
    /// The weight, as sources have it.
    pub(in crate::cuda) struct Weight {
        w: u64,
        rows_of_scales: u64,
    }

    /// Where sums go, as sources have it.
    pub(in crate::cuda) struct Output {
        y: u64,
        bias: u64,
        parts: u64,
        counters: u64,
        m: i32,
        n: i32,
    }
}

/// A weight as launches have it.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct Placed {
    /// Where it lies.
    pub at: Weight,
    /// Outputs and columns.
    pub shape: [usize; 2],
    /// The form of its atoms.
    pub atom: Atom,
}

impl From<&Weights> for Placed {
    fn from(w: &Weights) -> Self {
        Self { at: Weight { w: w.atoms(), rows_of_scales: w.rows() }, shape: w.shape(), atom: w.atom() }
    }
}

impl Output {
    /// Of m rows and n outputs; y, bias and the workspace are addresses, of the bias 0 if there is none.
    pub fn new([y, bias, workspace]: [u64; 3], m: usize, n: usize) -> Self {
        let parts = workspace + Workspace::COUNTER_BYTES as u64;
        Self { y, bias, parts, counters: workspace, m: m as i32, n: n as i32 }
    }
}
