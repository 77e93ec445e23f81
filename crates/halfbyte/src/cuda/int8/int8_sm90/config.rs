//! Which form the kernel takes for a shape: a pure function of the numbers.
//!
//! Two blocks share a multiprocessor, so that one multiplies while the other fills its ring or stores; their sums must fit
//! half of the registers each: 64 outputs × 256 pixels, 128 × 128, and smaller ones where there are few pixels. Of these the one of
//! the least time is taken, by a model whose constants were fitted to measurements on an H200:
//!
//! ```text
//! unit = max(products at 4096 a clock, bytes of W and x at 56 a clock)            128 columns of a tile
//! time = rounds · (units · max(unit of the blocks side by side, LATENCY over the stages in flight) + TILE)
//!      + PART · parts + PIECE · (pieces of 8 pixels and 64 outputs)     where a cluster shares the columns of a tile
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
    /// Whether x is unsigned.
    pub unsigned: bool,
    /// Blocks of a cluster, which share the columns of a tile.
    pub parts: usize,
}

/// Warpgroups that multiply.
const WARPGROUPS: usize = 2;

/// Shared memory that a block may have as one of two.
const SHARED_BYTES: usize = 115_712;

/// Clocks of the beginning and the end of a tile, of which those of two blocks overlap.
const TILE: usize = 3000;

/// Blocks that may share a tile: as many as every cluster may have, and find room.
const PARTS: [usize; 4] = [1, 2, 4, 8];

/// Clocks of blocks that share a tile, for each of them; and for each 8 pixels and 64 outputs of a warpgroup, whose sums they leave for
/// each other. Fitted to 47 layers (1 to 8 images) on an H200.
const PART: usize = 200;
const PIECE: usize = 300;

/// Clocks from the request of a stage to its arrival.
const LATENCY: usize = 2000;

/// Multiply-adds and bytes from the second-level cache that a multiprocessor has in a clock.
const PRODUCTS: usize = 4096;
const BYTES: usize = 56;

/// Every form that is compiled.
pub fn forms(unsigned: bool) -> Vec<Config> {
    let forms = [[128, 1], [64, 2], [64, 1], [32, 1]];
    forms.map(|[tokens, strips]| Config { tokens, strips, stages: 0, unsigned, parts: 1 }.fitted()).into()
}

/// Every configuration for a shape: pixels, outputs of a group, columns, groups. Tiles are shared where all blocks find room at once.
pub fn configs([m, n, k, groups]: [usize; 4], unsigned: bool, multiprocessors: usize) -> Vec<Config> {
    let steps = k.div_ceil(STEP);
    let all = forms(unsigned).into_iter().flat_map(|form| PARTS.map(|parts| Config { parts, ..form }));
    let has_room = |config: &Config| {
        let blocks = config.tiles([m, n]).saturating_mul(groups).saturating_mul(config.parts);
        config.parts == 1 || config.parts <= steps && blocks <= 2 * multiprocessors
    };
    all.filter(has_room).collect()
}

/// The configuration for a shape, as [`configs`] has it, and its time in clocks.
pub fn config(shape: [usize; 4], unsigned: bool, multiprocessors: usize) -> (Config, usize) {
    let [m, n, k, groups] = shape;
    let time = |config: Config| {
        let blocks = config.tiles([m, n]).saturating_mul(groups).saturating_mul(config.parts);
        let multiprocessors = multiprocessors.max(1);
        let (together, rounds) = (blocks.div_ceil(multiprocessors).min(2), blocks.div_ceil(2 * multiprocessors));
        let (outputs, pixels) = (config.strips * STRIP, WARPGROUPS * config.tokens);
        let products = outputs * pixels * STEP / PRODUCTS;
        let bytes = (outputs + pixels) * STEP / BYTES;
        let unit = (together * products.max(bytes)).max(LATENCY / (config.stages - 1));
        let pieces = config.strips * config.tokens / 8;
        let join = if config.parts > 1 { PART * config.parts + PIECE * pieces } else { 0 };
        let units = k.div_ceil(STEP).div_ceil(config.parts);
        rounds.saturating_mul(units.saturating_mul(unit).saturating_add(TILE)).saturating_add(join)
    };
    let widest = Config { tokens: 128, strips: 1, stages: 0, unsigned, parts: 1 }.fitted();
    let all = configs(shape, unsigned, multiprocessors).into_iter().map(|config| (config, time(config)));
    all.min_by_key(|(_, time)| *time).unwrap_or((widest, usize::MAX))
}

impl std::fmt::Display for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { tokens, strips, stages, parts, .. } = self;
        write!(f, "2 × {tokens} pixels, {strips} strips, {stages} stages")?;
        if *parts > 1 { write!(f, ", {parts} parts") } else { Ok(()) }
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
            let (config, _) = config([m, n, k, 1], true, 132);
            (config.tokens, config.strips, config.tiles([m, n]))
        };
        // What is not seen at the same distances everywhere, or is seen once.
        assert_eq!(of(32 * 56 * 56, 64, 256), (128, 1, 392));
        assert_eq!(of(32 * 28 * 28, 128, 512), (64, 2, 196));
        assert_eq!(of(32 * 28 * 28, 128, 1152), (64, 2, 196));
        assert_eq!(of(32 * 14 * 14, 256, 1024), (64, 1, 196));
        assert_eq!(of(32 * 7 * 7, 512, 2048), (32, 1, 200));
        assert_eq!(of(32 * 7 * 7, 2048, 512), (64, 2, 208));
    }

    #[test]
    fn few_tiles_of_many_columns_are_shared() {
        let of = |m, n, k| {
            let (config, _) = config([m, n, k, 1], true, 132);
            (config.tokens, config.parts)
        };
        // As fast as the best that was measured, or within 7 %.
        assert_eq!(of(49, 120, 18432), (32, 8));
        assert_eq!(of(196, 256, 2304), (32, 4));
        assert_eq!(of(2048, 160, 5184), (64, 4));
        assert_eq!(of(392, 512, 4608), (32, 4));
        assert_eq!(of(49, 512, 128), (32, 1));
        assert_eq!(of(6272, 128, 1152), (32, 1));
    }

    #[test]
    fn two_blocks_of_every_form_fit_a_multiprocessor() {
        for config in forms(false) {
            assert!(config.stages >= 2 && config.shared_bytes() <= SHARED_BYTES, "{config:?}");
        }
    }
}
