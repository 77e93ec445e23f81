//! Activations that are codes of 8 bits already: products of rows that were quantised once, by whatever made them.
//!
//! ```text
//! form = rows_form(caps, w, m)                     how x must lie for a weight; None: its kernels quantise x themselves
//! rows = QuantizedRows::allocate(gpu, form)
//! nn::rms_norm_quantized(.., rows.view_mut(m))     or nn::gate_quantized, or quantize_activations
//! run_quantized(.., x: rows.view(m))               the bits of run with the floats that were quantised
//! ```
//!
//! Weights whose forms are equal read the same rows.

use super::quantize_activations::{Form, Target};
use super::{Configuration, Epilogue, Kernel, OP, Packed, check_gate, select};
use crate::cuda::driver::{Buffer, FloatViewMut, Stream, View, ViewMut};
use crate::cuda::{Caps, Gpu, Workspace};
use crate::error::{Error, Result};
use crate::kernel::Problem;
use crate::tensor::Float;

/// Rows of quantised activations on a device, or room for them.
#[derive(Debug)]
pub struct QuantizedRows {
    form: Form,
    codes: Buffer<u8>,
    terms: Buffer<f32>,
}

/// Some of them.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedView<'a> {
    /// How codes and terms lie; its `m` is the number of rows.
    pub form: Form,
    /// Codes.
    pub codes: View<'a, u8>,
    /// Terms.
    pub terms: View<'a, f32>,
}

/// Some of them, to be written.
#[derive(Debug)]
pub struct QuantizedViewMut<'a> {
    /// How codes and terms lie; its `m` is the number of rows.
    pub form: Form,
    /// Codes.
    pub codes: ViewMut<'a, u8>,
    /// Terms.
    pub terms: ViewMut<'a, f32>,
}

impl QuantizedRows {
    /// Room for as many rows as the form has. Errors: groups that no kernel makes, memory is short.
    pub fn allocate(gpu: &Gpu, form: Form) -> Result<Self> {
        form.check()?;
        let codes = form.m.checked_mul(form.pitch());
        let codes = codes.ok_or_else(|| Error::invalid(OP, "codes that fit memory", format!("{form:?}")))?;
        let context = gpu.context();
        Ok(Self { form, codes: context.allocate(codes)?, terms: context.allocate(form.terms_bytes() / 4)? })
    }

    /// How they lie; its `m` is how many there is room for.
    pub fn form(&self) -> Form {
        self.form
    }

    /// The first m rows, as they were written; panics if there is no room for so many.
    pub fn view(&self, m: usize) -> QuantizedView<'_> {
        let form = self.first(m);
        let (codes, terms) = (0..form.codes_bytes(), 0..form.terms_bytes() / 4);
        QuantizedView { form, codes: self.codes.view().slice(codes), terms: self.terms.view().slice(terms) }
    }

    /// Room for the first m rows; panics if there is not so much.
    pub fn view_mut(&mut self, m: usize) -> QuantizedViewMut<'_> {
        let form = self.first(m);
        let (codes, terms) = (0..form.codes_bytes(), 0..form.terms_bytes() / 4);
        QuantizedViewMut { form, codes: self.codes.view_mut().slice(codes), terms: self.terms.view_mut().slice(terms) }
    }

    fn first(&self, m: usize) -> Form {
        assert!(m <= self.form.m, "{m} of {} quantised rows", self.form.m);
        Form { m, ..self.form }
    }
}

impl QuantizedViewMut<'_> {
    /// What kernels are told. Error: columns that are not those of the numbers to be quantised.
    pub(in crate::cuda) fn target(&self, op: &'static str, [m, k]: [usize; 2]) -> Result<Target> {
        if [self.form.m, self.form.k] != [m, k] {
            let got = format!("{} × {}", self.form.m, self.form.k);
            return Err(Error::invalid(op, format!("room for codes of {m} × {k}"), got));
        }
        Ok(Target::new(self.form, [self.codes.pointer(), self.terms.pointer()]))
    }
}

