//! Grouped GEMM: products with several weights of one shape and format, each with rows of its own, in one launch.
//!
//! ```text
//! tile = grouped.tile(how rows are dealt out)
//! list of columns of tiles, on the device      nn/assign.rs, or whoever sorts rows by weight
//! grouped.run(.., GroupedCall { list, x, y })    the kernels of gemm.rs, compiled with HB_GROUPED
//! ```
//!
//! Which rows are whose is read on the device, so that a launch that is recorded serves every choice of weights. Weights that
//! [`super::Packer::pack_gated`] has packed leave `f(gate) · other` of each pair of outputs, in the type of x; others leave sums
//! in f32.

mod cost;

use super::gemm::{self, Gemm, Operands, Placed, X};
use super::kernel::Answer;
use super::quantize_activations;
use super::wna16::Weights;
use super::{Packed, wna8, wna8_mma, wna8_sm90, wna16_mma, wna16_sm90};
use crate::cuda::driver::{Buffer, FloatView, FloatViewMut, Stream, View};
use crate::cuda::kept::Kept;
use crate::cuda::nn::Gate;
use crate::cuda::parameters::parameters;
use crate::cuda::schedule::Schedule;
use crate::cuda::sources::Instance;
use crate::cuda::tiled::{self, Form, Prepared, Room, Tile};
use crate::cuda::{Caps, Cuda, Gpu, Workspace};
use crate::error::{Error, Result};
use crate::format::Format;
use crate::kernel::{Activation, Problem, Reason};
use crate::tensor::Float;
pub use cost::Dealt;
pub(super) use cost::{clocks_by_mma, microseconds};
use std::fmt::Debug;

const OP: &str = "grouped";

/// Number in the sources of what clamps a gate.
const CLAMPED: u32 = 5;

/// Rows of a tile from which on weights are likely to have several columns.
const MANY: usize = 64;

/// Rows at whose multiples those of a weight begin, where x is quantised: terms of four are copied at once.
const ALIGNMENT: usize = 4;

parameters! {
    /// As in `include/grouped.cuh`.
    pub(super) struct GroupedOperands {
        atoms: u64,
        rows_of_scales: u64,
        biases: u64,
        list: u64,
        count: u64,
        listed: u32,
        padding: u32,
    }
}

/// Declares `GroupedArguments` of a source, whose `Arguments` of one weight stand where this does.
macro_rules! grouped_arguments {
    () => {
        $crate::cuda::parameters::parameters! {
            /// `GroupedArguments` of the source.
            pub(super) struct GroupedArguments {
                product: $crate::cuda::parameters::Flat<Arguments>,
                grouped: $crate::cuda::matmul::grouped::GroupedOperands,
            }
        }

        impl From<(Arguments, $crate::cuda::matmul::grouped::GroupedOperands)> for GroupedArguments {
            fn from((product, grouped): (Arguments, $crate::cuda::matmul::grouped::GroupedOperands)) -> Self {
                Self { product: $crate::cuda::parameters::Flat(product), grouped }
            }
        }
    };
}
pub(super) use grouped_arguments;

/// Several weights, for products with rows that a device deals out to them. It holds addresses: of the weights, which must outlive
/// it.
#[derive(Debug)]
pub struct Grouped {
    product: Box<dyn Product>,
    shape: [usize; 2],
    outputs: usize,
    x: Float,
    y: Float,
}

/// One launch.
#[derive(Debug)]
pub struct GroupedCall<'a> {
    /// Columns of tiles: weight, first row of y, the row behind the last, first row of x, four numbers each; and how many there are.
    pub list: View<'a, u32>,
    /// How many of them there are, one number.
    pub count: View<'a, u32>,
    /// Another kernel follows the one that leaves the list, and waits for it before it lets the next begin: weights are then read
    /// while what is before this launch ends.
    pub listed: bool,
    /// Rows of a tile, as [`Grouped::tile`] gives it.
    pub tile: usize,
    /// Activations `[rows, k]`.
    pub x: FloatView<'a>,
    /// Outputs `[rows of y, outputs]`.
    pub y: FloatViewMut<'a>,
}

