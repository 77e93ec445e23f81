//! What products with a weight are computed by, for every number of rows, decided once.
//!
//! The choice of a kernel and of its configuration is a function of the number of rows, and constant over ranges of it. They are
//! found when the weight is first multiplied, or before, when a caller asks for them:
//!
//! * up to [`EACH`] rows at both ends of each eight of them, and at every one of the first and of those whose ends differ: tiles of so few rows
//!   are a multiple of eight;
//! * from there to where the largest tiles ([`LARGEST_TILE`] rows) are two for each multiprocessor, once for each [`STEP`] rows:
//!   tiles of so many rows are a multiple of [`STEP`], and the choice depends on how many tiles there are;
//! * beyond, to four times as many rows, at both ends of each sixteenth of a power of two ([`stepped`]): a choice may depend on how many
//!   tiles there are nearly;
//! * then, where no choice depends on that any more, by doubling. What changes between two ends (a product too large for a kernel's
//!   numbers) is found by bisection.
//!
//! A product then looks for its range by binary search.

use super::kernel::Configuration;
use super::{Call, KERNELS, Kernel, OP, Packed};
use crate::cuda::driver::Stream;
use crate::cuda::{Caps, Gpu};
use crate::error::{Error, Result};
use crate::format::Format;
use crate::kernel::{Problem, first};
use crate::layout::cuda_wna16::STRIP;
use crate::tensor::Float;
use rayon::prelude::*;
use std::fmt::{Display, Formatter};
use std::sync::{Arc, Mutex, PoisonError};

/// Rows up to which tiles are multiples of [`FEW`].
pub(super) const EACH: usize = 512;
pub(super) const FEW: usize = 8;

/// Rows of which tiles are multiples, beyond [`EACH`].
pub(super) const STEP: usize = 32;

/// Steps of each range that are tried in its end, and the share of its rows that these are at least, up to some rows.
const LAST: usize = 16;
const NEARLY_ALL: usize = 12;

/// Rows beyond which ranges are wide.
const VERY_MANY: usize = 1 << 15;

/// Rows and outputs of the largest tile.
const LARGEST_TILE: [usize; 2] = [256, 4 * STRIP];

/// Rows at most: what kernels count with 31 bits.
const MOST: usize = i32::MAX as usize;

/// What products with some numbers of rows are computed by.
#[derive(Clone, Debug)]
pub struct Plan {
    kernel: &'static Kernel,
    configuration: Configuration,
    rows: [usize; 2],
    workspace_bytes: usize,
}

impl Plan {
    /// The kernel.
    pub fn kernel(&self) -> &'static Kernel {
        self.kernel
    }

    /// Its configuration.
    pub fn configuration(&self) -> &Configuration {
        &self.configuration
    }

    /// The fewest and the most rows that it is for.
    pub fn rows(&self) -> [usize; 2] {
        self.rows
    }

    /// Bytes of workspace that are enough for every number of rows that it is for.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// Puts a product into a stream whose plan this is: of this weight, these types, so many rows, and lengths that fit.
    pub(crate) fn run(&self, gpu: &Gpu, stream: &Stream, call: &Call<'_>) -> Result<()> {
        if call.y.is_empty() { Ok(()) } else { self.configuration.get().run(gpu, stream, call) }
    }
}

impl Display for Plan {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let [first, last] = self.rows;
        write!(f, "m {first} to {last}: {} {}, {} bytes", self.kernel.name, self.configuration, self.workspace_bytes)
    }
}

/// The plans of a weight for all numbers of rows.
#[derive(Debug)]
pub struct Plans {
    caps: Caps,
    /// For one row.
    problem: Problem,
    layout: &'static str,
    /// In the order of rows, with gaps where nothing serves.
    fastest: Vec<Plan>,
    batch_invariant: Vec<Plan>,
}

impl Plans {
    /// For weights of a form in a layout, x and y of these types, on a device. Error: no kernel computes products with any number of
    /// rows.
    pub fn new(caps: Caps, problem: Problem, layout: &'static str) -> Result<Self> {
        let problem = Problem { m: 1, ..problem };
        let plans = |batch_invariant| Maker { caps: &caps, problem, layout, batch_invariant }.plans();
        let plans = Self { caps, problem, layout, fastest: plans(false), batch_invariant: plans(true) };
        plans.at(1, false)?;
        Ok(plans)
    }

