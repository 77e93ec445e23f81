//! Launches of implicit products that a weight keeps prepared, since encoding tensor maps takes longer than a launch.

use crate::conv::Conv2dShape;
use crate::cuda::driver::{Function, Launch, TensorMap};
use crate::error::Result;
use crate::kernel::Activation;
use crate::tensor::Float;
use std::sync::{Arc, Mutex, PoisonError};

/// Launches that are kept.
const KEPT: usize = 32;

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

/// The launches that a weight keeps prepared.
#[derive(Debug)]
pub(super) struct Launches<P>(Mutex<Vec<(Key<P>, Arc<Prepared>)>>);

impl<P> Default for Launches<P> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<P: Copy + PartialEq> Launches<P> {
    /// The launch for a key, out of those kept, or made and kept.
    pub fn prepare(&self, key: Key<P>, make: impl FnOnce() -> Result<Prepared>) -> Result<Arc<Prepared>> {
        let kept = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, prepared)) = kept().iter().find(|(other, _)| *other == key) {
            return Ok(prepared.clone());
        }
        let prepared = Arc::new(make()?);
        let mut kept = kept();
        if kept.len() == KEPT {
            kept.remove(0);
        }
        kept.push((key, prepared.clone()));
        Ok(prepared)
    }
}
