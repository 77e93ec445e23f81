//! GEMM in tiles on weights in layout `cuda_wna16`: one launcher for all kernels of this kind.
//!
//! ```text
//! x in floats:   where it lies, or a copy of 256 rows at a time         gather.cu
//! x quantised:   codes and terms of all rows into the workspace first   quantize_activations.cu
//! rows at once:  all; 64 where rows must not depend on each other and sums are cut
//! each time:     configuration(rows, n, k), schedule(configuration), launch
//! ```
//!
//! A kernel says by [`Gemm`] what it multiplies, which configuration it takes for a shape, and what its parameters are.

mod chosen;
mod operands;

pub(super) use chosen::Products;
pub(super) use operands::{Operands, X};
pub(in crate::cuda) use operands::{Output, Placed, Weight};

use super::grouped::GroupedOperands;
use super::kernel::{Answer, Configuration, Kernel};
use super::plans::settled;
use super::quantize_activations::{self, Form as QuantizedForm};
use super::sum_groups::{self, SumsOfX};
use super::wna16::{self, Weights};
use super::{Packed, gather, wna8, wna8_mma, wna8_sm90, wna16_mma, wna16_sm90};
use crate::cuda::Caps;
use crate::cuda::driver::TensorMap;
use crate::cuda::parameters::Parameters;
use crate::cuda::schedule::Schedule;
use crate::cuda::sources::{Arch, Instance};
use crate::cuda::tiled::{self, Form, Tile};
use crate::error::Result;
use crate::format::{Format, Zero};
use crate::kernel::{Activation, Problem, Reason};
use crate::layout::cuda_wna16::Atom;
use crate::tensor::Float;
use chosen::{Chosen, Places};

/// A configuration, and whether sums are cut as n and k alone tell, so that a row of y has the same bits whatever m is.
pub(super) type Choice<C> = (C, bool);

/// A kernel for products in tiles.
pub(super) trait Gemm: Sized + 'static {
    /// Name of the kernel.
    const NAME: &'static str;
    /// Whether x is quantised before.
    const QUANTIZES: bool;
    /// Whether x comes by a tensor map (TMA).
    const MAPS: bool;
    /// Whether sums of x over the groups of weights with offsets are made before.
    const SUMS_X: bool;
    /// Whether rows can be computed that do not depend on each other; then so many at once.
    const INVARIANT_ROWS: Option<usize>;
    /// Size of a tile, stages in flight, and so on.
    type Config: Tile;
    /// The first parameter.
    type Arguments: Parameters;
    /// The same with several weights.
    type Grouped: Parameters + From<(Self::Arguments, GroupedOperands)>;

    /// The form of a problem whose weights have atoms of a form that is known, or that which their format says; or why there is none.
    fn form(held: Option<Atom>, problem: &Problem) -> Answer<Form>;

    /// The configuration for so many rows, outputs and columns.
    fn config(form: &Form, shape: [usize; 3], caps: &Caps, batch_invariant: bool) -> Self::Config;

    /// Who computes what.
    fn schedule(form: &Form, choice: Choice<Self::Config>, shape: [usize; 3], caps: &Caps) -> Schedule;

    /// The sums of x that a configuration reads.
    fn sums_of_x(_: &Form, _: Self::Config) -> Option<SumsOfX> {
        None
    }

    /// Whether a configuration does its product's part of a norm.
    fn folds_norms(_: &Form, _: Self::Config) -> bool {
        false
    }

    /// Configurations that may be asked for.
    fn candidates(form: &Form, m: usize, caps: &Caps) -> Vec<Self::Config>;

    /// Whether a configuration may be asked for.
    fn allows(form: &Form, config: Self::Config, caps: &Caps) -> bool;

    /// Every configuration that some shape takes on some device that runs code for a processor.
    fn every_config(form: &Form, arch: Arch) -> Vec<Self::Config>;

    /// Rows of the tiles that products with several weights may have, the smallest first.
    fn grouped_tiles(form: &Form) -> Vec<usize>;

    /// The configuration for one of these tiles, and blocks at once. It takes no clusters.
    fn grouped_config(form: &Form, shape: [usize; 3], caps: &Caps) -> (Self::Config, usize);

    /// Microseconds that a product with several weights of a shape is expected to take in such tiles, of which there are so many columns.
    fn grouped_microseconds(form: &Form, tokens: usize, shape: [usize; 2], columns: f64, caps: &Caps) -> f64;

    /// What a weight keeps prepared for it.
    fn products(w: &Weights) -> &Products<Self>;

    /// The map of x, if it comes by one.
    fn map(_: Self::Config, _: &Operands<'_>) -> Result<Option<TensorMap>> {
        Ok(None)
    }

    /// The parameters of a launch.
    fn arguments(w: Placed, config: Self::Config, schedule: &Schedule, operands: &Operands<'_>) -> Self::Arguments;
}