    /// What a product with m rows is computed by, whose rows may depend on each other or not. Error: no kernel does, and why.
    pub fn at(&self, m: usize, batch_invariant: bool) -> Result<&Plan> {
        let plans = if batch_invariant { &self.batch_invariant } else { &self.fastest };
        let next = plans.partition_point(|plan| plan.rows[0] <= m);
        match plans[..next].last().filter(|plan| m <= plan.rows[1]) {
            Some(plan) => Ok(plan),
            None => {
                let problem = Problem { m, ..self.problem };
                let refused = choose(&self.caps, &problem, self.layout, batch_invariant).err();
                Err(refused.unwrap_or_else(|| Error::invalid(OP, format!("at most {MOST} rows"), m.to_string())))
            }
        }
    }

    /// Bytes of workspace that are enough for every product with up to so many rows, whether they depend on each other or not.
    pub fn workspace_bytes(&self, most_m: usize) -> usize {
        let plans = self.fastest.iter().chain(&self.batch_invariant).filter(|plan| plan.rows[0] <= most_m);
        let bytes = |plan: &Plan| match plan.rows[1] <= most_m {
            true => plan.workspace_bytes,
            false => self.most_bytes(plan.kernel, [plan.rows[0], most_m]),
        };
        plans.map(bytes).max().unwrap_or(0)
    }

    fn most_bytes(&self, kernel: &Kernel, rows: [usize; 2]) -> usize {
        most_bytes(kernel, &self.caps, &self.problem, rows)
    }

    /// What is held, in the order of rows: for rows that may depend on each other, then for those that do not.
    pub fn explain(&self) -> [&[Plan]; 2] {
        [&self.fastest, &self.batch_invariant]
    }

    /// Whether these are the plans for weights of a form in a layout.
    pub(in crate::cuda) fn are_for(&self, caps: &Caps, problem: &Problem, layout: &str) -> bool {
        Problem { m: 1, ..*problem } == self.problem && layout == self.layout && *caps == self.caps
    }
}

impl Display for Plans {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        for (plans, what) in self.explain().into_iter().zip(["", "batch-invariant, "]) {
            plans.iter().try_for_each(|plan| writeln!(f, "{what}{plan}"))?;
        }
        Ok(())
    }
}

/// The rows that plans do not tell apart from so many, both ends: the choice is the same for them. Both are the last where that is all that tiles
/// depend on.
pub(super) fn alike(m: usize, n: usize, caps: &Caps) -> [usize; 2] {
    match m {
        ..=EACH => [m.max(1).next_multiple_of(FEW); 2],
        _ if m <= settled(caps, n) => [m.next_multiple_of(STEP); 2],
        _ if m < far(caps, n) => [stepped_from(m), stepped(m).min(far(caps, n))],
        _ => [far(caps, n); 2],
    }
}

/// The first kernel of a layout that serves a problem, with its configuration. Error: none does.
pub(super) fn choose(
    caps: &Caps,
    problem: &Problem,
    layout: &str,
    batch_invariant: bool,
) -> Result<(&'static Kernel, Configuration)> {
    let kernels = KERNELS.iter().filter(|kernel| kernel.layout == layout);
    // Rows that do not depend on each other: the same kernel whatever their number is.
    let problem_of_kernel = if batch_invariant { Problem { m: 1, ..*problem } } else { *problem };
    let (kernel, chosen) = first(OP, problem, kernels, |kernel| {
        kernel.choose(caps, &problem_of_kernel, batch_invariant).map(|configuration| (kernel, configuration))
    })?;
    match problem_of_kernel == *problem {
        true => Ok((kernel, chosen)),
        false => first(OP, problem, [kernel], |kernel| {
            kernel.choose(caps, problem, batch_invariant).map(|configuration| (kernel, configuration))
        }),
    }
}

