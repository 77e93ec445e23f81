//! What grouped products are expected to take, by how rows are dealt out to weights.

use crate::cuda::Caps;
use crate::layout::cuda_wna16::{Atom, STEP, STRIP};

/// Rows that choose some of several weights each, by chance.
#[derive(Clone, Copy, Debug)]
pub struct Dealt {
    /// Rows.
    pub rows: usize,
    /// Weights.
    pub weights: usize,
    /// Different weights that each row chooses.
    pub each: usize,
}

impl Dealt {
    /// Columns of tiles of so many rows, of all weights, on average: those of a weight have its rows alone.
    pub fn columns(&self, tile: usize) -> f64 {
        let (rows, share) = (self.rows as f64, self.each as f64 / self.weights as f64);
        // Rows of a weight have a binomial distribution: whether there are any, and, as of a normal one, whether there are more than some.
        let (mean, deviation) = (rows * share, (rows * share * (1.0 - share)).sqrt());
        let some = 1.0 - (1.0 - share).powf(rows);
        let more_than = |count: f64| match deviation > 0.0 {
            true => 0.5 * libm::erfc((count + 0.5 - mean) / (deviation * std::f64::consts::SQRT_2)),
            false => f64::from(u8::from(mean > count)),
        };
        let most = ((mean + 6.0 * deviation) / tile as f64).ceil() as usize;
        let others: f64 = (1..=most).map(|columns| more_than((columns * tile) as f64)).sum();
        self.weights as f64 * (some + others)
    }
}

/// How sharply the slower of memory and multiprocessors decides, as neither hides the other wholly.
const SHARPLY: f64 = 3.3;

/// Microseconds of a product with weights of a shape, in so many columns of tiles that each read a weight from memory: where a multiprocessor
/// takes so many clocks to convert and multiply an atom.
pub fn microseconds(atom: Atom, clocks: f64, [n, k]: [usize; 2], columns: f64, caps: &Caps) -> f64 {
    let caps = caps.or_known();
    let atoms = columns * (n.div_ceil(STRIP) * k.div_ceil(STEP)) as f64;
    let slower = (caps.clocks_of_memory(atom.bytes()).powf(SHARPLY) + clocks.powf(SHARPLY)).powf(SHARPLY.recip());
    atoms * slower / (f64::from(caps.multiprocessors.max(1)) * f64::from(caps.clock_khz) * 1e-3)
}

/// The clocks by `mma.sync`: of an atom, and of its tokens and groups of scales.
pub fn clocks_by_mma(atom: Atom, tokens: usize) -> f64 {
    100.0 + 5.5 * tokens as f64 + 10.0 * atom.groups() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_those_that_rows_take_by_chance() {
        // By the distribution itself.
        let exactly = |Dealt { rows, weights, each }: Dealt, tile: usize| {
            let share = each as f64 / weights as f64;
            let mut probability = (1.0 - share).powi(rows as i32);
            let mut columns = 0.0;
            for own in 0..=rows {
                columns += probability * own.div_ceil(tile) as f64;
                probability *= (rows - own) as f64 / (own + 1) as f64 * share / (1.0 - share);
            }
            weights as f64 * columns
        };
        for (rows, weights, each) in
            [(1, 8, 2), (1, 128, 8), (7, 4, 1), (40, 32, 4), (64, 6, 1), (300, 160, 2), (900, 24, 3)]
        {
            let dealt = Dealt { rows, weights, each };
            for tile in [8, 16, 24, 64, 256] {
                let (got, expected) = (dealt.columns(tile), exactly(dealt, tile));
                assert!((got - expected).abs() <= 0.03 * expected, "{dealt:?} in {tile}: {got}, {expected}");
            }
        }
        let all = Dealt { rows: 20, weights: 2, each: 2 };
        assert_eq!([8, 20, 32].map(|tile| all.columns(tile)), [6.0, 2.0, 2.0]);
        assert_eq!(Dealt { rows: 0, ..all }.columns(8), 0.0);
    }
}
