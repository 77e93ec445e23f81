//! Convolutions of bytes whose groups have few channels and whose columns are neighbours in x: a form of `int8_depthwise`, launches of
//! `int8_depthwise_rows.cu`.

use super::int8_depthwise::{Kind, NAME};
use super::layer::LayerArguments;
use super::{Call, Int8, Place, Problem, check_addresses};
use crate::conv::Geometry;
use crate::cuda::Gpu;
use crate::cuda::conv::windows::Windows;
use crate::cuda::dispatch::Configured;
use crate::cuda::driver::{Launch, Stream};
use crate::cuda::parameters::{Flat, Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::Result;
use crate::layout::cuda_int8::STEP;

static SOURCE: Source = Source {
    path: "int8/int8_depthwise_rows.cu",
    text: include_str!("int8_depthwise_rows.cu"),
    parameters: &[Arguments::LAYOUT],
};

/// As in the source: threads of a block, channels of a thread, pixels of a span in a row.
const THREADS: usize = 256;
const VECTOR: usize = 4;
const PIXELS: usize = 4;

/// Vectors of a tile at most.
const MOST_LANES: usize = 64;

/// Shared memory of a block at most: all blocks of a multiprocessor of every processor have as much, and leave the most to L1.
const SHARED_BYTES: usize = 20 << 10;

/// What a kernel sees of x, beside its number of channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Form {
    /// Of a group.
    channels: usize,
    /// Rows and columns of the kernel; 0: any.
    side: usize,
    /// Across.
    stride: usize,
}

impl Form {
    /// All that the source is compiled for.
    const ALL: [Self; 6] = [
        Self { channels: 1, side: 3, stride: 1 },
        Self { channels: 1, side: 3, stride: 2 },
        Self { channels: 1, side: 0, stride: 1 },
        Self { channels: 2, side: 3, stride: 1 },
        Self { channels: 4, side: 3, stride: 1 },
        Self { channels: 8, side: 3, stride: 1 },
    ];

    /// The form for a geometry, if there is one. Rows of a span with two see the same rows of x, so that their positions are
    /// neighbours.
    fn of(g: &Geometry) -> Option<Self> {
        let side = if g.kernel == [3, 3] { 3 } else { 0 };
        let form = Self { channels: g.channels(), side, stride: g.stride[1] };
        let neighbours = g.dilation[1] == 1 && (form.rows() == 1 || g.stride[0] == 1 && g.dilation[0] == 1);
        (neighbours && Self::ALL.contains(&form)).then_some(form)
    }

    /// Rows of a span.
    fn rows(self) -> usize {
        if self.stride == 1 { 2 } else { 1 }
    }

    /// Blocks that a multiprocessor has at a time, by their registers.
    fn blocks(self, problem: &Problem) -> usize {
        let few = self.side == 3 && [1, 4].contains(&self.channels);
        if few && problem.symmetric && !problem.floats { 3 } else { 2 }
    }

    /// Bands of rows of x that positions of the kernel see.
    fn bands(self, kernel: [usize; 2]) -> usize {
        if self.side > 0 { 1 } else { (kernel[0] + 1).div_ceil(4) }
    }

    /// Bytes that the weights of a vector's outputs take in shared memory.
    fn weight_bytes(self, kernel: [usize; 2], zeros: bool) -> usize {
        let terms = if self.channels < 4 { self.channels * self.rows() } else { 3 * self.channels / 4 };
        let words = terms * VECTOR * if zeros { 2 } else { 1 };
        self.bands(kernel).saturating_mul(kernel[1]).saturating_mul(4 * words)
    }

    fn instance(self, kind: Kind) -> Instance {
        let [unsigned, zeros, floats] = kind.flags();
        let numbers = [("C", self.channels), ("SIDE", self.side), ("STRIDE", self.stride)];
        let flags = [("UNSIGNED", unsigned), ("ZEROS", zeros), ("FLOATS", floats)];
        let all = numbers.into_iter().chain(flags);
        Instance::new(&SOURCE, "int8_depthwise_rows").with(all.map(|(name, value)| format!("HB_{name}={value}")))
    }
}