/// The most bytes that a kernel needs for a number of rows from one to another.
fn most_bytes(kernel: &Kernel, caps: &Caps, problem: &Problem, [first, last]: [usize; 2]) -> usize {
    let bytes = |m| kernel.workspace_bytes(caps, &Problem { m, ..*problem });
    let each = (first / FEW + 1..=last.min(EACH) / FEW).map(|eights| eights * FEW);
    // Sums of cut tiles change with the number of tiles, other parts grow with m. Where no choice changes any more the last steps
    // tell: if tiles are cut at any number of rows, they are cut at one of these. Nothing is cut where blocks have as many tiles each
    // and 93 % of them have some, which can be so for as large a share of the rows.
    let from = first.max(EACH);
    let of = |from: usize, to: usize| (from / STEP + 1..=to / STEP).map(|steps| steps * STEP);
    let few = last <= LARGEST_TILE[0] * caps.multiprocessors as usize;
    let end = if few { (LAST * STEP).max(last / NEARLY_ALL) } else { LAST * STEP };
    let (settled, far) = (settled(caps, problem.n), far(caps, problem.n));
    let steps = of(from, last.min(settled)).chain(of(from.max(last.saturating_sub(end)), last));
    let next = |&m: &usize| Some(stepped(m + 1)).filter(|&m| m <= last.min(far));
    let stepped = std::iter::successors(next(&first.max(settled)), next);
    let all: Vec<usize> = each.chain(steps).chain(stepped).chain([first, last]).collect();
    all.into_par_iter().map(bytes).max().unwrap_or(0)
}

/// Rows up to which a choice may depend on the exact number of tiles.
pub(super) fn settled(caps: &Caps, n: usize) -> usize {
    let [rows, outputs] = LARGEST_TILE;
    let columns = (2 * caps.multiprocessors.max(1) as usize).div_ceil(n.div_ceil(outputs).max(1)) + 1;
    (columns * rows).max(EACH)
}

/// Rows beyond which no choice depends on the number of tiles; from [`settled`] ones on it depends on [`stepped`] rows.
pub(super) fn far(caps: &Caps, n: usize) -> usize {
    4 * settled(caps, n)
}

/// Rows rounded up to a sixteenth of the power of two below them, or to a multiple of [`STEP`].
pub(super) fn stepped(m: usize) -> usize {
    m.next_multiple_of(sixteenth(m))
}

/// The fewest rows that are rounded up to as many as so many are.
pub(super) fn stepped_from(m: usize) -> usize {
    stepped(m) - sixteenth(m) + 1
}

fn sixteenth(m: usize) -> usize {
    (m.next_power_of_two() / 32).max(STEP)
}

/// Finds ranges.
struct Maker<'a> {
    caps: &'a Caps,
    problem: Problem,
    layout: &'static str,
    batch_invariant: bool,
}

