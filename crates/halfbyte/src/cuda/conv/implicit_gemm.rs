//! Implicit GEMM: what kernels have in common that multiply weights by windows on images, which the copy engine (TMA) brings from
//! where they lie. No matrix of patches is made.
//!
//! Rows of the product are output pixels; each group of the convolution is a launch of its own.

use super::{Call, Convolution, Problem};
use crate::conv::Conv2dShape;
use crate::cuda::dispatch::{Bind, Configured};
use crate::cuda::driver::{Stream, TensorMap, View};
use crate::cuda::kept::Kept;
use crate::cuda::matmul::Wna16Weights;
use crate::cuda::parameters::Parameters;
use crate::cuda::schedule::Schedule;
use crate::cuda::sources::Instance;
use crate::cuda::tiled::{Form, Prepared, Tile, check};
use crate::cuda::{Caps, Gpu, Workspace};
use crate::error::Result;
use crate::kernel::{Activation, Reason};

/// A configuration, and who computes what with it.
pub(super) type Tiling<I> = (<<I as ImplicitGemm>::Kernel as Windowed>::Config, Schedule);

/// Where something is computed before a product.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub gpu: &'a Gpu,
    pub stream: &'a Stream,
    pub workspace: View<'a, u8>,
    /// Bytes of sums of cut tiles behind the counters of the workspace.
    pub parts_bytes: usize,
}

/// What a kernel reads windows on, and what lies beside it.
#[derive(Clone, Copy)]
pub(super) struct Images<'a> {
    /// Images.
    pub x: View<'a, u8>,
    /// Scales of pixels and so on, where they are codes; else nothing.
    pub terms: View<'a, u8>,
}

/// A group of the convolution: what is multiplied, and the addresses of y, of the bias (0: none) and of the workspace.
pub(super) struct Part<'a> {
    pub w: &'a Wna16Weights,
    pub images: &'a Images<'a>,
    pub addresses: [u64; 3],
}

/// A kernel on tiles that reads windows, in all of its configurations.
pub(super) trait Windowed: Send + Sync {
    /// Size of a tile, stages in flight, and so on.
    type Config: Tile;

    /// What is compiled.
    fn instance(form: &Form, config: Self::Config, activation: Activation) -> Instance;

    /// The tiling that is taken for rows, outputs and columns on a device of so many multiprocessors; `once`: each number of x is seen
    /// by one pixel only.
    fn tiling(form: &Form, sizes: [usize; 3], multiprocessors: usize, once: bool) -> (Self::Config, Schedule);

    /// All tilings that it is chosen from.
    fn tilings(form: &Form, sizes: [usize; 3], multiprocessors: usize) -> Vec<(Self::Config, Schedule)>;

    /// What a configuration is.
    fn text(config: Self::Config) -> String;
}

