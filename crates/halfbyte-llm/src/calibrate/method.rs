//! What a quantiser is told of a group of linear layers, and what it answers.

use super::inputs::Inputs;
use crate::arch::spec::{Fold, LinearGroup};
use halfbyte::quantize::{
    Calibrated, Gptq, Refine, Rtn, SymmetricScale, awq_scales, correct, gptq, refine, rtn, rtn_clipped,
};
use halfbyte::{Error, Floats, Group, QTensor, Result, WeightFormat, Zeros};
use std::borrow::Cow;
use std::ops::Range;

/// A way to choose codes.
///
/// Called once for each group of layers that share an input, with the inputs that the model has when everything before
/// them is quantised. Results must not depend on the number of threads.
pub trait Method: Sync {
    /// Its name and everything that its results depend on besides its arguments. Unfinished work goes on only where this
    /// is the same.
    fn settings(&self) -> String;

    /// What it looks at besides Hessians.
    fn needs(&self) -> Needs {
        Needs::default()
    }

    /// Factors for the input channels of a block's groups, before anything of the block is quantised. Asked only if
    /// [`Needs::scales`].
    ///
    /// Column `j` of a group's weights is multiplied by factor `j`, and what makes the input is divided by it: the norm
    /// before the group or the layer that [`LinearGroup::fold`] names. *Shapes:* for each group `[k]` or None; a group
    /// that cannot fold gets None.
    fn scales(&self, block: &[Layers<'_>], format: WeightFormat) -> Result<Vec<Option<Vec<f32>>>> {
        let _ = format;
        Ok(vec![None; block.len()])
    }

    /// Quantises the layers of a group, in order.
    fn quantize(&self, layers: &Layers<'_>, format: WeightFormat) -> Result<Vec<Outcome>>;

    /// How layers are rounded to nearest whose inputs are all zero, as those of experts that no token chose; none: the method
    /// needs no inputs, and gets these layers too.
    fn rounding(&self) -> Option<Rtn> {
        None
    }

    /// Operations of [`Method::quantize`] on `[n, k]` weights, in any unit: estimates of time scale by it. As it stands, for
    /// a method that looks at each weight alone.
    fn operations(&self, n: usize, k: usize) -> f64 {
        n as f64 * k as f64
    }

    /// Bytes that [`Method::quantize`] takes besides its arguments, what it returns included. As it stands, only that.
    fn memory_bytes(&self, n: usize, k: usize, format: WeightFormat) -> u64 {
        tensor_bytes(n, k, format)
    }
}

/// What a method looks at besides Hessians. All of it takes memory; the default is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Inputs of all groups of a block at once, to choose factors for their channels.
    pub scales: bool,
    /// How far the dense model is from the quantised one: [`Inputs::drift`]. The dense model is run beside the quantised one
    /// then.
    pub drift: bool,
    /// About this many of the inputs themselves.
    pub rows: usize,
}

/// The linear layers of a group.
#[derive(Debug)]
pub struct Layers<'a> {
    /// Their names and shapes.
    pub group: &'a LinearGroup,
    /// Their weights, one below the other, `[n, k]`; columns are multiplied by the factors that were chosen for them.
    pub weights: &'a [f32],
    /// What their inputs are like.
    pub inputs: &'a Inputs,
}

impl Layers<'_> {
    /// Inputs.
    pub fn k(&self) -> usize {
        self.group.k()
    }

    /// Rows of each layer in [`Layers::weights`].
    pub fn rows(&self) -> Vec<Range<usize>> {
        let mut from = 0;
        let of_layer = |(_, shape): &(_, crate::arch::spec::Shape)| {
            from += shape.n;
            from - shape.n..from
        };
        self.group.layers.iter().map(of_layer).collect()
    }

    /// The layers one by one: their rows of the weights, `[n, k]`, and n.
    pub fn each(&self) -> impl Iterator<Item = (&[f32], usize)> {
        let k = self.k();
        self.rows().into_iter().map(move |rows| (&self.weights[rows.start * k..rows.end * k], rows.len()))
    }
}