type Chosen = Option<(&'static Kernel, Configuration)>;

impl Maker<'_> {
    fn choose(&self, m: usize) -> Chosen {
        choose(self.caps, &Problem { m, ..self.problem }, self.layout, self.batch_invariant).ok()
    }

    fn plans(&self) -> Vec<Plan> {
        let (settled, far) = (settled(self.caps, self.problem.n), far(self.caps, self.problem.n));
        let eights = (0..EACH).step_by(FEW).map(|eight| [eight + 1, eight + FEW]);
        let steps = (EACH..settled).step_by(STEP).map(|m| [m + 1; 2]);
        let next = |&[_, low]: &[usize; 2]| {
            let high = if low < far { stepped(low + 1).min(far) } else { (2 * low).min(MOST) };
            (low < MOST).then_some([low + 1, high])
        };
        let wide = std::iter::successors(next(&[0, settled]), next);
        // Each takes some microseconds, and there are up to some thousand.
        let ends: Vec<[usize; 2]> = eights.chain(steps).chain(wide).collect();
        let of_ends: Vec<[Chosen; 2]> = ends
            .par_iter()
            .map(|&[first, last]| {
                let chosen = self.choose(first);
                [chosen.clone(), if first == last { chosen } else { self.choose(last) }]
            })
            .collect();

        let mut runs: Vec<(usize, Chosen)> = Vec::new();
        let mut add = |m: usize, chosen: Chosen| {
            if runs.last().is_none_or(|(_, last)| !same(last, &chosen)) {
                runs.push((m, chosen));
            }
        };
        add(0, self.choose(0));
        for ([first, last], [mut before, chosen]) in ends.into_iter().zip(of_ends) {
            add(first, before.clone());
            // The first few rows each by itself: x in f32 is multiplied as three times as many.
            if last <= FEW || last <= EACH && !same(&before, &chosen) {
                (first + 1..last).for_each(|m| add(m, self.choose(m)));
                add(last, chosen);
                continue;
            }
            let mut first = first;
            while !same(&before, &chosen) {
                // The last number of rows with the choice before, and the first with another.
                let (mut here, mut next) = (first, last);
                while here + 1 < next {
                    let middle = here.midpoint(next);
                    if same(&self.choose(middle), &before) { here = middle } else { next = middle }
                }
                (first, before) = (next, self.choose(next));
                add(next, before.clone());
            }
        }
        let ends = runs.iter().skip(1).map(|(first, _)| first - 1).chain([MOST]).collect::<Vec<_>>();
        let of = |((first, chosen), last): ((usize, Chosen), usize)| {
            let (kernel, configuration) = chosen?;
            Some(self.plan(kernel, configuration, [first, last]))
        };
        runs.into_iter().zip(ends).filter_map(of).flatten().collect()
    }

    /// Of one range, in pieces from [`EACH`] on, so that what is asked for is at most about twice what is needed; of very many rows eight
    /// times.
    fn plan(&self, kernel: &'static Kernel, configuration: Configuration, [first, last]: [usize; 2]) -> Vec<Plan> {
        let mut plans = Vec::new();
        let mut from = first;
        while from <= last {
            let times = if from > VERY_MANY { 8 } else { 1 };
            let to = last.min((from.max(EACH).next_power_of_two() * times).max(from + from / 2));
            let rows = [from, to];
            let workspace_bytes = most_bytes(kernel, self.caps, &self.problem, rows);
            plans.push(Plan { kernel, configuration: configuration.clone(), rows, workspace_bytes });
            from = to + 1;
        }
        plans
    }
}

fn same(a: &Chosen, b: &Chosen) -> bool {
    match (a, b) {
        (Some((kernel, configuration)), Some((other, others))) => {
            std::ptr::eq(*kernel, *other) && configuration == others
        }
        (None, None) => true,
        _ => false,
    }
}

/// Plans that are kept: by a weight for the types that it is multiplied in, by a device for weights of the same form.
#[derive(Debug, Default)]
pub(in crate::cuda) struct KeptPlans(Mutex<Vec<Arc<Plans>>>);

impl KeptPlans {
    /// Those for a form, or made and kept.
    pub(in crate::cuda) fn get(
        &self,
        caps: &Caps,
        problem: &Problem,
        layout: &str,
        make: impl FnOnce() -> Result<Arc<Plans>>,
    ) -> Result<Arc<Plans>> {
        let kept = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plans) = kept().iter().find(|plans| plans.are_for(caps, problem, layout)) {
            return Ok(plans.clone());
        }
        let plans = make()?;
        kept().push(plans.clone());
        Ok(plans)
    }
}

impl Packed {
    /// What products with it are computed by, with x and y of these types: made once for all weights of its form. Error: no kernel
    /// computes them.
    pub fn plans(&self, gpu: &Gpu, x: Float, y: Float) -> Result<Arc<Plans>> {
        let [n, k] = self.shape();
        let format: Option<Format> = Some(self.format());
        let (caps, problem, layout) = (self.caps(gpu), Problem { format, x, y, m: 1, n, k }, self.layout());
        let new = || Ok(Arc::new(Plans::new(caps, problem, layout)?));
        self.kept_plans().get(&caps, &problem, layout, || gpu.plans().get(&caps, &problem, layout, new))
    }

    fn kept_plans(&self) -> &KeptPlans {
        match self {
            Packed::Plain(w) => &w.plans,
            Packed::Wna16(w) => &w.plans,
        }
    }
}
