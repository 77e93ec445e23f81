//! Models on a GPU: the same decoder, the same numbers but for the type of what products read.

mod ahead;
mod experts;
mod kernels;
mod loading;
mod next;
mod persistent;
mod profile;
mod projection;
mod ranks;
mod recording;
mod run;
mod text;
mod texts;
mod vocabulary;

use super::{Gpu as Device, LoadTimes, Resident, Room, Text, Texts};
use crate::arch::Spec;
use crate::arch::spec::{MlpKind, NormKind};
use crate::comm::Comm;
use crate::decoder::{Decoder, Experts, Layer, Mlp, ModelDevice, Slot};
use crate::device::rope::Rope;
use crate::error::{Error, Result};
use crate::explain::{self, PlanOfRows, Product};
use crate::load::Loader;
use crate::shard::Shard;
use halfbyte::cpu::Cpu;
use halfbyte::cuda::driver::Buffer;
use halfbyte::cuda::matmul::{Plan, QuantizedForm};
use halfbyte::cuda::nn::{self, ExpertLayer, PersistentLayers};
use halfbyte::kernel::{KvType, Reason};
use halfbyte::{Cuda, Float};
use kernels::Kernels;
use loading::{Lanes, Loading};
use projection::Projection;
use run::Run;
use std::sync::Arc;
use std::time::Instant;
use text::CudaText;
use texts::CudaTexts;
use vocabulary::Vocabulary;

const OP: &str = "load a model onto a GPU";

/// Tokens of one text that go through the layers together.
const PREFILL_TOKENS: usize = 2048;

/// A GPU, as the decoder knows it.
#[derive(Debug)]
pub(crate) struct OnCuda;

impl ModelDevice for OnCuda {
    type Projection = Projection;
    type Vector = Buffer<f32>;
    type Rope = Rope<nn::Rope>;
    type Vocabulary = Vocabulary;
    type Run<'m> = Run<'m>;
}

/// A model on a GPU.
#[derive(Debug)]
pub(crate) struct CudaModel {
    /// The queue that weights came by.
    cuda: Cuda,
    /// Those that the model is shared with.
    comm: Arc<dyn Comm>,
    activations: Float,
    /// Of keys and values.
    kv: KvType,
    /// Whether norms quantise what only products with quantised activations read.
    fused: bool,
    /// For layers without rotary positions: it rotates nothing.
    no_rope: nn::Rope,
    decoder: Decoder<OnCuda>,
    /// What all layers of a step of one token are computed by; or what that would need, where they go kernel by kernel.
    persistent: std::result::Result<Arc<PersistentLayers>, Reason>,
    /// Of each mixture, in order, all experts together; None: they are multiplied one by one.
    expert_layers: Vec<Option<ExpertLayer>>,
    times: LoadTimes,
}

impl CudaModel {
    /// Packs this rank's part of the weights onto a GPU. Errors: those of [`Decoder::load`], a recipe that GPUs do not compute.
    pub fn load(
        spec: &Spec,
        loader: &mut Loader<'_>,
        device: &Device,
        comm: Arc<dyn Comm>,
        kv: KvType,
    ) -> Result<Self> {
        let shard = Shard::of(comm.as_ref());
        if !spec.hidden.is_multiple_of(4)
            && spec.layers.iter().any(|layer| matches!(layer.mlp.kind, MlpKind::Experts(_)))
        {
            let expected = "experts of vectors of a multiple of 4 elements";
            return Err(Error::invalid(OP, expected, spec.hidden.to_string()));
        }
        let Device { gpu, activations, fused, persistent } = device.clone();
        let stream = gpu.stream()?;
        let cuda = Cuda::new(gpu, stream)?;
        let begun = Instant::now();
        let (kernels, lanes) = (Kernels::default(), Lanes::new(&cuda)?);
        let mut of_any_model = nn::instances(cuda.gpu().caps().arch, Some(spec.heads.head_size), &[kv]);
        of_any_model.extend(nn::instances_of_attention(cuda.gpu().caps().arch, spec.heads.head_size, kv, false));
        let (decoder, kernels) = std::thread::scope(|scope| {
            let load = || kernels.load(cuda.gpu(), &of_any_model);
            let loaded = std::thread::Builder::new().spawn_scoped(scope, load).ok();
            let end = kernels.until_dropped();
            let decoder = Decoder::load(spec, loader, &mut Loading::new(&cuda, activations, &lanes, &kernels), shard);
            drop(end);
            (decoder, loaded.and_then(|thread| thread.join().ok()).unwrap_or_default())
        });
        let decoder = decoder?;
        let no_rope = nn::Rope::new(cuda.gpu(), cuda.stream(), &[])?;
        cuda.synchronize()?;
        let caps = cuda.gpu().caps();
        let mut persistent = match persistent {
            false => Err(Reason("a device that allows it".into())),
            true if kv != activations.into() => Err(Reason(format!("keys and values in {activations}, not {kv}"))),
            true => persistent::plan(&caps, &decoder, activations, comm.size()),
        };
        if comm.size() > 1 {
            // All of them, or none; and none where ranks have parts of different sizes.
            let places =
                persistent.as_ref().ok().map(|plan| plan.places().map(|place| place as u64)).unwrap_or_default();
            let own: &[u8] = bytemuck::cast_slice(&places);
            let all = comm.all_gather_bytes(own)?;
            if persistent.is_ok() && all.iter().any(|places| places != own) {
                persistent = Err(Reason("parts of one size on all ranks".into()));
            }
        }
        let persistent = match persistent {
            Ok(plan) => Ok(persistent::layers(&cuda, &decoder, plan)?),
            Err(why) => Err(why),
        };
        let times = LoadTimes { weights: begun.elapsed(), kernels, lanes: lanes.count(), sent: lanes.sent() };
        let expert_layers = experts::layers(&cuda, &decoder, activations)?;
        // What products are computed by is decided here, and not by the first token.
        for projection in decoder.projections().chain(&decoder.vocabulary.head) {
            projection.plans(&cuda, activations)?;
        }
        Ok(Self { cuda, comm, activations, kv, fused, no_rope, decoder, persistent, expert_layers, times })
    }

