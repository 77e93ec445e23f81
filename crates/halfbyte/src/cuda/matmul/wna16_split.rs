//! Products with x in f32 on tensor cores: each number of x is the sum of three in bf16, so that a product of three times the rows, by
//! the first kernel that multiplies bf16, leaves sums whose threes are added.
//!
//! ```text
//! rows at a time:   x -> [3][rows][k] in bf16       crate::cuda::halfs
//!                   sums = x · Wᵀ, in f32           wna16_sm90 or wna16_mma
//!                   y = activation(Σ sums + bias)   finish.cu
//! ```
//!
//! Weights are read once for all three parts, and are never rounded. An f32 has 24 bits, three bf16 have 8 each.

use super::finish::{self, Finish};
use super::kernel::{Answer, Configuration, Configured, Kernel, is_same};
use super::plans::{EACH, FEW, STEP};
use super::{Call, Epilogue, wna16, wna16_mma, wna16_sm90};
use crate::cuda::driver::{FloatView, FloatViewMut, Stream};
use crate::cuda::halfs::{self, PARTS_OF_F32, PIECE, Runs};
use crate::cuda::sources::Instance;
use crate::cuda::{Caps, Gpu, Workspace};
use crate::error::{Error, Result};
use crate::kernel::{Activation, Problem, Reason};
use crate::tensor::Float;
use half::bf16;

const NAME: &str = "wna16_split";

pub(super) const KERNEL: Kernel = Kernel {
    name: NAME,
    layout: wna16::LAYOUT,
    what: "x in f32 as three bf16: products of three times the rows, whose sums are added",
    packs: true,
    batch_invariant: true,
    serves: |arch| arch.multiplies(Float::BF16),
    instances: |_| vec![finish::instance()],
    every_instance: |arch, format, [x, _]| match x {
        Float::F32 => {
            let inner = INNER.iter().filter(|kernel| (kernel.serves)(arch));
            let products = inner.flat_map(|kernel| (kernel.every_instance)(arch, format, [Float::BF16, Float::F32]));
            products.chain([halfs::instance(Float::F32, None), finish::instance()]).collect()
        }
        _ => Vec::new(),
    },
    choose,
    candidates: |caps, problem| choose(caps, problem, false).map(|_| Vec::new()),
    rows_form: |_| None,
    rounds_weights: |_, _| false,
    workspace_bytes: |caps, problem| {
        let of =
            |invariant| choose(caps, problem, invariant).map_or(0, |it| it.workspace_bytes(caps, problem, invariant));
        of(false).max(of(true))
    },
    holds: wna16_mma::KERNEL.holds,
    pack: wna16_mma::KERNEL.pack,
};

/// The kernels for bf16, the preferred first.
const INNER: [&Kernel; 2] = [&wna16_sm90::KERNEL, &wna16_mma::KERNEL];

/// Parts of x, and sums, that lie in memory at a time, unless those of a few rows take more.
const MOST_BYTES: usize = 128 << 20;

/// Where parts of the workspace begin.
const ALIGNMENT: usize = 256;

/// Rows of x at a time.
#[derive(Clone, Copy)]
struct Rows {
    /// Those that there are.
    there: usize,
    /// With rows of zeros, so that parts of x are whole pieces, and that what is chosen for so many rows holds for all that plans take
    /// for as many.
    filled: usize,
}

impl Rows {
    /// All of them, or a quarter of what memory would hold.
    fn of(problem: &Problem) -> Self {
        let (m, most) = (problem.m.max(1), Self::most(problem));
        let there = if m <= most { m } else { (most / 4 / STEP * STEP).max(STEP) };
        let filled = match there {
            ..=FEW if problem.k.is_multiple_of(PIECE) => there,
            ..=EACH => there.next_multiple_of(FEW),
            _ => there.next_multiple_of(STEP),
        };
        Self { there, filled }
    }

    /// Rows that memory holds.
    fn most(problem: &Problem) -> usize {
        let of_row = PARTS_OF_F32 * (2 * problem.k).max(4 * problem.n).max(1);
        (MOST_BYTES / of_row / STEP * STEP).max(STEP)
    }
}

/// The product in bf16 of the rows at a time.
fn inner(problem: &Problem) -> Problem {
    Problem { x: Float::BF16, y: Float::F32, m: PARTS_OF_F32 * Rows::of(problem).filled, ..*problem }
}

