//! A kernel in one of its configurations, and the products that weights keep prepared for it.
//!
//! What the numbers of a product tell (rows, types, addresses) is found once and kept by its weight: where everything lies in the
//! workspace, and every launch with its schedule, function and tensor maps. A product that comes again is looked up and launched.

use super::super::folded_norm::{self, Fold, FoldedNorm};
use super::super::grouped::with_output_function;
use super::super::kernel::{Configuration, Configured, is_same};
use super::super::quantize_activations::{self, Form as QuantizedForm};
use super::super::sum_groups::{self, SumGroups, SumsOfX};
use super::super::wna16::Weights;
use super::super::{Call, Epilogue, Packed, QuantizedCall, QuantizedView, gather, problem, wna8};
use super::{
    Gemm, Operands, X, at_once, bytes, config_of_copies, covers, form_on, most_parts_bytes, parts_bytes, plan, shape,
};
use crate::cuda::driver::{FloatView, FloatViewMut, Stream, View};
use crate::cuda::kept::Kept;
use crate::cuda::nn::Gate;
use crate::cuda::sources::Instance;
use crate::cuda::tiled::{self, Form, Prepared, Room, Tile};
use crate::cuda::{Caps, Gpu, Workspace};
use crate::error::{Error, Result};
use crate::kernel::{Activation, Problem, Reason};
use crate::layout::cuda_wna16::Atom;
use crate::tensor::Float;
use gather::Gather;
use half::{bf16, f16};
use std::fmt::{Debug, Display, Formatter};

/// The products of a kernel that a weight keeps prepared.
pub(in crate::cuda::matmul) type Products<T> = Kept<Key<<T as Gemm>::Config>, Product<<T as Gemm>::Config>>;

/// A configuration for so many rows at once.
pub(super) struct Chosen<T: Gemm> {
    pub config: T::Config,
    /// Whether it is the caller's, for any number of rows.
    pub given: bool,
    /// The form of the weight's atoms that it was chosen for, if that was known, and the function of its gates.
    pub held: Option<Atom>,
    pub gate: Option<Gate>,
}

impl<T: Gemm> PartialEq for Chosen<T> {
    fn eq(&self, other: &Self) -> bool {
        self.config == other.config && self.given == other.given
    }
}

impl<T: Gemm> Debug for Chosen<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} of {}", self.config, T::NAME)
    }
}

impl<T: Gemm> Display for Chosen<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        Display::fmt(&self.config, f)
    }
}

impl Configuration {
    /// One of a kernel's [`Gemm::candidates`], or another that it allows.
    pub(super) fn given<T: Gemm>(config: T::Config) -> Self {
        Self::new(Chosen::<T> { config, given: true, held: None, gate: None })
    }
}

/// A configuration as it is compiled.
fn instance(
    config: impl Tile,
    form: &Form,
    activation: Activation,
    gate: Option<Gate>,
    fold: Option<Fold>,
) -> Instance {
    let plain = config.instance(form, activation);
    let gated = if gate.is_some() { with_output_function(plain, Activation::None, gate) } else { plain };
    fold.into_iter().fold(gated, |instance, fold| instance.defining("FOLDED_NORM", fold as usize))
}

/// What a product is prepared for.
#[derive(Debug, PartialEq)]
pub(in crate::cuda::matmul) struct Key<C> {
    /// Address of x where the kernel reads it as the caller has it, 0 if nothing that is prepared depends on it; None: it comes to
    /// lie in the workspace.
    x: Option<u64>,
    /// Address and size of the workspace.
    workspace: (u64, usize),
    m: usize,
    types: [Float; 2],
    activation: Activation,
    batch_invariant: bool,
    fold: Option<Fold>,
    config: C,
    given: bool,
}

/// What is the same in every product for a key.
#[derive(Debug)]
pub(in crate::cuda::matmul) struct Product<C> {
    places: Places,
    parts: Vec<Part<C>>,
}

/// One launch of a product.
#[derive(Debug)]
struct Part<C> {
    /// The first of the rows whose x lies together, and their number.
    rows: [usize; 2],
    /// The first row of these that it multiplies, and how many.
    first: usize,
    m: usize,
    config: C,
    /// Sums of x that are made before it.
    sums: Option<SumsOfX>,
    launch: Prepared,
}

/// Where the parts of a product lie in the workspace: counters, sums of cut tiles, then x where it is not read as the caller has it.
#[derive(Debug)]
pub(super) struct Places {
    /// Where codes of x begin, or copies of its rows.
    x: usize,
    /// Where terms of codes begin, or sums of floats.
    terms: usize,
    /// How codes lie; None: x is floats.
    codes: Option<QuantizedForm>,
    /// All of it.
    pub bytes: usize,
}

