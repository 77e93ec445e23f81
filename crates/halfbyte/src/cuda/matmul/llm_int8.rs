//! LLM.int8() on a device, as [`LlmInt8Linear`](crate::ops::LlmInt8Linear) has it: launches of `llm_int8.cu` round a product of
//! quantised rows.
//!
//! The host waits for nothing: which columns are outliers, and how many, stays on the device. The product has the scale 1 for
//! every row and output, so that its sums in f32 are those of integers: exact up to 2²⁴.

use super::quantize_activations::{Form, Target};
use super::quantized_rows::{QuantizedCall, QuantizedView, rows_form, run_quantized};
use super::staged::aligned;
use super::{Epilogue, Packed, pack};
use crate::cuda::driver::{Buffer, FloatView, FloatViewMut, Launch, Stream, View};
use crate::cuda::parameters::{Parameters, float_type, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::cuda::{Gpu, Workspace};
use crate::error::{Error, Result};
use crate::format::{Act, Group, QTensor, WeightFormat, Zero, Zeros};
use crate::tensor::Float;

static SOURCE: Source =
    Source { path: "matmul/llm_int8.cu", text: include_str!("llm_int8.cu"), parameters: &[Params::LAYOUT] };

const OP: &str = "llm.int8 linear";

/// As in the source: threads of a block, and rows of a thread that looks for outliers, and of one that adds them.
const THREADS: usize = 256;
const LISTING: u32 = 1024;
const ROWS: usize = 16;
const PIECE: usize = 4;

const KERNELS: [&str; 4] = ["outlier_columns", "list_outliers", "quantize_outside", "add_outliers"];

parameters! {
    /// As in the source.
    struct Params {
        x: u64,
        columns: u64,
        scales: u64,
        bias: u64,
        sums: u64,
        y: u64,
        flags: u64,
        outliers: u64,
        ranges: u64,
        to: Target,
        n: u64,
        threshold: f32,
        x_type: u32,
        y_type: u32,
        unused: u32,
    }
}

pub(super) fn instances() -> Vec<Instance> {
    KERNELS.map(instance).into()
}

fn instance(name: &str) -> Instance {
    Instance::new(&SOURCE, name)
}

/// A weight in signed bytes with a scale an output, on a device.
#[derive(Debug)]
pub struct LlmInt8 {
    packed: Packed,
    /// `[k, n]`: those of an outlier column are neighbours.
    columns: Buffer<i8>,
    scales: Buffer<f32>,
    bias: Option<Buffer<f32>>,
}

/// One product.
#[derive(Debug)]
pub struct LlmInt8Call<'a> {
    /// Activations `[m, k]`.
    pub x: FloatView<'a>,
    /// Rows of x.
    pub m: usize,
    /// Beyond which |x| is an outlier, rounded to the type of x.
    pub threshold: f32,
    /// Output `[m, n]`.
    pub y: FloatViewMut<'a>,
    /// Of at least [`LlmInt8::workspace_bytes`].
    pub workspace: Option<&'a mut Workspace>,
}

/// Where what is between the kernels lies, behind the workspace of the product: bytes from there on.
struct Room {
    sums: usize,
    codes: usize,
    terms: usize,
    ranges: usize,
    flags: usize,
    outliers: usize,
    end: usize,
}

impl Room {
    fn new(form: Form, n: usize) -> Option<Self> {
        let mut end = 0usize;
        let mut next = |bytes: Option<usize>| {
            let at = end;
            end = end.checked_add(bytes?.checked_next_multiple_of(256)?)?;
            Some(at)
        };
        let floats = |count: usize| count.checked_mul(4);
        let sums = next(form.m.checked_mul(n).and_then(floats))?;
        let codes = next(form.m.checked_mul(form.pitch()))?;
        let [terms, ranges] = [next(Some(form.terms_bytes()))?, next(floats(form.m))?];
        let [flags, outliers] = [next(floats(form.k))?, next(floats(form.k + 1))?];
        Some(Self { sums, codes, terms, ranges, flags, outliers, end })
    }
}

