//! The block that is being quantised: its weights as floats and as they run, and the factors folded into them.

use super::activations::ActivationError;
use super::block::{self, Block};
use super::inputs::{DriftOf, Inputs};
use super::method::{Layers, Method, Needs};
use super::outcomes::quantized;
use super::report::reports;
use super::{Job, work};
use crate::arch::spec::{Fold, LinearGroup};
use crate::device::cpu::Projection;
use crate::error::{Error, Result};
use crate::load::{LoadOptions, Loader};
use crate::shard::{self, Shard};
use halfbyte::cpu::Cpu;
use halfbyte::ops::{Linear, Weight};
use halfbyte::{Act, Floats, FloatsMut, QTensor, WeightFormat};
use halfbyte_checkpoint::{Cut, FloatData, StoredLinear, StoredWeight, Weights};
use std::borrow::Cow;
use std::ops::{ControlFlow, Range};

const OP: &str = "calibration";

/// The residual streams of all calibration text, `[windows · window, hidden]`.
#[derive(Debug)]
pub(super) struct Streams {
    /// Elements of a token's vector.
    pub hidden: usize,
    /// Elements of a window.
    pub window: usize,
    /// Through the quantised model.
    pub quantized: Vec<f32>,
    /// Through the dense model, where a method wants to compare.
    pub dense: Option<Vec<f32>>,
}

/// Told how many windows are done; may fail with [`Error::Cancelled`].
pub(super) type OnWindow<'a> = dyn FnMut(usize) -> Result<()> + 'a;

/// A block on its way from floats to codes.
#[derive(Debug)]
pub(super) struct Piece<'a> {
    source: &'a Weights,
    cpu: &'a Cpu,
    pub groups: Vec<LinearGroup>,
    /// How the block runs rows of the first group, which files may have head by head: queries, then keys, then values.
    qkv: Vec<Cut>,
    /// As it is so far: quantised up to some group.
    running: Block,
    /// As it was, beside it, without any factors.
    dense: Option<Block>,
    /// Factors of each group's columns.
    columns: Vec<Option<Vec<f32>>>,
    /// Divisors of each layer's rows, by group and place.
    rows: Vec<Vec<Option<Vec<f32>>>>,
    /// The rule of activations whose cost is measured.
    act: Option<Act>,
    /// What it costs in each group that is quantised and whose step was not taken yet.
    costs: Vec<Option<ActivationError>>,
    /// What is done.
    pub finished: work::Block,
}

impl<'a> Piece<'a> {
    /// Loads block `i`, twice if the dense model runs beside.
    pub fn load(job: &Job<'a>, i: usize) -> Result<Self> {
        let spec = &job.config.spec;
        let load = || Block::load(spec, &mut Loader::new(job.source, LoadOptions::default())?, i);
        let groups = block::groups(spec, i)?;
        let cuts = shard::qkv(&spec.layers[i].attention, spec.heads, &Shard::WHOLE.heads(spec.heads)?);
        Ok(Self {
            source: job.source,
            cpu: job.cpu,
            qkv: cuts.into_iter().map(|(_, cut)| cut).collect(),
            running: load()?,
            dense: job.method.needs().drift.then(load).transpose()?,
            columns: vec![None; groups.len()],
            rows: groups.iter().map(|group| vec![None; group.layers.len()]).collect(),
            act: job.act.is_quantized().then_some(job.act),
            costs: groups.iter().map(|_| None).collect(),
            groups,
            finished: work::Block::default(),
        })
    }

    /// Steps in which the block adds to the stream.
    pub fn steps(&self) -> usize {
        self.groups.last().map_or(0, |group| group.step + 1)
    }

    /// The weights of a group, one below the other, with all factors.
    pub fn weights(&self, group: usize) -> Result<Vec<f32>> {
        let mut weights = Vec::with_capacity(self.groups[group].n() * self.groups[group].k());
        for layer in 0..self.groups[group].layers.len() {
            weights.extend(self.layer(group, layer)?);
        }
        Ok(weights)
    }

