//! GEMM on the scalar units (SIMT), which is right for every format: launches of `simt.cu`. Where activations are quantised it reads
//! what their codes stand for, in f32.

use super::kernel::{Configuration, Configured, Kernel, is_same};
use super::pack::{Packer, Target, Whole};
use super::plans::KeptPlans;
use super::round_activations::{self, Groups};
use super::{Call, Packed};
use crate::cuda::driver::{Buffer, Launch, Stream, View};
use crate::cuda::nn::FloatBuffer;
use crate::cuda::parameters::{Parameters, float_type, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::cuda::{Caps, Gpu, Workspace};
use crate::error::{Error, Result};
use crate::format::{Act, Format, WeightFormat, Zero};
use crate::kernel::{Activation, Problem, Reason};
use crate::layout::codes::field_bits;
use crate::layout::stored::StoredTensor;
use crate::tensor::Float;

static SOURCE: Source = Source { path: "matmul/simt.cu", text: include_str!("simt.cu"), parameters: &[Params::LAYOUT] };

/// Name of the layout.
pub(super) const LAYOUT: &str = "cuda_plain";

pub(super) const KERNEL: Kernel = Kernel {
    name: "simt",
    layout: LAYOUT,
    what: "weights to f32 in shared memory, f32 multiply-add, every format and processor",
    packs: true,
    batch_invariant: true,
    serves: |arch| arch.number >= 75,
    instances: |_| {
        let before = [Act::A8, Act::A8Asym].map(round_activations::instance);
        FIELDS.into_iter().flat_map(of_field).chain(before).collect()
    },
    every_instance: |_, format, _| {
        let before = format.act.is_quantized().then(|| round_activations::instance(format.act));
        of_field(field_bits(format.weight.bits)).into_iter().chain(before).collect()
    },
    choose: |_, problem, _| supports(problem).map(|rows| Configuration::new(Simt { rows })),
    candidates: |_, problem| supports(problem).map(|_| Vec::new()),
    rows_form: |_| None,
    rounds_weights: |_, _| false,
    workspace_bytes: |_, problem| rounded_bytes(problem),
    holds: |_, _| Ok(()),
    pack: |packer, whole, parts, act| Ok(Packed::Plain(Weights::new(packer, whole, parts, act)?)),
};

/// Bits of a code's place in a word.
const FIELDS: [u32; 3] = [2, 4, 8];

/// Rows of x a thread.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Simt {
    rows: u32,
}

/// `n32`: rows of x a block.
impl std::fmt::Display for Simt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "n{}", self.rows * THREADS_DOWN)
    }
}

impl Configured for Simt {
    fn is(&self, other: &dyn Configured) -> bool {
        is_same(self, other)
    }

    fn instances(&self, problem: &Problem, _: Activation) -> Vec<Instance> {
        let Some(Format { weight, act }) = problem.format else { return Vec::new() };
        let before = act.is_quantized().then(|| round_activations::instance(act));
        [instance(field_bits(weight.bits), self.rows)].into_iter().chain(before).collect()
    }

    fn workspace_bytes(&self, _: &Caps, problem: &Problem, _: bool) -> usize {
        rounded_bytes(problem)
    }

    fn run(&self, gpu: &Gpu, stream: &Stream, call: &Call<'_>) -> Result<()> {
        run(gpu, stream, call)
    }
}

/// As in the source: outputs and threads of a block.
const OUTPUTS: usize = 64;
const THREADS: u32 = 256;

/// Rows of x a thread, and rows a block for each of them.
const ROWS: u32 = 8;
const SMALL_ROWS: u32 = 1;
const THREADS_DOWN: u32 = THREADS / OUTPUTS as u32;

/// Blocks of a launch, at most.
const MOST_BLOCKS: u64 = i32::MAX as u64;

fn instance(field: u32, rows: u32) -> Instance {
    Instance::new(&SOURCE, format!("simt<{field}, {rows}>"))
}

fn of_field(field: u32) -> [Instance; 2] {
    [SMALL_ROWS, ROWS].map(|rows| instance(field, rows))
}

/// Rows a thread, blocks along the rows, and all blocks.
fn grid(m: usize, n: usize) -> (u32, u64, u64) {
    let rows = if m <= THREADS_DOWN as usize { SMALL_ROWS } else { ROWS };
    let down = (m as u64).div_ceil(u64::from(THREADS_DOWN * rows));
    (rows, down, down.saturating_mul((n as u64).div_ceil(OUTPUTS as u64)))
}

/// Rows of x that are quantised at once.
const ROUNDED_ROWS: usize = 256;

/// Bytes of workspace for a problem: counters, which this kernel leaves alone, and what the codes of some rows stand for.
fn rounded_bytes(problem: &Problem) -> usize {
    match problem.format.is_some_and(|format| format.act.is_quantized()) {
        true => Workspace::COUNTER_BYTES + problem.m.min(ROUNDED_ROWS) * problem.k * size_of::<f32>(),
        false => 0,
    }
}