/// How rows must lie as codes for a weight; None where its products quantise x themselves, or do not at all, or read columns
/// in an order of their own.
pub fn rows_form(caps: &Caps, w: &Packed, m: usize) -> Option<Form> {
    // Columns in an order of their own are gathered by products.
    if !w.in_order() {
        return None;
    }
    let problem = problem(w, m, Float::F32);
    select(caps, &problem, Some(w.layout())).ok()?.rows_form(&problem)
}

/// One product of quantised rows.
#[derive(Debug)]
pub struct QuantizedCall<'a> {
    /// Activations `[m, k]`.
    pub x: QuantizedView<'a>,
    /// Weight.
    pub w: &'a Packed,
    /// What happens to the sums.
    pub epilogue: Epilogue<'a>,
    /// Output `[m, n]`, of [`Packed::outputs`].
    pub y: FloatViewMut<'a>,
    /// As that of a product with floats.
    pub workspace: Option<&'a mut Workspace>,
}

/// Puts a product into a stream.
///
/// *Accuracy:* the bits of [`super::run`] with the numbers that were quantised. *Errors:* rows of another form than
/// [`rows_form`] gives, lengths that do not fit, a workspace that is too small, a kernel that cannot be compiled.
pub fn run_quantized(gpu: &Gpu, stream: &Stream, call: QuantizedCall<'_>) -> Result<()> {
    let problem = problem(call.w, call.x.form.m, call.y.dtype());
    let plans = call.w.plans(gpu, problem.x, problem.y);
    let plan = plans.as_ref().ok().and_then(|plans| plans.at(problem.m, false).ok());
    launch(gpu, stream, &problem, plan.map(|plan| (plan.kernel(), plan.configuration())), &call)
}

/// The same by a kernel of the caller's choice. Error also: it does not read such rows.
pub fn run_quantized_with(kernel: &Kernel, gpu: &Gpu, stream: &Stream, call: QuantizedCall<'_>) -> Result<()> {
    let problem = problem(call.w, call.x.form.m, call.y.dtype());
    let chosen = kernel.choose(&call.w.caps(gpu), &problem, false).ok().filter(|_| kernel.layout == call.w.layout());
    launch(gpu, stream, &problem, chosen.as_ref().map(|configuration| (kernel, configuration)), &call)
}

fn launch(
    gpu: &Gpu,
    stream: &Stream,
    problem: &Problem,
    plan: Option<(&Kernel, &Configuration)>,
    call: &QuantizedCall<'_>,
) -> Result<()> {
    let (form, [n, k]) = (call.x.form, call.w.shape());
    let plan = plan.filter(|_| call.w.in_order());
    let wanted = plan.and_then(|(kernel, _)| kernel.rows_form(problem));
    let Some((_, configuration)) = plan.filter(|_| wanted == Some(form)) else {
        let expected = match wanted {
            Some(wanted) => format!("rows of {wanted:?} for weights of {n} × {k}"),
            None => format!("weights that quantised rows are multiplied by, not {} of {n} × {k}", call.w.format()),
        };
        return Err(Error::invalid(OP, expected, format!("rows of {form:?}")));
    };
    let fits = |what: &str, expected: Option<usize>, got: usize| match expected == Some(got) {
        true => Ok(()),
        false => Err(Error::invalid(OP, format!("{what} of {} × {n}", form.m), format!("{got} elements"))),
    };
    check_gate(call.w, &call.epilogue)?;
    fits("y", form.m.checked_mul(call.w.outputs()), call.y.len())?;
    if let Some(bias) = call.epilogue.bias {
        fits("a bias, once for rows,", Some(n), bias.len())?;
    }
    if call.y.is_empty() { Ok(()) } else { configuration.get().run_quantized(gpu, stream, problem, call) }
}

/// The type of x does not matter any more.
fn problem(w: &Packed, m: usize, y: Float) -> Problem {
    let [n, k] = w.shape();
    Problem { format: Some(w.format()), x: Float::F32, y, m, n, k }
}