/// A configuration of each kernel may be asked for.
macro_rules! given {
    ($($module:ident::$kernel:ident),+) => {$(
        impl From<$module::config::Config> for Configuration {
            fn from(config: $module::config::Config) -> Self {
                Self::given::<$module::$kernel>(config)
            }
        }
    )+};
}
given!(wna16_mma::Wna16Mma, wna16_sm90::Wna16Sm90, wna8_mma::Wna8Mma, wna8_sm90::Wna8Sm90);

/// A row of the table for a kernel of this kind.
pub(super) const fn row<T: Gemm>(
    what: &'static str,
    serves: fn(Arch) -> bool,
    instances: fn(Arch) -> Vec<Instance>,
) -> Kernel {
    Kernel {
        name: T::NAME,
        layout: wna16::LAYOUT,
        what,
        packs: true,
        batch_invariant: T::INVARIANT_ROWS.is_some(),
        serves,
        instances,
        every_instance: every_instance::<T>,
        choose: choose::<T>,
        candidates: candidates::<T>,
        rows_form: rows_form::<T>,
        rounds_weights: |caps, problem| {
            T::form(caps.atom, problem).is_ok_and(|form| T::config(&form, shape(problem), caps, false).rounds_weights())
        },
        workspace_bytes: |caps, problem| {
            let of = |batch_invariant| bytes::<T>(caps, problem, batch_invariant, None).unwrap_or(0);
            if T::INVARIANT_ROWS.is_some() { of(false).max(of(true)) } else { of(false) }
        },
        holds: wna16::holds,
        pack: |packer, whole, parts, act| Ok(Packed::Wna16(Weights::new(packer, whole, parts, act)?)),
    }
}

/// Sizes of a product.
fn shape(problem: &Problem) -> [usize; 3] {
    [problem.m, problem.n, problem.k].map(|size| size.max(1))
}

/// Rows of one launch out of m.
fn at_once<T: Gemm>(m: usize, batch_invariant: bool) -> usize {
    let most = if batch_invariant { T::INVARIANT_ROWS } else { None };
    most.map_or(m, |most| m.min(most)).max(1)
}

/// The configuration for the rows of one launch, and who computes what.
fn plan<T: Gemm>(
    caps: &Caps,
    form: &Form,
    problem: &Problem,
    m: usize,
    batch_invariant: bool,
    given: Option<T::Config>,
) -> (T::Config, Schedule) {
    let shape = shape(&Problem { m, ..*problem });
    let config = given.unwrap_or_else(|| T::config(form, shape, caps, batch_invariant));
    (config, T::schedule(form, (config, batch_invariant), shape, caps))
}

/// What copies of rows are multiplied by, as many as are made at once, of which the last are fewer. Weights are exact where those of a product
/// of all rows are, whose bound holds.
fn config_of_copies<T: Gemm>(caps: &Caps, form: &Form, problem: &Problem, batch_invariant: bool) -> T::Config {
    let of = |m: usize, invariant: bool| T::config(form, shape(&Problem { m, ..*problem }), caps, invariant);
    let rows = at_once::<T>(problem.m.min(gather::ROWS), batch_invariant);
    let config = of(rows, batch_invariant);
    match config.rounds_weights() && !of(problem.m, batch_invariant).rounds_weights() {
        true => of(rows, true),
        false => config,
    }
}

/// Whether a kernel has products for x of a type on a processor: it quantises x, or tensor cores multiply such halves.
fn multiplies<T: Gemm>(arch: Arch, x: Float) -> bool {
    T::QUANTIZES || arch.multiplies(x)
}

/// The form of a problem on a device, or why there is none.
pub(super) fn form_on<T: Gemm>(caps: &Caps, problem: &Problem) -> Answer<Form> {
    let form = T::form(caps.atom, problem)?;
    match multiplies::<T>(caps.arch, problem.x) {
        true => Ok(form),
        false => Err(Reason(format!("multiplies x in f16 on {}; x is {}", caps.arch, problem.x))),
    }
}

fn choose<T: Gemm>(caps: &Caps, problem: &Problem, batch_invariant: bool) -> Answer<Configuration> {
    let form = form_on::<T>(caps, problem)?;
    // Whether rows may depend on each other is a matter of calls: a kernel serves both, or neither.
    let of = |invariant: bool| {
        let plan = plan::<T>(caps, &form, problem, at_once::<T>(problem.m, invariant), invariant, None);
        tiled::check(caps, &form, &plan).map(|()| plan.0)
    };
    let fastest = of(false)?;
    let invariant = T::INVARIANT_ROWS.map(|_| of(true)).transpose()?;
    let config = invariant.filter(|_| batch_invariant).unwrap_or(fastest);
    Ok(Configuration::new(Chosen::<T> { config, given: false, held: caps.atom, gate: caps.gate }))
}

