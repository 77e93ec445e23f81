//! Configurations to measure against the one that is chosen.

use super::config::{Config, MOST_TOKENS_OF_SMALL_GROUPS, TWO_BY_TWO, TWO_SETS};
use crate::cuda::tiled::{Form, Tile};
use crate::layout::cuda_wna16::Atom;
use crate::tensor::Float;

/// Tokens a tile.
const TOKENS: [usize; 10] = [8, 16, 24, 32, 48, 64, 96, 128, 192, 256];

/// Whether the kernel compiles with a configuration, without spills, for atoms of a form and y of a type.
pub fn compiles(config: Config, atom: Atom, out: Float) -> bool {
    let Config { tokens, strips, sets, wgmma, early, split, blocks, .. } = config;
    let joint = config.joint();
    let sums = strips * tokens;
    // Of a group beside those of the tile.
    let two_sums = !early && atom.group > 0;
    let registers = match (wgmma, joint) {
        (false, _) => tokens <= 32 && sums <= if blocks == 2 { 24 } else { 32 },
        (true, true) => {
            sums <= if blocks == 1 {
                64
            } else if two_sums && split == 1 {
                24
            } else {
                32
            }
        }
        (true, false) if two_sums && atom.group < 128 => sums <= MOST_TOKENS_OF_SMALL_GROUPS && config.boxes == 2,
        (true, false) => sums <= if two_sums { 128 } else { 256 },
    };
    let scales = !early || (out != Float::F32 && atom.group > 0 && wgmma);
    let groups = early || !wgmma || matches!(atom.group, 0 | 128) || strips == 1;
    let most = if blocks == 2 { 115_712 } else { 232_448 };
    let rings = config.stages_w >= 2.max(sets) && config.stages_x >= 2.max(sets);
    let room = config.shared_bytes(&Form::floats(atom, out)) <= most;
    registers && scales && groups && rings && room && (sets == 1 || split == 1) && (blocks == 1 || joint)
}

/// Configurations for a number of rows that may be worth measuring.
pub fn candidates(atom: Atom, m: usize, out: Float) -> Vec<Config> {
    let least = TOKENS.into_iter().find(|&tokens| tokens >= m).unwrap_or(256);
    let tokens = TOKENS.into_iter().filter(|&tokens| tokens <= least && tokens * 2 >= least.min(128));
    let paired = Config { blocks: 2, trigger: 0, ..TWO_BY_TWO };
    let narrow = Config { strips: 1, ..TWO_BY_TWO };
    let bases = [
        Config { wgmma: false, ..paired },
        Config { wgmma: false, strips: 1, ..paired },
        Config { wgmma: false, trigger: 8, prefetch: 4, ..paired },
        Config { wgmma: false, trigger: 8, prefetch: 4, ..TWO_BY_TWO },
        Config { strips: 1, ..paired },
        TWO_SETS,
        TWO_BY_TWO,
        narrow,
        Config { boxes: 1, ..narrow },
    ];
    let mut all = Vec::new();
    for tokens in tokens {
        for base in bases {
            for (early, split) in [false, true].into_iter().flat_map(|early| [1, 2, 4, 8].map(|split| (early, split))) {
                let config = Config { tokens, early, split, ..base }.fitted(atom, out);
                let joint = config.joint() && config.boxes != 2;
                if !joint && compiles(config, atom, out) && !all.contains(&config) {
                    all.push(config);
                }
            }
        }
    }
    all
}
