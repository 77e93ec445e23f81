//! Launches of `plain.cu`, which is right for every format.

use super::{Call, Kernel, Packed, upload};
use crate::cuda::driver::{Arg, Buffer, FloatView, Launch, Stream, View};
use crate::cuda::sources::{Instance, Source};
use crate::cuda::{Caps, Gpu};
use crate::error::{Error, Result};
use crate::format::{Act, Format, QTensor, WeightFormat};
use crate::kernel::{Activation, Problem, Reason};
use crate::layout::cpu_n16::field_bits;
use crate::layout::cuda_plain::{CudaPlain, PlainZeros};
use crate::tensor::{Float, FloatData};
use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};

static SOURCE: Source = Source { path: "matmul/plain.cu", text: include_str!("plain.cu") };

pub(super) const KERNEL: Kernel = Kernel {
    name: "plain",
    layout: "cuda_plain",
    what: "weights to f32 in shared memory, f32 multiply-add, every format and processor",
    batch_invariant: true,
    serves: |arch| arch.number >= 75,
    instances: || {
        let fields = [2, 4, 8].into_iter();
        fields.flat_map(|field| [SMALL_ROWS, ROWS].map(|rows| instance(field, rows))).collect()
    },
    instances_of: |_, problem| {
        let bits = problem.format.map(|format| format.weight.bits);
        bits.map(|bits| instance(field_bits(bits), grid(problem.m, problem.n).0)).into_iter().collect()
    },
    supports,
    workspace_bytes: |_, _| 0,
    holds: |_| Ok(()),
    pack: |gpu, stream, w, act| Ok(Packed::Plain(Weights::new(gpu, stream, w, act)?)),
    run,
};

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
    Instance::new(&SOURCE, format!("plain<{field}, {rows}>"))
}

/// Rows a thread, blocks along the rows, and all blocks.
fn grid(m: usize, n: usize) -> (u32, u64, u64) {
    let rows = if m <= THREADS_DOWN as usize { SMALL_ROWS } else { ROWS };
    let down = (m as u64).div_ceil(u64::from(THREADS_DOWN * rows));
    (rows, down, down.saturating_mul((n as u64).div_ceil(OUTPUTS as u64)))
}

fn supports(_: &Caps, problem: &Problem) -> std::result::Result<(), Reason> {
    match problem.format {
        None => return Err(Reason("multiplies codes, the weights are dense".into())),
        Some(format) if format.act.is_quantized() => {
            return Err(Reason("multiplies exact activations (a16, a32), the format says quantised ones".into()));
        }
        Some(_) => {}
    }
    if problem.k > i32::MAX as usize || grid(problem.m, problem.n).2 > MOST_BLOCKS {
        return Err(Reason("more columns or blocks than 31 bits count".into()));
    }
    Ok(())
}

/// Floats that stay on a device.
#[derive(Debug)]
enum Floats {
    F16(Buffer<f16>),
    BF16(Buffer<bf16>),
    F32(Buffer<f32>),
}

impl Floats {
    fn upload(gpu: &Gpu, stream: &Stream, values: &FloatData<'_>) -> Result<Self> {
        Ok(match values {
            FloatData::F16(v) => Self::F16(upload(gpu, stream, v)?),
            FloatData::BF16(v) => Self::BF16(upload(gpu, stream, v)?),
            FloatData::F32(v) => Self::F32(upload(gpu, stream, v)?),
        })
    }

    fn duplicate(&self, stream: &Stream) -> Result<Self> {
        Ok(match self {
            Self::F16(v) => Self::F16(v.duplicate(stream)?),
            Self::BF16(v) => Self::BF16(v.duplicate(stream)?),
            Self::F32(v) => Self::F32(v.duplicate(stream)?),
        })
    }

    fn view(&self) -> FloatView<'_> {
        match self {
            Self::F16(v) => FloatView::F16(v.view()),
            Self::BF16(v) => FloatView::BF16(v.view()),
            Self::F32(v) => FloatView::F32(v.view()),
        }
    }

    fn bytes(&self) -> usize {
        self.view().len() * self.view().dtype().size_bytes()
    }
}

#[derive(Debug)]
enum DeviceZeros {
    Symmetric,
    Integer(Buffer<u16>),
    Float(Floats),
}