/// All instances for some kinds.
pub(super) fn instances(kinds: &[Kind]) -> Vec<Instance> {
    let of_kind = |kind: &Kind| {
        let kind = *kind;
        Form::ALL.into_iter().filter(move |form| form.channels == kind.channels).map(move |form| form.instance(kind))
    };
    kinds.iter().flat_map(of_kind).collect()
}

/// A place of spans: an image, a line of rows of spans, a column of them.
type Spans = [i32; 3];

parameters! {
    /// `Arguments` of the source.
    struct Arguments {
        layer: Flat<LayerArguments>,
        lanes: u32,
        steps: i32,
        spans: i32,
        lines: i32,
        across: i32,
        next: Spans,
        bands: i32,
        atoms: i32,
        height: i32,
        width: i32,
        windows: Windows,
    }
}

/// How a convolution is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    /// Tiles of channels, and vectors of each.
    tiles: usize,
    lanes: usize,
    /// Lines of spans in an image, spans of a line, and all spans.
    lines: usize,
    across: usize,
    spans: usize,
    /// Blocks of a tile, and steps of each.
    blocks: usize,
    steps: usize,
}

impl Cut {
    /// On so many multiprocessors, if shared memory holds the weights.
    fn of(problem: &Problem, form: Form, multiprocessors: usize) -> Option<Self> {
        let (shape, g) = (&problem.shape, problem.shape.geometry());
        let vectors = g.ci / VECTOR;
        // Tiles begin at multiples of 16 channels.
        let most = MOST_LANES.min(SHARED_BYTES / form.weight_bytes(g.kernel, !problem.symmetric) / 4 * 4);
        if most == 0 {
            return None;
        }
        let lanes = vectors.div_ceil(vectors.div_ceil(most)).next_multiple_of(4);
        let tiles = vectors.div_ceil(lanes);
        let [rows, columns] = shape.output();
        let (lines, across) = (rows.div_ceil(form.rows()), columns.div_ceil(PIXELS));
        let spans = shape.batch().saturating_mul(lines).saturating_mul(across);
        let all = spans.div_ceil(THREADS / lanes).max(1);
        let steps = all.div_ceil((form.blocks(problem) * multiprocessors / tiles).clamp(1, 65_535));
        let cut = Self { tiles, lanes, lines, across, spans, blocks: all.div_ceil(steps), steps };
        // A block's last step may look beyond the last span.
        (spans <= i32::MAX as usize / 2).then_some(cut)
    }

    /// How far on spans are after so many.
    fn next(&self, spans: usize) -> Spans {
        let lines = spans / self.across.max(1);
        let place = [lines / self.lines.max(1), lines % self.lines.max(1), spans % self.across.max(1)];
        place.map(|size| size as i32)
    }
}

/// A convolution by spans of rows.
pub(super) struct Rows {
    problem: Problem,
    kind: Kind,
    form: Form,
    cut: Cut,
}

impl Rows {
    /// On so many multiprocessors, if there is a form for the problem: one that `int8_depthwise` takes.
    pub(super) fn of(problem: &Problem, kind: Kind, multiprocessors: usize) -> Option<Self> {
        let form = Form::of(problem.shape.geometry())?;
        let cut = Cut::of(problem, form, multiprocessors.max(1))?;
        Some(Self { problem: *problem, kind, form, cut })
    }
}

impl Configured<Int8> for Rows {
    fn text(&self) -> String {
        let (Cut { lanes, steps, .. }, channels) = (self.cut, self.kind.channels);
        let (rows, of_tile) = (self.form.rows(), lanes * VECTOR);
        format!("groups of {channels}, spans of {rows} x {PIXELS} pixels, {of_tile} channels a tile, {steps} steps")
    }

    fn instances(&self) -> Vec<Instance> {
        vec![self.form.instance(self.kind)]
    }

