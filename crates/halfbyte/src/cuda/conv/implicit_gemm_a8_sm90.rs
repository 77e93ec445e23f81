//! Implicit GEMM with quantised activations on Hopper: `wna8_sm90.cu` with windows on images of codes, which the copy engine
//! brings position by position, and with windows on the scales of their pixels.
//!
//! Every pixel is quantised once, before: a scale for the channels that share one in a weight, so that it has the same codes in
//! every window. Each position and group of channels is a group of the product. Each group of the convolution is a launch of
//! its own.

pub mod config;

use super::columns::{Columns, FILLED};
use super::implicit_gemm::{self, Images, ImplicitGemm, Part, Place, Windowed, counted};
use super::weights::Unpacked;
use super::windows::{self, Windows};
use super::{Call, Kernel, Problem};
use crate::conv::{Conv2dShape, Geometry};
use crate::cuda::driver::{Swizzle, TensorMap, Windows as Map};
use crate::cuda::matmul::wna8_sm90::{self, MOST_K, config::Config, config::Terms};
use crate::cuda::matmul::{QuantizedForm, quantize_activations};
use crate::cuda::parameters::{Flat, Parameters, parameters};
use crate::cuda::sources::{Arch, Instance, Source};
use crate::cuda::tiled::{Form, Room, Tile};
use crate::error::{Error, Result};
use crate::format::{Act, Format, Group, QTensor, WeightFormat};
use crate::kernel::{Activation, Reason};
use crate::layout::cuda_wna16::Atom;
use crate::tensor::Float;
use config::Tiling;
use std::borrow::Cow;

/// The kernel of products, which takes windows besides where they are asked for.
static SOURCE: Source = Source {
    path: "matmul/wna8_sm90.cu",
    text: include_str!("../matmul/wna8_sm90.cu"),
    parameters: &[ConvArguments::LAYOUT],
};

const NAME: &str = "implicit_gemm_a8_sm90";

/// Of the weights that it reads.
const LAYOUT: &str = "cuda_wna16";

pub(super) const KERNEL: Kernel = Kernel {
    name: NAME,
    what: "wna8_sm90 on windows of images quantised before, which the copy engine brings: no matrix of patches",
    serves: Arch::is_hopper,
    instances,
    every_instance,
    choose: implicit_gemm::choose::<Codes>,
    candidates: implicit_gemm::candidates::<Codes>,
};

/// Channels of a box of codes.
const BOX: usize = 64;

/// A pixel's terms of a piece as the copy engine counts them: elements of so many bytes.
const TERM_BYTES: usize = 2;
const TERM_ELEMENTS: usize = 16 / TERM_BYTES;

/// Both widths of tiles for the commonest formats, and the other terms.
fn instances() -> Vec<Instance> {
    let atom = Atom::W4_G128;
    let plain = Terms { sums: false, offsets: false, pixels: true };
    let all = Terms { sums: true, offsets: true, ..plain };
    let forms = [
        (atom, plain, Float::F16, Activation::Relu),
        (Atom { bits: 8, group: 64, ..atom }, plain, Float::F16, Activation::None),
        (Atom { bits: 8, scale: Float::BF16, ..atom }, Terms { offsets: true, ..plain }, Float::BF16, Activation::Silu),
        (Atom { group: 32, ..atom }, plain, Float::F32, Activation::None),
        (Atom { zero: true, group: 32, ..atom }, all, Float::F32, Activation::None),
        (Atom { bits: 8, zero: true, ..atom }, all, Float::F16, Activation::Gelu),
        (Atom { bits: 8, zero: true, group: 64, ..atom }, all, Float::F16, Activation::None),
    ];
    let all = forms.into_iter().flat_map(|(atom, terms, out, activation)| {
        let configs = config::configs(atom, terms, 64, out).into_iter();
        configs.map(move |config| OnWindows::instance(&Form::codes(atom, terms, out), config, activation))
    });
    all.collect()
}

/// Every configuration for a format that is chosen from, with y of each type and without an activation; none if it is not served.
fn every_instance(_: Arch, format: Format) -> Vec<Instance> {
    if !format.act.is_quantized() {
        return Vec::new();
    }
    // A scale for each position has as many channels as there are, in whole boxes.
    let shares = match format.weight.group {
        Group::Size(size) if size != BOX && size != 2 * BOX => vec![size, BOX, 2 * BOX],
        _ => vec![BOX, 2 * BOX],
    };
    let atoms = shares.into_iter().filter_map(|share| {
        let atom = Atom::of(WeightFormat { group: Group::Size(share), ..format.weight }, usize::MAX);
        atom.ok()
    });
    let forms =
        atoms.flat_map(|atom| [Float::F16, Float::BF16, Float::F32].map(|out| (atom, terms(atom, format.act), out)));
    let all = forms.flat_map(|(atom, terms, out)| {
        let configs = [64, 512].into_iter().flat_map(move |n| config::configs(atom, terms, n, out));
        configs.map(move |config| OnWindows::instance(&Form::codes(atom, terms, out), config, Activation::None))
    });
    all.collect()
}

