//! Launches of `experts.cu`: what a mixture of experts does beside its products.

use super::{launch, narrow, rows_of, same_length};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, FloatView, FloatViewMut, Launch, Stream, View, ViewMut};
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::{Error, Result};
use bytemuck::Pod;

static SOURCE: Source = Source {
    path: "nn/experts.cu",
    text: include_str!("experts.cu"),
    parameters: &[RouteParams::LAYOUT, GatherParams::LAYOUT, CombineParams::LAYOUT],
};

/// As in the source: of a block, and rows of one that chooses.
const THREADS: u32 = 256;
const WARPS: usize = 4;

pub(super) fn instances() -> [Instance; 3] {
    ["route", "gather", "combine_experts"].map(|kernel| Instance::new(&SOURCE, kernel))
}

parameters! {
    /// As in the source.
    struct RouteParams {
        logits: u64,
        ids: u64,
        shares: u64,
        rows: u32,
        experts: u32,
        top_k: u32,
        of_chosen: u32,
    }

    /// As in the source.
    struct GatherParams {
        from: u64,
        rows: u64,
        to: u64,
        width: u64,
        rows_of_from: u32,
        vectors: u32,
    }

    /// As in the source.
    struct CombineParams {
        from: u64,
        places: u64,
        shares: u64,
        out: u64,
        width: u64,
        rows_of_from: u32,
        top_k: u32,
        vectors: u32,
        padding: u32,
    }
}

/// The `top_k` experts with the greatest logits of each row, the greatest first, of equals the lower id; and their shares, by a
/// softmax over the chosen (`of_chosen`) or over all.
///
/// *Shapes:* logits `[m, experts]`, ids and shares `[m, top_k]`. *Accuracy:* relative error ≤ (experts/32 + 16)·2⁻²³ of shares
/// above 2⁻¹⁰⁰. A row with a logit that is not finite has shares of NaN. *Errors:* lengths that do not fit, more experts chosen
/// than there are or none. *Source:* Shazeer et al., "Outrageously Large Neural Networks", 2017.
pub fn route(
    gpu: &Gpu,
    stream: &Stream,
    logits: View<'_, f32>,
    [experts, top_k]: [usize; 2],
    of_chosen: bool,
    ids: ViewMut<'_, u32>,
    shares: ViewMut<'_, f32>,
) -> Result<()> {
    const OP: &str = "route";
    let m = rows_of(OP, logits.len(), experts)?;
    if top_k == 0 || top_k > experts {
        return Err(Error::invalid(OP, format!("from 1 to {experts} experts chosen"), top_k.to_string()));
    }
    same_length(OP, "ids", m.checked_mul(top_k), ids.len())?;
    same_length(OP, "shares", m.checked_mul(top_k), shares.len())?;
    let params = RouteParams {
        logits: logits.pointer(),
        ids: ids.pointer(),
        shares: shares.pointer(),
        rows: narrow(OP, "rows", m)?,
        experts: narrow(OP, "experts", experts)?,
        top_k: narrow(OP, "experts", top_k)?,
        of_chosen: of_chosen.into(),
    };
    put(gpu, stream, 0, m, launch(OP, [m.div_ceil(WARPS), 1, 1], 32 * WARPS as u32, 0)?, &params)
}

/// `to[i] = from[rows[i]]`.
///
/// *Shapes:* from `[n, width]`, to `[rows, width]`, of one type; rows are below n. *Errors:* lengths or types that do not fit.
pub fn gather(
    gpu: &Gpu,
    stream: &Stream,
    from: FloatView<'_>,
    width: usize,
    rows: View<'_, u32>,
    to: FloatViewMut<'_>,
) -> Result<()> {
    const OP: &str = "gather";
    let rows_of_from = rows_of(OP, from.len(), width)?;
    same_length(OP, "to", rows.len().checked_mul(width), to.len())?;
    if from.dtype() != to.dtype() || (rows_of_from == 0 && !rows.is_empty()) {
        let expected = format!("rows of {}", to.dtype());
        return Err(Error::invalid(OP, expected, format!("{rows_of_from} of {}", from.dtype())));
    }
    let halves = width * (from.dtype().size_bytes() / 2);
    let aligned = [from.pointer(), to.pointer()].iter().all(|at| at.is_multiple_of(16));
    let params = GatherParams {
        from: from.pointer(),
        rows: rows.pointer(),
        to: to.pointer(),
        width: halves as u64,
        rows_of_from: narrow(OP, "rows", rows_of_from)?,
        vectors: (aligned && halves.is_multiple_of(8)).into(),
    };
    put(gpu, stream, 1, rows.len(), launch(OP, [rows.len(), 1, 1], THREADS, 0)?, &params)
}

/// `out[i] = Σ shares[i][k] · from[places[i][k]]`, in the order of k.
///
/// *Shapes:* from `[n, width]`, places and shares `[m, top_k]`, out `[m, width]`; places are below n. *Accuracy:* absolute error
/// ≤ top_k·2⁻²⁴ · `Σ |share · from|`. *Errors:* lengths that do not fit.
pub fn combine_experts(
    gpu: &Gpu,
    stream: &Stream,
    from: View<'_, f32>,
    width: usize,
    (places, shares): (View<'_, u32>, View<'_, f32>),
    out: ViewMut<'_, f32>,
) -> Result<()> {
    const OP: &str = "combine_experts";
    let (rows_of_from, m) = (rows_of(OP, from.len(), width)?, rows_of(OP, out.len(), width)?);
    let top_k = places.len().checked_div(m).unwrap_or(0);
    same_length(OP, "places", m.checked_mul(top_k), places.len())?;
    same_length(OP, "shares", Some(places.len()), shares.len())?;
    if rows_of_from == 0 && m > 0 {
        return Err(Error::invalid(OP, "rows to add up", "none"));
    }
    let aligned = [from.pointer(), out.pointer()].iter().all(|at| at.is_multiple_of(16));
    let params = CombineParams {
        from: from.pointer(),
        places: places.pointer(),
        shares: shares.pointer(),
        out: out.pointer(),
        width: width as u64,
        rows_of_from: narrow(OP, "rows", rows_of_from)?,
        top_k: narrow(OP, "experts", top_k)?,
        vectors: (aligned && width.is_multiple_of(4)).into(),
        padding: 0,
    };
    put(gpu, stream, 2, m, launch(OP, [m, width.div_ceil(4 * THREADS as usize), 1], THREADS, 0)?, &params)
}

/// Puts one of the kernels into a stream, with its parameters, for rows of which there may be none.
fn put<P: Pod>(gpu: &Gpu, stream: &Stream, kernel: usize, rows: usize, form: Launch, params: &P) -> Result<()> {
    if rows == 0 {
        return Ok(());
    }
    let function = gpu.function(&instances()[kernel])?;
    // SAFETY: the one parameter is the kernel's, whose lengths the callers have checked.
    unsafe { function.launch(stream, &gpu.overlapping(form), &[Arg::new(params)]) }
}
