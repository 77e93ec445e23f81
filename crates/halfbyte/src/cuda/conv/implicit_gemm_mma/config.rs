//! Which form of `wna16_mma.cu` an implicit product takes: pure functions of the numbers.
//!
//! Convolutions have many tokens (output pixels) and few outputs and columns, so that tiles have as few strips as a group of outputs,
//! and several blocks share a multiprocessor. Every form is tried with a model of its time, in clocks of a multiprocessor:
//!
//! ```text
//! unit  = products + reads of shared memory + conversion of W, or the bytes of W and x from the second-level cache
//! whole = rounds · (units · blocks together · unit + TILE)        every tile by one block
//! cut   = tiles · (units · unit + TILE / blocks together) / multiprocessors + TILE + JOIN
//! ```
//!
//! A warpgroup alone on a multiprocessor takes twice its time.
//!
//! Its constants come from 60 times of five layers in groups on an H200, and were tried on twelve drawn at random
//! (`docs/decisions/0031`): products, reads and conversion overlap little, since two to four warps of a scheduler wait for each
//! other's stages.

use crate::cuda::Caps;
use crate::cuda::matmul::wna16_mma::config::{Config, pieces, schedule};
use crate::cuda::schedule::Schedule;
use crate::cuda::tiled::{Form, Tile};
use crate::layout::cuda_wna16::{Atom, STEP, STRIP};
use crate::tensor::Float;

/// A configuration, and who computes what with it.
pub type Tiling = (Config, Schedule);

/// Pixels of a tile; warpgroups, and strips of each.
const TOKENS: [usize; 3] = [16, 32, 64];
const FORMS: [[usize; 2]; 3] = [[1, 1], [2, 1], [2, 2]];

/// Clocks of the beginning and the end of a tile, and of joining parts of cut ones.
const TILE: usize = 2500;
const JOIN: usize = 9700;

/// Bytes that a multiprocessor has of shared memory and of the second-level cache in a clock.
const SHARED: usize = 128;
const BYTES: usize = 56;

/// Warpgroups from which on a multiprocessor has no more to do at a time.
const WARPGROUPS: usize = 2;

/// Clocks of converting a strip of a unit.
const CONVERSION: usize = 70;

/// Patches of [`super::super::im2col_gemm`] on Hopper: bytes that a multiprocessor writes and reads again in a clock, multiply-adds
/// with them, and clocks of its launches.
const PATCH_BYTES: usize = 4;
const PATCH_PRODUCTS: usize = 574;
const PATCH_LAUNCHES: usize = 4000;

/// Sizes of a product: pixels, rows of W, atoms along k of all parts of x; and the strips of W that a group has, if there are several.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    /// Output pixels.
    pub pixels: usize,
    /// Rows of W, of all groups.
    pub rows: usize,
    /// Atoms along k.
    pub steps: usize,
    /// Strips that a tile's must divide.
    pub strips_of_group: Option<usize>,
}

/// Every configuration for a form of atoms that a device has room for.
pub fn configs(atom: Atom, out: Float, caps: &Caps) -> Vec<Config> {
    let form = Form::floats(atom, out);
    let forms = TOKENS.into_iter().flat_map(|tokens| FORMS.map(|[warpgroups, strips]| [tokens, warpgroups, strips]));
    let all = forms.filter_map(|form| Config::for_images(form, atom, out, caps));
    all.filter(|config| config.shared_bytes(&form) <= caps.shared_bytes as usize).collect()
}

