//! What a CPU could do at most, measured, and the least time that it allows a product.

use crate::args::WeightKind;
use halfbyte::Float;
use halfbyte::cpu::Cpu;
use halfbyte::cpu::roofline::Roofline;
use serde::Serialize;

/// What the machine can do at most.
#[derive(Clone, Copy, Serialize)]
pub struct Limits {
    pub read_gb_per_s: f64,
    pub int8_gop_per_s: f64,
    pub f32_gflop_per_s: f64,
    pub bf16_gflop_per_s: Option<f64>,
    /// See [`Roofline`]; the instruction set says the same.
    #[serde(skip)]
    pub bf16_tiles: bool,
}

impl Limits {
    pub fn measure(cpu: &Cpu) -> Self {
        let roofline = Roofline::measure(cpu);
        Self {
            read_gb_per_s: roofline.read_bytes_per_second / 1e9,
            int8_gop_per_s: roofline.int8_ops_per_second / 1e9,
            f32_gflop_per_s: roofline.f32_flops_per_second / 1e9,
            bf16_gflop_per_s: roofline.bf16_flops_per_second.map(|flops| flops / 1e9),
            bf16_tiles: roofline.bf16_tiles,
        }
    }

    /// The better of two measurements: a limit is what was reached at any time.
    pub fn best(self, other: Self) -> Self {
        Self {
            read_gb_per_s: self.read_gb_per_s.max(other.read_gb_per_s),
            int8_gop_per_s: self.int8_gop_per_s.max(other.int8_gop_per_s),
            f32_gflop_per_s: self.f32_gflop_per_s.max(other.f32_gflop_per_s),
            bf16_gflop_per_s: self.bf16_gflop_per_s.zip(other.bf16_gflop_per_s).map(|(a, b)| a.max(b)),
            bf16_tiles: self.bf16_tiles,
        }
    }

    /// Peak of products of codes by exact activations of a type, in GFLOP/s, and what sets it.
    pub fn exact(&self, x: Float) -> (f64, &'static str) {
        let roofline = Roofline {
            read_bytes_per_second: self.read_gb_per_s * 1e9,
            int8_ops_per_second: self.int8_gop_per_s * 1e9,
            f32_flops_per_second: self.f32_gflop_per_s * 1e9,
            bf16_flops_per_second: self.bf16_gflop_per_s.map(|gflops| gflops * 1e9),
            bf16_tiles: self.bf16_tiles,
        };
        let (flops, name) = roofline.exact_flops_per_second(x);
        (flops / 1e9, name)
    }

    /// Least time for reading these bytes and doing these operations, in seconds, and what sets it.
    pub fn least_seconds(&self, kind: WeightKind, x: Float, bytes: f64, ops: f64) -> (f64, &'static str) {
        let (peak, name) = match kind {
            WeightKind::Quantized(f) if f.act.is_quantized() => (self.int8_gop_per_s, "int8 peak"),
            WeightKind::Quantized(_) => self.exact(x),
            WeightKind::Dense(_) => (self.f32_gflop_per_s, "f32 peak"),
        };
        let (reading, computing) = (bytes / self.read_gb_per_s / 1e9, ops / peak / 1e9);
        if reading > computing { (reading, "read") } else { (computing, name) }
    }

    /// What the machine could do, a line each time it was measured.
    pub fn table(before: Self, after: Self) -> String {
        let line = |(when, limits): (&str, Self)| {
            let bf16 = limits.bf16_gflop_per_s.map_or_else(String::new, |peak| format!(", bf16 {peak:.0} GFLOP/s"));
            format!(
                "machine {when:<6} read {:.1} GB/s, int8 {:.0} GOP/s, f32 {:.0} GFLOP/s{bf16}\n",
                limits.read_gb_per_s, limits.int8_gop_per_s, limits.f32_gflop_per_s
            )
        };
        [("before", before), ("after", after)].map(line).concat()
    }
}