fn candidates<T: Gemm>(caps: &Caps, problem: &Problem) -> Answer<Vec<Configuration>> {
    let form = form_on::<T>(caps, problem)?;
    let all = T::candidates(&form, problem.m, caps).into_iter();
    let covered = all.filter(|&config| covers::<T>(caps, &form, problem, config, false));
    let given = |config| Configuration::new(Chosen::<T> { config, given: true, held: caps.atom, gate: caps.gate });
    Ok(covered.map(given).collect())
}

/// Whether a configuration covers a problem on a device.
fn covers<T: Gemm>(caps: &Caps, form: &Form, problem: &Problem, config: T::Config, batch_invariant: bool) -> bool {
    let rows = at_once::<T>(problem.m, batch_invariant);
    let plan = plan::<T>(caps, form, problem, rows, batch_invariant, Some(config));
    tiled::check(caps, form, &plan).is_ok() && plan.1.steps >= config.split()
}

fn rows_form<T: Gemm>(problem: &Problem) -> Option<QuantizedForm> {
    let form = T::form(None, problem).ok().filter(|_| T::QUANTIZES)?;
    Some(wna8::x_form(problem, &form))
}

/// Every form of a format's weights, whatever their number of columns is: groups may be whole rows.
fn forms<T: Gemm>(format: Format, [x, y]: [Float; 2]) -> impl Iterator<Item = Form> {
    let problem = move |k| Problem { format: Some(format), x, y, m: 1, n: 1, k };
    let of = move |k| T::form(None, &problem(k)).ok();
    let group = format.weight.group.len(wna8::MOST_K);
    let [many, one] = [of(wna8::MOST_COLUMNS.max(2 * group).min(wna8::MOST_K)), of(1)];
    let one = one.filter(|_| one != many);
    // As files hold them, too, of which more is known.
    let held = many.into_iter().flat_map(move |form| form.atom.forms_of_files(format.act));
    let held = held.filter_map(move |atom| T::form(Some(atom), &problem(wna8::MOST_K)).ok());
    many.into_iter().chain(one).chain(held)
}

fn every_instance<T: Gemm>(arch: Arch, format: Format, types: [Float; 2]) -> Vec<Instance> {
    if !multiplies::<T>(arch, types[0]) {
        return Vec::new();
    }
    let of = |form: Form| {
        let all = T::every_config(&form, arch).into_iter();
        all.map(move |config| config.instance(&form, Activation::None))
    };
    let before = if T::QUANTIZES { quantize_activations::instances() } else { vec![gather::instance()] };
    let sums = T::SUMS_X && format.weight.zero == Zero::Float;
    let before = before.into_iter().chain(sums.then(sum_groups::instances).into_iter().flatten());
    forms::<T>(format, types).flat_map(of).chain(before).collect()
}

/// Bytes of workspace for a problem.
fn bytes<T: Gemm>(caps: &Caps, problem: &Problem, batch_invariant: bool, given: Option<T::Config>) -> Answer<usize> {
    Ok(Places::of::<T>(caps, &T::form(caps.atom, problem)?, problem, batch_invariant, given).bytes)
}

/// Sums of cut tiles that a configuration leaves at most, whatever the number of rows is.
fn most_parts_bytes(caps: &Caps, config: impl Tile, schedule: Schedule) -> usize {
    let workers = schedule.workers.max(caps.multiprocessors as usize);
    config.parts_bytes(&Schedule { workers, cut: 2, sharers: 1, ..schedule })
}

/// Sums of cut tiles at most, in bytes: the rows that are left in the end may be cut another way. Of many rows those that a number near to this
/// one may leave.
fn parts_bytes<T: Gemm>(
    caps: &Caps,
    form: &Form,
    problem: &Problem,
    batch_invariant: bool,
    given: Option<T::Config>,
) -> usize {
    let of = |m: usize| {
        let (config, schedule) = plan::<T>(caps, form, problem, m, batch_invariant, given);
        match batch_invariant || m <= settled(caps, problem.n) {
            true => config.parts_bytes(&schedule),
            false => most_parts_bytes(caps, config, schedule),
        }
    };
    let rows = at_once::<T>(problem.m, batch_invariant);
    let left = problem.m % rows;
    if left > 0 { of(rows).max(of(left)) } else { of(rows) }
}