/// The tilings of a product on a device with their clocks, the fastest by the model first.
pub fn tilings(atom: Atom, sizes: Sizes, out: Float, caps: &Caps) -> Vec<(usize, Tiling)> {
    let form = Form::floats(atom, out);
    let divides = |config: &Config| sizes.strips_of_group.is_none_or(|strips| strips % config.tile_strips() == 0);
    let shape = [sizes.pixels, sizes.rows, sizes.steps * STEP];
    let of = |config: Config| {
        let [whole, cut] = times(config, &form, sizes, caps);
        let schedule = schedule(config, shape, config.workers(atom, out, caps));
        // A block for every tile where nothing is to be cut.
        let uncut = pieces(config, shape, 1);
        if whole <= cut && schedule.cut > 0 && uncut.fits() {
            (whole, (config, uncut))
        } else {
            (whole.min(cut), (config, schedule))
        }
    };
    let mut all: Vec<_> = configs(atom, out, caps).into_iter().filter(divides).map(of).collect();
    all.sort_by_key(|&(time, _)| time);
    all
}

/// Clocks that a configuration takes with whole tiles, and with cut ones.
fn times(config: Config, form: &Form, sizes: Sizes, caps: &Caps) -> [usize; 2] {
    let (strips, tokens) = (config.tile_strips(), config.tokens);
    // Clocks in which a multiprocessor multiplies 64 rows of a unit by a token: of graphics cards twice as many.
    let of_token = match caps.arch.number {
        90 => 6,
        80 | 87 | 100..120 => 8,
        _ => 16,
    };
    // Each warp reads all of x, and what is copied is written.
    let x = tokens * STEP * 2;
    let w = strips * STRIP * STEP * form.atom.bits as usize / 8;
    let shared = ((config.warpgroups * 4 + 1) * x + 2 * w) / SHARED;
    let computed = strips * tokens * of_token + shared + strips * CONVERSION;
    // Small groups are scaled apart, and offsets have sums of x made.
    let quarters = match (form.atom.offset, form.atom.group) {
        (true, _) => 9,
        (false, 16 | 32 | 64) => 6,
        _ => 4,
    };
    let unit = (computed * quarters / 4).max((x + w) / BYTES);
    let multiprocessors = caps.multiprocessors.max(1) as usize;
    let tiles = sizes.pixels.div_ceil(tokens).saturating_mul(sizes.rows.div_ceil(STRIP).div_ceil(strips));
    let most = config.workers(form.atom, form.out, caps) / multiprocessors;
    let (together, rounds) =
        (tiles.div_ceil(multiprocessors).clamp(1, most), tiles.div_ceil(most * multiprocessors).max(1));
    let busy = together.max(WARPGROUPS.div_ceil(config.warpgroups));
    let whole = rounds.saturating_mul(sizes.steps * busy * unit + TILE);
    let cut = tiles.saturating_mul(sizes.steps * unit + TILE / most).div_ceil(multiprocessors) + TILE + JOIN;
    [whole, cut]
}

/// Clocks that products of patches of one group take on Hopper.
pub fn time_of_patches([pixels, outputs, columns]: [usize; 3], caps: &Caps) -> usize {
    let multiprocessors = caps.multiprocessors.max(1) as usize;
    let elements = pixels.saturating_mul(columns);
    let clocks = elements.saturating_mul(2) / PATCH_BYTES + elements.saturating_mul(outputs) / PATCH_PRODUCTS;
    clocks / multiprocessors + PATCH_LAUNCHES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::sources::Arch;

    #[test]
    fn every_form_fits_a_processor_and_the_group() {
        for number in [75, 80, 86, 90] {
            let caps = Caps::of_arch(Arch { number, specific: number == 90, ptx: false });
            for bits in [2, 3, 4, 8] {
                for (strips, pixels) in [(Some(1), 100), (Some(2), 100_000), (Some(3), 9), (None, 5000)] {
                    let sizes = Sizes { pixels, rows: 6 * STRIP, steps: 9, strips_of_group: strips };
                    let all = tilings(Atom { bits, ..Atom::W4_G128 }, sizes, Float::F16, &caps);
                    assert!(!all.is_empty(), "sm_{number} {bits} bits {sizes:?}");
                    for (_, (config, schedule)) in all {
                        assert!(strips.is_none_or(|strips| strips % config.tile_strips() == 0), "{config}");
                        assert!(schedule.fits(), "{config}: {schedule:?}");
                    }
                }
            }
        }
    }
}
