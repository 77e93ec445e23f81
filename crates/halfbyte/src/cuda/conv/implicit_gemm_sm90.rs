//! Implicit GEMM on Hopper: `wna16_sm90.cu` with windows on images for x, which the copy engine brings position by position.
//!
//! Rows of the product are output pixels, so that x and y lie pixel by pixel, and k is no longer in memory than in
//! the weight. Each group of the convolution is a launch of its own.

pub mod config;

use super::implicit_gemm::{self, Images, ImplicitGemm, Part, Place, Windowed, counted};
use super::weights::Unpacked;
use super::windows::{self, Windows};
use super::{Call, Kernel, Problem};
use crate::conv::Conv2dShape;
use crate::cuda::driver::{FloatView, Swizzle, TensorMap, View, Windows as Map};
use crate::cuda::matmul::wna16_sm90::{self, config::Config};
use crate::cuda::parameters::{Flat, Parameters, parameters};
use crate::cuda::sources::{Arch, Instance, Source};
use crate::cuda::tiled::{Form, Tile};
use crate::error::{Error, Result};
use crate::format::Format;
use crate::kernel::{Activation, Reason};
use crate::layout::cuda_wna16::Atom;
use crate::tensor::Float;
use config::Tiling;

/// The kernel of products, which takes windows besides where they are asked for.
pub(super) static SOURCE: Source = Source {
    path: "matmul/wna16_sm90.cu",
    text: include_str!("../matmul/wna16_sm90.cu"),
    parameters: &[ConvArguments::LAYOUT],
};

const NAME: &str = "implicit_gemm_sm90";

/// Of the weights that it reads.
const LAYOUT: &str = "cuda_wna16";

pub(super) const KERNEL: Kernel = Kernel {
    name: NAME,
    what: "wna16_sm90 on windows of images, which the copy engine brings: no matrix of patches",
    serves: Arch::is_hopper,
    instances,
    every_instance: every_instance::<BOX>,
    choose: implicit_gemm::choose::<Pixels>,
    candidates: implicit_gemm::candidates::<Pixels>,
};

/// Channels of a box of x.
const BOX: usize = 64;

/// `wna16_sm90.cu` with windows for x, in boxes of so many channels.
pub(super) struct OnWindows<const CHANNELS: usize>;

impl<const CHANNELS: usize> Windowed for OnWindows<CHANNELS> {
    type Config = Config;

    fn instance(form: &Form, config: Config, activation: Activation) -> Instance {
        let mut instance = Instance { source: &SOURCE, ..config.instance(form, activation) };
        instance.defines.push(format!("HB_CONV={CHANNELS}"));
        instance
    }

    fn tiling(&Form { atom, out, .. }: &Form, sizes: [usize; 3], multiprocessors: usize, once: bool) -> Tiling {
        config::tiling(atom, sizes, out, multiprocessors, once)
    }

    fn tilings(&Form { atom, out, .. }: &Form, sizes: [usize; 3], multiprocessors: usize) -> Vec<Tiling> {
        config::tilings(atom, sizes, out, multiprocessors)
    }

    fn text(config: Config) -> String {
        config.to_string()
    }
}

/// The widths of tiles for the commonest formats, with one strip and more.
fn instances() -> Vec<Instance> {
    let atom = Atom { bits: 4, group: 0, zero: false, scale: Float::F16, ..Atom::W4_G128 };
    let forms = [
        (atom, Float::F16, Activation::Relu),
        (Atom { bits: 8, zero: true, scale: Float::BF16, ..atom }, Float::BF16, Activation::None),
        (Atom { bits: 8, zero: true, group: 32, ..atom }, Float::F16, Activation::Gelu),
        (Atom { group: 64, zero: true, scale: Float::BF16, ..atom }, Float::BF16, Activation::Silu),
        (Atom { bits: 8, group: 128, ..atom }, Float::F32, Activation::None),
    ];
    let all = forms.into_iter().flat_map(|(atom, out, activation)| {
        let configs = [64, 512].into_iter().flat_map(move |n| config::configs(atom, n, out));
        configs.map(move |config| OnWindows::<BOX>::instance(&Form::floats(atom, out), config, activation))
    });
    all.collect()
}

/// Every configuration for a format that is chosen from, with y of the type of x and in f32 and without an activation; none if it
/// is not served.
pub(super) fn every_instance<const CHANNELS: usize>(_: Arch, format: Format) -> Vec<Instance> {
    if format.act.is_quantized() {
        return Vec::new();
    }
    // With more columns than any group, and with so few that a row has one.
    let mut atoms: Vec<Atom> = [usize::MAX, 1].into_iter().filter_map(|k| Atom::of(format.weight, k).ok()).collect();
    atoms.dedup();
    let forms = atoms.into_iter().flat_map(|atom| [atom.scale, Float::F32].map(|out| Form::floats(atom, out)));
    let all = forms.flat_map(|form| {
        let configs = [64, 512].into_iter().flat_map(move |n| config::configs(form.atom, n, form.out));
        configs.map(move |config| OnWindows::<CHANNELS>::instance(&form, config, Activation::None))
    });
    all.collect()
}

