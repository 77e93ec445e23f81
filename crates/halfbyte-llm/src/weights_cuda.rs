//! From a checkpoint's tensors to products on a GPU, one at a time.

use crate::error::{Error, Result};
use crate::weights::{Loader, Shape, alike, below_each_other};
use halfbyte::cuda::driver::{Buffer, FloatView, Stream};
use halfbyte::cuda::matmul::{
    self, Call, Epilogue, Packed, Packer, QuantizedCall, QuantizedForm, QuantizedView, rows_form,
};
use halfbyte::cuda::nn::{self, Dense, DenseCall};
use halfbyte::cuda::sources::Instance;
use halfbyte::cuda::{Gpu, Workspace};
use halfbyte::kernel::{Activation, Problem};
use halfbyte::{Act, Float, Floats, StoredTensor};
use halfbyte_checkpoint::{StoredLinear, StoredWeight};
use std::collections::{BTreeMap, HashSet};

/// What weights are loaded with.
#[derive(Debug)]
pub(crate) struct Loading<'a> {
    pub(crate) gpu: &'a Gpu,
    pub(crate) stream: &'a Stream,
    /// Type of what products will read.
    pub(crate) activations: Float,
    pub(crate) packer: Packer<'a>,
}

impl Loading<'_> {
    /// A vector on the device.
    pub(crate) fn vector(&self, values: &[f32]) -> Result<Buffer<f32>> {
        let mut buffer = self.gpu.context().allocate(values.len())?;
        self.stream.upload(values, buffer.view_mut())?;
        Ok(buffer)
    }

    /// As [`Loader::joined`].
    pub(crate) fn joined(&mut self, weights: &mut Loader<'_>, layers: &[(String, Shape)]) -> Result<Projection> {
        weights.joined_by(layers, |loaded, act, prefix| self.pack(loaded, act, prefix))
    }

    /// Packs layers of the same k, as one product where they are stored alike. Errors name `prefix`.
    pub(crate) fn pack(&mut self, layers: &[StoredLinear<'_>], act: Act, prefix: &str) -> Result<Projection> {
        let parts = layers.chunk_by(alike).map(|alike| self.part(alike, act, prefix)).collect::<Result<_>>()?;
        Ok(Projection { parts })
    }

    fn part(&mut self, layers: &[StoredLinear<'_>], act: Act, prefix: &str) -> Result<Part> {
        let named = |source: halfbyte::Error| Error::Weight {
            name: prefix.to_owned(),
            expected: "weights that can be packed".to_owned(),
            got: source.to_string(),
        };
        let outputs = |layer: &StoredLinear<'_>| layer.weight.shape()[0];
        let [n, k]: [usize; 2] = [layers.iter().map(outputs).sum(), layers[0].weight.shape()[1]];
        let weight = match &layers[0].weight {
            StoredWeight::Quantized(_) => {
                let parts: Vec<&StoredTensor<'_>> = layers.iter().filter_map(codes).collect();
                match self.packer.pack(&parts, act, self.activations) {
                    Err(source @ halfbyte::Error::Invalid { .. }) => return Err(named(source)),
                    packed => Weight::Quantized(Box::new(packed?)),
                }
            }
            StoredWeight::Dense { floats, .. } => {
                let parts: Vec<Floats<'_>> = layers.iter().filter_map(dense).collect();
                let whole = match parts.as_slice() {
                    [single] => Dense::new(self.gpu, self.stream, *single, [n, k]),
                    several => {
                        let joined = below_each_other(several, floats.dtype());
                        Dense::new(self.gpu, self.stream, joined.as_floats(), [n, k])
                    }
                };
                Weight::Dense(whole?)
            }
        };
        let bias = match layers.iter().any(|layer| layer.bias.is_some()) {
            false => None,
            true => {
                let of = |layer: &StoredLinear<'_>| layer.bias.clone().unwrap_or_else(|| vec![0.0; outputs(layer)]);
                Some(self.vector(&layers.iter().flat_map(of).collect::<Vec<f32>>())?)
            }
        };
        Ok(Part { weight, bias })
    }
}

fn codes<'a, 'b>(layer: &'a StoredLinear<'b>) -> Option<&'a StoredTensor<'b>> {
    if let StoredWeight::Quantized(codes) = &layer.weight { Some(codes) } else { None }
}

fn dense<'a>(layer: &'a StoredLinear<'_>) -> Option<Floats<'a>> {
    if let StoredWeight::Dense { floats, .. } = &layer.weight { Some(floats.as_floats()) } else { None }
}

/// Linear layers on a GPU that read the same vector; their outputs lie side by side.
#[derive(Debug)]
pub(crate) struct Projection {
    /// More than one only where the checkpoint stores them in different formats.
    parts: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    weight: Weight,
    bias: Option<Buffer<f32>>,
}

#[derive(Debug)]
enum Weight {
    Quantized(Box<Packed>),
    Dense(Dense),
}

impl Part {
    fn n(&self) -> usize {
        match &self.weight {
            Weight::Quantized(packed) => packed.shape()[0],
            Weight::Dense(dense) => dense.shape()[0],
        }
    }
}

impl Projection {
    /// Bytes that the packed weights take on the device.
    pub(crate) fn bytes(&self) -> usize {
        let bytes = |part: &Part| match &part.weight {
            Weight::Quantized(packed) => packed.bytes(),
            Weight::Dense(dense) => dense.bytes(),
        };
        self.parts.iter().map(bytes).sum()
    }

    /// Its quantised weights.
    pub(crate) fn quantized(&self) -> impl Iterator<Item = &Packed> {
        self.parts.iter().filter_map(|part| match &part.weight {
            Weight::Quantized(packed) => Some(packed.as_ref()),
            Weight::Dense(_) => None,
        })
    }

    /// How m rows of x must lie as codes for it; None where any part of it does not read codes, or other ones than the rest.
    pub(crate) fn rows_form(&self, gpu: &Gpu, m: usize) -> Option<QuantizedForm> {
        let mut forms = self.parts.iter().map(|part| match &part.weight {
            Weight::Quantized(packed) => rows_form(&gpu.caps(), packed, m),
            Weight::Dense(_) => None,
        });
        let first = forms.next().flatten()?;
        forms.all(|form| form == Some(first)).then_some(first)
    }

    /// Outputs of the widest part, if there are several.
    pub(crate) fn widest_part(&self) -> usize {
        if self.parts.len() < 2 { 0 } else { self.parts.iter().map(Part::n).max().unwrap_or(0) }
    }
}

/// What kernels work in: for a single row, whose products are recorded and must find it where it was, and for several.
#[derive(Debug, Default)]
pub(crate) struct Workspaces {
    of_one: Option<Workspace>,
    of_many: Option<Workspace>,
}

impl Workspaces {
    /// Room that every product with a single row finds large enough.
    pub(crate) fn of<'a>(
        gpu: &Gpu,
        stream: &Stream,
        projections: impl Iterator<Item = &'a Projection>,
        x: Float,
    ) -> halfbyte::Result<Self> {
        let mut most = 0;
        for part in projections.flat_map(|projection| &projection.parts) {
            if let Weight::Quantized(packed) = &part.weight {
                most = most.max(needed(gpu, packed, x, 1)?);
            }
        }
        let of_one = if most > 0 { Some(Workspace::new(gpu, stream, most)?) } else { None };
        Ok(Self { of_one, of_many: None })
    }

    fn at_least(
        &mut self,
        gpu: &Gpu,
        stream: &Stream,
        m: usize,
        bytes: usize,
    ) -> halfbyte::Result<Option<&mut Workspace>> {
        if m == 1 || bytes == 0 {
            return Ok(self.of_one.as_mut());
        }
        if self.of_many.as_ref().is_none_or(|workspace| workspace.bytes() < bytes) {
            self.of_many = Some(Workspace::new(gpu, stream, bytes)?);
        }
        Ok(self.of_many.as_mut())
    }
}

