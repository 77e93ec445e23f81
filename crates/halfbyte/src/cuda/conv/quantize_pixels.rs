//! Launches of `quantize_pixels.cu`: images as what their codes of 8 bits stand for, by the rule of
//! [`crate::ops::Conv2d`].

use super::Call;
use crate::conv::{Conv2dShape, Layout2d};
use crate::cuda::driver::{FloatView, Launch, Stream, ViewMut};
use crate::cuda::matmul::float_type;
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::cuda::{Gpu, Workspace};
use crate::error::{Error, Result};
use crate::format::{Act, Format};

static SOURCE: Source =
    Source { path: "conv/quantize_pixels.cu", text: include_str!("quantize_pixels.cu"), parameters: &[Params::LAYOUT] };

const OP: &str = "quantize pixels";

const THREADS: usize = 256;

parameters! {
    /// As in the source.
    struct Params {
        x: u64,
        y: u64,
        pixels: u64,
        plane: u64,
        channels: u32,
        share: u32,
        x_type: u32,
        nhwc: u32,
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
    let tasks = shape.input_pixels() * (ci / share);
    let (Ok(blocks), Ok(channels)) = (i32::try_from(tasks.div_ceil(THREADS)), u32::try_from(ci)) else {
        return Err(Error::invalid(OP, "fewer than 2³⁹ scales", tasks.to_string()));
    };
    if x.len() != shape.x_len() || y.len() != x.len() {
        let got = format!("{} and {}", x.len(), y.len());
        return Err(Error::invalid(OP, format!("x and y of {} elements", shape.x_len()), got));
    }
    if tasks == 0 {
        return Ok(());
    }
    let params = Params {
        x: x.pointer(),
        y: y.pointer(),
        pixels: shape.input_pixels() as u64,
        plane: shape.input().iter().product::<usize>() as u64,
        channels,
        share: share as u32,
        x_type: float_type(x.dtype()),
        nhwc: (layout == Layout2d::Nhwc).into(),
    };
    let function = gpu.function_once((OP, [(act == Act::A8Asym).into(), 0]), || instance(act))?;
    function.launch_typed(stream, &Launch::linear(blocks as u32, THREADS as u32), &params, &[])
}
