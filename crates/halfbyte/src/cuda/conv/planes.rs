//! Images in planes for kernels that have them pixel by pixel: launches of `planes.cu` before and after.
//!
//! The kernel is the first of the table that computes the same convolution of images pixel by pixel, or from planes to pixels; x, if it
//! must, and y go through the workspace.

use super::simt;
use super::{Call, Convolution, Kernel, Problem};
use crate::conv::{Conv2dShape, Layout2d};
use crate::cuda::dispatch::{About, Bind, Configured, Operation};
use crate::cuda::driver::{FloatView, FloatViewMut, Launch, Stream, ViewMut};
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::cuda::{Caps, Gpu, Workspace};
use crate::error::{Error, Result};
use crate::kernel::Reason;
use crate::tensor::Float;
use half::{bf16, f16};

static SOURCE: Source =
    Source { path: "conv/planes.cu", text: include_str!("planes.cu"), parameters: &[Params::LAYOUT] };

const NAME: &str = "planes";

pub(super) const KERNEL: Kernel = Kernel::with_one(
    About {
        name: NAME,
        what: "planes to pixels and back through the workspace, the convolution by the first kernel for pixels",
        serves: |arch| arch.number >= 75,
        instances,
    },
    choose,
);

/// Bytes of an element, and the type that moves it.
const TYPES: [(usize, &str); 3] = [(1, "unsigned char"), (2, "unsigned short"), (4, "unsigned int")];

/// As in the source: rows and columns of a tile, threads of a block.
const TILE: usize = 32;
const THREADS: u32 = 256;

const ALIGNMENT: usize = 256;

parameters! {
    /// As in the source.
    struct Params {
        from: u64,
        to: u64,
        images: u32,
        rows: u32,
        columns: u32,
        down: u32,
        across: u32,
        padding: u32,
    }
}

fn instance(name: &str) -> Instance {
    Instance::new(&SOURCE, format!("transpose<{name}>"))
}

/// Those of every element.
pub(in crate::cuda) fn instances() -> Vec<Instance> {
    TYPES.map(|(_, name)| instance(name)).into()
}

/// Images, the elements of a plane, channels.
type Sizes = [usize; 3];

fn tiles([images, pixels, channels]: Sizes) -> Option<usize> {
    pixels.div_ceil(TILE).checked_mul(channels.div_ceil(TILE))?.checked_mul(images)
}

/// Puts a copy of images into a stream, from an address to another: from a layout to the other one. The caller vouches for the
/// addresses, and that [`Moves::new`] took the shape.
fn transpose(
    gpu: &Gpu,
    stream: &Stream,
    element: usize,
    [images, pixels, channels]: Sizes,
    from: Layout2d,
    [source, target]: [u64; 2],
) -> Result<()> {
    let Some((_, name)) = TYPES.into_iter().find(|&(bytes, _)| bytes == element) else {
        return Err(Error::invalid(NAME, "elements of 1, 2 or 4 bytes", element.to_string()));
    };
    let [rows, columns] = if from == Layout2d::Nchw { [channels, pixels] } else { [pixels, channels] };
    let [down, across] = [rows, columns].map(|size| size.div_ceil(TILE) as u32);
    let params = Params {
        from: source,
        to: target,
        images: images as u32,
        rows: rows as u32,
        columns: columns as u32,
        down,
        across,
        padding: 0,
    };
    let launch = Launch::linear(images as u32 * down * across, THREADS);
    gpu.function_once((NAME, [element as u32, 0]), || instance(name))?.launch_typed(stream, &launch, &params, &[])
}

/// What goes through the workspace: x, y or both, of elements of so many bytes.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct Moves {
    elements: [usize; 2],
    x: Option<Sizes>,
    y: Option<Sizes>,
    /// Bytes of each, 0 where it lies as the caller has it.
    bytes: [usize; 2],
    /// Where x begins, behind the counters and what the kernel for pixels works in; where y begins.
    places: [usize; 2],
}