    fn layer(&self, group: usize, layer: usize) -> Result<Vec<f32>> {
        let (name, shape) = &self.groups[group].layers[layer];
        let loaded = self.source.stored_linear(name)?;
        let StoredWeight::Dense { floats, shape: found } = &loaded.weight else {
            let (expected, got) = ("floats, to be quantised".to_owned(), "codes".to_owned());
            return Err(Error::Weight { name: name.clone(), expected, got });
        };
        let (expected, got) = ([shape.n, shape.k], *found);
        if expected != got {
            let [expected, got] = [expected, got].map(|[n, k]| format!("{n} × {k}"));
            return Err(Error::Weight { name: name.clone(), expected, got });
        }
        let mut weights = floats.to_f32();
        self.source.release(name);
        if let Some(columns) = &self.columns[group] {
            for row in weights.chunks_exact_mut(shape.k) {
                row.iter_mut().zip(columns).for_each(|(w, factor)| *w *= factor);
            }
        }
        if let Some(rows) = &self.rows[group][layer] {
            for (row, divisor) in weights.chunks_exact_mut(shape.k).zip(rows) {
                row.iter_mut().for_each(|w| *w /= divisor);
            }
        }
        Ok(weights)
    }

    fn bias(&self, group: usize, layer: usize) -> Result<Option<Vec<f32>>> {
        let (name, shape) = &self.groups[group].layers[layer];
        let name = format!("{name}.bias");
        if let Some((_, bias)) = self.finished.changed.iter().find(|(changed, _)| *changed == name) {
            return Ok(Some(bias.clone()));
        }
        match self.source.checkpoint().contains(&name) {
            true => Ok(Some(self.source.floats(&name, &[shape.n])?.to_f32())),
            false => Ok(None),
        }
    }

    /// Lets the method choose factors for the input channels of all groups, and folds them.
    pub fn choose_scales(&mut self, inputs: &[Inputs], method: &dyn Method, format: WeightFormat) -> Result<()> {
        let weights = (0..self.groups.len()).map(|group| self.weights(group)).collect::<Result<Vec<_>>>()?;
        let groups = self.groups.iter().zip(&weights).zip(inputs);
        let block: Vec<Layers<'_>> =
            groups.map(|((group, weights), inputs)| Layers { group, weights, inputs }).collect();
        let name = self.groups[0].layers[0].0.clone();
        let scales = method.scales(&block, format).map_err(|source| Error::Quantize { name, source })?;
        self.rescale(scales)
    }

    /// Folds factors of input channels into what makes the inputs, and into the weights that read them.
    ///
    /// A norm is rounded to its type in the source, and the columns' factors are those that the rounded one asks for.
    /// Errors: factors of another number, such that are not above 0 and finite, any for a group that cannot fold.
    fn rescale(&mut self, scales: Vec<Option<Vec<f32>>>) -> Result<()> {
        if scales.len() != self.groups.len() {
            let expected = format!("factors or none for each of {} groups", self.groups.len());
            return Err(Error::invalid(OP, expected, scales.len().to_string()));
        }
        let mut touched = vec![false; self.groups.len()];
        for (g, scales) in scales.into_iter().enumerate() {
            let Some(mut scales) = scales else { continue };
            let group = &self.groups[g];
            let refuse = |got: String| {
                let expected = format!("{} factors above 0 for the inputs of {}", group.k(), group.layers[0].0);
                Error::invalid(OP, expected, got)
            };
            if scales.len() != group.k() {
                return Err(refuse(scales.len().to_string()));
            }
            if let Some(bad) = scales.iter().find(|s| !(s.is_finite() && **s > 0.0)) {
                return Err(refuse(bad.to_string()));
            }
            match group.fold.clone() {
                None => return Err(refuse("some, though nothing can take them up".to_owned())),
                Some(Fold::Norm(norm)) => {
                    let (before, mut weight) = self.divided(&norm.weight(), &scales, norm.offset)?;
                    for ((scale, before), after) in scales.iter_mut().zip(before).zip(&mut weight) {
                        let ratio = (before + norm.offset) / (*after + norm.offset);
                        if ratio.is_finite() && ratio > 0.0 {
                            *scale = ratio;
                        } else {
                            // Rounded to 0 or infinity, or 0 all along: the channel stays as it is.
                            (*scale, *after) = (1.0, before);
                        }
                    }
                    self.running.replace_norm(g, weight.iter().map(|v| v + norm.offset).collect());
                    self.finished.changed.push((norm.weight(), weight));
                    if let Some(bias) = norm.bias() {
                        let (_, divided) = self.divided(&bias, &scales, 0.0)?;
                        if let Some(bad) = divided.iter().find(|v| !v.is_finite()) {
                            return Err(refuse(format!("such that {bias} becomes {bad}")));
                        }
                        self.running.replace_norm_bias(g, divided.clone());
                        self.finished.changed.push((bias, divided));
                    }
                }
                Some(Fold::Linear { group: from, layer }) => {
                    let bias = format!("{}.bias", self.groups[from].layers[layer].0);
                    if self.source.checkpoint().contains(&bias) {
                        let (_, divided) = self.divided(&bias, &scales, 0.0)?;
                        if let Some(bad) = divided.iter().find(|v| !v.is_finite()) {
                            return Err(refuse(format!("such that {bias} becomes {bad}")));
                        }
                        self.finished.changed.push((bias, divided));
                    }
                    self.rows[from][layer] = Some(scales.clone());
                    touched[from] = true;
                }
            }
            self.columns[g] = Some(scales);
            touched[g] = true;
        }
        for g in (0..touched.len()).filter(|&g| touched[g]) {
            let layers = (0..self.groups[g].layers.len())
                .map(|l| {
                    let (floats, shape) = (FloatData::F32(Cow::Owned(self.layer(g, l)?)), self.groups[g].layers[l].1);
                    let weight = StoredWeight::Dense { floats, shape: [shape.n, shape.k] };
                    Ok(StoredLinear { weight, bias: self.bias(g, l)?, findings: Vec::new() })
                })
                .collect::<Result<Vec<_>>>()?;
            self.replace(g, layers)?;
        }
        Ok(())
    }

