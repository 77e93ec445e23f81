//! The layers of a model, as `persistent_decode.cu` is told of them.

use super::kv_cache::KvCache;
use super::persistent_decode::OP;
use super::persistent_model::form;
use super::persistent_plan::{PRODUCTS, Plan, Sizes};
use super::rope::HeadNorms;
use super::{Gate, narrow, same_length};
use crate::checks::check_cap;
use crate::cuda::driver::{Buffer, FloatView, Stream, View};
use crate::cuda::matmul::{self, Call, Epilogue, Packed};
use crate::cuda::parameters::parameters;
use crate::cuda::{Gpu, Workspace};
use crate::error::{Error, Result};
use crate::layout::cuda_wna16::Atom;
use crate::tensor::Float;

parameters! {
    /// As in the source.
    #[derive(Debug)]
    struct Product {
        w: u64,
        bias: u64,
    }

    /// As in the source, where products are an array.
    #[derive(Debug)]
    pub(super) struct Layer {
        qkv: Product,
        output: Product,
        up: Product,
        down: Product,
        norms: [u64; 2],
        norm_biases: [u64; 2],
        norms_behind: [u64; 2],
        query_norm: u64,
        key_norm: u64,
        keys: u64,
        values: u64,
        w_of_values: u64,
        bias_of_values: u64,
        router: u64,
        eps: [f32; 2],
        eps_behind: [f32; 2],
        head_eps: f32,
        scale: f32,
        cap: f32,
        window: u32,
        rope: u32,
        forms: u32,
    }
}

/// A norm of the stream: an RMS norm, or a LayerNorm where it has a bias.
#[derive(Clone, Copy, Debug)]
pub struct StreamNorm<'a> {
    /// `[hidden]`.
    pub weight: View<'a, f32>,
    /// `[hidden]`.
    pub bias: Option<View<'a, f32>>,
    /// Added to the mean square.
    pub eps: f32,
}

impl StreamNorm<'_> {
    pub(super) fn bias(&self) -> u64 {
        self.bias.map_or(0, |bias| bias.pointer())
    }

    /// *Errors:* vectors of another length, a bias where the others have none or none where they have one.
    pub(super) fn fits(&self, hidden: usize, layer_norm: bool) -> Result<()> {
        same_length(OP, "a norm", Some(hidden), self.weight.len())?;
        same_length(
            OP,
            "a norm's bias",
            Some(if layer_norm { hidden } else { 0 }),
            self.bias.map_or(0, |bias| bias.len()),
        )
    }
}

/// A weight and its bias.
pub type StepProduct<'a> = (&'a Packed, Option<View<'a, f32>>);

/// The products of a layer's MLP.
#[derive(Debug)]
pub enum StepMlp<'a> {
    /// Weights and biases of gate and up, or of up alone; down.
    Dense([StepProduct<'a>; 2]),
    /// A mixture of experts.
    Experts(StepExperts<'a>),
}

impl<'a> StepMlp<'a> {
    pub(super) fn experts(&self) -> Option<&StepExperts<'a>> {
        if let Self::Experts(experts) = self { Some(experts) } else { None }
    }
}

/// A mixture of experts without biases.
#[derive(Debug)]
pub struct StepExperts<'a> {
    /// Of each expert gate and up, as [`Packer::pack_gated`](crate::cuda::matmul::Packer::pack_gated) leaves them; down.
    pub experts: Vec<[&'a Packed; 2]>,
    /// `[experts, hidden]`.
    pub router: FloatView<'a>,
    /// Experts of a token.
    pub top_k: usize,
    /// Whether their shares are a softmax of their logits alone, or of all.
    pub of_chosen: bool,
}

impl StepExperts<'_> {
    /// What the kernel would need.
    pub(super) fn unlike(&self, hidden: usize) -> Option<&'static str> {
        if self.router.len() != self.experts.len() * hidden {
            return Some("a router of all experts");
        }
        let gated = |[up, down]: &[&Packed; 2]| up.gate().is_some() && down.gate().is_none();
        (!self.experts.iter().all(gated)).then_some("experts whose gates and what they let through take turns")
    }
}