/// Bytes that a product works in.
fn needed(gpu: &Gpu, packed: &Packed, x: Float, m: usize) -> halfbyte::Result<usize> {
    Ok(packed.plans(gpu, x, Float::F32)?.at(m, false)?.workspace_bytes())
}

fn problem(packed: &Packed, x: Float, m: usize) -> Problem {
    let [n, k] = packed.shape();
    Problem { format: Some(packed.format()), x, y: Float::F32, m, n, k }
}

/// The kernels that products of up to `most` rows with some weights are computed by.
pub(crate) fn instances<'a>(
    gpu: &Gpu,
    weights: impl Iterator<Item = &'a Packed>,
    x: Float,
    most: usize,
) -> halfbyte::Result<Vec<Instance>> {
    let mut shapes = HashSet::new();
    let mut instances = BTreeMap::new();
    for packed in weights.filter(|packed| shapes.insert((packed.format().to_string(), packed.shape()))) {
        let plans = packed.plans(gpu, x, Float::F32)?;
        let [fastest, _] = plans.explain();
        for plan in fastest.iter().filter(|plan| plan.rows()[0] <= most) {
            let m = plan.rows()[1].min(most);
            for instance in plan.configuration().instances(&problem(packed, x, m)) {
                instances.insert(instance.to_string(), instance);
            }
        }
    }
    Ok(instances.into_values().collect())
}

