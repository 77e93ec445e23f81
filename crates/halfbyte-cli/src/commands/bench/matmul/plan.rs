//! What `bench matmul` measures: shapes, formats and numbers of rows, from a file, drawn at random, or as named.

use super::super::case::{Case, Shape};
use super::Args;
use crate::args::WeightKind;
use crate::failure::{Failure, Result};
use crate::random;
use halfbyte::{Act, Float, Format, Group, WeightFormat, Zero};

/// What is measured.
pub(super) struct Plan {
    pub origin: Option<String>,
    pub kinds: Vec<WeightKind>,
    pub shapes: Vec<Rows>,
}

/// A shape, and the numbers of rows that it is measured with.
pub(super) struct Rows {
    pub shape: Shape,
    /// Whether the results say where the shape comes from.
    pub named: bool,
    pub m: Vec<usize>,
}

/// What is measured unless told: w4a8-g128.
const DEFAULT: WeightKind = WeightKind::Quantized(Format {
    weight: WeightFormat {
        bits: 4,
        group: Group::Size(128),
        zero: Zero::Symmetric,
        scale: Float::F16,
        channel_scale: None,
    },
    act: Act::A8,
});

/// Numbers of rows that are drawn for a random shape.
const ROWS_OF_RANDOM: usize = 8;

/// Shapes of multiples of 64, and rows.
fn draw(count: u32, seed: u64, m: &[usize]) -> Vec<Rows> {
    let mut random = random::Random(seed);
    let mut draw = |from: f64, to: f64| {
        let share = f64::from(random.uniform()).midpoint(1.0);
        from * (to / from).powf(share)
    };
    let mut shapes = Vec::new();
    for _ in 0..count {
        let [n, k] = [(); 2].map(|()| (draw(512.0, 32768.0) / 64.0).round() as usize * 64);
        let rows = if m.is_empty() { ROWS_OF_RANDOM } else { 0 };
        let drawn = (0..rows).map(|_| draw(1.0, 4096.0).round() as usize);
        let m = m.iter().copied().chain(drawn).collect();
        shapes.push(Rows { shape: Shape { origin: String::new(), n, k }, named: false, m });
    }
    shapes
}

/// From what is asked for. Errors: a file that is no case, sizes that are none.
pub(super) fn plan(args: &Args) -> Result<Plan> {
    let or = |given: &[usize], other: Vec<usize>| if given.is_empty() { other } else { given.to_vec() };
    let plan = match &args.case {
        Some(path) => {
            let (case, kinds) = Case::read(path)?;
            let kinds = if args.format.is_empty() { kinds } else { args.format.clone() };
            let m = or(&args.m, case.m);
            let shapes = case.shapes.into_iter().map(|shape| Rows { shape, named: true, m: m.clone() }).collect();
            Plan { origin: Some(case.origin), kinds, shapes }
        }
        None => {
            let kinds = if args.format.is_empty() { vec![DEFAULT] } else { args.format.clone() };
            let shapes = match args.random {
                Some(count) => draw(count, args.seed, &args.m),
                None => {
                    let shape = Shape { origin: String::new(), n: args.n, k: args.k };
                    vec![Rows { shape, named: false, m: or(&args.m, vec![1, 8, 128, 512]) }]
                }
            };
            Plan { origin: None, kinds, shapes }
        }
    };
    let too_large = |a: usize, b: usize| a.checked_mul(b).is_none_or(|size| size > 1 << 40);
    for Rows { shape, m, .. } in &plan.shapes {
        let bad_m = m.iter().any(|&m| m == 0 || too_large(m, shape.n.max(shape.k)));
        if shape.n == 0 || shape.k == 0 || too_large(shape.n, shape.k) || bad_m {
            return Err(Failure::usage(
                "sizes must be at least 1 and matrices at most 2^40 elements",
                format!("m {m:?}, n {}, k {}", shape.n, shape.k),
                "choose other sizes",
            ));
        }
    }
    Ok(plan)
}
