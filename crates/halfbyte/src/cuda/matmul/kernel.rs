//! A row of the table of products, and a kernel in one of its configurations.

use super::pack::{Packer, Whole};
use super::{Call, Fold, FoldedNorm, OP, Packed, QuantizedCall, QuantizedForm};
use crate::cuda::driver::Stream;
use crate::cuda::sources::{Arch, Instance};
use crate::cuda::{Caps, Gpu};
use crate::error::{Error, Result};
use crate::format::reference::Bound;
use crate::format::{Act, Format};
use crate::kernel::{Activation, Problem, Reason, Row};
use crate::layout::stored::StoredTensor;
use crate::tensor::Float;
use std::any::Any;
use std::fmt::{Debug, Display, Formatter};
use std::sync::Arc;

/// What a kernel does with a problem: something, or why not.
pub(super) type Answer<T> = std::result::Result<T, Reason>;

/// A way to compute products: all that is known of a kernel.
pub struct Kernel {
    /// Name, the stem of its files.
    pub name: &'static str,
    /// Layout of the weights that it reads.
    pub layout: &'static str,
    /// What it does, in one line.
    pub what: &'static str,
    /// Whether weights are packed for it; else it reads what was packed for another kernel.
    pub packs: bool,
    /// Whether it can sum in an order that does not depend on the number of rows.
    pub batch_invariant: bool,
    /// Whether it is written for a processor.
    pub serves: fn(Arch) -> bool,
    /// Enough of its instances for a processor that nothing in its sources is left out: what tests compile.
    pub instances: fn(Arch) -> Vec<Instance>,
    /// Every instance that a product with weights of a format, x and y of these types, and no activation is computed by, with
    /// whatever sizes on whatever device of those that it is written for.
    pub every_instance: fn(Arch, Format, [Float; 2]) -> Vec<Instance>,
    /// The configuration for a problem, whose rows depend on each other or not; why there is none.
    pub(super) choose: fn(&Caps, &Problem, bool) -> Answer<Configuration>,
    /// Configurations worth measuring.
    pub(super) candidates: fn(&Caps, &Problem) -> Answer<Vec<Configuration>>,
    /// How x must lie as codes; none: it reads floats.
    pub(super) rows_form: fn(&Problem) -> Option<QuantizedForm>,
    pub(super) rounds_weights: fn(&Caps, &Problem) -> bool,
    pub(super) workspace_bytes: fn(&Caps, &Problem) -> usize,
    pub(super) holds: fn(&StoredTensor<'_>, Act) -> Answer<()>,
    pub(super) pack: fn(&mut Packer<'_>, Whole, &[&StoredTensor<'_>], Act) -> Result<Packed>,
}

impl Row for Kernel {
    fn name(&self) -> &'static str {
        self.name
    }
}

impl Debug for Kernel {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "Kernel({} of {})", self.name, self.layout)
    }
}

impl Kernel {
    /// Whether it computes a problem on a device, or why not.
    pub fn supports(&self, caps: &Caps, problem: &Problem) -> std::result::Result<(), Reason> {
        self.choose(caps, problem, false).map(drop)
    }

    /// The configuration with which it computes a problem on a device, or why it does not.
    pub fn choose(
        &self,
        caps: &Caps,
        problem: &Problem,
        batch_invariant: bool,
    ) -> std::result::Result<Configuration, Reason> {
        if !(self.serves)(caps.arch) {
            return Err(Reason(format!("is not written for {}", caps.arch)));
        }
        if batch_invariant && !self.batch_invariant {
            return Err(Reason("is not batch-invariant".into()));
        }
        (self.choose)(caps, problem, batch_invariant)
    }

    /// Configurations worth measuring against the one that is chosen, which is the first. Error: the reason why there is none.
    pub fn candidates(&self, caps: &Caps, problem: &Problem) -> std::result::Result<Vec<Configuration>, Reason> {
        let chosen = self.choose(caps, problem, false)?;
        let others = (self.candidates)(caps, problem)?;
        let others = others.into_iter().filter(|other| other.to_string() != chosen.to_string());
        Ok([chosen.clone()].into_iter().chain(others).collect())
    }

    /// How far its results lie from the reference at most.
    pub fn bound(&self, caps: &Caps, problem: &Problem) -> Bound {
        let rounded_weights = (self.rounds_weights)(caps, problem).then_some(problem.x);
        Bound { rounded_weights, ..Bound::new(problem.y, problem.k) }
    }