    /// A vector of the source, and the same divided by factors and rounded to its type; `offset` is what it lacks of what is divided.
    fn divided(&self, name: &str, scales: &[f32], offset: f32) -> Result<(Vec<f32>, Vec<f32>)> {
        let vector = self.source.floats(name, &[scales.len()])?;
        let before = vector.to_f32();
        let divided = |(v, scale): (&f32, &f32)| vector.dtype().round((v + offset) / scale - offset);
        let after = before.iter().zip(scales).map(divided).collect();
        Ok((before, after))
    }

    /// Inputs of some groups over all text. The streams must be where the step of the first of them begins.
    pub fn collect(
        &mut self,
        streams: &Streams,
        wanted: Range<usize>,
        needs: Needs,
        on_window: &mut OnWindow<'_>,
    ) -> Result<Vec<Inputs>> {
        let rows = streams.quantized.len() / streams.hidden;
        let mut inputs = Vec::new();
        for (group, outputs) in wanted.clone().zip(self.outputs(wanted.clone())?) {
            let of_group = &self.groups[group];
            let drift = if outputs.is_some() { DriftOf::Outputs } else { DriftOf::Inputs };
            let of_none = Inputs::new([of_group.n(), of_group.k()], rows, needs_of(needs, of_group), drift);
            let of_none = of_none.map_err(|source| self.named(group, source))?;
            inputs.push((of_none, outputs));
        }
        let Self { groups, cpu, running, dense, columns, .. } = self;
        let [mut stream, mut missing] = [vec![0.0; streams.window], Vec::new()];
        let mut of_dense: Vec<Seen> = wanted.clone().map(|_| Seen::default()).collect();
        for (done, window) in streams.quantized.chunks_exact(streams.window).enumerate() {
            on_window(done)?;
            if let (Some(dense), Some(all)) = (dense.as_mut(), &streams.dense) {
                stream.copy_from_slice(&all[done * streams.window..][..streams.window]);
                run(dense, cpu, groups, wanted.clone(), &mut stream, &mut |group, x, stream| {
                    if groups[group].routed {
                        return Ok(());
                    }
                    let seen = &mut of_dense[group - wanted.start];
                    seen.take(x, stream);
                    if let Some(factors) = &columns[group] {
                        for row in seen.inputs.chunks_exact_mut(factors.len()) {
                            row.iter_mut().zip(factors).for_each(|(v, factor)| *v /= factor);
                        }
                    }
                    Ok(())
                })?;
            }
            stream.copy_from_slice(window);
            run(running, cpu, groups, wanted.clone(), &mut stream, &mut |group, x, stream| {
                let place = group - wanted.start;
                let (inputs, outputs) = &mut inputs[place];
                let needs = needs_of(needs, &groups[group]);
                if needs.drift {
                    of_dense[place].missing_to(x, stream, outputs.as_ref(), cpu, &mut missing)?;
                }
                let added = inputs.add(x, needs.drift.then_some(missing.as_slice()));
                added.map_err(|source| Error::Quantize { name: groups[group].layers[0].0.clone(), source })
            })?;
        }
        Ok(inputs.into_iter().map(|(inputs, _)| inputs).collect())
    }