/// A layer of a model.
#[derive(Debug)]
pub struct StepLayer<'a> {
    /// Weights and biases of q, k and v; the output.
    pub products: [StepProduct<'a>; 2],
    /// What follows attention.
    pub mlp: StepMlp<'a>,
    /// What is between its products.
    pub gate: Gate,
    /// Those of v, where it is not in the first of them.
    pub values: Option<StepProduct<'a>>,
    /// Before attention, and before the MLP.
    pub norms: [StreamNorm<'a>; 2],
    /// Of what the output and the MLP give, before it is added to the stream, where the model has them.
    pub norms_behind: Option<[StreamNorm<'a>; 2]>,
    /// Norms of heads, where the model has them.
    pub head_norms: Option<HeadNorms<'a>>,
    /// Of each head, by how much a score falls with each position that lies between, `[heads]`; the same in all layers.
    pub alibi: Option<View<'a, f32>>,
    /// Which of the rotations of the step its heads have.
    pub rope: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// `c · tanh(score / c)` instead of a score; from 2⁻¹²⁶ to 2¹²⁵.
    pub cap: Option<f32>,
    /// Positions that a query sees at most.
    pub window: Option<usize>,
}

/// What the source is told of a product.
#[derive(Clone, Copy)]
struct OfProduct {
    atom: Atom,
    w: u64,
    bias: u64,
    rows: u64,
}

/// *Errors:* weights in another layout, a bias of another length.
fn of_product((w, bias): StepProduct<'_>) -> Result<OfProduct> {
    let Packed::Wna16(w) = w else {
        return Err(Error::invalid(OP, "weights in layout cuda_wna16", "others"));
    };
    if let Some(bias) = bias {
        same_length(OP, "a bias", Some(w.shape()[0]), bias.len())?;
    }
    Ok(OfProduct { atom: w.atom(), w: w.atoms(), bias: bias.map_or(0, |bias| bias.pointer()), rows: w.rows() })
}

/// The layers of a model, the same for all of its texts. It holds addresses of weights.
#[derive(Debug)]
pub struct PersistentLayers {
    plan: Plan,
    /// Without keys and values.
    table: Vec<Layer>,
    /// Where the scales of rows are, of each layer and product.
    scales: Buffer<u64>,
    /// Where weights of experts are, of each layer gate and up of all, then down.
    experts: Buffer<u64>,
    /// Where slopes of heads are, or 0.
    slopes: u64,
    /// Where the norm of the last addend is, or 0; what is added to its mean square.
    last_behind: (u64, f32),
    /// Of products behind norms whose biases are in theirs.
    biases: Vec<Buffer<f32>>,
}

impl PersistentLayers {
    /// The layers of a model. *Errors:* another number of layers than the plan has, vectors of a wrong length, memory that is short.
    pub fn new(gpu: &Gpu, stream: &Stream, plan: Plan, layers: &[StepLayer<'_>]) -> Result<Self> {
        let Sizes { hidden, heads, .. } = plan.sizes;
        same_length(OP, "layers", Some(plan.layers), layers.len())?;
        let context = gpu.context();
        let mut addresses = Vec::new();
        for experts in layers.iter().filter_map(|layer| layer.mlp.experts()) {
            for at in 0..2 {
                for weights in &experts.experts {
                    addresses.push(of_product((weights[at], None))?.w);
                }
            }
        }
        let mut experts = context.allocate(addresses.len())?;
        stream.upload(&addresses, experts.view_mut())?;
        let table_of = |layer: usize, at: usize| {
            let count = plan.mixture.map_or(0, |mixture| mixture.experts);
            experts.pointer() + (8 * count * (2 * layer + at)) as u64
        };
        let mut slopes: Option<Vec<f32>> = None;
        let mut table = Vec::with_capacity(layers.len());
        let mut scales = Vec::with_capacity(layers.len() * PRODUCTS);
        for (i, layer) in layers.iter().enumerate() {
            for norm in layer.norms.into_iter().chain(layer.norms_behind.into_iter().flatten()) {
                norm.fits(hidden, plan.steps_of_layer.layer_norm)?;
            }
            if let Some(of_heads) = layer.alibi {
                same_length(OP, "slopes", Some(heads.heads), of_heads.len())?;
                let mut values = vec![0.0; heads.heads];
                stream.download(of_heads, &mut values)?;
                if *slopes.get_or_insert_with(|| values.clone()) != values {
                    return Err(Error::invalid(OP, "the same slopes in all layers", "others"));
                }
            }
            layer.cap.map_or(Ok(()), |cap| check_cap(OP, cap))?;
            for weight in layer.head_norms.iter().flat_map(|norms| [norms.queries, norms.keys]) {
                same_length(OP, "a norm of heads", Some(heads.head_size), weight.len())?;
            }
            let [qkv, output] = [of_product(layer.products[0])?, of_product(layer.products[1])?];
            let [up, down] = match &layer.mlp {
                StepMlp::Dense(products) => [of_product(products[0])?, of_product(products[1])?],
                StepMlp::Experts(_) => [0, 1].map(|at| OfProduct { w: table_of(i, at), ..qkv }),
            };
            // Of q, k and v in one tensor the rows of v begin where their atoms do.
            let values = match layer.values {
                None => {
                    let bytes_before = plan.bytes_before_values(qkv.atom) as u64;
                    OfProduct { w: qkv.w + bytes_before, ..qkv }
                }
                Some(values) => {
                    let values = of_product(values)?;
                    if (values.bias == 0) != (qkv.bias == 0) {
                        return Err(Error::invalid(OP, "biases of q, k and v, or none", "of some"));
                    }
                    OfProduct { bias: plan.before_values(values.bias), ..values }
                }
            };
            let products = [qkv, output, up, down];
            scales.extend(products.map(|product| product.rows));
            let forms = products.iter().chain([&values]).enumerate();
            let forms = forms.fold(0, |forms, (at, product)| forms | form(product.atom).unwrap_or(0) << (4 * at));
            let [qkv, output, up, down] = products.map(|OfProduct { w, bias, .. }| Product { w, bias });
            let norms = layer.head_norms;
            // Of both streams, what was added last; nothing was to the first layer's.
            let before = i.checked_sub(1).and_then(|before| layers.get(before)).unwrap_or(layer);
            let behind = layer.norms_behind.zip(before.norms_behind).map(|(own, before)| [before[1], own[0]]);
            table.push(Layer {
                qkv,
                output,
                up,
                down,
                norms: layer.norms.map(|norm| norm.weight.pointer()),
                norm_biases: layer.norms.map(|norm| norm.bias()),
                norms_behind: behind.map_or([0; 2], |norms| norms.map(|norm| norm.weight.pointer())),
                query_norm: norms.map_or(0, |norms| norms.queries.pointer()),
                key_norm: norms.map_or(0, |norms| norms.keys.pointer()),
                keys: 0,
                values: 0,
                w_of_values: values.w,
                bias_of_values: values.bias,
                router: layer.mlp.experts().map_or(0, |experts| experts.router.pointer()),
                eps: layer.norms.map(|norm| norm.eps),
                eps_behind: behind.map_or([0.0; 2], |norms| norms.map(|norm| norm.eps)),
                head_eps: norms.map_or(0.0, |norms| norms.eps),
                scale: layer.scale,
                cap: layer.cap.unwrap_or(0.0),
                rope: narrow(OP, "rotations", layer.rope)?,
                // No text is longer than positions have bits for.
                window: layer.window.map_or(0, |window| u32::try_from(window).unwrap_or(u32::MAX)),
                forms,
            });
        }
        let mut of_rows = context.allocate(scales.len())?;
        stream.upload(&scales, of_rows.view_mut())?;
        let slopes = layers.first().and_then(|layer| layer.alibi).map_or(0, |slopes| slopes.pointer());
        let mut biases = Vec::new();
        if plan.has_mean_of_sums() {
            for (of, layer) in table.iter_mut().zip(layers) {
                fold_biases(gpu, stream, &plan, (of, layer), &mut biases)?;
            }
            stream.synchronize()?;
        }
        let last_behind = layers.last().and_then(|layer| layer.norms_behind);
        let last_behind = last_behind.map_or((0, 0.0), |[_, norm]| (norm.weight.pointer(), norm.eps));
        Ok(Self { plan, table, scales: of_rows, experts, slopes, last_behind, biases })
    }

    /// What they are computed by.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Bytes that it takes on the device.
    pub fn bytes(&self) -> usize {
        self.scales.bytes() + self.experts.bytes() + self.biases.iter().map(Buffer::bytes).sum::<usize>()
    }

    /// With the keys and values of a cache. *Errors:* a cache of fewer layers.
    pub(super) fn table(&self, cache: &KvCache) -> Result<Vec<Layer>> {
        let with_cache = |(i, of): (usize, &Layer)| {
            let [keys, values] = cache.layer(OP, i)?.map(|of_layer| of_layer.pointer());
            Ok(Layer { keys, values, ..*of })
        };
        self.table.iter().enumerate().map(with_cache).collect()
    }

    pub(super) fn scales(&self) -> u64 {
        self.scales.pointer()
    }

    pub(super) fn slopes(&self) -> u64 {
        self.slopes
    }

    pub(super) fn last_behind(&self) -> (u64, f32) {
        self.last_behind
    }
}

/// Puts what norms add, times the weights, into the biases of the products behind them.
fn fold_biases(
    gpu: &Gpu,
    stream: &Stream,
    plan: &Plan,
    (of, layer): (&mut Layer, &StepLayer<'_>),
    biases: &mut Vec<Buffer<f32>>,
) -> Result<()> {
    let mut fold = |(w, bias): StepProduct<'_>, norm: &StreamNorm<'_>| {
        let Some(x) = norm.bias else { return Err(Error::invalid(OP, "norms with biases", "one without")) };
        let mut y = gpu.context().allocate(w.shape()[0])?;
        let bytes = w.plans(gpu, Float::F32, Float::F32)?.workspace_bytes(1);
        let mut workspace = (bytes > 0).then(|| Workspace::new(gpu, stream, bytes)).transpose()?;
        let call = Call {
            x: x.into(),
            m: 1,
            w,
            epilogue: Epilogue { bias, ..Epilogue::default() },
            y: y.view_mut().into(),
            workspace: workspace.as_mut(),
            batch_invariant: false,
        };
        matmul::run(gpu, stream, call)?;
        let at = y.pointer();
        biases.push(y);
        if workspace.is_some() {
            stream.synchronize()?;
        }
        Ok(at)
    };
    of.qkv.bias = fold(layer.products[0], &layer.norms[0])?;
    if let Some(values) = layer.values {
        of.bias_of_values = plan.before_values(fold(values, &layer.norms[0])?);
    }
    if let StepMlp::Dense([up, _]) = &layer.mlp {
        of.up.bias = fold(*up, &layer.norms[1])?;
    }
    of.norm_biases = [0; 2];
    Ok(())
}
