//! Tables of kernels on a GPU: which row serves a problem, why the others do not, and the plan that comes of it.
//!
//! A row ([`Kernel`]) holds all that is known of a kernel. Binding it to a problem decides on a configuration; what comes of that is
//! a [`Plan`], which is made once and then launched for every input of that size. Convolutions ([`super::conv`]) and layers of
//! bytes ([`super::int8`]) are operations of this kind.

use super::driver::Stream;
use super::kept::Kept;
use super::sources::{Arch, Instance};
use super::{Caps, Gpu};
use crate::error::{Error, Result};
use crate::format::Format;
use crate::kernel::{self, Reason, Row};
use std::fmt::{Debug, Display};
use std::sync::Arc;

/// Something that the kernels of one table compute.
pub trait Operation: Sized + 'static {
    /// Its name in errors.
    const NAME: &'static str;

    /// All kernels, the preferred first.
    const KERNELS: &'static [Kernel<Self>];

    /// What is to be computed, and how large.
    type Problem: Copy + Debug + Display + PartialEq + Send + Sync;

    /// The same with its operands.
    type Call<'a>;

    /// What a call asks for. Error: lengths that do not fit.
    fn asked(call: &Self::Call<'_>) -> Result<Asked<Self>>;
}

/// What a call asks for.
#[derive(Debug)]
pub struct Asked<O: Operation> {
    /// The problem.
    pub problem: O::Problem,
    /// Bytes of the workspace that it brings.
    pub workspace_bytes: usize,
    /// Whether y has no elements.
    pub nothing: bool,
}

/// A kernel in one of its configurations, for one problem on one device.
pub(in crate::cuda) trait Configured<O: Operation>: Send + Sync {
    /// What the configuration is: sizes of tiles and so on.
    fn text(&self) -> String;

    /// All that is launched, without an activation where that is compiled in.
    fn instances(&self) -> Vec<Instance>;

    /// Bytes of workspace that it needs.
    fn workspace_bytes(&self) -> usize {
        0
    }

    /// Whether weights are scaled and rounded to the type of x before they are multiplied.
    fn rounds_weights(&self) -> bool {
        false
    }

    /// Puts it into a stream; the call is of the problem, with lengths and a workspace that fit, and y has elements.
    fn run(&self, gpu: &Gpu, stream: &Stream, call: O::Call<'_>) -> Result<()>;
}

/// What binding a kernel to a problem gives: a configuration, or why there is none.
pub(in crate::cuda) type Bind<O> = std::result::Result<Box<dyn Configured<O>>, Reason>;

/// A way to compute an operation: a row of its table.
pub struct Kernel<O: Operation> {
    /// Name, the stem of its files.
    pub name: &'static str,
    /// What it does, in one line.
    pub what: &'static str,
    /// Whether it is written for a processor.
    pub serves: fn(Arch) -> bool,
    /// Instances of its own that may be launched; of a kernel with very many, enough that nothing in its sources is left out.
    pub instances: fn() -> Vec<Instance>,
    /// Every instance of its own that weights of a format may be multiplied by on a processor, without an activation where that is compiled in,
    /// where there are more than `instances` has.
    pub every_instance: fn(Arch, Format) -> Vec<Instance>,
    /// The configuration for a problem.
    pub(in crate::cuda) choose: fn(&Caps, &O::Problem) -> Bind<O>,
    /// All configurations of a problem that it supports, to be measured; none if there is but one.
    pub(in crate::cuda) candidates: Candidates<O>,
}

/// Makes all configurations of a problem.
type Candidates<O> = fn(&Caps, &<O as Operation>::Problem) -> Vec<Box<dyn Configured<O>>>;

impl<O: Operation> Row for Kernel<O> {
    fn name(&self) -> &'static str {
        self.name
    }
}

/// What a row says of a kernel, but for its configurations.
pub(in crate::cuda) struct About {
    pub name: &'static str,
    pub what: &'static str,
    pub serves: fn(Arch) -> bool,
    pub instances: fn() -> Vec<Instance>,
}

impl<O: Operation> Kernel<O> {
    /// A kernel that has but one configuration for a problem, and no more instances than are listed.
    pub(in crate::cuda) const fn with_one(about: About, choose: fn(&Caps, &O::Problem) -> Bind<O>) -> Self {
        let About { name, what, serves, instances } = about;
        Self { name, what, serves, instances, every_instance: |_, _| Vec::new(), choose, candidates: |_, _| Vec::new() }
    }