    /// The dense weights of those groups whose outputs' drift is wanted, to be multiplied.
    fn outputs(&self, wanted: Range<usize>) -> Result<Vec<Option<Linear>>> {
        let of_group = |group: usize| {
            if self.dense.is_none() || !self.groups[group].adds {
                return Ok(None);
            }
            let (weights, of_group) = (self.weights(group)?, &self.groups[group]);
            let linear = Linear::new(Weight::Dense(Floats::F32(&weights), [of_group.n(), of_group.k()]));
            Ok(Some(linear.map_err(|source| self.named(group, source))?))
        };
        wanted.map(of_group).collect()
    }

    fn named(&self, group: usize, source: halfbyte::Error) -> Error {
        Error::Quantize { name: self.groups[group].layers[0].0.clone(), source }
    }

    /// Takes the streams through a step, and measures on the way what quantising the inputs of its groups would add.
    pub fn advance(&mut self, streams: &mut Streams, step: usize, on_window: &mut OnWindow<'_>) -> Result<()> {
        let places = self.places();
        let Self { groups, cpu, running, costs, finished, .. } = self;
        for (done, window) in streams.quantized.chunks_exact_mut(streams.window).enumerate() {
            on_window(done)?;
            let _ = running.forward(cpu, step, window, &mut |group, x| {
                if let Some(cost) = &mut costs[group] {
                    let weights = finished.tensors[places[group].clone()].iter().map(|(_, q)| q);
                    let added = cost.add(cpu, x, weights);
                    added.map_err(|source| Error::Quantize { name: groups[group].layers[0].0.clone(), source })?;
                }
                Ok(ControlFlow::Continue(()))
            })?;
        }
        for group in (0..groups.len()).filter(|&group| groups[group].step == step) {
            if let Some(cost) = costs[group].take() {
                cost.report(&mut finished.report[places[group].clone()])?;
            }
        }
        let go = &mut |_: usize, _: &[f32]| Ok(ControlFlow::Continue(()));
        if let (Some(dense), Some(all)) = (&mut self.dense, &mut streams.dense) {
            for (done, window) in all.chunks_exact_mut(streams.window).enumerate() {
                on_window(done)?;
                let _ = dense.forward(self.cpu, step, window, go)?;
            }
        }
        Ok(())
    }

    /// Places of each group's layers among all of the block.
    fn places(&self) -> Vec<Range<usize>> {
        let mut from = 0;
        let of_group = |group: &LinearGroup| {
            from += group.layers.len();
            from - group.layers.len()..from
        };
        self.groups.iter().map(of_group).collect()
    }

    /// Quantises a group; from now on the block runs with it.
    pub fn quantize(&mut self, group: usize, inputs: &Inputs, method: &dyn Method, format: WeightFormat) -> Result<()> {
        let weights = self.weights(group)?;
        let of_group = &self.groups[group];
        let layers = Layers { group: of_group, weights: &weights, inputs };
        let name = &of_group.layers[0].0;
        let outcomes = quantized(method, &layers, format)?;
        let (reports, outputs): (Vec<_>, Vec<f64>) = reports(&layers, &outcomes).into_iter().unzip();
        drop(weights);
        if let Some(act) = self.act {
            let layers = outcomes.iter().map(|outcome| &outcome.weights).zip(outputs);
            let cost = ActivationError::new(layers, act);
            self.costs[group] = Some(cost.map_err(|source| Error::Quantize { name: name.clone(), source })?);
        }
        self.finished.report.extend(reports);
        self.take(group, outcomes.into_iter().map(|outcome| outcome.weights).collect())
    }

    /// Puts finished layers in the place of the dense ones.
    fn take(&mut self, group: usize, tensors: Vec<QTensor>) -> Result<()> {
        let mut layers = Vec::with_capacity(tensors.len());
        for (layer, q) in tensors.iter().enumerate() {
            let (weight, bias) = (StoredWeight::Quantized(q.into()), self.bias(group, layer)?);
            layers.push(StoredLinear { weight, bias, findings: Vec::new() });
        }
        self.replace(group, layers)?;
        let names = &self.groups[group].layers;
        self.finished.tensors.extend(names.iter().map(|(name, _)| name.clone()).zip(tensors));
        Ok(())
    }