    fn run(&self, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
        let (shape, layer, cut, form) = (&self.problem.shape, call.layer, &self.cut, self.form);
        let (g, y) = (shape.geometry(), Place::of(&call.y));
        check_addresses(NAME, [call.x.pointer(), y.address])?;
        let arguments = Arguments {
            layer: Flat(layer.arguments(call.x, y)),
            lanes: cut.lanes as u32,
            steps: cut.steps as i32,
            spans: cut.spans as i32,
            lines: cut.lines as i32,
            across: cut.across as i32,
            next: cut.next(THREADS / cut.lanes),
            bands: form.bands(g.kernel) as i32,
            atoms: g.k().div_ceil(STEP) as i32,
            height: shape.input()[0] as i32,
            width: shape.input()[1] as i32,
            windows: Windows::new(shape, g.channels()),
        };
        let launch = gpu.overlapping(Launch {
            grid: [cut.tiles as u32, cut.blocks as u32, 1],
            shared_bytes: (cut.lanes * form.weight_bytes(g.kernel, self.kind.zeros)) as u32,
            ..Launch::linear(1, THREADS as u32)
        });
        let (key, instance) = (self.kind.key(1 + form.side as u32 + form.stride as u32), form.instance(self.kind));
        gpu.function_once((NAME, key), || instance)?.launch_typed(stream, &launch, &arguments, &[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv::{Conv2dShape, Layout2d};
    use crate::format::int8::Byte;

    fn problem(geometry: Geometry, batch: usize, size: [usize; 2]) -> Problem {
        let shape = Conv2dShape::new(geometry, batch, size).unwrap();
        Problem { shape, x: Byte::U8, symmetric: true, floats: false, layouts: [Layout2d::Nhwc; 2] }
    }

    #[test]
    fn tiles_and_steps_cover_all_channels_and_spans_and_fit_shared_memory() {
        for (ci, channels) in [(16, 1), (128, 1), (144, 1), (272, 1), (960, 1), (144, 2), (128, 4), (256, 8)] {
            for kernel in [[3, 3], [7, 7], [5, 5], [1, 1], [31, 31], [2, 90]] {
                for (batch, size) in [(0, [4, 4]), (1, [7, 7]), (3, [9, 57]), (32, [56, 56])] {
                    let geometry =
                        Geometry { padding: [45; 4], groups: ci / channels, ..Geometry::new(ci, ci, kernel) };
                    let problem = problem(geometry, batch, size);
                    let form = Form::of(&geometry);
                    assert_eq!(form.is_some(), channels == 1 || kernel == [3, 3]);
                    let Some((form, cut)) = form.and_then(|form| Some((form, Cut::of(&problem, form, 132)?))) else {
                        continue;
                    };
                    let Cut { tiles, lanes, lines, across, spans, blocks, steps } = cut;
                    assert!(tiles * lanes * VECTOR >= ci && (tiles - 1) * lanes * VECTOR < ci, "{cut:?}");
                    assert!(lanes.is_multiple_of(4) && lanes <= MOST_LANES, "{cut:?}");
                    assert!(lanes * form.weight_bytes(kernel, false) <= SHARED_BYTES, "{cut:?}");
                    let slots = THREADS / lanes;
                    assert!(batch * lines * across == spans && blocks * steps * slots >= spans, "{cut:?}");
                    let [images, down, right] = cut.next(slots).map(|size| size as usize);
                    assert_eq!((images * lines + down) * across + right, slots, "{cut:?}");
                    assert!(down < lines && right < across, "{cut:?}");
                }
            }
        }
        let depthwise = Geometry { groups: 128, padding: [1; 4], ..Geometry::new(128, 128, [3, 3]) };
        let form = Form::of(&depthwise).unwrap();
        let all = Cut::of(&problem(depthwise, 32, [56; 2]), form, 132).unwrap();
        assert_eq!([all.tiles, all.lanes, all.lines, all.across, all.steps], [1, 32, 28, 14, 4]);
    }

    #[test]
    fn forms_are_of_neighbours() {
        let of = |stride, dilation, kernel| {
            Form::of(&Geometry { groups: 32, stride, dilation, ..Geometry::new(32, 32, kernel) }).map(|form| {
                let Form { channels, side, stride } = form;
                [channels, side, stride]
            })
        };
        assert_eq!(of([1, 1], [1, 1], [3, 3]), Some([1, 3, 1]));
        assert_eq!(of([3, 2], [2, 1], [3, 3]), Some([1, 3, 2]));
        assert_eq!(of([1, 1], [1, 1], [5, 7]), Some([1, 0, 1]));
        for (stride, dilation, kernel) in
            [([2, 1], [1, 1], [3, 3]), ([1, 1], [2, 1], [3, 3]), ([1, 2], [1, 2], [3, 3]), ([2, 2], [1, 1], [5, 5])]
        {
            assert_eq!(of(stride, dilation, kernel), None);
        }
    }
}