/// A quantised layer.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Its codes.
    pub weights: QTensor,
    /// The damping that was needed, where the method has one.
    pub damping: Option<f64>,
}

/// [`rtn`]: looks at no inputs.
#[derive(Clone, Copy, Debug)]
pub struct RoundToNearest(pub Rtn);

impl Method for RoundToNearest {
    fn settings(&self) -> String {
        format!("rtn {:?}", self.0)
    }

    fn quantize(&self, layers: &Layers<'_>, format: WeightFormat) -> Result<Vec<Outcome>> {
        let k = layers.k();
        layers
            .each()
            .map(|(w, n)| Ok(Outcome { weights: rtn(Floats::F32(w), [n, k], format, self.0)?, damping: None }))
            .collect()
    }
}

/// [`gptq`]: one factorisation serves all layers of a group.
///
/// On the model that ships, with 4 bits in groups of 128 and zero points, correcting, searching and three sweeps of
/// refinement take back more than half of what plain GPTQ loses in perplexity.
#[derive(Clone, Copy, Debug)]
pub struct ByGptq {
    /// How codes are chosen.
    pub gptq: Gptq,
    /// Aim at the outputs of the dense model instead of those of the layer, by [`correct`] with this damping.
    pub correct: Option<f64>,
    /// What [`refine`] does after that.
    pub refine: Option<Refine>,
}

impl ByGptq {
    fn quantize_rows(&self, layers: &Layers<'_>, w: &[f32], n: usize, format: WeightFormat) -> Result<Calibrated> {
        let (shape, hessian) = ([n, layers.k()], &layers.inputs.hessian);
        let mut w = Cow::Borrowed(w);
        if let (Some(damping), Some(drift)) = (self.correct, layers.inputs.drift()) {
            w = Cow::Owned(correct(Floats::F32(&w), shape, hessian, drift, damping)?);
        }
        let done = gptq(Floats::F32(&w), shape, format, hessian, self.gptq)?;
        match self.refine {
            None => Ok(done),
            Some(options) => refine(Floats::F32(&w), &done.weights, hessian, options),
        }
    }
}

impl Method for ByGptq {
    fn settings(&self) -> String {
        format!("gptq {:?}, correct {:?}, refine {:?}", self.gptq, self.correct, self.refine)
    }

    fn needs(&self) -> Needs {
        Needs { drift: self.correct.is_some(), ..Needs::default() }
    }

    fn rounding(&self) -> Option<Rtn> {
        Some(Rtn { symmetric: self.gptq.symmetric, search: self.gptq.search })
    }

    fn quantize(&self, layers: &Layers<'_>, format: WeightFormat) -> Result<Vec<Outcome>> {
        let outcome = |done: Calibrated| Outcome { weights: done.weights, damping: Some(done.damping) };
        if format.group == Group::Tensor || layers.group.layers.len() == 1 {
            // One scale reaches over all of a layer, and not beyond it.
            return layers.each().map(|(w, n)| Ok(outcome(self.quantize_rows(layers, w, n, format)?))).collect();
        }
        // Rows do not depend on each other.
        let done = self.quantize_rows(layers, layers.weights, layers.group.n(), format)?;
        let of_layer = |rows| Ok(Outcome { weights: some_rows(&done.weights, rows)?, damping: Some(done.damping) });
        layers.rows().into_iter().map(of_layer).collect()
    }

    fn operations(&self, n: usize, k: usize) -> f64 {
        let (n, k) = (n as f64, k as f64);
        let factors = 1.0 + if self.correct.is_some() { 1.0 } else { 0.0 };
        let products = 1.0
            + if self.correct.is_some() { 3.0 } else { 0.0 }
            + self.refine.map_or(0.0, |refine| 2.0 * refine.sweeps as f64 + 1.0);
        factors * k * k * k / 3.0 + products * n * k * k
    }