    /// Whether it computes a problem on a device, or why not.
    pub fn supports(&self, caps: &Caps, problem: &O::Problem) -> std::result::Result<(), Reason> {
        self.bind(caps, problem).map(drop)
    }

    /// The configuration for a problem on a device, or why there is none.
    pub(in crate::cuda) fn bind(&self, caps: &Caps, problem: &O::Problem) -> Bind<O> {
        if !(self.serves)(caps.arch) {
            return Err(Reason(format!("is not written for {}", caps.arch)));
        }
        (self.choose)(caps, problem)
    }

    /// How it computes a problem on a device, or why it does not.
    pub fn plan(&'static self, caps: &Caps, problem: &O::Problem) -> std::result::Result<Plan<O>, Reason> {
        Ok(Plan { kernel: self, problem: *problem, configured: self.bind(caps, problem)? })
    }

    /// Every way in which it could compute a problem on a device, to be measured; none if it does not support it.
    pub fn plans(&'static self, caps: &Caps, problem: &O::Problem) -> Vec<Plan<O>> {
        let Ok(chosen) = self.plan(caps, problem) else { return Vec::new() };
        let all = (self.candidates)(caps, problem).into_iter();
        let all: Vec<_> = all.map(|configured| Plan { kernel: self, problem: *problem, configured }).collect();
        if all.is_empty() { vec![chosen] } else { all }
    }
}

/// How a problem is computed: the kernel, its configuration, and what it needs. It keeps what is the same in every launch.
pub struct Plan<O: Operation> {
    kernel: &'static Kernel<O>,
    problem: O::Problem,
    configured: Box<dyn Configured<O>>,
}

impl<O: Operation> Plan<O> {
    /// That of the first kernel that supports a problem. Error: none does, and why.
    pub fn of(caps: &Caps, problem: &O::Problem) -> Result<Self> {
        kernel::first(O::NAME, problem, O::KERNELS, |kernel| kernel.plan(caps, problem))
    }

    /// Every kernel with the reason against it; the first without one is that of the plan.
    pub fn explain(caps: &Caps, problem: &O::Problem) -> Vec<(&'static Kernel<O>, Option<Reason>)> {
        kernel::explain(O::KERNELS, |kernel| kernel.supports(caps, problem).err())
    }

    /// The kernel.
    pub fn kernel(&self) -> &'static Kernel<O> {
        self.kernel
    }

    /// What it computes.
    pub fn problem(&self) -> &O::Problem {
        &self.problem
    }

    /// Bytes of workspace that it needs.
    pub fn workspace_bytes(&self) -> usize {
        self.configured.workspace_bytes()
    }

    /// Whether weights are scaled and rounded to the type of x before they are multiplied.
    pub fn rounds_weights(&self) -> bool {
        self.configured.rounds_weights()
    }

    /// All that it launches, without an activation where that is compiled in: to be compiled before it is needed.
    pub fn instances(&self) -> Vec<Instance> {
        self.configured.instances()
    }

    /// Puts it into a stream.
    ///
    /// Errors: a call of another problem, a length that does not fit, a workspace that is too small, a kernel that cannot be compiled.
    pub fn run(&self, gpu: &Gpu, stream: &Stream, call: O::Call<'_>) -> Result<()> {
        let Asked { problem, workspace_bytes: given, nothing } = O::asked(&call)?;
        if problem != self.problem {
            return Err(Error::invalid(O::NAME, self.problem.to_string(), problem.to_string()));
        }
        let needed = self.workspace_bytes();
        if given < needed {
            return Err(Error::invalid(O::NAME, format!("a workspace of {needed} bytes"), given.to_string()));
        }
        if nothing { Ok(()) } else { self.configured.run(gpu, stream, call) }
    }
}

/// The configuration.
impl<O: Operation> Display for Plan<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.configured.text())
    }
}

impl<O: Operation> Debug for Plan<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {} by {}, {self}", O::NAME, self.problem, self.kernel.name)
    }
}

impl<O: Operation> Debug for Kernel<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// The plans of the problems that a weight has seen last.
#[derive(Debug)]
pub(in crate::cuda) struct Plans<O: Operation>(Kept<O::Problem, Plan<O>>);

impl<O: Operation> Default for Plans<O> {
    fn default() -> Self {
        Self(Kept::default())
    }
}

impl<O: Operation> Plans<O> {
    /// The plan for a problem, made when it is first asked for. Error: no kernel supports it.
    pub fn get(&self, gpu: &Gpu, problem: O::Problem) -> Result<Arc<Plan<O>>> {
        self.0.get(problem, |problem| Plan::of(&gpu.caps(), problem))
    }
}
