//! Configurations to measure against the one that is chosen, and those that compile.

use super::choice::{SPLITS, may_round, of_any_tokens, tokens_for};
use super::config::{self, Config, TWO_BY_TWO, TWO_SETS, most_tokens_of_groups, room};
use crate::cuda::Caps;
use crate::cuda::tiled::{Form, Tile};
use crate::tensor::Float;

/// Whether the kernel compiles with a configuration, without spills, for a form.
pub fn compiles(config: Config, form: &Form) -> bool {
    let atom = form.atom;
    let Config { tokens, strips, sets, wgmma, early, split, blocks, .. } = config;
    let joint = config.joint();
    let sums = strips * tokens;
    // Of a group beside those of the tile.
    let two_sums = !early && atom.group > 0;
    let registers = match (wgmma, joint) {
        (false, _) if blocks == 2 => {
            sums <= if atom.field_bits() == 8 && (atom.zero || atom.bits < 8) { 24 } else { 32 }
        }
        (false, _) => tokens <= 32 && sums <= 32,
        (true, true) => {
            sums <= if blocks == 1 {
                64
            } else if two_sums && atom.bits == 8 && atom.zero {
                16
            } else if two_sums && split == 1 {
                24
            } else {
                32
            }
        }
        (true, false) if strips == 2 && config.computes_weights(form) => tokens <= 64,
        (true, false) if strips == 2 && tokens == 128 => early && atom.field_bits() == 4 && atom.scale == Float::F16,
        (true, false) if two_sums && atom.group < 128 => sums <= most_tokens_of_groups(atom) && config.boxes == 2,
        (true, false) => sums <= if two_sums { 128 } else { 256 },
    };
    // Registers, and whole units of x, with which its sums come.
    let wide = !atom.is_wide()
        || match wgmma {
            true if early => !joint,
            true => !joint && config.boxes == 2 && strips == 1 && tokens <= most_tokens_of_groups(atom),
            false => {
                (tokens <= 8 && (!atom.offset || split > 1 || strips * blocks < 4))
                    || (tokens <= 16 && strips == 1 && !atom.offset)
                    || (tokens <= 16 && blocks == 1 && sets == 1 && atom.multiples)
            }
        };
    let scales = !early || (atom.group > 0 && wgmma);
    let groups = early || !wgmma || matches!(atom.group, 0 | 128) || strips == 1;
    let rings = config.stages_w >= 2.max(sets) && config.stages_x >= 2.max(sets);
    let fits = config.shared_bytes(form) <= room(blocks);
    registers && wide && scales && groups && rings && fits && (sets == 1 || split == 1) && (blocks == 1 || joint)
}

/// Configurations for a number of rows that may be worth measuring, on a device: those that may be chosen, and others.
pub fn candidates(form: &Form, m: usize, caps: &Caps) -> Vec<Config> {
    let atom = form.atom;
    let paired = Config { blocks: 2, trigger: 0, ..TWO_BY_TWO };
    let bases = [
        Config { wgmma: false, strips: 1, ..paired },
        Config { wgmma: false, trigger: 8, prefetch: 4, ..paired },
        Config { wgmma: false, trigger: 8, prefetch: 4, ..TWO_BY_TWO },
        TWO_SETS,
        TWO_BY_TWO,
        Config { strips: 1, ..TWO_BY_TWO },
    ];
    let rounding = may_round(form, caps);
    let mut all = Vec::new();
    for tokens in tokens_for(m, atom.is_wide()) {
        let others = bases.into_iter().flat_map(|base| SPLITS.map(|split| Config { tokens, split, ..base }));
        for config in of_any_tokens(tokens, atom, rounding).into_iter().chain(others) {
            let config = config.fitted(form);
            if compiles(config, form) && !all.contains(&config) {
                all.push(config);
            }
        }
    }
    all
}

/// Configurations for a form that together are chosen for many shapes on an H200.
pub fn all(form: &Form) -> Vec<Config> {
    const SHAPES: [[usize; 2]; 7] =
        [[21504, 14336], [4096, 4096], [12288, 4096], [28672, 4096], [6144, 4096], [2048, 2048], [600, 1000]];
    let mut all = Vec::new();
    for m in [8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512] {
        for [n, k] in SHAPES {
            let config = config::config(form, [m, n, k], &Caps::H200);
            if !all.contains(&config) {
                all.push(config);
            }
        }
    }
    all
}
