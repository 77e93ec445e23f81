//! Which form of `wna16_mma.cu` an implicit product takes: pure functions of the numbers.
//!
//! Convolutions have many tokens (output pixels) and few outputs and columns, so that tiles have as few strips as a group of outputs,
//! and several blocks share a multiprocessor. Every form is tried with a model of its time, in clocks of a multiprocessor:
//!
//! ```text
//! unit  = max(products, reads of shared memory, bytes of W and x from the second-level cache) + conversion of W
//! whole = rounds · (units · max(blocks together · unit, LATENCY / stages in flight) + TILE)
//! cut   = units of all tiles / multiprocessors + 2 TILE + JOIN
//! ```

use crate::cuda::Caps;
use crate::cuda::matmul::wna16_mma::config::{Config, copies_wait_in_registers, schedule};
use crate::cuda::schedule::Schedule;
use crate::cuda::tiled::{Form, Tile};
use crate::layout::cuda_wna16::{Atom, STEP, STRIP};
use crate::tensor::Float;

/// A configuration, and who computes what with it.
pub type Tiling = (Config, Schedule);

/// Pixels of a tile; warpgroups, and strips of each.
const TOKENS: [usize; 3] = [16, 32, 64];
const FORMS: [[usize; 2]; 3] = [[1, 1], [2, 1], [2, 2]];

/// Clocks of the beginning and the end of a tile, of joining parts of one, and from the request of a stage to its arrival.
const TILE: usize = 3000;
const JOIN: usize = 5000;
const LATENCY: usize = 2000;

/// Bytes that a multiprocessor has of shared memory and of the second-level cache in a clock.
const SHARED: usize = 128;
const BYTES: usize = 56;

/// Clocks of converting a strip of a unit.
const CONVERSION: usize = 60;

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

/// The tilings of a product on a device, the fastest by the model first.
pub fn tilings(atom: Atom, sizes: Sizes, out: Float, caps: &Caps) -> Vec<Tiling> {
    let form = Form::floats(atom, out);
    let divides = |config: &Config| sizes.strips_of_group.is_none_or(|strips| strips % config.tile_strips() == 0);
    let mut all: Vec<_> = configs(atom, out, caps).into_iter().filter(divides).collect();
    all.sort_by_key(|&config| time(config, &form, sizes, caps));
    let shape = [sizes.pixels, sizes.rows, sizes.steps * STEP];
    all.into_iter().map(|config| (config, schedule(config, shape, config.workers(atom, out, caps)))).collect()
}

/// Clocks that a configuration takes.
fn time(config: Config, form: &Form, sizes: Sizes, caps: &Caps) -> usize {
    let (strips, tokens) = (config.tile_strips(), config.tokens);
    // Clocks in which a multiprocessor multiplies 64 rows of a unit by a token: of data centres' processors 5.3 to 8, of graphics
    // cards twice as many.
    let of_token = match caps.arch.number {
        90 => 6,
        80 | 87 | 100..120 => 8,
        _ => 16,
    };
    let products = strips * tokens * of_token;
    // Each warp reads all of x, and what is copied is written.
    let x = tokens * STEP * 2;
    let w = strips * STRIP * STEP * form.atom.bits as usize / 8;
    let shared = ((config.warpgroups * 4 + 1) * x + 2 * w) / SHARED;
    let unit = products.max(shared).max((x + w) / BYTES) + strips * CONVERSION;
    let multiprocessors = caps.multiprocessors.max(1) as usize;
    let tiles = sizes.pixels.div_ceil(tokens) * sizes.rows.div_ceil(STRIP).div_ceil(strips);
    let most = config.workers(form.atom, form.out, caps) / multiprocessors;
    let (together, rounds) =
        (tiles.div_ceil(multiprocessors).clamp(1, most), tiles.div_ceil(most * multiprocessors).max(1));
    let in_flight = (config.stages * config.step / STEP).max(2) - 1;
    let whole = rounds.saturating_mul(sizes.steps * (together * unit).max(LATENCY / in_flight) + TILE);
    let cut = (tiles * sizes.steps * unit).div_ceil(multiprocessors) + 2 * TILE + JOIN;
    if copies_wait_in_registers(caps) { whole } else { whole.min(cut) }
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
                    for (config, schedule) in all {
                        assert!(strips.is_none_or(|strips| strips % config.tile_strips() == 0), "{config}");
                        assert!(schedule.fits(), "{config}: {schedule:?}");
                    }
                }
            }
        }
    }
}