/// Rows a thread, if it computes a problem.
fn supports(problem: &Problem) -> std::result::Result<u32, Reason> {
    if problem.format.is_none() {
        return Err(Reason("multiplies codes, the weights are dense".into()));
    }
    let (rows, _, blocks) = grid(problem.m, problem.n);
    if problem.k > i32::MAX as usize || blocks > MOST_BLOCKS {
        return Err(Reason("more columns or blocks than 31 bits count".into()));
    }
    Ok(rows)
}

#[derive(Debug)]
enum DeviceZeros {
    Symmetric,
    Integer(Buffer<u16>),
    Float(FloatBuffer),
}

impl DeviceZeros {
    /// Address; 0 if there are none.
    fn pointer(&self) -> u64 {
        match self {
            Self::Symmetric => 0,
            Self::Integer(z) => z.pointer(),
            Self::Float(o) => o.all().pointer(),
        }
    }
}

/// A weight in the plain layout on a device.
#[derive(Debug)]
pub struct Weights {
    n: usize,
    k: usize,
    format: WeightFormat,
    act: Act,
    codes: Buffer<u32>,
    scales: FloatBuffer,
    zeros: DeviceZeros,
    group_of: Option<Buffer<u32>>,
    /// Of x, where it is quantised.
    groups_of_x: Option<Groups>,
    /// Whether products may round them to the type of x.
    pub(super) rounded: bool,
    /// Choices for all numbers of rows.
    pub(super) plans: KeptPlans,
}

impl Weights {
    fn new(packer: &mut Packer<'_>, whole: Whole, parts: &[&StoredTensor<'_>], act: Act) -> Result<Self> {
        let Whole { format, n, k, groups, .. } = whole;
        let too_large = || Error::invalid("pack", "a matrix that fits memory", format!("{n} × {k}"));
        let sized = |count: usize| count.checked_mul(n).ok_or_else(too_large);
        let params = sized(groups)?;
        let group_of = parts.first().and_then(|part| part.group_index());
        let packed = Self {
            n,
            k,
            format,
            act,
            codes: packer.allocate(sized(k.div_ceil(32 / field_bits(format.bits) as usize))?)?,
            scales: packer.allocate_floats(format.scale, params)?,
            zeros: match format.zero {
                Zero::Symmetric => DeviceZeros::Symmetric,
                Zero::Integer => DeviceZeros::Integer(packer.allocate(params)?),
                Zero::Float => DeviceZeros::Float(packer.allocate_floats(format.scale, params)?),
            },
            group_of: group_of.map(|index| packer.upload(index)).transpose()?,
            groups_of_x: match act.is_quantized() {
                true => Some(Groups::new(packer, (format, k, groups), group_of)?),
                false => None,
            },
            rounded: false,
            plans: Default::default(),
        };
        let target = Target::Plain {
            codes: packed.codes.pointer(),
            scales: packed.scales.all().pointer(),
            zeros: packed.zeros.pointer(),
        };
        packer.write(whole, parts, &target)?;
        Ok(packed)
    }

    pub(super) fn duplicate(&self, stream: &Stream) -> Result<Self> {
        Ok(Self {
            codes: self.codes.duplicate(stream)?,
            scales: self.scales.duplicate(stream)?,
            zeros: match &self.zeros {
                DeviceZeros::Symmetric => DeviceZeros::Symmetric,
                DeviceZeros::Integer(z) => DeviceZeros::Integer(z.duplicate(stream)?),
                DeviceZeros::Float(o) => DeviceZeros::Float(o.duplicate(stream)?),
            },
            group_of: self.group_of.as_ref().map(|index| index.duplicate(stream)).transpose()?,
            groups_of_x: self.groups_of_x.as_ref().map(|groups| groups.duplicate(stream)).transpose()?,
            plans: Default::default(),
            ..*self
        })
    }

    pub(super) fn shape(&self) -> [usize; 2] {
        [self.n, self.k]
    }

    /// What its products are chosen by on a device.
    pub(super) fn caps(&self, gpu: &Gpu) -> Caps {
        Caps { rounded_weights: self.rounded, ..gpu.caps() }
    }

    pub(super) fn format(&self) -> Format {
        Format { weight: self.format, act: self.act }
    }

    /// How many scales it has.
    pub(super) fn scales(&self) -> usize {
        self.scales.len()
    }

    /// What kernels are told of it.
    pub(in crate::cuda) fn parts(&self) -> Parts {
        Parts {
            codes: self.codes.pointer(),
            scales: self.scales.all().pointer(),
            zeros: self.zeros.pointer(),
            group_of: self.group_of.as_ref().map_or(0, Buffer::pointer),
            group: self.format.group.len(self.k).clamp(1, i32::MAX as usize) as u32,
            middle: self.format.middle(),
            scale_type: float_type(self.scales.dtype()),
            zero_kind: zero_kind(self.format.zero),
            field_bits: field_bits(self.format.bits),
        }
    }

    pub(super) fn memory(&self) -> Vec<View<'_, u8>> {
        let zeros = match &self.zeros {
            DeviceZeros::Symmetric => None,
            DeviceZeros::Integer(z) => Some(z.view().cast()),
            DeviceZeros::Float(o) => Some(o.all().into_bytes()),
        };
        let group_of = self.group_of.as_ref().map(|index| index.view().cast());
        let of_x = self.groups_of_x.iter().flat_map(Groups::memory);
        [self.codes.view().cast(), self.scales.all().into_bytes()]
            .into_iter()
            .chain(zeros)
            .chain(group_of)
            .chain(of_x)
            .collect()
    }
}