impl Moves {
    /// Of a shape whose images are in `from`, for a kernel that has them in `to` and works in so many bytes. Error: more elements
    /// than 31 bits count.
    pub fn new(
        shape: &Conv2dShape,
        elements: [usize; 2],
        [from, to]: [[Layout2d; 2]; 2],
        worked_in: usize,
    ) -> std::result::Result<Self, Reason> {
        let g = shape.geometry();
        let sizes = |pixels: usize, channels: usize| [shape.batch(), pixels / shape.batch().max(1), channels];
        let of_x = sizes(shape.input_pixels(), g.ci);
        let of_y = sizes(shape.output_pixels(), g.co);
        let fits = |sizes: Sizes| {
            let tiles = tiles(sizes);
            sizes.iter().copied().chain(tiles).all(|size| size <= i32::MAX as usize) && tiles.is_some()
        };
        if ![of_x, of_y].into_iter().all(fits) {
            return Err(Reason("more pixels, channels or tiles than 31 bits count".into()));
        }
        let x = (from[0] != to[0]).then_some(of_x);
        let y = (from[1] != to[1]).then_some(of_y);
        let of = |sizes: Option<Sizes>, element| sizes.map_or(0, |sizes| sizes.iter().product::<usize>() * element);
        let bytes = [of(x, elements[0]), of(y, elements[1])];
        // Counters are zeros for every kernel that shares the workspace, also where this one has none.
        let begin = worked_in.max(Workspace::COUNTER_BYTES).next_multiple_of(ALIGNMENT);
        Ok(Self { elements, x, y, bytes, places: [begin, (begin + bytes[0]).next_multiple_of(ALIGNMENT)] })
    }

    /// Bytes of workspace.
    pub fn bytes(&self) -> usize {
        self.places[1] + self.bytes[1]
    }

    /// Where the kernel's own workspace ends.
    pub fn begin(&self) -> usize {
        self.places[0]
    }

    /// The parts of what lies behind the kernel's own workspace that are x and y; none: they lie where the caller has them.
    pub fn parts<'a>(&self, room: ViewMut<'a, u8>) -> [Option<ViewMut<'a, u8>>; 2] {
        let ([begin, y_at], [x_bytes, y_bytes]) = (self.places, self.bytes);
        let (x, y) = room.split_at(y_at - begin);
        [self.x.map(|_| x.slice(0..x_bytes)), self.y.map(|_| y.slice(0..y_bytes))]
    }

    /// Puts the copy of x into a stream, if there is one.
    pub fn copy_x(&self, gpu: &Gpu, stream: &Stream, from: Layout2d, addresses: [u64; 2]) -> Result<()> {
        self.x.map_or(Ok(()), |sizes| transpose(gpu, stream, self.elements[0], sizes, from, addresses))
    }

    /// Puts the copy of y into a stream, if there is one.
    pub fn copy_y(&self, gpu: &Gpu, stream: &Stream, from: Layout2d, addresses: [u64; 2]) -> Result<()> {
        self.y.map_or(Ok(()), |sizes| transpose(gpu, stream, self.elements[1], sizes, from, addresses))
    }

    /// What is launched.
    pub fn instances(&self) -> Vec<Instance> {
        let moved = [self.x.map(|_| self.elements[0]), self.y.map(|_| self.elements[1])];
        let types = TYPES.into_iter().filter(|&(bytes, _)| moved.contains(&Some(bytes)));
        types.map(|(_, name)| instance(name)).collect()
    }
}

/// Layouts that x and y of a problem may have instead, y pixel by pixel; x as it lies comes first.
pub(in crate::cuda) fn instead([x, _]: [Layout2d; 2]) -> impl Iterator<Item = [Layout2d; 2]> {
    let others = [[x, Layout2d::Nhwc], [Layout2d::Nhwc; 2]];
    others.into_iter().take(if x == Layout2d::Nhwc { 1 } else { 2 })
}

/// A problem, and what computes it.
type Bound<O> = (<O as Operation>::Problem, Box<dyn Configured<O>>);

/// The first kernel of a table that computes one of these problems, but for the plain one and the one of this name, which copies.
pub(in crate::cuda) fn first<O: Operation>(
    plain: &'static str,
    name: &'static str,
    caps: &Caps,
    problems: impl Iterator<Item = O::Problem> + Clone,
) -> std::result::Result<Bound<O>, Reason> {
    let others = O::KERNELS.iter().filter(|kernel| ![plain, name].contains(&kernel.name));
    let found = others.flat_map(|kernel| problems.clone().map(move |problem| (kernel, problem)));
    let mut found = found.filter_map(|(kernel, problem)| Some((problem, kernel.bind(caps, &problem).ok()?)));
    found.next().ok_or_else(|| Reason("no kernel for images pixel by pixel computes it but the plain one".into()))
}