    /// What a problem that it supports is computed by, without an activation.
    pub fn instances_of(&self, caps: &Caps, problem: &Problem) -> Vec<Instance> {
        self.choose(caps, problem, false)
            .map_or_else(|_| Vec::new(), |chosen| chosen.instances(problem, Activation::None))
    }

    /// Bytes of workspace that it needs for a problem that it supports, with rows that depend on each other or not.
    pub fn workspace_bytes(&self, caps: &Caps, problem: &Problem) -> usize {
        (self.workspace_bytes)(caps, problem)
    }

    /// Whether its layout holds the numbers of a tensor whose format it supports, or why not.
    pub fn holds(&self, w: &StoredTensor<'_>, act: Act) -> std::result::Result<(), Reason> {
        (self.holds)(w, act)
    }

    /// How x must lie as codes for products that it quantises x for; none: it reads floats.
    pub fn rows_form(&self, problem: &Problem) -> Option<QuantizedForm> {
        (self.rows_form)(problem)
    }
}

/// A kernel in one of its configurations.
pub(super) trait Configured: Any + Debug + Display + Send + Sync {
    /// Whether another one is the same.
    fn is(&self, other: &dyn Configured) -> bool;

    /// What a problem is computed by, with an activation.
    fn instances(&self, problem: &Problem, activation: Activation) -> Vec<Instance>;

    /// Bytes of workspace for a problem.
    fn workspace_bytes(&self, caps: &Caps, problem: &Problem, batch_invariant: bool) -> usize;

    /// Puts a product into a stream: lengths fit, and y has elements. Error: a workspace that is too small.
    fn run(&self, gpu: &Gpu, stream: &Stream, call: &Call<'_>) -> Result<()>;

    /// Whether a product does its part of a norm.
    fn folds(&self, _: &Caps, _: &Problem, _: Activation, _: Fold) -> bool {
        false
    }

    /// What a problem is computed by where it does; else None.
    fn folding(&self, _: &Caps, _: &Problem, _: Activation, _: Fold) -> Option<Instance> {
        None
    }

    /// The same as [`Configured::run`] of such a product.
    fn run_folded(&self, _: &Gpu, _: &Stream, _: &Call<'_>, _: &FoldedNorm<'_>) -> Result<()> {
        Err(Error::invalid(OP, "a kernel that does its part of a norm", self.to_string()))
    }

    /// The same with x that is quantised already, as the kernel's row says.
    fn run_quantized(&self, _: &Gpu, _: &Stream, _: &Problem, _: &QuantizedCall<'_>) -> Result<()> {
        Err(Error::invalid(OP, "a kernel that reads quantised rows", format!("one that reads floats, {self}")))
    }
}

/// Whether another one is of the same type, and equal.
pub(super) fn is_same<T: Configured + PartialEq>(this: &T, other: &dyn Configured) -> bool {
    let other: &dyn Any = other;
    other.downcast_ref::<T>() == Some(this)
}

/// A configuration of some kernel: how large its tiles are, and so on. It writes as what it is.
#[derive(Clone, Debug)]
pub struct Configuration(Arc<dyn Configured>);

impl Configuration {
    pub(super) fn new(configured: impl Configured) -> Self {
        Self(Arc::new(configured))
    }

    /// What a problem is computed by with it, and with an activation.
    pub fn instances(&self, problem: &Problem, activation: Activation) -> Vec<Instance> {
        self.0.instances(problem, activation)
    }

    /// Bytes of workspace that a problem takes with it.
    pub fn workspace_bytes(&self, caps: &Caps, problem: &Problem, batch_invariant: bool) -> usize {
        self.0.workspace_bytes(caps, problem, batch_invariant)
    }

    pub(super) fn get(&self) -> &dyn Configured {
        &*self.0
    }

    /// Puts a product whose lengths fit into a stream.
    pub(in crate::cuda) fn run(&self, gpu: &Gpu, stream: &Stream, call: &Call<'_>) -> Result<()> {
        if call.y.is_empty() { Ok(()) } else { self.0.run(gpu, stream, call) }
    }
}

impl PartialEq for Configuration {
    fn eq(&self, other: &Self) -> bool {
        self.0.is(&*other.0)
    }
}

impl Display for Configuration {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        Display::fmt(&self.0, f)
    }
}