/// What a projection reads.
#[derive(Clone, Copy)]
pub(crate) enum Input<'a> {
    Floats(FloatView<'a>),
    /// Quantised before, once for all that read it.
    Codes(QuantizedView<'a>),
}

/// What products are made with.
pub(crate) struct Products<'a> {
    pub(crate) gpu: &'a Gpu,
    pub(crate) stream: &'a Stream,
    /// Room for the outputs of one part.
    pub(crate) part: &'a mut Buffer<f32>,
    pub(crate) workspaces: &'a mut Workspaces,
}

impl Products<'_> {
    /// Multiplies. Shapes: x `[m, k]`, y at least `[m, n]`.
    pub(crate) fn run(&mut self, of: &Projection, x: Input<'_>, m: usize, y: &mut Buffer<f32>) -> halfbyte::Result<()> {
        let Self { gpu, stream, .. } = *self;
        let n: usize = of.parts.iter().map(Part::n).sum();
        let mut first = 0;
        for part in &of.parts {
            let columns = first..first + part.n();
            first = columns.end;
            // A row's outputs lie side by side; kernels store 16 bytes at once.
            let in_place = of.parts.len() == 1 || (m == 1 && columns.start.is_multiple_of(4));
            let out = match in_place {
                true => y.view_mut().slice(columns.start..columns.start + m * columns.len()),
                false => self.part.view_mut().slice(0..m * columns.len()),
            };
            let bias = part.bias.as_ref().map(Buffer::view);
            let epilogue = Epilogue { bias, activation: Activation::None };
            let to = out.into();
            match (&part.weight, x) {
                (Weight::Dense(dense), Input::Floats(x)) => {
                    dense.forward(gpu, stream, DenseCall { x, m, bias, y: to })?
                }
                (Weight::Quantized(w), Input::Floats(x)) => {
                    let workspace = self.workspaces.at_least(gpu, stream, m, needed(gpu, w, x.dtype(), m)?)?;
                    let call = Call { x, m, w, epilogue, y: to, workspace, batch_invariant: false };
                    matmul::run(gpu, stream, call)?;
                }
                (Weight::Quantized(w), Input::Codes(x)) => {
                    let workspace = self.workspaces.at_least(gpu, stream, m, needed(gpu, w, Float::F32, m)?)?;
                    matmul::run_quantized(gpu, stream, QuantizedCall { x, w, epilogue, y: to, workspace })?;
                }
                (Weight::Dense(_), Input::Codes(_)) => {
                    let [expected, got] = ["floats for dense weights", "codes"].map(str::to_owned);
                    return Err(halfbyte::Error::Invalid { op: "projection", expected, got });
                }
            }
            if !in_place {
                let from = self.part.view().slice(0..m * columns.len());
                nn::columns(gpu, stream, from, y.view_mut().slice(0..m * n), n, columns)?;
            }
        }
        Ok(())
    }
}