    /// Another queue on its GPU.
    fn queue(&self) -> Result<Cuda> {
        Ok(Cuda::new(self.cuda.gpu().clone(), self.cuda.gpu().stream()?)?)
    }

    fn projections(&self) -> impl Iterator<Item = &Projection> {
        self.decoder.projections().chain(self.decoder.vocabulary.product())
    }

    /// How m rows lie that are quantised where they are made, before a projection reads them; None where it reads floats. Attention leaves
    /// floats, and so do products that activate what they leave, and activations where a row has one scale: one kernel for both makes all
    /// results twice.
    fn form_of_rows(&self, projection: &Projection, from: Slot, m: usize) -> Option<QuantizedForm> {
        let form = self.fused.then(|| projection.rows_form(&self.cuda, m)).flatten()?;
        match from {
            Slot::Attended => None,
            Slot::Inner if form.is_long() || self.is_behind_activated(projection) => None,
            _ => Some(form),
        }
    }

    /// Whether a projection reads what a product leaves that activates it.
    fn is_behind_activated(&self, projection: &Projection) -> bool {
        let mut mlps = self.decoder.layers.iter().filter_map(dense_mlp);
        mlps.any(|mlp| std::ptr::eq(&mlp.down, projection) && mlp.up.activated_outputs().is_some())
    }

    /// Every form of rows that norms and activations leave.
    fn forms_of_rows(&self, m: usize) -> Vec<QuantizedForm> {
        let mut forms = Vec::new();
        for layer in &self.decoder.layers {
            let of_mlp = dense_mlp(layer).map(|mlp| [(&mlp.up, Slot::Normed), (&mlp.down, Slot::Inner)]);
            for (projection, from) in
                [(&layer.attention.qkv, Slot::Normed)].into_iter().chain(of_mlp.into_iter().flatten())
            {
                forms.extend(self.form_of_rows(projection, from, m).filter(|form| !forms.contains(form)));
            }
        }
        forms
    }

    /// Whether it has steps that Llama does not have.
    fn has_more_steps(&self) -> bool {
        let Decoder { embedding_norm, layers, norm, .. } = &self.decoder;
        let has_more = |layer: &Layer<OnCuda>| layer.attention.alibi.is_some() || matches!(layer.mlp, Mlp::Experts(_));
        let other_norms = embedding_norm.is_some() || norm.kind != NormKind::Rms;
        other_norms || layers.iter().any(has_more) || persistent::lacks(&self.decoder).is_some()
    }

    /// What computes one row of all layers, if they go through one kernel.
    fn plan_of_one_row(&self) -> Option<PlanOfRows> {
        self.persistent.as_ref().ok().map(|layers| PlanOfRows {
            rows: [1, 1],
            kernel: "persistent_decode",
            configuration: layers.plan().describe(),
            workspace_bytes: 0,
        })
    }

    /// The longest vector inside an MLP.
    fn inner(&self) -> usize {
        let of_layer = |layer: &Layer<OnCuda>| match &layer.mlp {
            Mlp::Dense(mlp) => mlp.inner,
            Mlp::Experts(experts) => experts.experts.iter().map(|mlp| mlp.inner).max().unwrap_or(0),
        };
        self.decoder.layers.iter().map(of_layer).max().unwrap_or(0)
    }

    /// The longest vector that a product leaves for a kernel that gates or activates it.
    fn not_activated(&self) -> usize {
        let mlps = self.decoder.layers.iter().flat_map(|layer| match &layer.mlp {
            Mlp::Dense(mlp) => std::slice::from_ref(mlp),
            Mlp::Experts(experts) => &experts.experts,
        });
        mlps.map(|mlp| &mlp.up).filter(|up| up.activated_outputs().is_none()).map(Projection::n).max().unwrap_or(0)
    }

    /// Its mixtures of experts.
    fn mixtures(&self) -> impl Iterator<Item = &Experts<OnCuda>> {
        self.decoder.layers.iter().filter_map(|layer| match &layer.mlp {
            Mlp::Dense(_) => None,
            Mlp::Experts(experts) => Some(experts),
        })
    }
}