    fn memory_bytes(&self, n: usize, k: usize, format: WeightFormat) -> u64 {
        let (wide, threads) = (k as u64, rayon::current_num_threads() as u64);
        // Weights, errors and a panel of the factor, for each thread.
        let of_thread = wide * 128 * (4 + 8 + 8);
        // The corrected weights, and what they are solved for in f64.
        let corrected = if self.correct.is_some() { 4 * n as u64 * wide + 8 * wide * n.max(k) as u64 } else { 0 };
        let factors = if self.correct.is_some() || self.refine.is_some() { 2 } else { 1 };
        factors * 8 * wide * wide + threads * of_thread + corrected + 2 * tensor_bytes(n, k, format)
    }
}

/// AWQ: [`awq_scales`] for what a norm makes the inputs of, folded into the norm; then [`rtn_clipped`].
#[derive(Clone, Copy, Debug)]
pub struct ByAwq {
    /// How a symmetric scale follows from the largest magnitude.
    pub symmetric: SymmetricScale,
}

impl Method for ByAwq {
    fn settings(&self) -> String {
        format!("awq {:?}", self.symmetric)
    }

    fn needs(&self) -> Needs {
        Needs { scales: true, ..Needs::default() }
    }

    fn scales(&self, block: &[Layers<'_>], format: WeightFormat) -> Result<Vec<Option<Vec<f32>>>> {
        let of_group = |layers: &Layers<'_>| match layers.group.fold {
            Some(Fold::Norm(_)) if layers.inputs.dead() < layers.k() => {
                let weights: Vec<_> = layers.each().map(|(w, n)| (Floats::F32(w), n)).collect();
                let found = awq_scales(&weights, layers.k(), format, &layers.inputs.hessian, self.symmetric)?;
                Ok(Some(found.scales))
            }
            _ => Ok(None),
        };
        block.iter().map(of_group).collect()
    }

    fn rounding(&self) -> Option<Rtn> {
        Some(Rtn { symmetric: self.symmetric, search: false })
    }

    fn quantize(&self, layers: &Layers<'_>, format: WeightFormat) -> Result<Vec<Outcome>> {
        let (k, hessian) = (layers.k(), &layers.inputs.hessian);
        let of_layer = |(w, n)| {
            let done = rtn_clipped(Floats::F32(w), [n, k], format, hessian, self.symmetric)?;
            Ok(Outcome { weights: done.weights, damping: None })
        };
        layers.each().map(of_layer).collect()
    }

    fn operations(&self, n: usize, k: usize) -> f64 {
        // The search of exponents looks at 256 rows of a matrix, the clipping at each group's own columns.
        n as f64 * k as f64 * 82.0 * 128.0 + 256.0 * 20.0 * (k * k) as f64
    }

    fn memory_bytes(&self, n: usize, k: usize, format: WeightFormat) -> u64 {
        let (wide, threads) = (k as u64, rayon::current_num_threads() as u64);
        8 * wide * wide + threads * wide * 128 * 20 + 2 * tensor_bytes(n, k, format)
    }
}

/// Bytes of a [`QTensor`] in memory.
pub(super) fn tensor_bytes(n: usize, k: usize, format: WeightFormat) -> u64 {
    let (n, groups) = (n as u64, format.group.count(k) as u64);
    n * k as u64 + n * groups * 8 + k as u64 * 4
}

/// Some rows of a tensor as one of its own.
fn some_rows(q: &QTensor, rows: Range<usize>) -> Result<QTensor> {
    if q.format().group == Group::Tensor {
        return Err(Error::Invalid {
            op: "rows of a tensor",
            expected: "scales of rows or groups".to_owned(),
            got: "one for the whole tensor".to_owned(),
        });
    }
    let of_groups = rows.start * q.groups()..rows.end * q.groups();
    let zeros = match q.zeros() {
        Zeros::Symmetric => Zeros::Symmetric,
        Zeros::Integer(zeros) => Zeros::Integer(zeros[of_groups.clone()].to_vec()),
        Zeros::Float(offsets) => Zeros::Float(offsets[of_groups.clone()].to_vec()),
    };
    QTensor::new(
        q.format(),
        [rows.len(), q.k()],
        q.codes()[rows.start * q.k()..rows.end * q.k()].to_vec(),
        q.scales()[of_groups].to_vec(),
        zeros,
        q.group_index().map(<[u32]>::to_vec),
    )
}
