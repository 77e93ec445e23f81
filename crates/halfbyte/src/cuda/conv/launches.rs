//! Launches of implicit products that a weight keeps prepared.

use crate::conv::Conv2dShape;
use crate::cuda::driver::{Function, Launch, TensorMap};
use crate::cuda::kept::Kept;
use crate::kernel::Activation;
use crate::tensor::Float;

/// What a launch was prepared for, with a plan of some kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Key<P> {
    /// Where what is multiplied begins.
    pub x: u64,
    pub shape: Conv2dShape,
    pub out: Float,
    pub activation: Activation,
    pub plan: P,
}

/// What is the same in every launch for a key.
#[derive(Debug)]
pub(super) struct Prepared {
    /// Of each group of the convolution, as many as the kernel takes.
    pub maps: Vec<TensorMap>,
    pub launch: Launch,
    pub function: Function,
}

/// The launches of one kernel that a weight keeps prepared.
pub(super) type Launches<P> = Kept<Key<P>, Prepared>;
