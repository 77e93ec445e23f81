//! 1 × 1 convolution as a GEMM: with stride 1 and images in nhwc, x is the matrix of the product as it lies.

use super::weights::Kind;
use super::{Call, Convolution, Kernel, Problem, implicit_gemm_sm90};
use crate::cuda::dispatch::{About, Bind, Configured};
use crate::cuda::driver::Stream;
use crate::cuda::matmul::{self, Configuration};
use crate::cuda::sources::Instance;
use crate::cuda::{Caps, Gpu};
use crate::error::{Error, Result};
use crate::kernel::{self, Activation, Reason};
use crate::layout::cuda_wna16::STRIP;

const NAME: &str = "gemm_1x1";

pub(super) const KERNEL: Kernel = Kernel::with_one(
    About {
        name: NAME,
        what: "one position, stride 1, no padding: the product of crate::cuda::matmul",
        serves: |_| true,
        instances: Vec::new,
    },
    choose,
);

/// Pixels from which tiles of one strip fill a device.
const MANY_PIXELS: usize = 4096;

fn choose(caps: &Caps, problem: &Problem) -> Bind<Convolution> {
    let (shape, g) = (&problem.shape, problem.shape.geometry());
    if !shape.is_product() {
        return Err(Reason("computes one position with stride 1, no padding and one group".into()));
    }
    problem.is_in_nhwc()?;
    // Few outputs of many pixels: products have no tile of one strip.
    let narrow = g.co <= STRIP && shape.output_pixels() >= MANY_PIXELS;
    if narrow && implicit_gemm_sm90::KERNEL.supports(caps, problem).is_ok() {
        return Err(Reason(format!(
            "leaves up to {STRIP} outputs of {MANY_PIXELS} pixels or more to implicit_gemm_sm90"
        )));
    }
    let (m, n, k) = (shape.output_pixels(), g.co, g.k());
    let product = kernel::Problem { format: problem.format, x: problem.x, y: problem.y, m, n, k };
    Ok(Box::new(Gemm::of(caps, product, problem.packed)?))
}

/// A product of matrices, planned: a row for each pixel.
pub(super) struct Gemm {
    pub problem: kernel::Problem,
    kernel: &'static matmul::Kernel,
    configuration: Configuration,
    workspace_bytes: usize,
    rounds_weights: bool,
}

impl Gemm {
    /// By the first kernel that supports it with a weight in a layout.
    pub fn of(caps: &Caps, problem: kernel::Problem, layout: &str) -> std::result::Result<Self, Reason> {
        let kernel = matmul::select(caps, &problem, Some(layout)).map_err(|why| Reason(why.to_string()))?;
        let configuration = kernel.choose(caps, &problem, false)?;
        let workspace_bytes = configuration.workspace_bytes(caps, &problem, false);
        let rounds_weights = kernel.bound(caps, &problem).rounded_weights.is_some();
        Ok(Self { problem, kernel, configuration, workspace_bytes, rounds_weights })
    }

    /// Whether weights are scaled and rounded to the type of x.
    pub fn rounds_weights(&self) -> bool {
        self.rounds_weights
    }

    /// Bytes of workspace that it needs.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// What it is computed by.
    pub fn instances(&self) -> Vec<Instance> {
        self.configuration.instances(&self.problem, Activation::None)
    }

    /// Puts it into a stream.
    pub fn run(&self, gpu: &Gpu, stream: &Stream, call: matmul::Call<'_>) -> Result<()> {
        self.configuration.run(gpu, stream, &call)
    }
}

impl Configured<Convolution> for Gemm {
    fn text(&self) -> String {
        let kernel::Problem { m, n, k, .. } = self.problem;
        format!("m={m} n={n} k={k} by {} {}", self.kernel.name, self.configuration)
    }

    fn instances(&self) -> Vec<Instance> {
        self.instances()
    }

    fn workspace_bytes(&self) -> usize {
        self.workspace_bytes()
    }

    fn rounds_weights(&self) -> bool {
        self.rounds_weights()
    }

    fn run(&self, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
        let Call { x, w, epilogue, y, workspace, .. } = call;
        let w = one_part(NAME, &w.kind)?;
        self.run(gpu, stream, matmul::Call { x, m: self.problem.m, w, epilogue, y, workspace, batch_invariant: false })
    }
}

/// The weight of a convolution of one group, quantised.
pub(super) fn one_part<'a>(op: &'static str, kind: &'a Kind) -> Result<&'a matmul::Packed> {
    match kind {
        Kind::Quantized(parts) if parts.len() == 1 => Ok(&parts[0]),
        Kind::Quantized(parts) => Err(Error::invalid(op, "one group", parts.len().to_string())),
        Kind::Dense(_) => Err(Error::invalid(op, "a quantised weight", "a dense one")),
    }
}