impl LlmInt8 {
    /// Puts codes `[n, k]` with scales `[n]` on the device.
    ///
    /// *Errors:* a length that does not fit, a processor before sm_75, no column or more than 65536, memory that is short.
    pub fn new(gpu: &Gpu, stream: &Stream, codes: &[i8], [n, k]: [usize; 2], scales: &[f32]) -> Result<Self> {
        if scales.len() != n || n.checked_mul(k) != Some(codes.len()) {
            let expected = format!("{n} × {k} codes and {n} scales");
            return Err(Error::invalid(OP, expected, format!("{} and {}", codes.len(), scales.len())));
        }
        let format = WeightFormat {
            bits: 8,
            group: Group::Channel,
            zero: Zero::Symmetric,
            scale: Float::F16,
            channel_scale: None,
        };
        let unsigned = codes.iter().map(|&code| code as u8 ^ 0x80).collect();
        let weight = QTensor::new(format, [n, k], unsigned, vec![1.0; n], Zeros::Symmetric, None)?;
        let packed = pack(gpu, stream, &weight, Act::A8, Float::F16)?;
        if rows_form(&gpu.caps(), &packed, 1).is_none() {
            let got = format!("a weight of {n} × {k} on sm_{}", gpu.caps().arch.number);
            return Err(Error::invalid(OP, "1 to 65536 columns and a processor from sm_75 on", got));
        }
        let mut columns = vec![0i8; codes.len()];
        for (i, row) in codes.chunks_exact(k).enumerate() {
            row.iter().enumerate().for_each(|(j, &code)| columns[j * n + i] = code);
        }
        let bias = None;
        Ok(Self { packed, columns: upload(gpu, stream, &columns)?, scales: upload(gpu, stream, scales)?, bias })
    }

    /// Sets what is added to every row, `[n]`. *Errors:* another length, memory that is short.
    pub fn set_bias(&mut self, gpu: &Gpu, stream: &Stream, bias: &[f32]) -> Result<()> {
        let [n, _] = self.packed.shape();
        if bias.len() != n {
            return Err(Error::invalid(OP, format!("a bias of {n}"), bias.len().to_string()));
        }
        self.bias = Some(upload(gpu, stream, bias)?);
        Ok(())
    }

    /// Bytes that the weight takes: it lies there twice.
    pub fn bytes(&self) -> usize {
        self.packed.bytes() + self.columns.bytes()
    }

    /// How rows lie as codes.
    fn form(&self, gpu: &Gpu, m: usize) -> Result<Form> {
        let form = rows_form(&gpu.caps(), &self.packed, m);
        form.ok_or_else(|| Error::invalid(OP, "a number of rows that products take", m.to_string()))
    }

    /// Bytes before the [`Room`], which are the product's workspace, and all with it.
    fn workspace(&self, gpu: &Gpu, m: usize) -> Result<(usize, Room, usize)> {
        let [n, _] = self.packed.shape();
        let plan = self.packed.plans(gpu, Float::F32, Float::F32)?.at(m, false)?.workspace_bytes();
        let product = aligned(plan.max(Workspace::COUNTER_BYTES));
        let room = Room::new(self.form(gpu, m)?, n);
        let all = room.and_then(|room| Some((product.checked_add(room.end)?, room)));
        let (bytes, room) = all.ok_or_else(|| Error::invalid(OP, "rows that fit memory", format!("{m} of {n}")))?;
        Ok((product, room, bytes))
    }

    /// Bytes of workspace for m rows. *Errors:* rows that no memory holds, or no kernel takes.
    pub fn workspace_bytes(&self, gpu: &Gpu, m: usize) -> Result<usize> {
        self.workspace(gpu, m.max(1)).map(|(_, _, bytes)| bytes)
    }

