//! Launches of `quantize_pixels.cu`: images as what their codes of 8 bits stand for, by the rule of
//! [`crate::ops::Conv2d`].

use super::Call;
use crate::conv::{Conv2dShape, Layout2d};
use crate::cuda::driver::{FloatView, Launch, Stream, ViewMut};
use crate::cuda::parameters::{Parameters, float_type, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::cuda::{Gpu, Workspace};
use crate::error::{Error, Result};
use crate::format::{Act, Format};

static SOURCE: Source =
    Source { path: "conv/quantize_pixels.cu", text: include_str!("quantize_pixels.cu"), parameters: &[Params::LAYOUT] };

const OP: &str = "quantize pixels";

/// As in the source: threads of a block, channels that are loaded and stored at once.
const THREADS: usize = 256;
const PIECE: usize = 8;

parameters! {
    /// As in the source.
    struct Params {
        x: u64,
        y: u64,
        runs: u64,
        plane: u64,
        channels: u32,
        share: u32,
        lanes: u32,
        form: u32,
        x_type: u32,
        vectors: u32,
    }
}

/// Numbers of the source: what a thread has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// A piece of several scales.
    Few = 0,
    /// Pieces of a scale, together with neighbouring lanes.
    Lanes = 1,
    /// A scale, of images in planes.
    Planes = 2,
}

/// How images are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    form: Form,
    /// Scales, of [`Form::Few`] pieces; lanes of each.
    runs: usize,
    lanes: usize,
    /// Whether all pieces are vectors.
    vectors: bool,
}

impl Cut {
    /// Of `len` elements of x, `share` of which have one scale; `aligned`: x begins at a multiple of 16 bytes.
    fn of(layout: Layout2d, len: usize, share: usize, aligned: bool) -> Self {
        if layout == Layout2d::Nchw {
            return Self { form: Form::Planes, runs: len / share, lanes: 1, vectors: false };
        }
        if aligned && [1, 2, 4].contains(&share) && len.is_multiple_of(PIECE) {
            return Self { form: Form::Few, runs: len / PIECE, lanes: 1, vectors: true };
        }
        let lanes = share.div_ceil(PIECE).next_power_of_two().min(32);
        Self { form: Form::Lanes, runs: len / share, lanes, vectors: aligned && share.is_multiple_of(PIECE) }
    }

    fn blocks(&self) -> usize {
        self.runs.div_ceil(THREADS / self.lanes)
    }
}

pub(super) fn instance(act: Act) -> Instance {
    Instance::new(&SOURCE, format!("quantize_pixels<{}>", act == Act::A8Asym))
}

pub(super) fn instances() -> Vec<Instance> {
    [Act::A8, Act::A8Asym].map(instance).into()
}

/// Whether a launch counts the scales of a shape's images.
pub(super) fn counts(shape: &Conv2dShape) -> bool {
    shape.x_len().div_ceil(THREADS) <= i32::MAX as usize
}

/// Bytes of workspace of [`in_workspace`].
pub(super) fn workspace_bytes(shape: &Conv2dShape) -> usize {
    Workspace::COUNTER_BYTES + 4 * shape.x_len()
}

/// Puts it into a stream, to the workspace of a call: what its images stand for, pixel by pixel in f32. Their address.
pub(super) fn in_workspace(
    gpu: &Gpu,
    stream: &Stream,
    (shape, format): (&Conv2dShape, Format),
    call: &mut Call<'_>,
) -> Result<u64> {
    let bytes = workspace_bytes(shape);
    let Some(workspace) = call.workspace.as_deref_mut() else {
        return Err(Error::invalid(OP, format!("a workspace of {bytes} bytes"), "none"));
    };
    let values = workspace.view_mut().slice(Workspace::COUNTER_BYTES..bytes).cast::<f32>();
    let share = shape.geometry().scale_channels(format.weight.activation_group())?;
    let address = values.pointer();
    run(gpu, stream, shape, (call.x, call.x_layout), (format.act, share), values)?;
    Ok(address)
}

/// Puts it into a stream: y `[pixels, ci]`; `share` channels have one scale.
fn run(
    gpu: &Gpu,
    stream: &Stream,
    shape: &Conv2dShape,
    (x, layout): (FloatView<'_>, Layout2d),
    (act, share): (Act, usize),
    y: ViewMut<'_, f32>,
) -> Result<()> {
    let ci = shape.geometry().ci;
    if x.len() != shape.x_len() || y.len() != x.len() {
        let got = format!("{} and {}", x.len(), y.len());
        return Err(Error::invalid(OP, format!("x and y of {} elements", shape.x_len()), got));
    }
    let aligned = [x.pointer(), y.pointer()].iter().all(|address| address.is_multiple_of(16));
    let cut = Cut::of(layout, x.len(), share, aligned);
    let (Ok(blocks), Ok(channels)) = (i32::try_from(cut.blocks()), u32::try_from(ci)) else {
        return Err(Error::invalid(OP, "fewer than 2³⁹ scales", (x.len() / share).to_string()));
    };
    if blocks == 0 {
        return Ok(());
    }
    let params = Params {
        x: x.pointer(),
        y: y.pointer(),
        runs: cut.runs as u64,
        plane: shape.input().iter().product::<usize>() as u64,
        channels,
        share: share as u32,
        lanes: cut.lanes as u32,
        form: cut.form as u32,
        x_type: float_type(x.dtype()),
        vectors: cut.vectors.into(),
    };
    let function = gpu.function_once((OP, [(act == Act::A8Asym).into(), 0]), || instance(act))?;
    let launch = gpu.overlapping(Launch::linear(blocks as u32, THREADS as u32));
    function.launch_typed(stream, &launch, &params, &[])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_channel_has_a_thread_and_vectors_begin_at_multiples_of_their_bytes() {
        for share in [1, 2, 3, 4, 8, 12, 20, 24, 32, 100, 256, 257, 1000] {
            for scales in [0, 1, 7, 8, 24, 1000] {
                for (layout, aligned) in [(Layout2d::Nhwc, true), (Layout2d::Nhwc, false), (Layout2d::Nchw, true)] {
                    let len = share * scales;
                    let cut = Cut::of(layout, len, share, aligned);
                    assert!(cut.lanes.is_power_of_two() && cut.lanes <= 32, "{cut:?}");
                    let of_run = if cut.form == Form::Few { PIECE } else { share };
                    assert_eq!(cut.runs * of_run, len, "{cut:?}");
                    assert!(!cut.vectors || of_run % PIECE == 0, "{cut:?}");
                    assert!(cut.form != Form::Few || PIECE.is_multiple_of(share), "{cut:?}");
                    assert!(cut.blocks() * (THREADS / cut.lanes) >= cut.runs, "{cut:?}");
                    assert!(cut.blocks() <= len.div_ceil(THREADS), "{cut:?}");
                }
            }
        }
        let cut = |share| Cut::of(Layout2d::Nhwc, 960 * share, share, true);
        assert_eq!([1, 8, 12, 256, 1000].map(|share| cut(share).lanes), [1, 1, 2, 32, 32]);
        assert_eq!([1, 4, 8, 20, 24].map(|share| cut(share).vectors), [true, true, true, false, true]);
    }
}
