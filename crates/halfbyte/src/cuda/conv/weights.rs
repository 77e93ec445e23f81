//! Weights of convolutions on a device.

use super::columns::{Columns, FILLED};
use super::launches::Launches;
use super::{OP, im2col_gemm, implicit_gemm_a8_sm90, implicit_gemm_rows_sm90, implicit_gemm_sm90};
use crate::conv::Geometry;
use crate::cuda::driver::Stream;
use crate::cuda::matmul::{self, KERNELS, Packed, Packer};
use crate::cuda::nn::FloatBuffer;
use crate::cuda::{Caps, Gpu};
use crate::error::{Error, Result};
use crate::format::{Act, Format, QTensor};
use crate::kernel;
use crate::tensor::{Float, Floats};
use std::borrow::Cow;

/// Name of the layout of weights that are floats.
pub(super) const DENSE: &str = "dense";

/// A convolution's weight `[co, k]` on a device, in the order of [`crate::conv`].
#[derive(Debug)]
pub struct Weights {
    geometry: Geometry,
    format: Option<Format>,
    pub(super) kind: Kind,
    pub(super) columns: Columns,
    /// What the implicit products keep prepared, each for itself: the address of x in a key is that of what it multiplies.
    pub(super) launches: Launches<implicit_gemm_sm90::config::Plan>,
    pub(super) launches_rows: Launches<implicit_gemm_sm90::config::Plan>,
    pub(super) launches_a8: Launches<implicit_gemm_a8_sm90::config::Plan>,
}

/// What a weight is made of.
#[derive(Debug)]
pub(super) enum Kind {
    /// Floats.
    Dense(FloatBuffer),
    /// Codes: all groups of the convolution in one, or each in one of its own, in one layout.
    Quantized(Vec<Packed>),
}

impl Weights {
    /// Packs a quantised weight for the kernel that serves it best, when x is of the type given.
    ///
    /// *Errors:* a geometry that [`Geometry::validate`] refuses, another shape of the weight, groups of a scale that do not
    /// divide `ci / groups`, columns in an order of their own (act-order), memory that is short.
    pub fn pack(gpu: &Gpu, stream: &Stream, w: &QTensor, act: Act, geometry: Geometry, x: Float) -> Result<Self> {
        geometry.validate()?;
        if [w.n(), w.k()] != [geometry.co, geometry.k()] {
            let expected = format!("a weight of {} × {}", geometry.co, geometry.k());
            return Err(Error::invalid(OP, expected, format!("{} × {}", w.n(), w.k())));
        }
        geometry.scale_channels(w.format().group)?;
        if w.group_index().is_some() {
            let got = "columns that are grouped in another order (act-order)";
            return Err(Error::invalid(OP, "groups of neighbouring channels", got));
        }
        let mut packer = Packer::new(gpu, stream);
        let layout = layout_of(&gpu.caps(), w, act, &geometry, x)?;
        let columns = if let Layout::Fragments(_, columns, _) = &layout { *columns } else { Columns::of(&geometry) };
        let parts = match layout {
            Layout::Product(w) => vec![packer.pack(&[&w.as_ref().into()], act, x)?],
            Layout::Plain => vec![packer.pack_for(matmul_kernel("plain")?, &[&w.into()], act)?],
            Layout::Fragments(w, _, kernel) => {
                let outputs = geometry.outputs();
                let packed = |group: usize| {
                    let rows = w.rows(group * outputs..(group + 1) * outputs)?;
                    packer.pack_for(kernel, &[&(&rows).into()], act)
                };
                (0..geometry.groups).map(packed).collect::<Result<_>>()?
            }
        };
        let format = Format { weight: w.format(), act };
        Ok(Self { columns, ..Self::of(geometry, Some(format), Kind::Quantized(parts)) })
    }

    /// Floats that are multiplied exactly.
    ///
    /// *Shapes:* w `[co, k]`. *Errors:* a geometry that [`Geometry::validate`] refuses, a length that does not fit, memory
    /// that is short.
    pub fn dense(gpu: &Gpu, stream: &Stream, w: Floats<'_>, geometry: Geometry) -> Result<Self> {
        geometry.validate()?;
        if w.len() != geometry.co * geometry.k() {
            let expected = format!("{} × {} weights", geometry.co, geometry.k());
            return Err(Error::invalid(OP, expected, w.len().to_string()));
        }
        Ok(Self::of(geometry, None, Kind::Dense(FloatBuffer::upload(gpu, stream, w)?)))
    }

    fn of(geometry: Geometry, format: Option<Format>, kind: Kind) -> Self {
        let columns = Columns::of(&geometry);
        Self {
            geometry,
            format,
            kind,
            columns,
            launches: Default::default(),
            launches_rows: Default::default(),
            launches_a8: Default::default(),
        }
    }