/// What follows from the first kernel that serves a problem on a device, and from its form there; or from why none does.
macro_rules! first_kernel {
    ($caps:expr, $problem:expr, $kernel:ident, $form:ident, $then:expr, $else:expr) => {{
        let mut why = Reason("takes sm_75".into());
        first_kernel!(@of why, $caps, $problem, $kernel, $form, $then, wna16_sm90::Wna16Sm90);
        first_kernel!(@of why, $caps, $problem, $kernel, $form, $then, wna16_mma::Wna16Mma);
        first_kernel!(@of why, $caps, $problem, $kernel, $form, $then, wna8_sm90::Wna8Sm90);
        first_kernel!(@of why, $caps, $problem, $kernel, $form, $then, wna8_mma::Wna8Mma);
        $else(why)
    }};
    (@of $why:ident, $caps:expr, $problem:expr, $kernel:ident, $form:ident, $then:expr, $module:ident::$of:ident) => {
        if ($module::KERNEL.serves)($caps.arch) {
            type $kernel = $module::$of;
            match gemm::form_on::<$kernel>($caps, $problem) {
                Ok($form) => return $then,
                Err(reason) => $why = reason,
            }
        }
    };
}

/// A kernel for the weights.
trait Product: Debug + Send + Sync {
    fn microseconds(&self, caps: &Caps, tile: usize, columns: f64) -> f64;
    fn tiles(&self) -> &[usize];
    fn alignment(&self) -> usize;
    fn workspace_bytes(&self, caps: &Caps, tile: usize, rows: usize) -> usize;
    fn instance(&self, caps: &Caps, tile: usize) -> Instance;
    fn run(&self, gpu: &Gpu, stream: &Stream, call: GroupedCall<'_>, workspace: &mut Workspace) -> Result<()>;
}

/// Weights, and what is done with them.
#[derive(Debug)]
struct Of<T: Gemm> {
    problem: Problem,
    form: Form,
    shape: [usize; 2],
    first: First,
    gate: Option<Gate>,
    atoms: Buffer<u64>,
    rows_of_scales: Buffer<u64>,
    biases: Option<Buffer<u64>>,
    /// Rows of the tiles that the device has room for.
    tiles: Vec<usize>,
    prepared: Kept<Key, (T::Config, Prepared)>,
}

/// One of the weights, whose numbers are those of all.
struct First(Placed);

impl Debug for First {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} of {:?}", self.0.shape, self.0.atom)
    }
}

#[derive(Debug, PartialEq)]
struct Key {
    tile: usize,
    rows: usize,
    x: u64,
    workspace: u64,
}

/// A kernel with what becomes of its sums: a function, or that of a gate times what it lets through.
pub(in crate::cuda) fn with_output_function(of: Instance, activation: Activation, gate: Option<Gate>) -> Instance {
    let (number, low, high) = match gate {
        Some(Gate { clamp: Some([alpha, limit]), .. }) => (CLAMPED, alpha, limit),
        _ => super::activation(gate.map_or(activation, |gate| gate.activation)),
    };
    let limit = |v: f32| format!("__uint_as_float({:#x}u)", v.to_bits());
    let of = of.defining("ACTIVATION", number).defining("LOW", limit(low)).defining("HIGH", limit(high));
    if gate.is_some() { of.defining("GATED", 1) } else { of }
}

/// A configuration as it is compiled.
fn instance(config: impl Tile, form: &Form, gate: Option<Gate>) -> Instance {
    let plain = config.instance(form, Activation::None).defining("GROUPED", 1);
    with_output_function(plain, Activation::None, gate)
}

/// All configurations of a kernel for some forms, for the record of what kernels take: with gates where y is a half, and then of a weight
/// alone too. (With sums of codes, groups of 32 and y in halfs tiles of 128 rows spill 104 bytes, with a gate or without.)
pub(super) fn samples<T: Gemm>(caps: &Caps, forms: &[Form]) -> Vec<Instance> {
    let of = |form: &Form| {
        let gate = (form.out != Float::F32).then_some(Gate::SWIGLU);
        let of_tile = |tile| instance(T::grouped_config(form, [tile, 28672, 4096], caps).0, form, gate);
        let alone = |m| {
            let plain = T::config(form, [m, 28672, 4096], caps, false).instance(form, Activation::None);
            with_output_function(plain, Activation::None, gate)
        };
        let rows = [1, 16, 64, 128, 1024].into_iter().filter(|_| gate.is_some() && !form.terms.sums);
        T::grouped_tiles(form).into_iter().map(of_tile).chain(rows.map(alone)).collect::<Vec<_>>()
    };
    forms.iter().flat_map(of).collect()
}

