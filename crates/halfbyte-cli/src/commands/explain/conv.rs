//! `halfbyte explain conv`: which kernel would compute a convolution, and why each other would not.

use super::{Explanation, line};
use crate::app::App;
use crate::args::FloatArg;
use crate::args::conv::{ByteArg, Kind, LayoutArg, Sizes};
use crate::failure::Result;
use halfbyte::conv::{Conv2dShape, Layout2d};
use halfbyte::cpu::conv::explain::{Explained, conv2d, conv2d_int8};
use halfbyte::cpu::isa;
use halfbyte::cuda::dispatch::{Operation, Plan};
use halfbyte::cuda::{Caps, Gpu, conv, int8};
use halfbyte::{Float, Format};

/// Show which kernel would compute a convolution, and why each other would not.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Format of the weights, as w8a8; f32, f16, bf16 for dense ones; or int8 for bytes in, bytes out.
    format: Kind,
    #[command(flatten)]
    sizes: Sizes,
    /// Images at a time.
    #[arg(long, value_name = "N", default_value_t = 1)]
    batch: usize,
    /// Order of the elements of x and y.
    #[arg(long, value_enum, default_value = "nhwc")]
    layout: LayoutArg,
    /// Type of x [default: f32; on a GPU f16].
    #[arg(long, value_enum)]
    x: Option<FloatArg>,
    /// Type of y [default: f32; on a GPU f16].
    #[arg(long, value_enum)]
    y: Option<FloatArg>,
    /// Type of x and y where the format is int8 [default: u8].
    #[arg(long, value_enum)]
    bytes: Option<ByteArg>,
}

/// Prints the table.
pub fn run(args: &Args, app: &App) -> Result<()> {
    Kind::refuse_unused(&[args.format], &[("--x", args.x.is_some()), ("--y", args.y.is_some())], args.bytes)?;
    let shape = Conv2dShape::new(args.sizes.geometry(), args.batch, args.sizes.size)?;
    let explained = match app.cuda()? {
        None => on_cpu(args, shape)?,
        Some(number) => on_cuda(args, shape, &Gpu::open(number)?.caps())?,
    };
    explained.print(app)
}

fn layouts(args: &Args) -> [Layout2d; 2] {
    [args.layout.into(); 2]
}

fn types(args: &Args, default: Float) -> [Float; 2] {
    [args.x, args.y].map(|dtype| dtype.map_or(default, Float::from))
}

/// The problem as a GPU would compute it: texts tell the same on a CPU.
fn floats(args: &Args, format: Option<Format>, shape: Conv2dShape, default: Float) -> conv::Problem {
    let [x, y] = types(args, default);
    conv::Problem { format, shape, x, y, layouts: layouts(args), packed: "" }
}

fn bytes(args: &Args, shape: Conv2dShape) -> int8::Problem {
    let x = args.bytes.unwrap_or(ByteArg::U8).into();
    int8::Problem { shape, x, symmetric: true, floats: false, layouts: layouts(args) }
}

fn on_cpu(args: &Args, shape: Conv2dShape) -> Result<Explanation> {
    let caps = isa::Caps::detect_within_environment()?;
    let (problem, explained) = match args.format {
        Kind::Floats(kind) => {
            let problem = floats(args, kind.format(), shape, Float::F32);
            (problem.to_string(), conv2d(&caps, problem.format, &shape, [problem.x, problem.y])?)
        }
        Kind::Int8 => (bytes(args, shape).to_string(), conv2d_int8(&caps, shape.geometry())),
    };
    let line = |Explained { kernel, layout, what, reason }: Explained| line(kernel, layout, what, reason);
    Ok(Explanation::new(problem, caps.isa.name().to_owned(), explained.into_iter().map(line).collect()))
}

fn on_cuda(args: &Args, shape: Conv2dShape, caps: &Caps) -> Result<Explanation> {
    match args.format {
        Kind::Floats(kind) => {
            let problem = floats(args, kind.format(), shape, Float::F16);
            let packed = conv::layout_of(caps, problem.format, shape.geometry(), problem.x)?;
            Ok(explained::<conv::Convolution>(caps, &conv::Problem { packed, ..problem }, packed))
        }
        Kind::Int8 => Ok(explained::<int8::Int8>(caps, &bytes(args, shape), "cuda_int8")),
    }
}

/// What a plan for a problem would hold, and why no other kernel's.
fn explained<O: Operation>(caps: &Caps, problem: &O::Problem, layout: &'static str) -> Explanation {
    let lines = Plan::<O>::explain(caps, problem).into_iter();
    let lines = lines.map(|(kernel, reason)| line(kernel.name, layout, kernel.what, reason)).collect();
    let plan = Plan::<O>::of(caps, problem).ok();
    Explanation {
        configuration: plan.as_ref().map(Plan::to_string),
        workspace_bytes: plan.as_ref().map(Plan::workspace_bytes),
        ..Explanation::new(problem.to_string(), caps.arch.to_string(), lines)
    }
}