    /// What the layer fixes.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Format; none if it is dense.
    pub fn format(&self) -> Option<Format> {
        self.format
    }

    /// Name of its layout.
    pub fn layout(&self) -> &'static str {
        match &self.kind {
            Kind::Dense(_) => DENSE,
            Kind::Quantized(_) if self.columns != Columns::of(&self.geometry) => FILLED,
            Kind::Quantized(parts) => parts.first().map_or(DENSE, Packed::layout),
        }
    }

    /// Bytes that it takes on the device.
    pub fn bytes(&self) -> usize {
        match &self.kind {
            Kind::Dense(floats) => floats.bytes(),
            Kind::Quantized(parts) => parts.iter().map(Packed::bytes).sum(),
        }
    }

    /// Another one with the same content in memory of its own, for measurements on cold weights. Error: memory is short.
    pub fn duplicate(&self, stream: &Stream) -> Result<Self> {
        let kind = match &self.kind {
            Kind::Dense(floats) => Kind::Dense(floats.duplicate(stream)?),
            Kind::Quantized(parts) => {
                Kind::Quantized(parts.iter().map(|part| part.duplicate(stream)).collect::<Result<_>>()?)
            }
        };
        Ok(Self { columns: self.columns, ..Self::of(self.geometry, self.format, kind) })
    }
}

/// Where a weight's kernel wants it to lie.
enum Layout<'a> {
    /// As products have it, and as the rows that they are multiplied by need it.
    Product(Cow<'a, QTensor>),
    /// As the implicit products have it: in fragments of the tensor cores, group by group, as a kernel of products packs them.
    Fragments(Cow<'a, QTensor>, Columns, &'static matmul::Kernel),
    /// As the direct convolution reads it.
    Plain,
}

fn layout_of<'a>(caps: &Caps, w: &'a QTensor, act: Act, geometry: &Geometry, x: Float) -> Result<Layout<'a>> {
    let format = Format { weight: w.format(), act };
    // Products have one scale of x a row, a pixel has one: with several positions they are not the same; and what reads factors
    // multiplies rows of matrices only.
    if w.format().channel_scale.is_some() {
        return Ok(Layout::Plain);
    }
    let implicit = match implicit_gemm_sm90::packs(caps, format, geometry, x) {
        true => Some((Cow::Borrowed(w), Columns::of(geometry), matmul_kernel("wna16_sm90")?)),
        false => {
            let weight = implicit_gemm_a8_sm90::weight(caps, w, format, geometry)?;
            weight.map(|(w, columns)| Ok((w, columns, matmul_kernel("wna8_sm90")?))).transpose()?
        }
    };
    if let Some((w, columns, kernel)) = implicit
        && kernel.holds(&w.as_ref().into()).is_ok()
    {
        return Ok(Layout::Fragments(w, columns, kernel));
    }
    // The layout in which products would have it.
    let layout = |w: &QTensor| {
        let format = Some(Format { weight: w.format(), act });
        let problem = kernel::Problem { format, x, y: x, m: 1, n: w.n(), k: w.k() };
        let serves = |kernel: &&matmul::Kernel| {
            kernel.packs && kernel.supports(caps, &problem).is_ok() && kernel.holds(&w.into()).is_ok()
        };
        KERNELS.iter().find(serves).map(|kernel| kernel.layout)
    };
    let Geometry { kernel, stride, padding, groups, .. } = *geometry;
    if kernel == [1, 1] && stride == [1, 1] && padding == [0; 4] && groups == 1 {
        return Ok(if layout(w).is_some() { Layout::Product(Cow::Borrowed(w)) } else { Layout::Plain });
    }
    let kernel = matmul_kernel("wna16_sm90")?;
    if let Some((w, columns)) = implicit_gemm_rows_sm90::weight(caps, w, format, geometry, x)?
        && kernel.holds(&w.as_ref().into()).is_ok()
    {
        return Ok(Layout::Fragments(w, columns, kernel));
    }
    if im2col_gemm::is_served(geometry)
        && let Some(wider) = im2col_gemm::weight(w, format, geometry)?
        && layout(&wider) == Some(im2col_gemm::LAYOUT)
    {
        return Ok(Layout::Product(wider));
    }
    Ok(Layout::Plain)
}

fn matmul_kernel(name: &str) -> Result<&'static matmul::Kernel> {
    let found = KERNELS.iter().find(|kernel| kernel.name == name);
    found.ok_or_else(|| Error::invalid(OP, format!("a kernel {name}"), "none"))
}
