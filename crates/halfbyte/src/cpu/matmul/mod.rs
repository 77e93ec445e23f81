//! Products on a CPU: the table of kernels, the choice among them, and its explanation.
//!
//! A product is computed by a *driver* (who packs x, cuts the work into tasks and blocks that fit the caches) with the
//! *tile* functions of an instruction set (who multiply a few rows of x by a few panels of weights in registers):
//!
//! | driver | tiles | activations |
//! |---|---|---|
//! | `amx` | `a8_amx`, `a16_amx` | quantised on the fly, or as they are in one to three bf16; tiles of 16 × 16 |
//! | `quantized_act` | `a8_avx512vnni`, `a8_avxvnni`, `a8_avx2`, `any_scalar` | quantised on the fly, int8 dot products |
//! | `exact_act` | `a16_avx512`, `a16_avx2`, `any_scalar` | as they are, f32 accumulation |
//! | `exact_row` | `a16_avx512vnni`, `a16_avxvnni`, `a16_avx2madd` | one row, as it is: integers of 32 bits, whose bytes or words are multiplied |
//! | `a16_avx512bf16` | its own | bf16 as they are, bf16 dot products |

/// The function of a const `FORM` for the form in which codes lie, one of [`Held::form`](crate::layout::cpu_n16::Held::form), with these
/// arguments; of tables with numbers that of the form behind each pattern.
#[cfg(target_arch = "x86_64")]
macro_rules! for_form {
    ($form:expr, $function:ident $arguments:tt, $($tables:pat => $table:ident),+) => {
        match $form {
            2 => $function::<2> $arguments,
            3 => $function::<3> $arguments,
            4 => $function::<4> $arguments,
            5 => $function::<5> $arguments,
            6 => $function::<6> $arguments,
            8 => $function::<8> $arguments,
            $($tables => $function::<$table> $arguments,)+
            form => unreachable!("no codes of form {form}"),
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod a16_amx;
#[cfg(target_arch = "x86_64")]
mod a16_avx2;
#[cfg(target_arch = "x86_64")]
mod a16_avx2madd;
#[cfg(target_arch = "x86_64")]
mod a16_avx512;
#[cfg(target_arch = "x86_64")]
mod a16_avx512bf16;
#[cfg(target_arch = "x86_64")]
mod a16_avx512vnni;
#[cfg(target_arch = "x86_64")]
mod a16_avxvnni;
#[cfg(target_arch = "x86_64")]
mod a8_amx;
#[cfg(target_arch = "x86_64")]
mod a8_avx2;
#[cfg(target_arch = "x86_64")]
mod a8_avx512vnni;
#[cfg(target_arch = "x86_64")]
mod a8_avxvnni;
#[cfg(target_arch = "x86_64")]
mod a8_ymm;
#[cfg(target_arch = "x86_64")]
mod amx;
mod any_scalar;
mod blocking;
mod encode;
mod epilogue;
mod exact_act;
#[cfg(target_arch = "x86_64")]
mod exact_row;
#[cfg(target_arch = "x86_64")]
mod exact_row_ymm;
mod placed;
mod quantized_act;
mod rows;

pub use crate::kernel::Activation;
pub(crate) use encode::Pixels;
pub use epilogue::Epilogue;
pub(crate) use epilogue::Output;
pub(crate) use placed::{Placed, Runs};
pub(crate) use rows::{Rows, widen};

use super::Cpu;
use super::isa::Caps;
#[cfg(target_arch = "x86_64")]
use super::isa::{Isa, needs};
use crate::error::Result;
use crate::format::{Act, Format};
use crate::kernel::{self, Problem, Reason, Row, first};
use crate::layout::Lines;
use crate::layout::cpu_dense_n16::CpuDenseN16;
use crate::layout::cpu_n16::CpuN16;
use crate::tensor::{Float, Floats, FloatsMut};
use std::sync::OnceLock;

/// A weight in the layout that the kernels read.
#[derive(Clone, Debug)]
pub enum Packed {
    /// Codes, and what becomes of the activations.
    Quantized(CpuN16, Act),
    /// Floats.
    Dense(CpuDenseN16),
}

impl Packed {
    /// Outputs.
    pub fn n(&self) -> usize {
        match self {
            Packed::Quantized(w, _) => w.n(),
            Packed::Dense(w) => w.n(),
        }
    }

    /// Length of the reduction.
    pub fn k(&self) -> usize {
        match self {
            Packed::Quantized(w, _) => w.k(),
            Packed::Dense(w) => w.k(),
        }
    }

    /// Format; None if dense.
    pub fn format(&self) -> Option<Format> {
        match self {
            Packed::Quantized(w, act) => Some(Format { weight: w.format(), act: *act }),
            Packed::Dense(_) => None,
        }
    }

    /// Whether columns of x are multiplied in their order, without filler between them.
    pub(crate) fn is_in_order(&self) -> bool {
        match self {
            Packed::Quantized(w, _) => w.columns().is_none(),
            Packed::Dense(_) => true,
        }
    }

    /// What the weights of output `i` stand for, into k elements. Panics if there is no such output, or no room for them.
    pub fn row(&self, i: usize, out: &mut [f32]) {
        assert!(i < self.n() && out.len() >= self.k());
        match self {
            Packed::Quantized(w, _) => w.row(i, out),
            Packed::Dense(w) => w.row(i, out),
        }
    }

    /// Bytes that the weight takes.
    pub fn bytes(&self) -> usize {
        match self {
            Packed::Quantized(w, _) => w.bytes(),
            Packed::Dense(w) => w.bytes(),
        }
    }
}

/// One product.
#[derive(Debug)]
pub struct Call<'a> {
    /// Activations `[m, k]`.
    pub x: Floats<'a>,
    /// Rows of x.
    pub m: usize,
    /// Weight.
    pub w: &'a Packed,
    /// What happens to the sums.
    pub epilogue: Epilogue<'a>,
    /// Output `[m, n]`.
    pub y: FloatsMut<'a>,
}

/// Buffers that a device keeps from product to product.
#[derive(Debug, Default)]
pub struct Scratch {
    pub(super) x: Lines,
    meta: Lines,
    #[cfg(target_arch = "x86_64")]
    row: Vec<exact_row::FixedPoint>,
}

/// A way to compute products.
pub struct Kernel {
    /// Name, the stem of its file.
    pub name: &'static str,
    /// Layout of the weights it reads.
    pub layout: &'static str,
    /// What it does, in one line.
    pub what: &'static str,
    /// Whether it multiplies rows wherever they lie ([`Rows::Placed`]), not only copies of them.
    pub(crate) placed: bool,
    supports: fn(&Caps, &Problem) -> std::result::Result<(), Reason>,
    run: fn(&Cpu, &mut Scratch, &Input<'_>, &Output<'_>),
}

impl Kernel {
    /// Whether it computes a problem on a device, or why not.
    pub fn supports(&self, caps: &Caps, problem: &Problem) -> std::result::Result<(), Reason> {
        (self.supports)(caps, problem)
    }

    /// The same of the windows of a convolution.
    pub(crate) fn supports_windows(&self, caps: &Caps, problem: &Problem) -> std::result::Result<(), Reason> {
        self.supports(caps, problem)?;
        #[cfg(target_arch = "x86_64")]
        if self.name == a16_amx::NAME {
            return a16_amx::supports_windows(problem);
        }
        Ok(())
    }
}

impl Row for Kernel {
    fn name(&self) -> &'static str {
        self.name
    }
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// What a kernel multiplies.
pub(crate) struct Input<'a> {
    /// Rows of x, as many as `m` says.
    pub x: Rows<'a>,
    /// Rows of x.
    pub m: usize,
    /// Weight.
    pub w: &'a Packed,
}

/// All kernels that this program was compiled with; the first that supports a problem serves it.
pub const KERNELS: &[Kernel] = &[
    #[cfg(target_arch = "x86_64")]
    Kernel {
        name: "a8_amx",
        layout: "cpu_n16",
        what: "x to int8, tdpbssd, f32 sums a group",
        placed: false,
        supports: a8_amx::supports,
        run: a8_amx::run,
    },
    #[cfg(target_arch = "x86_64")]
    Kernel {
        name: "a8_avx512vnni",
        layout: "cpu_n16",
        what: "x to int8, vpdpbusd, f32 sums a group",
        placed: false,
        supports: |caps, p| quantized(p).and_then(|()| needs(caps, Isa::Avx512)),
        run: |cpu, scratch, input, y| quantized_act::run(cpu, scratch, input, y, &a8_avx512vnni::TILES),
    },
    #[cfg(target_arch = "x86_64")]
    Kernel {
        name: "a8_avxvnni",
        layout: "cpu_n16",
        what: "x to int8, vpdpbusd of 256 bits, f32 sums a group",
        placed: false,
        supports: |caps, p| quantized(p).and_then(|()| needs(caps, Isa::AvxVnni)),
        run: |cpu, scratch, input, y| quantized_act::run(cpu, scratch, input, y, &a8_avxvnni::TILES),
    },
    #[cfg(target_arch = "x86_64")]
    Kernel {
        name: "a8_avx2",
        layout: "cpu_n16",
        what: "x to int8, vpmaddubsw, f32 sums a group",
        placed: false,
        supports: |caps, p| quantized(p).and_then(|()| needs(caps, Isa::Avx2)),
        run: |cpu, scratch, input, y| quantized_act::run(cpu, scratch, input, y, &a8_avx2::TILES),
    },
    #[cfg(target_arch = "x86_64")]
    Kernel {
        name: a16_amx::NAME,
        layout: "cpu_n16",
        what: "codes to bf16, x to one, two or three bf16, tdpbf16ps, f32 sums a group",
        placed: false,
        supports: a16_amx::supports,
        run: a16_amx::run,
    },
    #[cfg(target_arch = "x86_64")]
    Kernel {
        name: "a16_avx512bf16",
        layout: "cpu_n16",
        what: "codes to bf16, vdpbf16ps, f32 sums a group",
        placed: false,
        supports: a16_avx512bf16::supports,
        run: a16_avx512bf16::run,
    },
    #[cfg(target_arch = "x86_64")]
    Kernel {
        name: "a16_avx512vnni",
        layout: "cpu_n16",
        what: "one row: x to 32 bits of fixed point, vpdpbusd of its bytes, exact sums a group",
        placed: false,
        supports: |caps, p| exact_row::supports(caps, p, Isa::Avx512),
        run: |cpu, scratch, input, y| exact_row::run(cpu, scratch, input, y, &a16_avx512vnni::FUNCTIONS),
    },
    #[cfg(target_arch = "x86_64")]
    Kernel {
        name: "a16_avx512",
        layout: "cpu_n16, cpu_dense_n16",
        what: "weights to f32 in registers or a panel in cache, f32 multiply-add",
        placed: true,
        supports: |caps, p| exact(p).and_then(|()| needs(caps, Isa::Avx512)),
        run: |cpu, scratch, input, y| exact_act::run(cpu, scratch, input, y, &a16_avx512::TILES),
    },
    #[cfg(target_arch = "x86_64")]
    Kernel {
        name: "a16_avxvnni",
        layout: "cpu_n16",
        what: "one row: x to 32 bits of fixed point, vpdpbusd of its bytes in 256 bits, exact sums a group",
        placed: false,
        supports: |caps, p| exact_row::supports(caps, p, Isa::AvxVnni),
        run: |cpu, scratch, input, y| exact_row::run(cpu, scratch, input, y, &a16_avxvnni::FUNCTIONS),
    },
    #[cfg(target_arch = "x86_64")]
    Kernel {
        name: "a16_avx2madd",
        layout: "cpu_n16",
        what: "one row: x to 32 bits of fixed point, vpmaddwd of its halves, exact sums a group",
        placed: false,
        supports: |caps, p| exact_row::supports(caps, p, Isa::Avx2),
        run: |cpu, scratch, input, y| exact_row::run(cpu, scratch, input, y, &a16_avx2madd::FUNCTIONS),
    },
    #[cfg(target_arch = "x86_64")]
    Kernel {
        name: "a16_avx2",
        layout: "cpu_n16, cpu_dense_n16",
        what: "weights to f32 in registers or a panel in cache, f32 multiply-add",
        placed: true,
        supports: |caps, p| exact(p).and_then(|()| needs(caps, Isa::Avx2)),
        run: |cpu, scratch, input, y| exact_act::run(cpu, scratch, input, y, &a16_avx2::TILES),
    },
    Kernel {
        name: "any_scalar",
        layout: "cpu_n16, cpu_dense_n16",
        what: "plain Rust, every format, every processor",
        placed: true,
        supports: |_, _| Ok(()),
        run: |cpu, scratch, input, y| {
            if matches!(input.w, Packed::Quantized(_, act) if act.is_quantized()) {
                quantized_act::run(cpu, scratch, input, y, &any_scalar::QUANTIZED_ACT_TILES);
            } else {
                exact_act::run(cpu, scratch, input, y, &any_scalar::EXACT_ACT_TILES);
            }
        },
    },
];

#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "the plain kernel takes both"))]
fn quantized(p: &Problem) -> std::result::Result<(), Reason> {
    match p.format {
        Some(f) if f.act.is_quantized() => Ok(()),
        Some(_) => Err(Reason("multiplies quantised activations (a8), the format says exact ones".into())),
        None => Err(Reason("multiplies codes, the weights are dense".into())),
    }
}

#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "the plain kernel takes both"))]
fn exact(p: &Problem) -> std::result::Result<(), Reason> {
    match p.format {
        Some(f) if f.act.is_quantized() => {
            Err(Reason("multiplies exact activations (a16, a32), the format says quantised ones".into()))
        }
        _ => Ok(()),
    }
}

#[cfg(target_arch = "x86_64")]
fn at_least(rows: usize, p: &Problem) -> std::result::Result<(), Reason> {
    if p.m >= rows {
        return Ok(());
    }
    Err(Reason(format!("pays from {rows} rows on, x has {}", p.m)))
}

/// From each of these numbers of rows on another kernel may serve the same weight and types.
fn least_rows(problem: &Problem) -> [usize; 4] {
    #[cfg(target_arch = "x86_64")]
    return [
        exact_row::MORE_ROWS,
        a16_avx512bf16::LEAST_ROWS,
        a16_amx::least_rows(problem),
        a8_amx::least_rows(problem),
    ];
    #[cfg(not(target_arch = "x86_64"))]
    return [problem.m + 1; 4];
}

/// All numbers of rows from which on another kernel may serve a weight and types, from one on, in order.
pub(crate) fn rows_of_choices(problem: &Problem) -> Vec<usize> {
    let mut rows: Vec<usize> = std::iter::once(1).chain(least_rows(problem)).collect();
    rows.sort_unstable();
    rows.dedup();
    rows
}

/// The choices for one weight, as a matrix or as that of a convolution, each made when it is first needed: for every pair of types, and by how many of [`least_rows`] x
/// has.
#[derive(Debug, Default)]
pub(crate) struct Plans([[OnceLock<(Caps, &'static Kernel)>; 5]; 9]);

impl Plans {
    /// What [`select`] chooses. Error: no kernel serves the problem.
    pub fn at(&self, caps: &Caps, problem: &Problem) -> Result<&'static Kernel> {
        self.by(caps, problem, || select(caps, problem))
    }

    /// The kernel that serves the windows of a convolution. Error: there is none.
    pub fn of_windows(&self, caps: &Caps, problem: &Problem) -> Result<&'static Kernel> {
        let serves = |kernel: &'static Kernel| kernel.supports_windows(caps, problem).map(|()| kernel);
        self.by(caps, problem, || first("conv2d", problem, KERNELS, serves))
    }

    fn by(
        &self,
        caps: &Caps,
        problem: &Problem,
        select: impl FnOnce() -> Result<&'static Kernel>,
    ) -> Result<&'static Kernel> {
        let number = |dtype: Float| match dtype {
            Float::F16 => 0,
            Float::BF16 => 1,
            Float::F32 => 2,
        };
        let enough_for = least_rows(problem).into_iter().filter(|&least| problem.m >= least).count();
        let plan = &self.0[number(problem.x) * 3 + number(problem.y)][enough_for];
        match plan.get() {
            Some((of, kernel)) if of == caps => Ok(kernel),
            // The first device that runs a weight is nearly always the only one.
            _ => {
                let kernel = select()?;
                let _ = plan.set((*caps, kernel));
                Ok(kernel)
            }
        }
    }
}

/// The kernel that serves a problem.
pub fn select(caps: &Caps, problem: &Problem) -> Result<&'static Kernel> {
    first("matmul", problem, KERNELS, |kernel| (kernel.supports)(caps, problem).map(|()| kernel))
}

/// Every kernel with the reason against it; the first without one is chosen.
pub fn explain(caps: &Caps, problem: &Problem) -> Vec<(&'static Kernel, Option<Reason>)> {
    kernel::explain(KERNELS, |kernel| (kernel.supports)(caps, problem).err())
}

/// Computes a product whose shapes have been checked.
pub(crate) fn run(kernel: &Kernel, cpu: &Cpu, call: Call<'_>) {
    let output = Output::new(call.y, [call.m, call.w.n()], call.epilogue);
    let input = Input { x: Rows::Matrix(call.x), m: call.m, w: call.w };
    cpu.scratch.with(|scratch| run_part(kernel, cpu, scratch, &input, &output));
}

/// Computes a part of something larger, for which no other thread computes the same outputs at the time.
pub(crate) fn run_part(kernel: &Kernel, cpu: &Cpu, scratch: &mut Scratch, input: &Input<'_>, y: &Output<'_>) {
    (kernel.run)(cpu, scratch, input, y);
}
