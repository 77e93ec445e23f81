//! Images of bytes in planes, for kernels that have them pixel by pixel: copies before and after, as [`crate::cuda::conv`] has them
//! for floats.

use super::{Call, Int8, Kernel, Place, Problem, Target, int8_simt};
use crate::conv::Layout2d;
use crate::cuda::conv::planes::{self, Moves};
use crate::cuda::dispatch::{About, Bind, Configured};
use crate::cuda::driver::{Stream, ViewMut};
use crate::cuda::sources::Instance;
use crate::cuda::{Caps, Gpu};
use crate::error::{Error, Result};
use crate::kernel::Reason;

const NAME: &str = "int8_planes";

pub(super) const KERNEL: Kernel = Kernel::with_one(
    About {
        name: NAME,
        what: "planes to pixels and back through the workspace, the layer by the first kernel for pixels",
        serves: |arch| arch.number >= 75,
        instances: planes::instances,
    },
    choose,
);

fn choose(caps: &Caps, problem: &Problem) -> Bind<Int8> {
    if problem.layouts == [Layout2d::Nhwc; 2] {
        return Err(Reason("leaves images that lie pixel by pixel to the others".into()));
    }
    if problem.floats && problem.layouts[1] == Layout2d::Nchw {
        return Err(Reason("copies bytes of y, not floats".into()));
    }
    let problems = planes::instead(problem.layouts).map(|layouts| Problem { layouts, ..*problem }).collect::<Vec<_>>();
    let (inner, configured) = planes::first::<Int8>(int8_simt::KERNEL.name, NAME, caps, problems.into_iter())?;
    let moves = Moves::new(&problem.shape, [1; 2], [problem.layouts, inner.layouts], configured.workspace_bytes())?;
    Ok(Box::new(Planes { problem: *problem, inner, configured, moves }))
}

/// A layer whose images are in planes.
struct Planes {
    problem: Problem,
    inner: Problem,
    configured: Box<dyn Configured<Int8>>,
    moves: Moves,
}

impl Configured<Int8> for Planes {
    fn text(&self) -> String {
        format!("{} {} inside, {}", self.inner.layouts[0], self.inner.layouts[1], self.configured.text())
    }

    fn instances(&self) -> Vec<Instance> {
        [self.configured.instances(), self.moves.instances()].concat()
    }

    fn workspace_bytes(&self) -> usize {
        self.moves.bytes()
    }

    fn run(&self, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
        let target = Place::of(&call.y).address;
        let Some(workspace) = call.workspace else { return Err(Error::invalid(NAME, "a workspace", "none")) };
        let (mut own, room) = workspace.split_at_mut(self.moves.begin());
        let [x, y] = self.moves.parts(room);
        if let Some(x) = &x {
            self.moves.copy_x(gpu, stream, self.problem.layouts[0], [call.x.pointer(), x.pointer()])?;
        }
        let inside = y.as_ref().map(ViewMut::pointer);
        let [x_layout, y_layout] = self.inner.layouts;
        let inner = Call {
            x: x.as_ref().map_or(call.x, ViewMut::view),
            x_layout,
            y: y.map_or(call.y, Target::Bytes),
            y_layout,
            workspace: Some(own.get()),
            ..call
        };
        self.configured.run(gpu, stream, inner)?;
        inside.map_or(Ok(()), |inside| self.moves.copy_y(gpu, stream, y_layout, [inside, target]))
    }
}