/// A weight in the plain layout on a device.
#[derive(Debug)]
pub struct Weights {
    n: usize,
    k: usize,
    format: WeightFormat,
    act: Act,
    codes: Buffer<u32>,
    scales: Floats,
    zeros: DeviceZeros,
    group_of: Option<Buffer<u32>>,
}

impl Weights {
    fn new(gpu: &Gpu, stream: &Stream, w: &QTensor, act: Act) -> Result<Self> {
        let packed = CudaPlain::pack(w)?;
        Ok(Self {
            n: packed.n(),
            k: packed.k(),
            format: packed.format(),
            act,
            codes: upload(gpu, stream, packed.codes())?,
            scales: Floats::upload(gpu, stream, packed.scales())?,
            zeros: match packed.zeros() {
                PlainZeros::Symmetric => DeviceZeros::Symmetric,
                PlainZeros::Integer(z) => DeviceZeros::Integer(upload(gpu, stream, z)?),
                PlainZeros::Float(o) => DeviceZeros::Float(Floats::upload(gpu, stream, o)?),
            },
            group_of: packed.group_of().map(|index| upload(gpu, stream, index)).transpose()?,
        })
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
            ..*self
        })
    }

    pub(super) fn shape(&self) -> [usize; 2] {
        [self.n, self.k]
    }

    pub(super) fn format(&self) -> Format {
        Format { weight: self.format, act: self.act }
    }

    pub(super) fn bytes(&self) -> usize {
        let zeros = match &self.zeros {
            DeviceZeros::Symmetric => 0,
            DeviceZeros::Integer(z) => z.bytes(),
            DeviceZeros::Float(o) => o.bytes(),
        };
        self.codes.bytes() + self.scales.bytes() + zeros + self.group_of.as_ref().map_or(0, Buffer::bytes)
    }
}

/// As in the source.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
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

fn float_type(dtype: Float) -> u32 {
    match dtype {
        Float::F16 => 0,
        Float::BF16 => 1,
        Float::F32 => 2,
    }
}

/// Number of the function and its limits, as in the source.
fn activation(activation: Activation) -> (u32, f32, f32) {
    match activation {
        Activation::None => (0, 0.0, 0.0),
        Activation::Relu => (1, 0.0, f32::INFINITY),
        Activation::Relu6 => (1, 0.0, 6.0),
        Activation::Clamp(low, high) => (1, low, high),
        Activation::Gelu => (2, 0.0, 0.0),
        Activation::GeluTanh => (3, 0.0, 0.0),
        Activation::Silu => (4, 0.0, 0.0),
    }
}

fn run(gpu: &Gpu, stream: &Stream, call: &mut Call<'_>) -> Result<()> {
    let Packed::Plain(w) = call.w else {
        return Err(Error::invalid("plain", "weights in layout cuda_plain", call.w.layout()));
    };
    let (rows, row_blocks, blocks) = grid(call.m, w.n);
    let (zero_kind, zeros) = match &w.zeros {
        DeviceZeros::Symmetric => (0, 0),
        DeviceZeros::Integer(z) => (1, z.pointer()),
        DeviceZeros::Float(o) => (2, o.view().pointer()),
    };
    let (activation, low, high) = activation(call.epilogue.activation);
    let params = Params {
        x: call.x.pointer(),
        codes: w.codes.pointer(),
        scales: w.scales.view().pointer(),
        zeros,
        group_of: w.group_of.as_ref().map_or(0, Buffer::pointer),
        bias: call.epilogue.bias.map_or(0, |bias: View<'_, f32>| bias.pointer()),
        y: call.y.pointer(),
        m: call.m as u64,
        n: w.n as u64,
        k: w.k as u64,
        group: w.format.group.len(w.k).clamp(1, i32::MAX as usize) as u32,
        middle: w.format.middle(),
        x_type: float_type(call.x.dtype()),
        scale_type: float_type(w.scales.view().dtype()),
        y_type: float_type(call.y.dtype()),
        zero_kind,
        activation,
        low,
        high,
        row_blocks: row_blocks as u32,
    };
    let function = gpu.function(&instance(field_bits(w.format.bits), rows))?;
    // SAFETY: the one parameter is the source's `Params`; lengths of x, y and bias were checked by `run_with`, the others
    // are those of the packed weight; blocks are within the limit, as `supports` has checked.
    unsafe { function.launch(stream, &Launch::linear(blocks as u32, THREADS), &[Arg::new(&params)]) }
}