impl Places {
    /// Of a problem. Rows that are left in the end may be cut another way than others.
    pub fn of<T: Gemm>(
        caps: &Caps,
        form: &Form,
        problem: &Problem,
        batch_invariant: bool,
        given: Option<T::Config>,
    ) -> Self {
        let parts = |m: usize| parts_bytes::<T>(caps, form, &Problem { m, ..*problem }, batch_invariant, given);
        if T::QUANTIZES {
            let codes = wna8::x_form(problem, form);
            let room = Room::new(codes, parts(problem.m));
            return Self { x: room.codes, terms: room.terms, codes: Some(codes), bytes: room.bytes };
        }
        // All rows at once, or copies of some at a time, of which the last are fewer, so that their tiles may be cut in any way.
        let rows = problem.m.min(gather::ROWS);
        let copied = if rows < problem.m {
            let config = given.unwrap_or_else(|| config_of_copies::<T>(caps, form, problem, batch_invariant));
            let rows = at_once::<T>(rows, batch_invariant);
            let (config, schedule) = plan::<T>(caps, form, problem, rows, batch_invariant, Some(config));
            most_parts_bytes(caps, config, schedule)
        } else {
            0
        };
        let most = parts(problem.m).max(copied);
        let x = (Workspace::COUNTER_BYTES + most).next_multiple_of(16);
        let terms = (x + rows * gather::pitch(problem.k) * 2).next_multiple_of(16);
        let sums = T::SUMS_X && form.atom.offset;
        let sums = if sums { sum_groups::most_bytes([problem.m, problem.k]) } else { 0 };
        Self { x, terms, codes: None, bytes: terms + sums }
    }
}

