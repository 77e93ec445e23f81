//! Implicit GEMM with few channels on Hopper: `wna16_sm90.cu` with rows of windows for x.
//!
//! x is copied once, to images in which a row of a window is the channels of a pixel (`window_rows.rs`); the copy engine brings
//! those row by row, 32 columns at a time.

use super::columns::{Columns, FILLED};
use super::implicit_gemm::{self, Images, ImplicitGemm, Part, Place, Windowed, counted, sizes};
use super::implicit_gemm_sm90::{self, ConvArguments, OnWindows, config, config::Tiling};
use super::weights::Unpacked;
use super::window_rows::{self, BOX, WindowRows};
use super::windows::Windows;
use super::{Call, Kernel, Problem};
use crate::conv::{Conv2dShape, Layout2d};
use crate::cuda::Workspace;
use crate::cuda::driver::TensorMap;
use crate::cuda::matmul::wna16_sm90::{self, config::Config};
use crate::cuda::parameters::Flat;
use crate::cuda::sources::{Arch, Instance};
use crate::cuda::tiled::Form;
use crate::error::Result;
use crate::format::QTensor;
use crate::kernel::{Activation, Reason};
use crate::layout::cuda_wna16::Atom;
use crate::tensor::Float;
use std::borrow::Cow;

const NAME: &str = "implicit_gemm_rows_sm90";

pub(super) const KERNEL: Kernel = Kernel {
    name: NAME,
    what: "wna16_sm90 on rows of windows, which the copy engine brings from a copy of x: few channels",
    serves: Arch::is_hopper,
    instances,
    every_instance: implicit_gemm_sm90::every_instance::<BOX>,
    choose: implicit_gemm::choose::<RowsOfWindows>,
    candidates: implicit_gemm::candidates::<RowsOfWindows>,
};

const ALIGNMENT: usize = 256;

/// A third of the forms each for the commonest formats with one strip, and others with more: but for how the rows of x lie they
/// are those of `implicit_gemm_sm90`.
fn instances() -> Vec<Instance> {
    let atom = Atom { bits: 4, group: 0, zero: false, scale: Float::F16, ..Atom::W4_G128 };
    let forms = [
        (atom, 64, Float::F16, Activation::Relu),
        (Atom { bits: 8, ..atom }, 64, Float::F16, Activation::None),
        (
            Atom { bits: 8, zero: true, group: 32, scale: Float::BF16, ..Atom::W4_G128 },
            64,
            Float::BF16,
            Activation::None,
        ),
        (Atom { zero: true, scale: Float::BF16, ..atom }, 512, Float::F32, Activation::Silu),
    ];
    let all = forms.into_iter().enumerate().flat_map(|(first, (atom, n, out, activation))| {
        let configs = config::configs(atom, n, out).into_iter().skip(first % 3).step_by(3);
        configs.map(move |config| OnWindows::<BOX>::instance(&Form::floats(atom, out), config, activation))
    });
    all.chain([window_rows::instance()]).collect()
}

/// A weight as this kernel has it, and where its columns lie, if it serves the layer and the numbers.
pub(super) fn weight<'a>(of: &Unpacked<'a>) -> Result<Option<(Cow<'a, QTensor>, Columns)>> {
    let Unpacked { caps, w, format, geometry, x } = *of;
    let atom = Atom::of(format.weight, geometry.k());
    let served = (KERNEL.serves)(caps.arch) && !format.act.is_quantized() && atom.is_ok_and(|atom| atom.scale == x);
    let Some(rows) = WindowRows::of(geometry).ok().filter(|_| served) else { return Ok(None) };
    Ok(rows.weight(w, geometry)?.map(|w| (w, rows.weight_columns(geometry))))
}

/// Rows of windows in a copy of x.
#[derive(Clone)]
struct RowsOfWindows {
    rows: WindowRows,
    /// The problem's images.
    outer: Conv2dShape,
    x_layout: Layout2d,
    /// Images of rows of windows.
    inner: Conv2dShape,
    atom: Atom,
    out: Float,
}

impl RowsOfWindows {
    /// Where the images begin in the workspace.
    fn images_at(parts_bytes: usize) -> usize {
        (Workspace::COUNTER_BYTES + parts_bytes).next_multiple_of(ALIGNMENT)
    }
}

impl ImplicitGemm for RowsOfWindows {
    const NAME: &'static str = NAME;
    type Kernel = OnWindows<BOX>;
    type Arguments = ConvArguments;

    fn of(problem: &Problem) -> std::result::Result<Self, Reason> {
        let Problem { shape: outer, y: out, layouts: [x_layout, y_layout], packed, .. } = *problem;
        let g = outer.geometry();
        let rows = WindowRows::of(g)?;
        let inner = rows.shape(&outer).map_err(|why| Reason(why.to_string()))?;
        let atom = implicit_gemm_sm90::form(problem)?;
        if !rows.keeps_columns(g) && atom.group > 0 {
            return Err(Reason("fills up columns of weights with one scale a row".into()));
        }
        let expected = if rows.keeps_columns(g) { "cuda_wna16" } else { FILLED };
        if packed != expected {
            return Err(Reason(format!("reads layout {expected}, the weights lie in {packed}")));
        }
        if y_layout != Layout2d::Nhwc {
            return Err(Reason("writes images in nhwc".into()));
        }
        counted(&sizes(&inner))?;
        if inner.output_pixels() > 0 {
            rows.are_made(&outer)?;
        }
        Ok(Self { rows, outer, x_layout, inner, atom, out })
    }

    fn inner(&self) -> &Conv2dShape {
        &self.inner
    }

    fn form(&self) -> Form {
        Form::floats(self.atom, self.out)
    }

    fn workspace_bytes(&self, parts_bytes: usize) -> usize {
        Self::images_at(parts_bytes) + self.rows.bytes(&self.outer)
    }

    fn before(&self) -> Vec<Instance> {
        vec![window_rows::instance()]
    }

    fn images<'a>(&self, place: Place<'a>, call: &'a Call<'_>) -> Result<Images<'a>> {
        let Place { gpu, stream, workspace, parts_bytes } = place;
        let from = implicit_gemm_sm90::halfs(NAME, call.x)?.pointer();
        let x = workspace.slice(Self::images_at(parts_bytes)..self.workspace_bytes(parts_bytes));
        self.rows.make(gpu, stream, &self.outer, (from, self.x_layout), x.pointer())?;
        Ok(Images { x, terms: workspace.slice(0..0) })
    }

    fn maps(&self, images: &Images<'_>, config: &Config) -> Result<Vec<TensorMap>> {
        let map = self.rows.map(&self.outer, config.tokens)?;
        Ok(vec![TensorMap::of_windows(images.x, 2, &map)?])
    }

    fn arguments(&self, part: &Part<'_>, (config, schedule): &Tiling) -> ConvArguments {
        let pixels = self.inner.output_pixels();
        ConvArguments {
            product: Flat(wna16_sm90::Arguments::new(part.w.into(), schedule, part.addresses, pixels, config.tokens)),
            windows: Windows::new(&self.inner, self.rows.columns),
        }
    }
}