/// `wna8_sm90.cu` with windows on codes and on terms for x.
struct OnWindows;

impl Windowed for OnWindows {
    type Config = Config;

    fn instance(form: &Form, config: Config, activation: Activation) -> Instance {
        let mut instance = Instance { source: &SOURCE, ..config.instance(form, activation) };
        instance.defines.push(format!("HB_CONV={BOX}"));
        instance
    }

    fn tiling(&Form { atom, terms, out, .. }: &Form, sizes: [usize; 3], multiprocessors: usize, _: bool) -> Tiling {
        config::tiling(atom, terms, sizes, out, multiprocessors)
    }

    fn tilings(&Form { atom, terms, out, .. }: &Form, sizes: [usize; 3], multiprocessors: usize) -> Vec<Tiling> {
        config::tilings(atom, terms, sizes, out, multiprocessors)
    }

    fn text(Config { tokens, stages, .. }: Config) -> String {
        format!("n{tokens} x{stages}")
    }
}

/// What pixels have beside codes.
fn terms(atom: Atom, act: Act) -> Terms {
    Terms { sums: atom.zero, offsets: act == Act::A8Asym, pixels: true }
}

/// A weight as this kernel has it, and where its columns lie, if it serves the layer and the numbers.
pub(super) fn weight<'a>(of: &Unpacked<'a>) -> Result<Option<(Cow<'a, QTensor>, Columns)>> {
    let Unpacked { caps, w, format, geometry, .. } = *of;
    let numbers = Numbers::of(format, geometry).ok().filter(|_| (KERNEL.serves)(caps.arch));
    let Some(numbers) = numbers.filter(|numbers| windows::taken(&numbers.inner, BOX).is_ok()) else { return Ok(None) };
    let columns = Columns::of(&numbers.inner);
    if columns == Columns::of(geometry) {
        return Ok(Some((w.express(numbers.weight)?, columns)));
    }
    let by_position = WeightFormat { group: Group::Size(geometry.channels()), ..numbers.weight };
    let filled = columns.fill(w.express(by_position)?.as_ref(), geometry, numbers.weight.group)?;
    Ok(filled.map(|w| (Cow::Owned(w), columns)))
}

/// What the numbers of a layer are.
#[derive(Clone, Copy)]
struct Numbers {
    atom: Atom,
    terms: Terms,
    /// Channels of x that share a scale, and with those that are filled up.
    share: usize,
    columns: usize,
    /// That of weights: a scale for each position.
    weight: WeightFormat,
    /// The layer with its channels filled up to boxes.
    inner: Geometry,
}

impl Numbers {
    /// That of a layer, or why there is none.
    fn of(format: Format, geometry: &Geometry) -> std::result::Result<Self, Reason> {
        let refuse = |why: &str| Err(Reason(why.into()));
        if !format.act.is_quantized() {
            return refuse("multiplies quantised activations (a8), the format says exact ones");
        }
        let why = |why: Error| Reason(why.to_string());
        let (share, channels) = (geometry.scale_channels(format.weight.group).map_err(why)?, geometry.channels());
        // One scale a position is one of what is filled up, too.
        let fills = geometry.groups == 1 && share == channels && !channels.is_multiple_of(BOX);
        let inner = match fills {
            true => Geometry { ci: channels.next_multiple_of(BOX), ..*geometry },
            false => *geometry,
        };
        let columns = if fills { inner.ci } else { share };
        let weight = WeightFormat { group: Group::Size(columns), ..format.weight };
        let atom = Atom::of(weight, inner.k()).map_err(why)?;
        if atom.group == 0 {
            return refuse("multiplies weights of several positions or groups of channels");
        }
        Ok(Self { atom, terms: terms(atom, format.act), share, columns, weight, inner })
    }

    /// Columns that each set of a pixel's terms is for, if so many share a scale: zero points need the sums of an atom's groups,
    /// which may be parts of those.
    fn piece(&self, share: usize) -> usize {
        if self.terms.sums { self.atom.group } else { share }
    }
}

parameters! {
    /// `Arguments` of the source, with its windows.
    struct ConvArguments {
        product: Flat<wna8_sm90::Arguments>,
        windows: Windows,
    }
}

/// Pixels as codes, in the workspace.
#[derive(Clone)]
struct Codes {
    numbers: Numbers,
    /// The problem's images, with channels filled up.
    inner: Conv2dShape,
    /// Of the pixels of x.
    x: QuantizedForm,
    out: Float,
}