fn choose(caps: &Caps, problem: &Problem) -> Bind<Convolution> {
    if problem.layouts == [Layout2d::Nhwc; 2] {
        return Err(Reason("leaves images that lie pixel by pixel to the others".into()));
    }
    let problems = instead(problem.layouts).map(|layouts| Problem { layouts, ..*problem }).collect::<Vec<_>>();
    let (inner, configured) = first::<Convolution>(simt::KERNEL.name, NAME, caps, problems.into_iter())?;
    let elements = [problem.x, problem.y].map(Float::size_bytes);
    let moves = Moves::new(&problem.shape, elements, [problem.layouts, inner.layouts], configured.workspace_bytes())?;
    Ok(Box::new(Planes { problem: *problem, inner, configured, moves }))
}

/// A convolution of images in planes.
struct Planes {
    problem: Problem,
    inner: Problem,
    configured: Box<dyn Configured<Convolution>>,
    moves: Moves,
}

impl Configured<Convolution> for Planes {
    fn text(&self) -> String {
        format!("{} {} inside, {}", self.inner.layouts[0], self.inner.layouts[1], self.configured.text())
    }

    fn instances(&self) -> Vec<Instance> {
        [self.configured.instances(), self.moves.instances()].concat()
    }

    fn workspace_bytes(&self) -> usize {
        self.moves.bytes()
    }

    fn rounds_weights(&self) -> bool {
        self.configured.rounds_weights()
    }

    fn run(&self, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
        let Some(workspace) = call.workspace else { return Err(Error::invalid(NAME, "a workspace", "none")) };
        let (mut own, room) = workspace.split_at_mut(self.moves.begin());
        let [x, y] = self.moves.parts(room);
        if let Some(x) = &x {
            self.moves.copy_x(gpu, stream, self.problem.layouts[0], [call.x.pointer(), x.pointer()])?;
        }
        let (target, inside) = (call.y.pointer(), y.as_ref().map(ViewMut::pointer));
        let moved_y = match (y, self.problem.y) {
            (None, _) => call.y,
            (Some(y), Float::F16) => FloatViewMut::F16(y.cast::<f16>()),
            (Some(y), Float::BF16) => FloatViewMut::BF16(y.cast::<bf16>()),
            (Some(y), Float::F32) => FloatViewMut::F32(y.cast::<f32>()),
        };
        let moved_x = match (&x, self.problem.x) {
            (None, _) => call.x,
            (Some(x), Float::F16) => FloatView::F16(x.view().cast::<f16>()),
            (Some(x), Float::BF16) => FloatView::BF16(x.view().cast::<bf16>()),
            (Some(x), Float::F32) => FloatView::F32(x.view().cast::<f32>()),
        };
        let [x_layout, y_layout] = self.inner.layouts;
        let inner = Call { x: moved_x, x_layout, y: moved_y, y_layout, workspace: Some(own.get()), ..call };
        self.configured.run(gpu, stream, inner)?;
        inside.map_or(Ok(()), |inside| self.moves.copy_y(gpu, stream, y_layout, [inside, target]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv::Geometry;

    #[test]
    fn copies_lie_behind_the_counters_and_do_not_overlap() {
        let shape = Conv2dShape::new(Geometry::new(3, 5, [1, 1]), 2, [7, 9]).unwrap();
        let (nchw, nhwc) = ([Layout2d::Nchw; 2], [Layout2d::Nhwc; 2]);
        for worked_in in [0, 1, Workspace::COUNTER_BYTES, Workspace::COUNTER_BYTES + 4000] {
            for (from, [x, y]) in [(nchw, [378, 1260]), ([Layout2d::Nhwc, Layout2d::Nchw], [0, 1260])] {
                let moves = Moves::new(&shape, [1, 2], [from, nhwc], worked_in).unwrap();
                assert_eq!(moves.bytes, [x, y]);
                assert!(moves.begin() >= worked_in.max(Workspace::COUNTER_BYTES), "{moves:?}");
                assert!(moves.places[1] >= moves.begin() + x && moves.bytes() == moves.places[1] + y, "{moves:?}");
            }
        }
    }
}