/// Whether weights are packed for this kernel, if the layout holds their numbers.
pub(super) fn packs(of: &Unpacked<'_>) -> bool {
    let Unpacked { caps, format, geometry, x, .. } = *of;
    let atom = Atom::of(format.weight, geometry.k());
    (KERNEL.serves)(caps.arch)
        && !format.act.is_quantized()
        && atom.is_ok_and(|atom| atom.scale == x)
        && windows::taken(geometry, BOX).is_ok()
}

/// The form of atoms, or why there is none.
pub(super) fn form(problem: &Problem) -> std::result::Result<Atom, Reason> {
    let g = problem.shape.geometry();
    let Some(format) = problem.format else { return Err(Reason("multiplies codes, the weights are dense".into())) };
    if format.act.is_quantized() {
        return Err(Reason("multiplies exact activations (a16, a32), the format says quantised ones".into()));
    }
    let atom = Atom::of(format.weight, g.k()).map_err(|why| Reason(why.to_string()))?;
    if problem.x != atom.scale {
        let (scale, x) = (atom.scale, problem.x);
        return Err(Reason(format!("multiplies x of the type of the scales, {scale}; x is {x}")));
    }
    Ok(atom)
}

/// x in a half type, as bytes.
pub(super) fn halfs<'a>(kernel: &'static str, x: FloatView<'a>) -> Result<View<'a, u8>> {
    match x {
        FloatView::F16(x) => Ok(x.cast()),
        FloatView::BF16(x) => Ok(x.cast()),
        FloatView::F32(_) => Err(Error::invalid(kernel, "x in a half type", "f32")),
    }
}

parameters! {
    /// `Arguments` of the source, with its windows.
    pub(super) struct ConvArguments {
        pub product: Flat<wna16_sm90::Arguments>,
        pub windows: Windows,
    }
}

/// Pixels where they lie.
#[derive(Clone)]
struct Pixels {
    /// One row of pixels, where each output sees one of its own.
    shape: Conv2dShape,
    atom: Atom,
    out: Float,
}

impl ImplicitGemm for Pixels {
    const NAME: &'static str = NAME;
    type Kernel = OnWindows<BOX>;
    type Arguments = ConvArguments;

    fn of(problem: &Problem) -> std::result::Result<Self, Reason> {
        let Problem { shape, y: out, packed, .. } = *problem;
        if packed != LAYOUT {
            return Err(Reason(format!("reads layout {LAYOUT}, the weights lie in {packed}")));
        }
        problem.is_in_nhwc()?;
        let (atom, g) = (form(problem)?, shape.geometry());
        windows::taken(g, BOX)?;
        counted(&[shape.output_pixels(), shape.x_len(), g.co, g.k()])?;
        Ok(Self { shape: windows::flat(shape)?, atom, out })
    }

    fn inner(&self) -> &Conv2dShape {
        &self.shape
    }

    fn form(&self) -> Form {
        Form::floats(self.atom, self.out)
    }

    fn sees_once(&self) -> bool {
        self.shape.geometry().kernel == [1, 1]
    }

    fn images<'a>(&self, place: Place<'a>, call: &'a Call<'_>) -> Result<Images<'a>> {
        let x = halfs(NAME, call.x)?;
        if !x.pointer().is_multiple_of(16) {
            return Err(Error::invalid(NAME, "x that begins at a multiple of 16 bytes", format!("{:#x}", x.pointer())));
        }
        Ok(Images { x, terms: place.workspace.slice(0..0) })
    }

    fn maps(&self, images: &Images<'_>, config: &Config) -> Result<Vec<TensorMap>> {
        let (shape, g) = (&self.shape, self.shape.geometry());
        let windows = Map {
            shape: [shape.batch(), shape.input()[0], shape.input()[1], g.channels()],
            ..windows::map(shape, [config.tokens, BOX], Swizzle::Bytes128)
        };
        let x = images.x;
        let map = |group: usize| TensorMap::of_windows(x.slice(group * g.channels() * 2..x.len()), 2, &windows);
        (0..g.groups).map(map).collect()
    }

    fn arguments(&self, part: &Part<'_>, (config, schedule): &Tiling) -> ConvArguments {
        let pixels = self.shape.output_pixels();
        ConvArguments {
            product: Flat(wna16_sm90::Arguments::new(part.w.into(), schedule, part.addresses, pixels, config.tokens)),
            windows: Windows::new(&self.shape, self.shape.geometry().channels()),
        }
    }
}