    /// From now on the block runs with these layers of a group.
    fn replace(&mut self, group: usize, mut layers: Vec<StoredLinear<'_>>) -> Result<()> {
        let name = &self.groups[group].layers[0].0;
        if group == 0 {
            let cut = |(layer, cut): (_, &Cut)| cut.of(layer, name);
            layers = layers.into_iter().zip(&self.qkv).map(cut).collect::<std::result::Result<_, _>>()?;
        }
        self.running.replace(group, Projection::new(&layers, Act::A16, name)?);
        Ok(())
    }

    /// Puts a whole finished block in the place of the dense one.
    pub fn restore(&mut self, finished: work::Block) -> Result<()> {
        let work::Block { tensors, changed, report } = finished;
        for (name, values) in &changed {
            // The shape is checked where the tensor lies.
            self.source.floats(name, &[values.len()])?;
            for (at, group) in self.groups.iter().enumerate() {
                match &group.fold {
                    Some(Fold::Norm(norm)) if norm.weight() == *name => {
                        self.running.replace_norm(at, values.iter().map(|v| v + norm.offset).collect());
                    }
                    Some(Fold::Norm(norm)) if norm.bias().as_ref() == Some(name) => {
                        self.running.replace_norm_bias(at, values.clone());
                    }
                    _ => {}
                }
            }
        }
        self.finished = work::Block { tensors: Vec::new(), changed, report };
        let mut tensors = tensors.into_iter();
        for group in 0..self.groups.len() {
            let count = self.groups[group].layers.len();
            self.take(group, tensors.by_ref().take(count).map(|(_, q)| q).collect())?;
        }
        Ok(())
    }
}

/// What a method gets of a group: the dense model may send other tokens to an expert, and nothing can be compared then.
fn needs_of(needs: Needs, group: &LinearGroup) -> Needs {
    Needs { drift: needs.drift && !group.routed, ..needs }
}

/// Sees the inputs of a group, and the residual stream before its step.
type OnInputs<'a> = dyn FnMut(usize, &[f32], &[f32]) -> Result<()> + 'a;

/// Runs a window through the steps of the wanted groups, no farther than the last of them.
fn run(
    block: &mut Block,
    cpu: &Cpu,
    groups: &[LinearGroup],
    wanted: Range<usize>,
    stream: &mut [f32],
    see: &mut OnInputs<'_>,
) -> Result<()> {
    let mut before = Vec::new();
    for step in groups[wanted.start].step..=groups[wanted.end - 1].step {
        before.clear();
        before.extend_from_slice(stream);
        let flow = block.forward(cpu, step, stream, &mut |group, x| {
            if wanted.contains(&group) {
                see(group, x, &before)?;
            }
            Ok(if group + 1 == wanted.end { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        if flow.is_break() {
            break;
        }
    }
    Ok(())
}

/// What a model has before a group in one window.
#[derive(Debug, Default)]
struct Seen {
    inputs: Vec<f32>,
    stream: Vec<f32>,
}

impl Seen {
    fn take(&mut self, inputs: &[f32], stream: &[f32]) {
        for (to, from) in [(&mut self.inputs, inputs), (&mut self.stream, stream)] {
            to.clear();
            to.extend_from_slice(from);
        }
    }

    /// What is missing from a model with these inputs and this stream to the one that was seen: at the outputs of the
    /// layers, or at their inputs if there is nothing to multiply by.
    fn missing_to(
        &self,
        inputs: &[f32],
        stream: &[f32],
        outputs: Option<&Linear>,
        cpu: &Cpu,
        missing: &mut Vec<f32>,
    ) -> Result<()> {
        missing.clear();
        missing.extend(self.inputs.iter().zip(inputs).map(|(dense, x)| dense - x));
        if let Some(linear) = outputs {
            let (rows, differences) = (missing.len() / linear.k(), std::mem::take(missing));
            missing.resize(rows * linear.n(), 0.0);
            linear.forward(cpu, Floats::F32(&differences), rows, FloatsMut::F32(missing))?;
            let of_stream = self.stream.iter().zip(stream).map(|(dense, r)| dense - r);
            missing.iter_mut().zip(of_stream).for_each(|(missing, of_stream)| *missing += of_stream);
        }
        Ok(())
    }
}
