//! Linear layers on a GPU.

use crate::error::{Error, Result};
use halfbyte::cuda::driver::{Buffer, FloatView, FloatViewMut};
use halfbyte::cuda::matmul::{Fold, FoldedNorm, Plans, QuantizedForm, QuantizedView};
use halfbyte::cuda::nn::{self, Dense, StepProduct};
use halfbyte::cuda::sources::Instance;
use halfbyte::kernel::{Activation, Problem};
use halfbyte::ops::Linear;
use halfbyte::{Cuda, Float};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Linear layers on a GPU that read the same vector; their outputs lie side by side.
#[derive(Debug)]
pub(crate) struct Projection {
    /// More than one only where the checkpoint stores them in different formats.
    parts: Vec<Linear<Cuda>>,
    /// The type of what products leave.
    y: Float,
    /// Whether that is what the activation of an MLP makes of outputs.
    is_activated: bool,
    /// Whether it is only multiplied together with all experts of a layer.
    of_experts: bool,
}

impl Projection {
    /// Layers whose outputs lie side by side.
    pub(crate) fn of(parts: Vec<Linear<Cuda>>) -> Self {
        Self { parts, y: Float::F32, is_activated: false, of_experts: false }
    }

    /// The first layer of an MLP, whose products leave what the activation makes of outputs, in a type: of gates what they let through. Of an
    /// expert only those with all of its layer.
    pub(crate) fn activated(layer: Linear<Cuda>, y: Float, of_experts: bool) -> Self {
        Self { parts: vec![layer], y, is_activated: true, of_experts }
    }

    /// Length of the reduction.
    pub(crate) fn k(&self) -> usize {
        self.parts.first().map_or(0, Linear::k)
    }

    /// Outputs of all parts.
    pub(crate) fn n(&self) -> usize {
        self.parts.iter().map(Linear::n).sum()
    }