/// Activations as a product is given them.
#[derive(Clone, Copy)]
enum Input<'a> {
    /// Floats that are read where they lie.
    InPlace(FloatView<'a>),
    /// Floats whose rows are copied, some at a time: in the order of the weight's columns, or in wider rows.
    Copied(FloatView<'a>),
    /// Floats that become codes in the workspace.
    Quantized(FloatView<'a>),
    /// Codes that are read where they lie.
    Codes(QuantizedView<'a>),
}

impl<'a> Input<'a> {
    /// As a kernel has floats.
    fn of<T: Gemm>(w: &Weights, x: FloatView<'a>) -> Self {
        match T::QUANTIZES {
            true => Self::Quantized(x),
            false if w.reads_in_place(x) => Self::InPlace(x),
            false => Self::Copied(x),
        }
    }

    /// Its address, if it is read where it lies.
    fn address(&self) -> Option<u64> {
        match self {
            Self::InPlace(x) => Some(x.pointer()),
            Self::Codes(x) => Some(x.codes.pointer()),
            Self::Copied(_) | Self::Quantized(_) => None,
        }
    }

    /// Rows of which x lies together, out of m.
    fn rows_at_once(&self, m: usize) -> usize {
        if let Self::Copied(_) = self { gather::ROWS } else { m.max(1) }
    }

    /// As the kernel reads it, so many rows that lie together.
    fn x(&self, places: &Places, workspace: View<'a, u8>, [rows, k]: [usize; 2]) -> (X<'a>, usize) {
        match (*self, places.codes) {
            (Self::InPlace(x), _) => (X::Floats(x), k),
            (Self::Codes(QuantizedView { form, codes, terms }), _) => {
                (X::Codes(codes, terms.pointer(), form), form.pitch())
            }
            (Self::Quantized(_), Some(form)) => {
                let codes = workspace.slice(places.x..places.x + form.codes_bytes());
                (X::Codes(codes, workspace.pointer() + places.terms as u64, form), form.pitch())
            }
            (Self::Copied(x) | Self::Quantized(x), _) => {
                let pitch = gather::pitch(k);
                let copy = workspace.slice(places.x..places.x + rows * pitch * 2);
                let floats = match x.dtype() {
                    Float::BF16 => FloatView::BF16(copy.cast::<bf16>()),
                    _ => FloatView::F16(copy.cast::<f16>()),
                };
                (X::Floats(floats), pitch)
            }
        }
    }
}

/// Who multiplies, and by what.
struct Device<'a> {
    gpu: &'a Gpu,
    stream: &'a Stream,
    w: &'a Weights,
}

/// What comes out of a product, and where.
struct Output<'a> {
    /// Address of y.
    y: u64,
    /// Address of the bias; 0: none.
    bias: u64,
    activation: Activation,
    batch_invariant: bool,
    norm: Option<(Fold, folded_norm::NormOperands)>,
    workspace: View<'a, u8>,
}

impl<'a> Output<'a> {
    fn new(epilogue: &Epilogue<'_>, y: &FloatViewMut<'_>, workspace: Option<&'a Workspace>) -> Self {
        Self {
            y: y.pointer(),
            bias: epilogue.bias.map_or(0, |bias: View<'_, f32>| bias.pointer()),
            activation: epilogue.activation,
            batch_invariant: false,
            norm: None,
            workspace: workspace.map(Workspace::view).unwrap_or_default(),
        }
    }
}

impl<T: Gemm> Chosen<T> {
    /// The caller's configuration, if it may be asked for.
    fn given(&self, caps: &Caps, form: &Form, problem: &Problem, batch_invariant: bool) -> Result<Option<T::Config>> {
        let config = self.config;
        let fits = || T::allows(form, config, caps) && covers::<T>(caps, form, problem, config, batch_invariant);
        if self.given && !fits() {
            let expected = format!("a configuration for this weight that covers {problem}");
            return Err(Error::invalid(T::NAME, expected, config.to_string()));
        }
        Ok(self.given.then_some(config))
    }

    /// Finds all that does not change from a product to the next.
    fn prepare(&self, on: &Device<'_>, problem: &Problem, x: Input<'_>, to: &Output<'_>) -> Result<Product<T::Config>> {
        let (caps, batch_invariant, m) = (on.w.caps(on.gpu), to.batch_invariant, problem.m);
        let form = T::form(caps.atom, problem).map_err(unserved::<T>)?;
        let given = self.given(&caps, &form, problem, batch_invariant)?;
        let places = Places::of::<T>(&caps, &form, problem, batch_invariant, given);
        if to.workspace.len() < places.bytes {
            let (expected, got) = (format!("a workspace of {} bytes", places.bytes), to.workspace.len().to_string());
            return Err(Error::invalid(T::NAME, expected, got));
        }
        let mut parts = Vec::new();
        let together = x.rows_at_once(m);
        for rows in (0..m).step_by(together).map(|first| [first, together.min(m - first)]) {
            let (x, pitch) = x.x(&places, to.workspace, [rows[1], problem.k]);
            let at_once = at_once::<T>;
            for first in (0..rows[1]).step_by(at_once(rows[1], batch_invariant)) {
                let m = at_once(rows[1], batch_invariant).min(rows[1] - first);
                // Rows that are left in the end may be fewer than it was chosen for.
                let config = match self.given || m == at_once(problem.m, batch_invariant) {
                    true => self.config,
                    false if together < problem.m => config_of_copies::<T>(&caps, &form, problem, batch_invariant),
                    false => T::config(&form, shape(&Problem { m, ..*problem }), &caps, batch_invariant),
                };
                let plan = plan::<T>(&caps, &form, problem, m, batch_invariant, Some(config));
                tiled::check(&caps, &form, &plan).map_err(unserved::<T>)?;
                let (k, norm) = (problem.k, None);
                let operands = Operands { x, first, m, k, pitch, y: 0, bias: 0, workspace: 0, sums: 0, norm };
                let maps = T::map(config, &operands)?.into_iter().collect();
                let instance = instance(config, &form, to.activation, caps.gate, to.norm.map(|(fold, _)| fold));
                let launch = Prepared::new(on.gpu, &instance, &form, plan, maps)?;
                parts.push(Part { rows, first, m, config, sums: T::sums_of_x(&form, config), launch });
            }
        }
        Ok(Product { places, parts })
    }

    /// Launches what is prepared, or prepares it first.
    fn launch(&self, on: Device<'_>, problem: &Problem, input: Input<'_>, to: Output<'_>) -> Result<()> {
        let (Device { gpu, stream, w }, [_, k], outputs) = (&on, on.w.shape(), on.w.outputs());
        let key = Key {
            x: input.address().map(|x| if T::MAPS { x } else { 0 }),
            workspace: (to.workspace.pointer(), to.workspace.len()),
            m: problem.m,
            types: [problem.x, problem.y],
            activation: to.activation,
            batch_invariant: to.batch_invariant,
            fold: to.norm.map(|(fold, _)| fold),
            config: self.config,
            given: self.given,
        };
        let product = T::products(w).get(key, |_| self.prepare(&on, problem, input, &to))?;
        for Part { rows: [row, rows], first, m, config, sums, launch } in &product.parts {
            let (first, m) = (*first, *m);
            let (x, pitch) = input.x(&product.places, to.workspace, [*rows, k]);
            let y = to.y + ((row + first) * outputs * problem.y.size_bytes()) as u64;
            if !y.is_multiple_of(16) {
                return Err(Error::invalid(T::NAME, "y that begins at a multiple of 16 bytes", format!("{y:#x}")));
            }
            match (input, x) {
                (Input::Quantized(floats), X::Codes(codes, terms, form)) if first == 0 => {
                    quantize_activations::run(gpu, stream, form, floats, w.order(), [codes.pointer(), terms])?;
                }
                (Input::Copied(floats), X::Floats(copy)) if first == 0 => {
                    let (from, order, to) = (floats.pointer() + (row * k * 2) as u64, w.order(), copy.pointer());
                    Gather { x: from, order, to, rows: *rows, k, pitch }.run(gpu, stream)?;
                }
                _ => {}
            }
            let workspace = to.workspace.pointer();
            let sums_at = sums.map_or(0, |_| workspace + product.places.terms as u64);
            let norm = to.norm.map(|(_, norm)| norm);
            let operands = Operands { x, first, m, k, pitch, y, bias: to.bias, workspace, sums: sums_at, norm };
            if let Some(sums_of_x) = *sums {
                let (x, dtype) = (operands.x_at(), problem.x);
                SumGroups { sums_of_x, x, dtype, sums: sums_at, rows: m, k, pitch }.run(gpu, stream)?;
            }
            let arguments = T::arguments((*w).into(), *config, &launch.schedule, &operands);
            launch.function.launch_typed(stream, &launch.launch, &arguments, &launch.maps)?;
        }
        Ok(())
    }
}

impl<T: Gemm> Configured for Chosen<T> {
    fn is(&self, other: &dyn Configured) -> bool {
        is_same(self, other)
    }

    fn instances(&self, problem: &Problem, activation: Activation) -> Vec<Instance> {
        let Ok(form) = T::form(self.held, problem) else { return Vec::new() };
        let before = match T::QUANTIZES {
            true => quantize_activations::instance(wna8::x_form(problem, &form)),
            false => gather::instance(),
        };
        let sums = T::sums_of_x(&form, self.config).map(SumsOfX::instance);
        [instance(self.config, &form, activation, self.gate, None), before].into_iter().chain(sums).collect()
    }

    fn workspace_bytes(&self, caps: &Caps, problem: &Problem, batch_invariant: bool) -> usize {
        bytes::<T>(caps, problem, batch_invariant, self.given.then_some(self.config)).unwrap_or(0)
    }

    fn run(&self, gpu: &Gpu, stream: &Stream, call: &Call<'_>) -> Result<()> {
        let w = weights::<T>(call.w)?;
        let to = Output::new(&call.epilogue, &call.y, call.workspace.as_deref());
        let to = Output { batch_invariant: call.batch_invariant, ..to };
        self.launch(Device { gpu, stream, w }, &problem(call), Input::of::<T>(w, call.x), to)
    }

    fn folds(&self, caps: &Caps, problem: &Problem, activation: Activation, fold: Fold) -> bool {
        let serves = match fold {
            // Sums as they are, of rows that are written whole.
            Fold::Leaves => {
                let as_they_are = caps.gate.is_none() && activation == Activation::None && problem.y == Float::F32;
                as_they_are && problem.n.is_multiple_of(folded_norm::COLUMNS)
            }
            Fold::Divides => problem.k.is_multiple_of(folded_norm::COLUMNS),
        };
        let folds = |form: Form| T::folds_norms(&form, self.config);
        serves && problem.m <= folded_norm::ROWS && form_on::<T>(caps, problem).is_ok_and(folds)
    }

    fn folding(&self, caps: &Caps, problem: &Problem, activation: Activation, fold: Fold) -> Option<Instance> {
        let form = form_on::<T>(caps, problem).ok().filter(|_| self.folds(caps, problem, activation, fold))?;
        Some(instance(self.config, &form, activation, self.gate, Some(fold)))
    }

    fn run_folded(&self, gpu: &Gpu, stream: &Stream, call: &Call<'_>, norm: &FoldedNorm<'_>) -> Result<()> {
        let (w, problem, fold) = (weights::<T>(call.w)?, problem(call), norm.fold());
        let input = Input::of::<T>(w, call.x);
        let folds = self.folds(&w.caps(gpu), &problem, call.epilogue.activation, fold);
        if !folds || !matches!(input, Input::InPlace(_)) {
            return Err(unserved::<T>(Reason(format!("has no part of a norm in {problem}"))));
        }
        let to = Output::new(&call.epilogue, &call.y, call.workspace.as_deref());
        let norm = Some((fold, norm.parameters(&problem)?));
        self.launch(Device { gpu, stream, w }, &problem, input, Output { norm, ..to })
    }

    fn run_quantized(&self, gpu: &Gpu, stream: &Stream, problem: &Problem, call: &QuantizedCall<'_>) -> Result<()> {
        let w = weights::<T>(call.w)?;
        let to = Output::new(&call.epilogue, &call.y, call.workspace.as_deref());
        self.launch(Device { gpu, stream, w }, problem, Input::Codes(call.x), to)
    }
}

fn unserved<T: Gemm>(why: Reason) -> Error {
    Error::invalid(T::NAME, "a product that it serves", why.to_string())
}

fn weights<T: Gemm>(w: &Packed) -> Result<&Weights> {
    match w {
        Packed::Wna16(w) => Ok(w),
        other => Err(Error::invalid(T::NAME, "weights in layout cuda_wna16", other.layout())),
    }
}