impl Grouped {
    /// Of weights of one shape and format, each with its bias, for x of a type; or why there is no kernel for them: it takes sm_80, codes
    /// with half scales and no offsets, columns in order, a multiple of 8 of them, and weights that all have the same gate, or none.
    pub fn new(
        gpu: &Gpu,
        stream: &Stream,
        weights: &[(&Packed, Option<View<'_, f32>>)],
        x: Float,
    ) -> Result<Answer<Self>> {
        let refuse = |why: &str| Ok(Err(Reason(why.into())));
        let Some((first @ Packed::Wna16(of_first), _)) = weights.first() else {
            return refuse("takes weights in layout cuda_wna16, at least one");
        };
        if of_first.atom().is_wide() {
            return refuse("takes weights with half scales, without offsets, in groups of 32 or more");
        }
        let gate = first.gate();
        let mut all = Vec::new();
        for (w, bias) in weights {
            let Packed::Wna16(of) = w else { return refuse("takes weights in layout cuda_wna16") };
            if w.shape() != first.shape() || w.format() != first.format() || of.atom() != of_first.atom() {
                return refuse("takes weights of one shape and format");
            }
            if w.gate() != gate {
                return refuse("takes weights that all have the same gate, or none");
            }
            if !w.in_order() {
                return refuse("takes weights whose columns lie in order");
            }
            if let Some(bias) = bias
                && bias.len() != w.shape()[0]
            {
                return Err(Error::invalid(OP, format!("a bias of {}", w.shape()[0]), bias.len().to_string()));
            }
            if bias.is_some() != weights[0].1.is_some() {
                return refuse("takes weights that all have biases, or none");
            }
            all.push((of, *bias));
        }
        let [n, k] = first.shape();
        if k % 8 != 0 || n == 0 || x == Float::F32 {
            return refuse("takes x in 16 bits, in rows of a multiple of 8");
        }
        let y = if gate.is_some() { x } else { Float::F32 };
        let problem = Problem { format: Some(first.format()), x, y, m: 1, n, k };
        let outputs = first.outputs();
        first_kernel!(
            &first.caps(gpu),
            &problem,
            Kernel,
            form,
            {
                let product = Box::new(Of::<Kernel>::new(gpu, stream, &all, gate, (problem, form))?);
                Ok(Ok(Self { product, shape: [n, k], outputs, x, y }))
            },
            |why| Ok(Err(why))
        )
    }

    /// Columns of x.
    pub fn k(&self) -> usize {
        self.shape[1]
    }

    /// Outputs: of gated weights half of their rows.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Rows of the tile in which rows are expected to take the least time, and the microseconds.
    pub fn tile(&self, caps: &Caps, dealt: Dealt) -> (usize, f64) {
        let in_tiles = |&tile: &usize| (tile, self.product.microseconds(caps, tile, dealt.columns(tile)));
        let all = self.tiles().iter().map(in_tiles);
        all.min_by(|(_, one), (_, other)| one.total_cmp(other)).unwrap_or((MANY, f64::INFINITY))
    }

    /// Rows that tiles may have.
    pub fn tiles(&self) -> &[usize] {
        self.product.tiles()
    }

    /// The number of which rows of a weight must begin at a multiple, in x and y.
    pub fn alignment(&self) -> usize {
        self.product.alignment()
    }

    /// Bytes of workspace for so many rows of x.
    pub fn workspace_bytes(&self, caps: &Caps, tile: usize, rows: usize) -> usize {
        self.product.workspace_bytes(caps, tile, rows)
    }

    /// The kernel for a tile.
    pub fn instance(&self, caps: &Caps, tile: usize) -> Instance {
        self.product.instance(caps, tile)
    }

    /// Multiplies. *Accuracy:* as products of the kernel with one weight, rounded where its configuration says so. *Errors:* lengths, types or a tile that do not fit, memory
    /// that is not aligned.
    pub fn run(&self, gpu: &Gpu, stream: &Stream, call: GroupedCall<'_>, workspace: &mut Workspace) -> Result<()> {
        let (k, outputs) = (self.k(), self.outputs);
        let whole = call.x.len().is_multiple_of(k) && call.y.len().is_multiple_of(outputs);
        if !whole || call.x.dtype() != self.x || call.y.dtype() != self.y {
            let expected = format!("rows of {k} in {} and of {outputs} in {}", self.x, self.y);
            let got = format!("{} in {} and {} in {}", call.x.len(), call.x.dtype(), call.y.len(), call.y.dtype());
            return Err(Error::invalid(OP, expected, got));
        }
        if !call.list.len().is_multiple_of(4) || call.count.len() != 1 {
            return Err(Error::invalid(OP, "a list of four numbers each, and its length", call.list.len().to_string()));
        }
        let addresses = [call.x.pointer(), call.y.pointer(), call.list.pointer()];
        if let Some(odd) = addresses.iter().find(|at| !at.is_multiple_of(16)) {
            return Err(Error::invalid(OP, "memory at multiples of 16 bytes", format!("{odd:#x}")));
        }
        let needed = self.workspace_bytes(&gpu.caps(), call.tile, call.x.len() / k);
        if workspace.bytes() < needed {
            let got = workspace.bytes().to_string();
            return Err(Error::invalid(OP, format!("a workspace of {needed} bytes"), got));
        }
        if call.x.is_empty() || call.y.is_empty() {
            return Ok(());
        }
        self.product.run(gpu, stream, call, workspace)
    }

    /// The same in a queue, whose workspace it takes.
    pub fn forward(&self, device: &Cuda, call: GroupedCall<'_>) -> Result<()> {
        let bytes = self.workspace_bytes(&device.gpu().caps(), call.tile, call.x.len() / self.k());
        let mut working = device.workspace(OP, bytes)?;
        let workspace = working.get().ok_or_else(|| Error::invalid(OP, "a workspace", "none"))?;
        self.run(device.gpu(), device.stream(), call, workspace)
    }

    /// Whether weights of a format and shape have a kernel for x of a type, or why not.
    pub fn supports(caps: &Caps, format: Format, x: Float, [n, k]: [usize; 2]) -> Answer<()> {
        if k % 8 != 0 || x == Float::F32 {
            return Err(Reason("takes x in 16 bits, in rows of a multiple of 8".into()));
        }
        let problem = Problem { format: Some(format), x, y: x, m: 1, n, k };
        first_kernel!(caps, &problem, _Kernel, _form, Ok(()), Err)
    }
}

impl<T: Gemm> Of<T> {
    fn new(
        gpu: &Gpu,
        stream: &Stream,
        weights: &[(&Weights, Option<View<'_, f32>>)],
        gate: Option<Gate>,
        (problem, form): (Problem, Form),
    ) -> Result<Self> {
        let upload = |addresses: Vec<u64>| {
            let mut buffer = gpu.context().allocate(addresses.len())?;
            stream.upload(&addresses, buffer.view_mut())?;
            Ok::<_, Error>(buffer)
        };
        let of = |address: fn(&Weights) -> u64| upload(weights.iter().map(|(w, _)| address(w)).collect());
        let biases: Vec<u64> = weights.iter().filter_map(|(_, bias)| Some(bias.as_ref()?.pointer())).collect();
        let mut made = Self {
            problem,
            form,
            shape: [problem.n, problem.k],
            first: First(weights[0].0.into()),
            gate,
            atoms: of(Weights::atoms)?,
            rows_of_scales: of(Weights::rows)?,
            biases: if biases.is_empty() { None } else { Some(upload(biases)?) },
            tiles: Vec::new(),
            prepared: Kept::default(),
        };
        let caps = gpu.caps();
        let is_there = |&tile: &usize| {
            let plan = made.plan(&caps, tile);
            plan.0.tokens() == tile && tiled::check(&caps, &form, &plan).is_ok()
        };
        made.tiles = T::grouped_tiles(&form).into_iter().filter(is_there).collect();
        Ok(made)
    }

    /// The configuration for a tile, and who computes what as far as the host knows.
    fn plan(&self, caps: &Caps, tile: usize) -> (T::Config, Schedule) {
        let [n, k] = self.shape;
        let (config, workers) = T::grouped_config(&self.form, [tile, n, k], caps);
        let schedule = T::schedule(&self.form, (config, false), [tile, n, k], caps);
        // Weights of one column are read once.
        let columns = if tile < MANY { 1 } else { 2 };
        (config, Schedule { columns, waves: 0, workers, sharers: 1, cut: workers.max(2), ..schedule })
    }

    fn room(&self, caps: &Caps, tile: usize, rows: usize) -> Room {
        let (config, schedule) = self.plan(caps, tile);
        let parts = config.parts_bytes(&schedule);
        match T::QUANTIZES {
            true => Room::new(wna8::x_form(&Problem { m: rows, ..self.problem }, &self.form), parts),
            false => Room { codes: 0, terms: 0, bytes: Workspace::COUNTER_BYTES + parts },
        }
    }
}

impl<T: Gemm + Debug> Product for Of<T> {
    fn tiles(&self) -> &[usize] {
        &self.tiles
    }

    fn microseconds(&self, caps: &Caps, tile: usize, columns: f64) -> f64 {
        T::grouped_microseconds(&self.form, tile, self.shape, columns, caps)
    }

    fn alignment(&self) -> usize {
        if T::QUANTIZES { ALIGNMENT } else { 1 }
    }

    fn workspace_bytes(&self, caps: &Caps, tile: usize, rows: usize) -> usize {
        self.room(caps, tile, rows).bytes
    }

    fn instance(&self, caps: &Caps, tile: usize) -> Instance {
        instance(self.plan(caps, tile).0, &self.form, self.gate)
    }

    fn run(&self, gpu: &Gpu, stream: &Stream, call: GroupedCall<'_>, workspace: &mut Workspace) -> Result<()> {
        let (caps, [_, k]) = (gpu.caps(), self.shape);
        let GroupedCall { list, count, listed, tile, x, y } = call;
        let rows = x.len() / k;
        let problem = Problem { m: rows, ..self.problem };
        let room = self.room(&caps, tile, rows);
        let at = workspace.view().pointer();
        let (as_read, pitch) = if T::QUANTIZES {
            let form = wna8::x_form(&problem, &self.form);
            let terms = at + room.terms as u64;
            let codes = workspace.view().slice(room.codes..room.codes + form.codes_bytes());
            quantize_activations::run(gpu, stream, form, x, 0, [codes.pointer(), terms])?;
            (X::Codes(codes, terms, form), form.pitch())
        } else {
            (X::Floats(x), k)
        };
        let (x_at, y_at) = (x.pointer(), y.pointer());
        let operands =
            Operands { x: as_read, first: 0, m: rows, k, pitch, y: y_at, bias: 0, workspace: at, sums: 0, norm: None };
        let key = Key { tile, rows, x: x_at, workspace: at };
        let prepared = self.prepared.get(key, |_| {
            let plan = self.plan(&caps, tile);
            if plan.0.tokens() != tile {
                return Err(Error::invalid(OP, "the rows of a tile that there is", tile.to_string()));
            }
            let reason = |why: Reason| Error::invalid(OP, "a product that the device has room for", why.to_string());
            tiled::check(&caps, &self.form, &plan).map_err(reason)?;
            let maps = T::map(plan.0, &operands)?.into_iter().collect();
            Ok((plan.0, Prepared::new(gpu, &self.instance(&caps, tile), &self.form, plan, maps)?))
        })?;
        let (config, prepared) = &*prepared;
        let product = T::arguments(self.first.0, *config, &prepared.schedule, &operands);
        let grouped = GroupedOperands {
            atoms: self.atoms.pointer(),
            rows_of_scales: self.rows_of_scales.pointer(),
            biases: self.biases.as_ref().map_or(0, Buffer::pointer),
            list: list.pointer(),
            count: count.pointer(),
            listed: listed.into(),
            padding: 0,
        };
        prepared.function.launch_typed(stream, &prepared.launch, &T::Grouped::from((product, grouped)), &prepared.maps)
    }
}