    /// The one product that it is, with its bias; None where it has several parts or is dense.
    pub(crate) fn single(&self) -> Option<StepProduct<'_>> {
        let [part] = self.parts.as_slice() else { return None };
        Some((part.packed()?, part.bias()))
    }

    /// The matrix that it is, whose bias is apart; None where it has several parts or codes.
    pub(crate) fn dense(&self) -> Option<&Dense> {
        let [part] = self.parts.as_slice() else { return None };
        part.dense()
    }

    /// The floats that it is, without a bias; None where it has several parts, a bias or codes.
    pub(crate) fn floats(&self) -> Option<FloatView<'_>> {
        self.dense().filter(|_| !self.has_bias()).map(Dense::rows)
    }

    /// The products of its parts, with their biases; None where one is dense.
    pub(crate) fn products(&self) -> Option<Vec<StepProduct<'_>>> {
        self.parts.iter().map(|part| Some((part.packed()?, part.bias()))).collect()
    }

    /// What its products leave of a row, where that is what the activation of an MLP makes of outputs: all, or half of them behind gates.
    pub(crate) fn activated_outputs(&self) -> Option<usize> {
        let (packed, _) = self.single().filter(|_| self.is_activated)?;
        Some(if packed.gate().is_some() { self.n() / 2 } else { self.n() })
    }

    /// What its products apply to outputs; only one product does.
    fn activation(&self) -> Activation {
        self.parts.first().map_or(Activation::None, Linear::activation)
    }

    /// Whether something is added to its outputs.
    pub(crate) fn has_bias(&self) -> bool {
        self.parts.iter().any(|part| part.bias().is_some())
    }

    /// Bytes that the packed weights take on the device.
    pub(crate) fn bytes(&self) -> usize {
        self.parts.iter().map(Linear::bytes).sum()
    }

    /// How m rows of x must lie as codes for it; None where any part of it does not read codes, or other ones than the rest.
    pub(crate) fn rows_form(&self, cuda: &Cuda, m: usize) -> Option<QuantizedForm> {
        let mut forms = self.parts.iter().map(|part| part.rows_form(cuda, m));
        let first = forms.next().flatten()?;
        forms.all(|form| form == Some(first)).then_some(first)
    }

    /// Outputs of the widest part, if there are several.
    pub(crate) fn widest_part(&self) -> usize {
        if self.parts.len() < 2 { 0 } else { self.parts.iter().map(Linear::n).max().unwrap_or(0) }
    }

    /// What its quantised parts are computed by, with x of a type: each part's shape and plans.
    pub(crate) fn plans(&self, cuda: &Cuda, x: Float) -> Result<Vec<(Problem, Arc<Plans>)>> {
        let mut plans = Vec::new();
        for part in self.parts.iter().filter(|_| !self.of_experts) {
            if let Some(of_part) = part.plans(cuda, x, self.y)? {
                let problem = Problem { format: part.format(), x, y: self.y, m: 1, n: part.n(), k: part.k() };
                plans.push((problem, of_part));
            }
        }
        Ok(plans)
    }

    /// What multiplies m rows of a type: a kernel, or those of its parts.
    pub(crate) fn kernel(&self, cuda: &Cuda, m: usize, x: Float) -> Result<String> {
        let mut kernels: Vec<&str> = Vec::new();
        for part in &self.parts {
            let kernel = part.kernel(cuda, m, x, self.y)?;
            if !kernels.contains(&kernel) {
                kernels.push(kernel);
            }
        }
        Ok(kernels.join(", "))
    }

    /// Multiplies. Shapes: x `[m, k]`, y from `at` on at least `[m, n]`; `room` is for the outputs of one part.
    pub(crate) fn run(
        &self,
        cuda: &Cuda,
        x: Input<'_>,
        m: usize,
        (y, at): (&mut Buffer<f32>, usize),
        room: &mut Buffer<f32>,
    ) -> Result<()> {
        let (n, mut first) = (self.n(), 0);
        for part in &self.parts {
            let columns = first..first + part.n();
            first = columns.end;
            // A row's outputs lie side by side; kernels store 16 bytes at once.
            let in_place = self.parts.len() == 1 || (m == 1 && (at + columns.start).is_multiple_of(4));
            let out = match in_place {
                true => y.view_mut().slice(at + columns.start..at + columns.start + m * columns.len()),
                false => room.view_mut().slice(0..m * columns.len()),
            };
            match x {
                Input::Floats(x) => part.forward(cuda, x, m, out)?,
                Input::Codes(x) => part.forward_rows(cuda, x, out.into())?,
            }
            if !in_place {
                let from = room.view().slice(0..m * columns.len());
                nn::columns(cuda.gpu(), cuda.stream(), from, y.view_mut().slice(at..at + m * n), n, columns)?;
            }
        }
        Ok(())
    }

    /// Whether its products of m rows of a type do their part of a norm.
    pub(crate) fn folds(&self, cuda: &Cuda, x: Float, m: usize, fold: Fold) -> Result<bool> {
        let [part] = self.parts.as_slice() else { return Ok(false) };
        Ok(!self.of_experts && part.folds(cuda, [x, self.y], m, fold)?)
    }

    /// What such products of up to `most` rows are computed by.
    pub(crate) fn folding_instances(&self, cuda: &Cuda, x: Float, most: usize, fold: Fold) -> Result<Vec<Instance>> {
        let ([part], false) = (self.parts.as_slice(), self.of_experts) else { return Ok(Vec::new()) };
        let Some(plans) = part.plans(cuda, x, self.y)? else { return Ok(Vec::new()) };
        let [fastest, _] = plans.explain();
        let rows = fastest.iter().map(|plan| plan.rows()).filter(|rows| rows[0] <= most);
        let instances = rows.map(|[_, last]| part.folding(cuda, [x, self.y], last.min(most), fold));
        Ok(instances.filter_map(|instance| instance.transpose()).collect::<halfbyte::Result<_>>()?)
    }

    /// Multiplies and does its part of a norm. Shapes: x `[m, k]`, y `[m, activated_outputs]` or `[m, n]`.
    pub(crate) fn run_folded(
        &self,
        cuda: &Cuda,
        x: FloatView<'_>,
        m: usize,
        y: FloatViewMut<'_>,
        norm: &FoldedNorm<'_>,
    ) -> Result<()> {
        let [part] = self.parts.as_slice() else {
            return Err(Error::invalid("a folded norm", "one product", self.parts.len().to_string()));
        };
        Ok(part.forward_folded(cuda, x, m, y, norm)?)
    }

    /// Multiplies and activates. Shapes: x `[m, k]`, y `[m, activated_outputs]`.
    pub(crate) fn run_activated(&self, cuda: &Cuda, x: Input<'_>, m: usize, y: FloatViewMut<'_>) -> Result<()> {
        let [part] = self.parts.as_slice() else {
            return Err(Error::invalid("an MLP", "one product", self.parts.len().to_string()));
        };
        match x {
            Input::Floats(x) => part.forward(cuda, x, m, y)?,
            Input::Codes(x) => part.forward_rows(cuda, x, y)?,
        }
        Ok(())
    }
}

/// What a projection reads.
#[derive(Clone, Copy)]
pub(crate) enum Input<'a> {
    Floats(FloatView<'a>),
    /// Quantised before, once for all that read it.
    Codes(QuantizedView<'a>),
}

/// The kernels that products of up to `most` rows with some projections are computed by.
pub(crate) fn instances<'a>(
    cuda: &Cuda,
    projections: impl Iterator<Item = &'a Projection>,
    x: Float,
    most: usize,
) -> Result<Vec<Instance>> {
    let mut instances = BTreeMap::new();
    for projection in projections {
        for (problem, plans) in projection.plans(cuda, x)? {
            let [fastest, _] = plans.explain();
            for plan in fastest.iter().filter(|plan| plan.rows()[0] <= most) {
                let problem = Problem { m: plan.rows()[1].min(most), ..problem };
                let of_plan = plan.configuration().instances(&problem, projection.activation());
                instances.extend(of_plan.into_iter().map(|instance| (instance.to_string(), instance)));
            }
        }
    }
    Ok(instances.into_values().collect())
}