/// A problem as a kernel of this kind computes it.
pub(super) trait ImplicitGemm: Clone + Send + Sync + 'static {
    /// Name of the kernel.
    const NAME: &'static str;
    /// How it is compiled and launched.
    type Kernel: Windowed;
    /// Its parameters.
    type Arguments: Parameters;

    /// That of a problem, or why the kernel does not compute it.
    fn of(problem: &Problem) -> std::result::Result<Self, Reason>;

    /// Images that windows are on, with the weight's geometry.
    fn inner(&self) -> &Conv2dShape;

    /// What instances differ by besides the configuration.
    fn form(&self) -> Form;

    /// Whether each number of x is seen by one pixel only.
    fn sees_once(&self) -> bool {
        false
    }

    /// Bytes of workspace, with so many of sums.
    fn workspace_bytes(&self, parts_bytes: usize) -> usize {
        Workspace::COUNTER_BYTES + parts_bytes
    }

    /// What is launched before the product.
    fn before(&self) -> Vec<Instance> {
        Vec::new()
    }

    /// Puts into a stream what is computed before the product, and says what this reads: x, or what was made of it in the workspace.
    fn images<'a>(&self, place: Place<'a>, call: &'a Call<'_>) -> Result<Images<'a>>;

    /// Windows on images, group by group of the convolution: as many maps as the kernel takes, for each.
    fn maps(&self, images: &Images<'_>, config: &<Self::Kernel as Windowed>::Config) -> Result<Vec<TensorMap>>;

    /// Parameters for a group of the convolution.
    fn arguments(&self, part: &Part<'_>, tiling: &Tiling<Self>) -> Self::Arguments;
}

/// Rows, outputs and columns of a group's product.
pub(super) fn sizes(shape: &Conv2dShape) -> [usize; 3] {
    let g = shape.geometry();
    [shape.output_pixels(), g.outputs(), g.k()]
}

/// Refuses shapes that numbers of 31 bits do not count.
pub(super) fn counted(sizes: &[usize]) -> std::result::Result<(), Reason> {
    match sizes.iter().all(|&size| size <= i32::MAX as usize) {
        true => Ok(()),
        false => Err(Reason("more pixels or columns than 31 bits count".into())),
    }
}

/// The configuration of a row of the table.
pub(super) fn choose<I: ImplicitGemm>(caps: &Caps, problem: &Problem) -> Bind<Convolution> {
    let gemm = I::of(problem)?;
    let (form, multiprocessors) = (gemm.form(), caps.multiprocessors as usize);
    let tiling = I::Kernel::tiling(&form, sizes(gemm.inner()), multiprocessors, gemm.sees_once());
    check(caps, &form, &tiling)?;
    Ok(Box::new(Planned { gemm, tiling, launches: Kept::default() }))
}

/// All configurations of a row of the table that a device has room for.
pub(super) fn candidates<I: ImplicitGemm>(caps: &Caps, problem: &Problem) -> Vec<Box<dyn Configured<Convolution>>> {
    let Ok(gemm) = I::of(problem) else { return Vec::new() };
    let form = gemm.form();
    let all = I::Kernel::tilings(&form, sizes(gemm.inner()), caps.multiprocessors as usize).into_iter();
    let fit = all.filter(|tiling| check(caps, &form, tiling).is_ok());
    let planned = fit.map(|tiling| {
        let planned = Planned { gemm: gemm.clone(), tiling, launches: Kept::default() };
        Box::new(planned) as Box<dyn Configured<Convolution>>
    });
    planned.collect()
}

/// A problem with a tiling, and the launches that are kept prepared: by the address of what windows are on, and the activation.
struct Planned<I: ImplicitGemm> {
    gemm: I,
    tiling: Tiling<I>,
    launches: Kept<(u64, Activation), Prepared>,
}

impl<I: ImplicitGemm> Planned<I> {
    fn parts_bytes(&self) -> usize {
        self.tiling.0.parts_bytes(&self.tiling.1)
    }
}

impl<I: ImplicitGemm> Configured<Convolution> for Planned<I> {
    fn text(&self) -> String {
        let ends = if self.parts_bytes() > 0 { "cut" } else { "whole" };
        format!("{} {ends}", I::Kernel::text(self.tiling.0))
    }

    fn instances(&self) -> Vec<Instance> {
        let own = I::Kernel::instance(&self.gemm.form(), self.tiling.0, Activation::None);
        self.gemm.before().into_iter().chain([own]).collect()
    }

    fn workspace_bytes(&self) -> usize {
        self.gemm.workspace_bytes(self.parts_bytes())
    }

    fn rounds_weights(&self) -> bool {
        self.tiling.0.rounds_weights()
    }

    fn run(&self, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
        let Self { gemm, tiling, launches } = self;
        let workspace = call.room(I::NAME)?;
        let images = gemm.images(Place { gpu, stream, workspace, parts_bytes: self.parts_bytes() }, &call)?;
        let prepared = launches.get((images.x.pointer(), call.epilogue.activation), |&(_, activation)| {
            let (form, maps) = (gemm.form(), gemm.maps(&images, &tiling.0)?);
            Prepared::new(gpu, &I::Kernel::instance(&form, tiling.0, activation), &form, *tiling, maps)
        })?;
        let g = gemm.inner().geometry();
        let maps_of_group = prepared.maps.len() / g.groups;
        for (group, maps) in prepared.maps.chunks_exact(maps_of_group).enumerate() {
            let w = call.w.fragments(I::NAME, [group, g.groups], [g.outputs(), g.k()])?;
            let first = group * g.outputs();
            let addresses = [call.y_at(first), call.bias_at(first), workspace.pointer()];
            let part = Part { w, images: &images, addresses };
            prepared.function.launch_typed(stream, &prepared.launch, &gemm.arguments(&part, tiling), maps)?;
        }
        Ok(())
    }
}