fn dense_mlp(layer: &Layer<OnCuda>) -> Option<&crate::decoder::FeedForward<OnCuda>> {
    if let Mlp::Dense(mlp) = &layer.mlp { Some(mlp) } else { None }
}

impl Resident for CudaModel {
    fn begin<'m>(&'m self, _: &'m Cpu, context: usize) -> Result<Box<dyn Text + 'm>> {
        let text = || CudaText::new(self, self.queue()?, context, context.clamp(1, PREFILL_TOKENS));
        Ok(Box::new(ranks::together(&*self.comm, text(), CudaText::meet)?))
    }

    fn prefill_tokens(&self) -> usize {
        PREFILL_TOKENS
    }

    fn begin_many<'m>(&'m self, _: &'m Cpu, room: Room) -> Result<Box<dyn Texts + 'm>> {
        let texts = || CudaTexts::new(self, self.queue()?, room);
        Ok(Box::new(ranks::together(&*self.comm, texts(), CudaTexts::meet)?))
    }

    fn prepare(&self, progress: &(dyn Fn(usize, usize) + Sync)) -> Result<()> {
        let (head_size, caps) = (self.decoder.heads.head_size, self.cuda.gpu().caps());
        let mut instances = nn::instances(caps.arch, Some(head_size), &[self.kv]);
        // Layers may differ in what changes scores.
        let of_attention = |changed| nn::instances_of_attention(caps.arch, head_size, self.kv, changed);
        instances.extend(of_attention(false));
        instances.extend(self.forms_of_rows(PREFILL_TOKENS).into_iter().flat_map(nn::quantized_instances));
        instances.extend(projection::instances(&self.cuda, self.projections(), self.activations, PREFILL_TOKENS)?);
        instances.extend(run::folded::instances(self)?);
        if self.has_more_steps() {
            instances.extend(nn::instances_of_some_models(caps.arch, Some(head_size), &[self.kv]));
            instances.extend(of_attention(true));
        }
        instances.push(self.decoder.vocabulary.embedding.instance()?);
        instances.extend(self.persistent.iter().map(|layers| layers.plan().instance()));
        instances.extend(self.instances_of_experts());
        if self.comm.size() > 1 {
            instances.extend(nn::instances_of_ranks());
        }
        Ok(self.cuda.gpu().prepare(&instances, |done| progress(done, instances.len()))?)
    }

    fn explain(&self, _: &Cpu) -> Result<Vec<Product>> {
        let mut products = Vec::new();
        let of_layers: Vec<&Projection> = self.decoder.projections().collect();
        let together = self.explain_experts(&mut products);
        for projection in self.projections().filter(|&projection| !together.contains(&std::ptr::from_ref(projection))) {
            // One row of all layers goes through one kernel.
            let is_of_layer = of_layers.iter().any(|&known| std::ptr::eq(known, projection));
            let one_row = self.plan_of_one_row().filter(|_| is_of_layer);
            // Rows that are quantised where they are made come as the codes of floats in f32.
            let codes = self.form_of_rows(projection, Slot::Normed, 1).is_some();
            let x = if codes { Float::F32 } else { self.activations };
            for (problem, plans) in projection.plans(&self.cuda, x)? {
                let [fastest, _] = plans.explain();
                let of_rows = |plan: &Plan| PlanOfRows {
                    rows: plan.rows(),
                    kernel: plan.kernel().name,
                    configuration: plan.configuration().to_string(),
                    workspace_bytes: plan.workspace_bytes(),
                };
                let mut of_product: Vec<PlanOfRows> = fastest.iter().map(of_rows).collect();
                if let (Some(one_row), Some(first)) = (&one_row, of_product.first_mut()) {
                    first.rows[0] = 2;
                    of_product.retain(|plan| plan.rows[0] <= plan.rows[1]);
                    of_product.insert(0, one_row.clone());
                }
                explain::add(&mut products, problem, of_product);
            }
        }
        Ok(products)
    }

    fn one_kernel_needs(&self) -> Option<&Reason> {
        self.persistent.as_ref().err()
    }

    fn load_times(&self) -> Option<LoadTimes> {
        Some(self.times)
    }

    fn bytes(&self) -> usize {
        let norms: usize = self
            .decoder
            .norms()
            .flat_map(|norm| [Some(&norm.weight), norm.bias.as_ref()])
            .flatten()
            .map(Buffer::bytes)
            .sum();
        let products: usize = self.decoder.projections().map(Projection::bytes).sum();
        norms + products + self.decoder.vocabulary.bytes()
    }

    fn bytes_of_step(&self, tokens: usize) -> usize {
        self.bytes()
            - self.decoder.vocabulary.bytes_not_read(tokens)
            - self.decoder.idle_bytes(tokens, Projection::bytes)
    }

    fn kv_bytes_per_token(&self) -> usize {
        let Decoder { layers, heads, .. } = &self.decoder;
        2 * layers.len() * heads.kv_heads * self.kv.bytes(heads.head_size)
    }
}
