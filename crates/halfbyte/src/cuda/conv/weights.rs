//! Weights of convolutions on a device.

use super::columns::{Columns, FILLED};
use super::{
    Convolution, OP, im2col_gemm, implicit_gemm_a8_sm90, implicit_gemm_mma, implicit_gemm_rows_sm90, implicit_gemm_sm90,
};
use crate::conv::Geometry;
use crate::cuda::dispatch::Plans;
use crate::cuda::driver::Stream;
use crate::cuda::matmul::{self, KERNELS, Packed, Packer, Wna16Weights};
use crate::cuda::nn::FloatBuffer;
use crate::cuda::{Caps, Gpu};
use crate::error::{Error, Result};
use crate::format::{Act, Format, QTensor, WeightFormat, Zero, Zeros};
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
    layout: &'static str,
    pub(super) kind: Kind,
    pub(super) columns: Columns,
    /// What was chosen for the problems that it has seen.
    pub(super) plans: Plans<Convolution>,
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
        let (caps, format) = (gpu.caps(), Format { weight: w.format(), act });
        let place = Place::of(Unpacked { caps: &caps, w, format, geometry: &geometry, x })?;
        let (columns, layout) = (place.columns(&geometry), place.layout(&geometry));
        let parts = match place {
            Place::Product(w, _) => vec![packer.pack(&[&w.as_ref().into()], act, x)?],
            Place::Plain => vec![packer.pack_for(packs(PLAIN)?, &[&w.into()], act)?],
            // What is quantised on the fly is multiplied as the floats that it stands for.
            Place::Groups(w, _) => vec![packer.pack_for(packs(FRAGMENTS)?, &[&(&w).into()], Act::A16)?],
            Place::Fragments(w, _) => {
                let (kernel, outputs) = (packs(FRAGMENTS)?, geometry.outputs());
                let packed = |group: usize| {
                    let rows = w.rows(group * outputs..(group + 1) * outputs)?;
                    packer.pack_for(kernel, &[&(&rows).into()], act)
                };
                (0..geometry.groups).map(packed).collect::<Result<_>>()?
            }
        };
        Ok(Self { columns, ..Self::of(geometry, Some(format), layout, Kind::Quantized(parts)) })
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
        Ok(Self::of(geometry, None, DENSE, Kind::Dense(FloatBuffer::upload(gpu, stream, w)?)))
    }

    fn of(geometry: Geometry, format: Option<Format>, layout: &'static str, kind: Kind) -> Self {
        let columns = Columns::of(&geometry);
        Self { geometry, format, layout, kind, columns, plans: Plans::default() }
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
        self.layout
    }

    /// The fragments of a group of the convolution, for a kernel that multiplies so many groups of a shape.
    pub(super) fn fragments(
        &self,
        kernel: &'static str,
        [group, groups]: [usize; 2],
        shape: [usize; 2],
    ) -> Result<&Wna16Weights> {
        match &self.kind {
            Kind::Quantized(parts) if parts.len() == groups => match &parts[group] {
                Packed::Wna16(w) if w.shape() == shape => Ok(w),
                other => {
                    let [n, k] = shape;
                    let got = format!("{:?} in layout {}", other.shape(), other.layout());
                    Err(Error::invalid(kernel, format!("a weight of {n} × {k} in fragments"), got))
                }
            },
            _ => Err(Error::invalid(kernel, "weights in fragments, group by group", self.layout())),
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
        Ok(Self { columns: self.columns, ..Self::of(self.geometry, self.format, self.layout, kind) })
    }
}

/// Name of the layout that a weight of a format would have on a device, with x of a type, if the layout holds its numbers; none:
/// dense. Errors: those of [`Weights::pack`].
pub fn layout_of(caps: &Caps, format: Option<Format>, geometry: &Geometry, x: Float) -> Result<&'static str> {
    let Some(Format { weight, act }) = format else { return Ok(DENSE) };
    geometry.validate()?;
    geometry.scale_channels(weight.group)?;
    let (n, k) = (geometry.co, geometry.k());
    let groups = n * weight.group.count(k);
    let zeros = match weight.zero {
        Zero::Symmetric => Zeros::Symmetric,
        Zero::Integer => Zeros::Integer(vec![0; groups]),
        Zero::Float => Zeros::Float(vec![0.0; groups]),
    };
    let two_levels = weight.channel_scale.is_some();
    let scale = if two_levels { Float::F32 } else { weight.scale };
    let one_level = WeightFormat { scale, channel_scale: None, ..weight };
    let w = QTensor::new(one_level, [n, k], vec![0; n * k], vec![1.0; groups], zeros, None)?;
    let format = Format { weight, act };
    let unpacked = Unpacked { caps, w: &w, format, geometry, x };
    let place = if two_levels { Place::of_groups(unpacked) } else { Place::of(unpacked) }?;
    Ok(place.layout(geometry))
}