impl Codes {
    /// The terms of a pixel's channels in a group of the convolution, filled up.
    fn of_group(&self) -> QuantizedForm {
        QuantizedForm { k: self.numbers.inner.channels(), piece: self.numbers.piece(self.numbers.columns), ..self.x }
    }
}

impl ImplicitGemm for Codes {
    const NAME: &'static str = NAME;
    type Kernel = OnWindows;
    type Arguments = ConvArguments;

    fn of(problem: &Problem) -> std::result::Result<Self, Reason> {
        let Problem { format: Some(format), shape, y: out, packed, .. } = *problem else {
            return Err(Reason("multiplies codes, the weights are dense".into()));
        };
        let numbers = Numbers::of(format, shape.geometry())?;
        let inner =
            Conv2dShape::new(numbers.inner, shape.batch(), shape.input()).map_err(|why| Reason(why.to_string()))?;
        let expected = if numbers.inner == *shape.geometry() { LAYOUT } else { FILLED };
        if packed != expected {
            return Err(Reason(format!("reads layout {expected}, the weights lie in {packed}")));
        }
        problem.is_in_nhwc()?;
        windows::taken(&numbers.inner, BOX)?;
        counted(&[shape.output_pixels(), inner.x_len(), numbers.inner.co])?;
        if numbers.inner.k() > MOST_K {
            return Err(Reason(format!("multiplies up to {MOST_K} columns, a window has {}", numbers.inner.k())));
        }
        let x = QuantizedForm {
            m: shape.input_pixels(),
            k: shape.geometry().ci,
            group: numbers.share,
            piece: numbers.piece(numbers.share),
            sums: numbers.terms.sums,
            offsets: numbers.terms.offsets,
            pixels: true,
        };
        Ok(Self { numbers, inner, x, out })
    }

    fn inner(&self) -> &Conv2dShape {
        &self.inner
    }

    fn form(&self) -> Form {
        Form::codes(self.numbers.atom, self.numbers.terms, self.out)
    }

    fn workspace_bytes(&self, parts_bytes: usize) -> usize {
        Room::new(self.x, parts_bytes).bytes
    }

    fn before(&self) -> Vec<Instance> {
        vec![quantize_activations::instance(self.x)]
    }

    fn images<'a>(&self, place: Place<'a>, call: &'a Call<'_>) -> Result<Images<'a>> {
        let Place { gpu, stream, workspace, parts_bytes } = place;
        let room = Room::new(self.x, parts_bytes);
        let x = workspace.slice(room.codes..room.codes + self.x.codes_bytes());
        let terms = workspace.slice(room.terms..room.bytes);
        quantize_activations::run(gpu, stream, self.x, call.x, 0, [x.pointer(), terms.pointer()])?;
        Ok(Images { x, terms })
    }

    /// Two maps for each group: of codes and of terms, both the images' from the first pixel on.
    fn maps(&self, images: &Images<'_>, config: &Config) -> Result<Vec<TensorMap>> {
        let (shape, g, [h, w]) = (&self.inner, self.inner.geometry(), self.inner.input());
        let of_codes = Map {
            shape: [shape.batch(), h, w, g.channels()],
            ..windows::map(shape, [config.tokens, BOX], Swizzle::Bytes64)
        };
        let of_group = self.of_group().pieces() * TERM_ELEMENTS;
        let of_terms = Map {
            shape: [shape.batch(), h, w, of_group],
            pixel: of_group * g.groups,
            ..windows::map(shape, [config.tokens, TERM_ELEMENTS], Swizzle::None)
        };
        let Images { x: codes, terms } = *images;
        let mut maps = Vec::with_capacity(2 * g.groups);
        for group in 0..g.groups {
            let (codes_at, terms_at) = (group * g.channels(), group * of_group * TERM_BYTES);
            maps.push(TensorMap::of_windows(codes.slice(codes_at..codes.len()), 1, &of_codes)?);
            maps.push(TensorMap::of_windows(terms.slice(terms_at..terms.len()), TERM_BYTES, &of_terms)?);
        }
        Ok(maps)
    }

    fn arguments(&self, part: &Part<'_>, (config, schedule): &Tiling) -> ConvArguments {
        let (Part { w, images, addresses: [y, bias, workspace] }, shape) = (part, &self.inner);
        let (addresses, pixels) = ([images.terms.pointer(), *y, *bias, *workspace], shape.output_pixels());
        let of_x = self.of_group();
        ConvArguments {
            product: Flat(wna8_sm90::Arguments::new((*w).into(), schedule, addresses, (pixels, config.tokens), &of_x)),
            windows: Windows::new(shape, shape.geometry().channels()),
        }
    }
}