fn choose(caps: &Caps, problem: &Problem, batch_invariant: bool) -> Answer<Configuration> {
    if problem.x != Float::F32 {
        return Err(Reason(format!("splits x in f32, x is {}", problem.x)));
    }
    if caps.gate.is_some() {
        return Err(Reason("adds sums, where rows are gates and what they let through".into()));
    }
    let problem = inner(problem);
    if problem.m.saturating_mul(problem.k) > i32::MAX as usize {
        return Err(Reason("splits fewer than 2³¹ numbers of x at a time".into()));
    }
    let mut why = Reason(format!("is not written for {}", caps.arch));
    for kernel in INNER {
        if (kernel.rounds_weights)(caps, &problem) {
            continue;
        }
        match kernel.choose(caps, &problem, batch_invariant) {
            Ok(product) => return Ok(Configuration::new(Split { name: kernel.name, product })),
            Err(reason) => why = reason,
        }
    }
    Err(why)
}

/// The kernel for bf16, and its configuration.
#[derive(Clone, Debug, PartialEq)]
struct Split {
    name: &'static str,
    product: Configuration,
}

impl std::fmt::Display for Split {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} parts by {} {}", PARTS_OF_F32, self.name, self.product)
    }
}

/// Bytes of the parts of x, and of the sums.
fn bytes(problem: &Problem) -> [usize; 2] {
    let Problem { m, n, k, .. } = inner(problem);
    [2 * m * k, 4 * m * n].map(|bytes| bytes.next_multiple_of(ALIGNMENT))
}

impl Configured for Split {
    fn is(&self, other: &dyn Configured) -> bool {
        is_same(self, other)
    }

    fn instances(&self, problem: &Problem, _: Activation) -> Vec<Instance> {
        let product = self.product.instances(&inner(problem), Activation::None);
        product.into_iter().chain([halfs::instance(Float::F32, None), finish::instance()]).collect()
    }

    fn workspace_bytes(&self, caps: &Caps, problem: &Problem, batch_invariant: bool) -> usize {
        // Of more rows than memory holds a part at a time takes less: as much is asked for, so that more rows never take less.
        let whole = Problem { m: problem.m.min(Rows::most(problem)), ..*problem };
        let worked_in = |problem| self.product.workspace_bytes(caps, &inner(problem), batch_invariant);
        let worked_in = worked_in(problem).max(worked_in(&whole)).max(Workspace::COUNTER_BYTES);
        worked_in.next_multiple_of(ALIGNMENT) + bytes(&whole).into_iter().sum::<usize>()
    }

    fn run(&self, gpu: &Gpu, stream: &Stream, call: &Call<'_>) -> Result<()> {
        let (problem, [n, k]) = (super::problem(call), call.w.shape());
        let [of_x, of_sums] = bytes(&problem);
        let too_small = |bytes: usize| {
            let expected = format!("a workspace of more than {} bytes", of_x + of_sums + Workspace::COUNTER_BYTES);
            Error::invalid(NAME, expected, bytes.to_string())
        };
        let workspace = call.workspace.as_deref().ok_or_else(|| too_small(0))?;
        // Parts and sums lie at the end, where they leave the product what it works in.
        let end = workspace.bytes() / ALIGNMENT * ALIGNMENT;
        let Some(begin) = end.checked_sub(of_x + of_sums).filter(|&begin| begin >= Workspace::COUNTER_BYTES) else {
            return Err(too_small(workspace.bytes()));
        };
        let mut whole = workspace.first(end);
        let (mut worked_in, room) = whole.get().split_at_mut(begin);
        let (mut x, mut sums) = room.split_at(of_x);
        let (Rows { there, filled }, y_type) = (Rows::of(&problem), call.y.dtype());
        for first in (0..call.m).step_by(there) {
            // The last ones are as many as the others: some a second time.
            let first = first.min(call.m - there);
            let from = call.x.pointer() + (4 * first * k) as u64;
            let part = Runs { runs: 1, length: there * k, filled: filled * k };
            part.split(gpu, stream, (Float::F32, None), [from, x.pointer()])?;
            let m = PARTS_OF_F32 * filled;
            let halfs = x.reborrow().slice(0..2 * m * k).cast::<bf16>();
            let of_parts = sums.reborrow().slice(0..4 * m * n).cast::<f32>();
            let to_add = of_parts.pointer();
            let product = Call {
                x: FloatView::BF16(halfs.view()),
                m,
                w: call.w,
                epilogue: Epilogue::default(),
                y: FloatViewMut::F32(of_parts),
                workspace: Some(worked_in.get()),
                batch_invariant: call.batch_invariant,
            };
            self.product.run(gpu, stream, &product)?;
            let finish = Finish {
                sums: to_add,
                sums_pitch: n,
                parts: [PARTS_OF_F32, filled * n],
                bias: call.epilogue.bias.map_or(0, |bias| bias.pointer()),
                activation: call.epilogue.activation,
                y: call.y.pointer() + (first * n * y_type.size_bytes()) as u64,
                y_pitch: n,
                y_type,
                rows: there,
                n,
            };
            finish.run(gpu, stream)?;
        }
        Ok(())
    }
}
