//! Kernels that compute y in tiles (GEMM and implicit GEMM): what their launchers share.
//!
//! A launcher says by [`Tiled`] what a configuration takes and how it is compiled. Whether a device has room for it
//! ([`check`]), how it is launched ([`Prepared`]), and where quantised activations lie in the workspace ([`Room`]), is the same for
//! all.

use super::driver::{Function, Launch, TensorMap};
use super::matmul::QuantizedForm;
use super::schedule::Schedule;
use super::sources::Instance;
use super::{Caps, Gpu, Workspace};
use crate::error::Result;
use crate::kernel::{Activation, Reason};

/// A kernel whose blocks compute tiles of y.
pub(in crate::cuda) trait Tiled {
    /// What instances differ by besides configuration and activation: the form of weights, types, terms of x.
    type Form: Copy;
    /// Size of a tile, stages in flight, and so on.
    type Config: Copy + PartialEq + std::fmt::Debug;

    /// Threads of a block.
    fn threads(config: Self::Config) -> usize;

    /// Blocks of a cluster, which share the columns of one tile.
    fn split(_: Self::Config) -> usize {
        1
    }

    /// Dynamic shared memory of a block.
    fn shared_bytes(form: &Self::Form, config: Self::Config) -> usize;

    /// What is compiled.
    fn instance(form: &Self::Form, config: Self::Config, activation: Activation) -> Instance;
}

/// Whether a device has room for a configuration, and the kernel's numbers for its schedule, or why not.
pub(in crate::cuda) fn check<T: Tiled>(
    caps: &Caps,
    form: &T::Form,
    (config, schedule): &(T::Config, Schedule),
) -> std::result::Result<(), Reason> {
    let shared = T::shared_bytes(form, *config);
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
    pub fn new<T: Tiled>(
        gpu: &Gpu,
        form: &T::Form,
        (config, schedule): (T::Config, Schedule),
        activation: Activation,
        maps: Vec<TensorMap>,
    ) -> Result<Self> {
        let split = T::split(config);
        Ok(Self {
            schedule,
            maps,
            launch: Launch {
                cluster: [split as u32, 1, 1],
                shared_bytes: T::shared_bytes(form, config) as u32,
                programmatic: gpu.caps().arch.number >= 90,
                ..Launch::linear((schedule.workers * split) as u32, T::threads(config) as u32)
            },
            function: gpu.function(&T::instance(form, config, activation))?,
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