    /// Puts a product into a stream.
    ///
    /// *Accuracy:* as [`LlmInt8Linear::forward`](crate::ops::LlmInt8Linear::forward) says. *Errors:* a length that does not fit, a
    /// workspace that is too small, a kernel that cannot be compiled.
    pub fn run(&self, gpu: &Gpu, stream: &Stream, call: LlmInt8Call<'_>) -> Result<()> {
        let LlmInt8Call { x, m, threshold, y, workspace } = call;
        let [n, k] = self.packed.shape();
        if m.checked_mul(k) != Some(x.len()) || m.checked_mul(n) != Some(y.len()) {
            let expected = format!("x of {m} × {k} and y of {m} × {n}");
            return Err(Error::invalid(OP, expected, format!("{} and {} elements", x.len(), y.len())));
        }
        if y.is_empty() {
            return Ok(());
        }
        let (form, (product, room, bytes)) = (self.form(gpu, m)?, self.workspace(gpu, m)?);
        let given = workspace.as_ref().map_or(0, |workspace| workspace.bytes());
        let Some(workspace) = workspace.filter(|_| given >= bytes) else {
            return Err(Error::invalid(OP, format!("a workspace of {bytes} bytes"), given.to_string()));
        };
        let (mut of_product, rest) = workspace.split_at_mut(product);
        let (sums, mut rest) = rest.slice(0..room.end).split_at(room.codes);
        let sums = sums.slice(room.sums..room.sums + 4 * m * n);
        let part = |at: usize| rest.pointer() + (at - room.codes) as u64;
        let params = Params {
            x: x.pointer(),
            columns: self.columns.pointer(),
            scales: self.scales.pointer(),
            bias: self.bias.as_ref().map_or(0, Buffer::pointer),
            sums: sums.pointer(),
            y: y.pointer(),
            flags: part(room.flags),
            outliers: part(room.outliers),
            ranges: part(room.ranges),
            to: Target::new(form, [part(room.codes), part(room.terms)]),
            n: n as u64,
            threshold,
            x_type: float_type(x.dtype()),
            y_type: float_type(y.dtype()),
            unused: 0,
        };
        let place = |at: usize, bytes: usize| at - room.codes..at - room.codes + bytes;
        let [flags, codes, terms] =
            [place(room.flags, 4 * k), place(room.codes, form.codes_bytes()), place(room.terms, form.terms_bytes())];
        stream.fill(rest.reborrow().slice(flags), 0)?;
        launch(gpu, stream, 0, k * m.div_ceil(ROWS), &params)?;
        let listing = Launch::linear(1, LISTING);
        gpu.function_once((OP, [1, 0]), || instance(KERNELS[1]))?.launch_typed(stream, &listing, &params, &[])?;
        launch(gpu, stream, 2, m * THREADS, &params)?;
        let (codes, terms): (View<'_, u8>, View<'_, f32>) = (rest.view().slice(codes), rest.view().slice(terms).cast());
        let rows = QuantizedView { form, codes, terms };
        let (epilogue, y) = (Epilogue::default(), sums.cast::<f32>().into());
        let call = QuantizedCall { x: rows, w: &self.packed, epilogue, y, workspace: Some(of_product.get()) };
        run_quantized(gpu, stream, call)?;
        launch(gpu, stream, 3, n * m.div_ceil(PIECE), &params)
    }
}

/// A kernel of so many threads.
fn launch(gpu: &Gpu, stream: &Stream, kernel: usize, threads: usize, params: &Params) -> Result<()> {
    let blocks = threads.div_ceil(THREADS);
    let blocks = i32::try_from(blocks).map_err(|_| Error::invalid(OP, "fewer than 2³¹ blocks", blocks.to_string()))?;
    let function = gpu.function_once((OP, [kernel as u32, 0]), || instance(KERNELS[kernel]))?;
    function.launch_typed(stream, &Launch::linear(blocks as u32, THREADS as u32), params, &[])
}

fn upload<T: bytemuck::Pod>(gpu: &Gpu, stream: &Stream, values: &[T]) -> Result<Buffer<T>> {
    let mut buffer = gpu.context().allocate(values.len())?;
    stream.upload(values, buffer.view_mut())?;
    Ok(buffer)
}