/// The layouts in which products read weights: in fragments of the tensor cores, and as the direct convolution reads any.
const FRAGMENTS: &str = "cuda_wna16";
const PLAIN: &str = "cuda_plain";

/// A kernel of products for which weights are packed in a layout: which one of several makes no difference.
fn packs(layout: &str) -> Result<&'static matmul::Kernel> {
    let found = KERNELS.iter().find(|kernel| kernel.packs && kernel.layout == layout);
    found.ok_or_else(|| Error::invalid(OP, format!("a kernel that packs {layout}"), "none"))
}

/// A weight before it is packed, with what decides on its layout.
#[derive(Clone, Copy)]
pub(super) struct Unpacked<'a> {
    pub caps: &'a Caps,
    pub w: &'a QTensor,
    pub format: Format,
    pub geometry: &'a Geometry,
    /// Type of x.
    pub x: Float,
}

/// Where a weight's kernel wants it to lie.
enum Place<'a> {
    /// As products have it in a layout, and as the rows that they are multiplied by need it.
    Product(Cow<'a, QTensor>, &'static str),
    /// As implicit products have it: in fragments of the tensor cores, group by group.
    Fragments(Cow<'a, QTensor>, Columns),
    /// As implicit products by mma.sync have it: in fragments, all groups in one.
    Groups(QTensor, Columns),
    /// As the direct convolution reads it.
    Plain,
}

impl<'a> Place<'a> {
    fn of(unpacked: Unpacked<'a>) -> Result<Self> {
        let Unpacked { caps, w, format, geometry, x } = unpacked;
        // What reads factors multiplies rows of matrices only.
        if w.format().channel_scale.is_some() {
            return Self::of_groups(unpacked);
        }
        let fragments = packs(FRAGMENTS)?;
        let held = |(w, _): &(Cow<'a, QTensor>, Columns)| fragments.holds(&w.as_ref().into(), format.act).is_ok();
        let implicit = match implicit_gemm_sm90::packs(&unpacked) {
            true => Some((Cow::Borrowed(w), Columns::of(geometry))),
            false => implicit_gemm_a8_sm90::weight(&unpacked)?,
        };
        if let Some((w, columns)) = implicit.filter(held) {
            return Ok(Place::Fragments(w, columns));
        }
        // The layout in which products would have it.
        let layout = |w: &QTensor| {
            let problem = kernel::Problem {
                format: Some(Format { weight: w.format(), ..format }),
                x,
                y: x,
                m: 1,
                n: w.n(),
                k: w.k(),
            };
            let serves = |kernel: &&matmul::Kernel| {
                kernel.packs && kernel.supports(caps, &problem).is_ok() && kernel.holds(&w.into(), format.act).is_ok()
            };
            KERNELS.iter().find(serves).map(|kernel| kernel.layout)
        };
        let Geometry { kernel, stride, padding, groups, .. } = *geometry;
        if kernel == [1, 1] && stride == [1, 1] && padding == [0; 4] && groups == 1 {
            return Ok(layout(w).map_or(Place::Plain, |layout| Place::Product(Cow::Borrowed(w), layout)));
        }
        if let Some((w, columns)) = implicit_gemm_rows_sm90::weight(&unpacked)?.filter(held) {
            return Ok(Place::Fragments(w, columns));
        }
        // Patches of exact f32 would be split once they are made, which takes longer than windows on images that are.
        let is_split = x == Float::F32 && !format.act.is_quantized();
        if im2col_gemm::is_served(geometry)
            && !is_split
            && let Some(wider) = im2col_gemm::weight(w, format, geometry)?
            && layout(&wider) == Some(im2col_gemm::LAYOUT)
        {
            return Ok(Place::Product(wider, im2col_gemm::LAYOUT));
        }
        Self::of_groups(unpacked)
    }

    /// For the kernels that come last.
    fn of_groups(unpacked: Unpacked<'a>) -> Result<Self> {
        let fragments = packs(FRAGMENTS)?;
        let held = |(w, _): &(QTensor, Columns)| fragments.holds(&w.into(), Act::A16).is_ok();
        let weight = implicit_gemm_mma::weight(&unpacked)?.filter(held);
        Ok(weight.map_or(Place::Plain, |(w, columns)| Place::Groups(w, columns)))
    }

    /// Name of the layout of the packed weight.
    fn layout(&self, geometry: &Geometry) -> &'static str {
        match self {
            Place::Plain => PLAIN,
            Place::Product(_, layout) => layout,
            Place::Groups(..) => implicit_gemm_mma::OF_GROUPS,
            Place::Fragments(_, columns) if *columns != Columns::of(geometry) => FILLED,
            Place::Fragments(..) => FRAGMENTS,
        }
    }

    /// Where the columns of the packed weight lie.
    fn columns(&self, geometry: &Geometry) -> Columns {
        match self {
            Place::Fragments(_, columns) | Place::Groups(_, columns) => *columns,
            _ => Columns::of(geometry),
        }
    }
}
