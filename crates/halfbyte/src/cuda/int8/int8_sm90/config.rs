//! Which form the kernel takes for a shape: a pure function of the numbers.
//!
//! Two blocks share a multiprocessor, so that one multiplies while the other fills its ring or stores; their sums must fit
//! half of the registers each: 64 outputs × 256 pixels, 128 × 128, and smaller ones where there are few pixels. Of these the one of
//! the least time is taken by a model of what is known of the processor, which has not been fitted to measurements:
//!
//! ```text
//! unit = max(products at 4096 a clock, bytes of W and x at 40 a clock)            128 columns of a tile
//! time = tiles of a multiprocessor · units · unit + pairs of tiles · TILE
//! ```
//!
//! For ResNet-50 at a batch of 32 on 132 multiprocessors the tests of this file record what comes of it.

use crate::cuda::sources::Instance;
use crate::layout::cuda_int8::{STEP, STRIP};

/// What the kernel is compiled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Pixels a warpgroup, of which there are two.
    pub tokens: usize,
    /// Strips of 64 outputs.
    pub strips: usize,
    /// Stages of the ring, of 128 columns each.
    pub stages: usize,
    /// Whether boxes of x have 128 channels, and not 64.
    pub wide: bool,
    /// Whether x is unsigned.
    pub unsigned: bool,
}

/// Warpgroups that multiply.
const WARPGROUPS: usize = 2;

/// Shared memory that a block may have as one of two.
const SHARED_BYTES: usize = 115_712;

/// Clocks of the beginning and the end of a tile, of which those of two blocks overlap.
const TILE: usize = 3000;

/// Multiply-adds and bytes from the second-level cache that a multiprocessor has in a clock.
const PRODUCTS: usize = 4096;
const BYTES: usize = 40;

/// Every configuration for boxes of one size and x of one type.
pub fn configs(wide: bool, unsigned: bool) -> Vec<Config> {
    let forms = [[128, 1], [64, 2], [64, 1], [32, 1]];
    forms.map(|[tokens, strips]| Config { tokens, strips, stages: 0, wide, unsigned }.fitted()).into()
}

/// The configuration for a shape: pixels, outputs of a group, columns, groups.
pub fn config([m, n, k, groups]: [usize; 4], wide: bool, unsigned: bool, multiprocessors: usize) -> Config {
    let time = |config: &Config| {
        let tiles = config.tiles([m, n]).saturating_mul(groups);
        let each = tiles.div_ceil(multiprocessors.max(1));
        let (outputs, pixels) = (config.strips * STRIP, WARPGROUPS * config.tokens);
        let products = outputs * pixels * STEP / PRODUCTS;
        let bytes = (outputs + pixels) * STEP / BYTES;
        each.saturating_mul(k.div_ceil(STEP)).saturating_mul(products.max(bytes)) + each.div_ceil(2) * TILE
    };
    let widest = Config { tokens: 128, strips: 1, stages: 0, wide, unsigned }.fitted();
    configs(wide, unsigned).into_iter().min_by_key(time).unwrap_or(widest)
}

impl std::fmt::Display for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { tokens, strips, stages, .. } = self;
        write!(f, "2 × {tokens} pixels, {strips} strips, {stages} stages")
    }
}

impl Config {
    fn fitted(self) -> Self {
        let room = SHARED_BYTES - WARPGROUPS * self.tokens * 8;
        Self { stages: (room / (self.stage_bytes() + 16)).min(6), ..self }
    }

    fn stage_bytes(self) -> usize {
        (self.strips * STRIP + WARPGROUPS * self.tokens) * STEP
    }

    /// Tiles of a group's pixels and outputs.
    pub fn tiles(self, [m, n]: [usize; 2]) -> usize {
        m.div_ceil(WARPGROUPS * self.tokens).saturating_mul(self.rows(n))
    }

    /// Tiles along the outputs of a group.
    pub fn rows(self, n: usize) -> usize {
        n.div_ceil(STRIP).div_ceil(self.strips)
    }

    /// Shared memory of a block.
    pub fn shared_bytes(self) -> usize {
        self.stages * (self.stage_bytes() + 16) + WARPGROUPS * self.tokens * 8
    }

    /// Channels of a box of x.
    pub fn box_channels(self) -> usize {
        if self.wide { STEP } else { STEP / 2 }
    }

    /// Threads of a block.
    pub fn threads(self) -> usize {
        WARPGROUPS * 128 + 32
    }

    /// What is compiled.
    pub fn instance(self) -> Instance {
        let numbers = [
            ("NT", self.tokens),
            ("STRIPS", self.strips),
            ("STAGES", self.stages),
            ("WIDE", self.box_channels()),
            ("UNSIGNED", self.unsigned.into()),
            ("THREADS", self.threads()),
            ("SHARED_BYTES", self.shared_bytes()),
        ];
        let defines = numbers.iter().map(|(name, value)| format!("HB_{name}={value}"));
        Instance::new(&super::SOURCE, "int8_sm90").with(defines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layers_of_resnet_50() {
        let of = |m, n, k| {
            let config = config([m, n, k, 1], true, true, 132);
            (config.tokens, config.strips, config.tiles([m, n]))
        };
        assert_eq!(of(32 * 56 * 56, 64, 576), (128, 1, 392));
        assert_eq!(of(32 * 28 * 28, 128, 1152), (64, 2, 196));
        assert_eq!(of(32 * 14 * 14, 256, 2304), (64, 2, 98));
        assert_eq!(of(32 * 7 * 7, 512, 4608), (64, 1, 104));
    }

    #[test]
    fn two_blocks_of_every_form_fit_a_multiprocessor() {
        for config in configs(false, false) {
            assert!(config.stages >= 2 && config.shared_bytes() <= SHARED_BYTES, "{config:?}");
        }
    }
}
