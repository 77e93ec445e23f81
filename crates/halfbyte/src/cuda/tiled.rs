//! Kernels that compute y in tiles (GEMM and implicit GEMM): what their launchers share.
//!
//! A configuration says by [`Tile`] what it takes and how it is compiled. Whether a device has room for it
//! (`check`), how it is launched (`Prepared`), and where quantised activations lie in the workspace (`Room`), is the same for
//! all.

use super::driver::{Function, Launch, TensorMap};
use super::matmul::QuantizedForm;
use super::matmul::wna8::Terms;
use super::schedule::Schedule;
use super::sources::Instance;
use super::{Caps, Gpu, Workspace};
use crate::error::Result;
use crate::kernel::{Activation, Reason};
use crate::layout::cuda_wna16::Atom;
use crate::tensor::Float;
use std::fmt::{Debug, Display};

/// What instances of a kernel differ by, besides configuration and activation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Form {
    /// Form of the weights' atoms.
    pub atom: Atom,
    /// What x has beside codes and scales; nothing if it is floats.
    pub terms: Terms,
    /// Type of x; of codes that of the scales.
    pub x: Float,
    /// Type of y.
    pub out: Float,
}

impl Form {
    /// With x in floats of the type of the scales.
    pub fn floats(atom: Atom, out: Float) -> Self {
        Self::codes(atom, Terms::default(), out)
    }

    /// With x in codes.
    pub fn codes(atom: Atom, terms: Terms, out: Float) -> Self {
        Self { atom, terms, x: atom.scale, out }
    }
}

/// A configuration of a kernel whose blocks compute tiles of y: their size, stages in flight, and so on.
pub trait Tile: Copy + PartialEq + Debug + Display + Send + Sync + 'static {
    /// Rows of x a tile.
    fn tokens(self) -> usize;

    /// Threads of a block.
    fn threads(self, form: &Form) -> usize;

    /// Blocks of a cluster, which share the columns of one tile.
    fn split(self) -> usize {
        1
    }

    /// Dynamic shared memory of a block.
    fn shared_bytes(self, form: &Form) -> usize;

    /// Sums of cut tiles that are left in memory, in bytes.
    fn parts_bytes(self, schedule: &Schedule) -> usize;

    /// Whether weights are rounded to the type of x.
    fn rounds_weights(self) -> bool {
        false
    }

    /// What is compiled.
    fn instance(self, form: &Form, activation: Activation) -> Instance;
}

/// Whether a device has room for a configuration, and the kernel's numbers for its schedule, or why not.
pub(in crate::cuda) fn check(
    caps: &Caps,
    form: &Form,
    (config, schedule): &(impl Tile, Schedule),
) -> std::result::Result<(), Reason> {
    let shared = config.shared_bytes(form);
    if shared > caps.shared_bytes as usize {
        return Err(Reason(format!("needs {shared} bytes of shared memory, a block has {}", caps.shared_bytes)));
    }
    if !schedule.fits() {
        return Err(Reason("more tiles than 32 bits count".into()));
    }
    Ok(())
}

/// What is the same in every launch of a tile's kernel on some memory.
#[derive(Debug)]
pub(in crate::cuda) struct Prepared {
    /// Who computes what.
    pub schedule: Schedule,
    /// Tensor maps of x, as many as the kernel takes; of a convolution in groups, of each of these.
    pub maps: Vec<TensorMap>,
    /// The form of the launch.
    pub launch: Launch,
    /// What is launched.
    pub function: Function,
}

impl Prepared {
    /// A configuration and its schedule. Programmatic dependent launch: blocks start while the kernel before still runs.
    pub fn new(
        gpu: &Gpu,
        instance: &Instance,
        form: &Form,
        (config, schedule): (impl Tile, Schedule),
        maps: Vec<TensorMap>,
    ) -> Result<Self> {
        let split = config.split();
        Ok(Self {
            schedule,
            maps,
            launch: gpu.overlapping(Launch {
                cluster: [split as u32, 1, 1],
                shared_bytes: config.shared_bytes(form) as u32,
                ..Launch::linear((schedule.workers * split) as u32, config.threads(form) as u32)
            }),
            function: gpu.function(instance)?,
        })
    }
}

/// Where things lie in the workspace of a product that quantises x: counters, sums of cut tiles, codes of x, terms of x.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct Room {
    /// Where codes begin.
    pub codes: usize,
    /// Where terms begin.
    pub terms: usize,
    /// All of it.
    pub bytes: usize,
}

impl Room {
    /// For x in a form, and so many bytes of sums.
    pub fn new(x: QuantizedForm, parts_bytes: usize) -> Self {
        const ALIGNMENT: usize = 256;
        let codes = (Workspace::COUNTER_BYTES + parts_bytes).next_multiple_of(ALIGNMENT);
        let terms = (codes + x.codes_bytes()).next_multiple_of(ALIGNMENT);
        Self { codes, terms, bytes: terms + x.terms_bytes() }
    }
}