/// Addresses of a weight's parts, 0 where it has none, and the numbers of types and kinds.
pub(in crate::cuda) struct Parts {
    pub codes: u64,
    pub scales: u64,
    pub zeros: u64,
    pub group_of: u64,
    pub group: u32,
    pub middle: u32,
    pub scale_type: u32,
    pub zero_kind: u32,
    /// Bits of a code's place in a word.
    pub field_bits: u32,
}

parameters! {
    /// As in the source.
    struct Params {
        x: u64,
        codes: u64,
        scales: u64,
        zeros: u64,
        group_of: u64,
        bias: u64,
        y: u64,
        m: u64,
        n: u64,
        k: u64,
        group: u32,
        middle: u32,
        x_type: u32,
        scale_type: u32,
        y_type: u32,
        zero_kind: u32,
        activation: u32,
        low: f32,
        high: f32,
        row_blocks: u32,
    }
}

/// Number of the kind of zeros in the sources.
pub(in crate::cuda) fn zero_kind(zero: Zero) -> u32 {
    match zero {
        Zero::Symmetric => 0,
        Zero::Integer => 1,
        Zero::Float => 2,
    }
}

fn run(gpu: &Gpu, stream: &Stream, call: &Call<'_>) -> Result<()> {
    let Packed::Plain(w) = call.w else {
        return Err(Error::invalid(KERNEL.name, "weights in layout cuda_plain", call.w.layout()));
    };
    let (x, y) = ((call.x.pointer(), call.x.dtype()), call.y.pointer());
    let Some(groups) = &w.groups_of_x else { return multiply(gpu, stream, call, w, x, (y, call.m)) };
    let needed = rounded_bytes(&super::problem(call));
    let rounded = match call.workspace.as_deref() {
        Some(workspace) if workspace.bytes() >= needed => workspace.view().pointer() + Workspace::COUNTER_BYTES as u64,
        other => {
            let got = other.map_or(0, Workspace::bytes).to_string();
            return Err(Error::invalid(KERNEL.name, format!("a workspace of {needed} bytes"), got));
        }
    };
    for first in (0..call.m).step_by(ROUNDED_ROWS) {
        let rows = ROUNDED_ROWS.min(call.m - first);
        let at = |address: u64, columns: usize, dtype: Float| address + (first * columns * dtype.size_bytes()) as u64;
        groups.round(gpu, stream, (at(x.0, w.k, x.1), x.1, rows), w.act, rounded)?;
        multiply(gpu, stream, call, w, (rounded, Float::F32), (at(y, w.n, call.y.dtype()), rows))?;
    }
    Ok(())
}

/// Puts the product of some rows into a stream: of x at an address, of a type, to y at an address.
fn multiply(
    gpu: &Gpu,
    stream: &Stream,
    call: &Call<'_>,
    w: &Weights,
    (x, x_type): (u64, Float),
    (y, m): (u64, usize),
) -> Result<()> {
    let (rows, row_blocks, blocks) = grid(m, w.n);
    let parts = w.parts();
    let (activation, low, high) = super::activation(call.epilogue.activation);
    let params = Params {
        x,
        codes: parts.codes,
        scales: parts.scales,
        zeros: parts.zeros,
        group_of: parts.group_of,
        bias: call.epilogue.bias.map_or(0, |bias: View<'_, f32>| bias.pointer()),
        y,
        m: m as u64,
        n: w.n as u64,
        k: w.k as u64,
        group: parts.group,
        middle: parts.middle,
        x_type: float_type(x_type),
        scale_type: parts.scale_type,
        y_type: float_type(call.y.dtype()),
        zero_kind: parts.zero_kind,
        activation,
        low,
        high,
        row_blocks: row_blocks as u32,
    };
    let key = (KERNEL.name, [parts.field_bits, rows]);
    let function = gpu.function_once(key, || instance(parts.field_bits, rows))?;
    // Blocks are within the limit, as `supports` has checked.
    function.launch_typed(stream, &Launch::linear(blocks as u32, THREADS), &params, &[])
}
