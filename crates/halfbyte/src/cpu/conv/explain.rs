//! Which kernel computes a convolution, and why the others do not.

use super::depthwise;
use crate::conv::{Conv2dShape, Geometry};
use crate::cpu::isa::{Caps, Isa, needs};
use crate::cpu::matmul;
use crate::error::Result;
use crate::format::{Act, Format, Group, WeightFormat};
use crate::kernel::{Problem, Reason, Row, explain};
use crate::tensor::Float;

/// A kernel, and the reason against it.
#[derive(Clone, Debug)]
pub struct Explained {
    /// Name.
    pub kernel: &'static str,
    /// Layout of the weights that it reads.
    pub layout: &'static str,
    /// What it does, in one line.
    pub what: &'static str,
    /// Why it is not taken; none: it is.
    pub reason: Option<Reason>,
}

impl Row for Explained {
    fn name(&self) -> &'static str {
        self.kernel
    }
}

/// All of them, of which the first without a reason against it is chosen.
fn explained(rows: Vec<Explained>) -> Vec<Explained> {
    let all = explain(&rows, |row: &Explained| row.reason.clone());
    all.into_iter().map(|(row, reason)| Explained { reason, ..row.clone() }).collect()
}

/// The format in which the products of a convolution have a weight: with quantised activations a scale for each position, so that
/// each has the scale of x that its pixel has. Error: groups of a scale that do not divide `ci / groups`.
pub(crate) fn format_of_products(weight: WeightFormat, act: Act, geometry: &Geometry) -> Result<WeightFormat> {
    let share = geometry.scale_channels(weight.group)?;
    let by_pixel = act.is_quantized() && geometry.positions() > 1;
    Ok(if by_pixel { WeightFormat { group: Group::Size(share), ..weight } } else { weight })
}

/// Every kernel for convolutions of floats, with weights of a format (none: dense) and x and y of types.
///
/// *Errors:* groups of a scale that do not divide `ci / groups`.
pub fn conv2d(caps: &Caps, format: Option<Format>, shape: &Conv2dShape, [x, y]: [Float; 2]) -> Result<Vec<Explained>> {
    let g = shape.geometry();
    let of_product =
        |format: Format| Ok(Format { weight: format_of_products(format.weight, format.act, g)?, ..format });
    let format = format.map(of_product).transpose()?;
    let problem = Problem { format, x, y, m: shape.output_pixels(), n: g.outputs(), k: g.k() };
    let depthwise = Explained {
        kernel: "depthwise",
        layout: "positions, outputs",
        what: "one input channel a group, f32 multiply-add along the channels of a pixel",
        reason: depthwise::serves(g).err(),
    };
    let products = matmul::explain(caps, &problem).into_iter().map(|(kernel, _)| Explained {
        kernel: kernel.name,
        layout: kernel.layout,
        what: kernel.what,
        reason: kernel.supports_windows(caps, &problem).err(),
    });
    Ok(explained([depthwise].into_iter().chain(products).collect()))
}

/// Every kernel for convolutions of bytes.
pub fn conv2d_int8(caps: &Caps, geometry: &Geometry) -> Vec<Explained> {
    let depthwise = Explained {
        kernel: "int8_depthwise",
        layout: "positions, outputs",
        what: "one input channel a group, integer multiply-add along the channels of a pixel",
        reason: depthwise::serves(geometry).err(),
    };
    let dots = [
        ("int8_amx", "tdpbusd on windows that are gathered; few rows or columns as the next", Isa::Amx),
        ("int8_avx512vnni", "vpdpbusd on windows where they lie", Isa::Avx512),
        ("int8_avxvnni", "vpdpbusd of 256 bits on windows where they lie", Isa::AvxVnni),
        ("int8_avx2", "bytes widened to words, vpmaddwd, on windows where they lie", Isa::Avx2),
        ("int8_scalar", "plain Rust, every processor", Isa::Plain),
    ];
    let dots =
        dots.map(|(kernel, what, isa)| Explained { kernel, layout: "cpu_int8", what, reason: needs(caps, isa).err() });
    explained([depthwise].into_iter().chain(dots).collect())
}
