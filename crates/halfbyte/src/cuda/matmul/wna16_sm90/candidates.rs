//! Configurations to measure against the one that is chosen, and all that are chosen.

use super::config::{
    self, Config, EARLY, LEAST_APART, MOST_EXACT_ROWS, PAIRED, Shape, TWO_BY_TWO, TWO_SETS, may_round,
    most_tokens_of_groups,
};
use crate::cuda::Caps;
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
        (false, _) if blocks == 2 => sums <= if atom.bits == 8 && atom.zero { 16 } else { 24 },
        (false, _) => tokens <= 32 && sums <= 32,
        (true, true) => {
            sums <= if blocks == 1 {
                64
            } else if two_sums && split == 1 {
                24
            } else {
                32
            }
        }
        (true, false) if two_sums && atom.group < 128 => sums <= most_tokens_of_groups(atom) && config.boxes == 2,
        (true, false) => sums <= if two_sums { 128 } else { 256 },
    };
    // Registers, and whole units of x, with which its sums come.
    let wide = !atom.is_wide()
        || match wgmma {
            true => !joint && config.boxes == 2 && strips == 1 && tokens <= most_tokens_of_groups(atom),
            false => {
                (tokens <= 8 && (!atom.offset || split > 1 || strips * blocks < 4))
                    || (tokens <= 16 && strips == 1 && !atom.offset)
                    || (tokens <= 16 && blocks == 1 && sets == 1 && atom.multiples)
            }
        };
    let scales = !early || (atom.group > 0 && wgmma);
    let groups = early || !wgmma || matches!(atom.group, 0 | 128) || strips == 1;
    let most = if blocks == 2 { 115_712 } else { 232_448 };
    let rings = config.stages_w >= 2.max(sets) && config.stages_x >= 2.max(sets);
    let room = config.shared_bytes(&Form::floats(atom, out)) <= most;
    registers && wide && scales && groups && rings && room && (sets == 1 || split == 1) && (blocks == 1 || joint)
}

/// Configurations for a number of rows that may be worth measuring, on a device.
pub fn candidates(atom: Atom, m: usize, out: Float, caps: &Caps) -> Vec<Config> {
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
    let orders: &[bool] = if may_round(atom, out, caps) { &[false, true] } else { &[false] };
    let mut all = Vec::new();
    for tokens in tokens {
        for base in bases {
            for (early, split) in orders.iter().flat_map(|&early| [1, 2, 4, 8].map(|split| (early, split))) {
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

/// Configurations for a form of atoms that together are chosen for many shapes on an H200.
pub fn all(atom: Atom, out: Float) -> Vec<Config> {
    const SHAPES: [[usize; 2]; 7] =
        [[21504, 14336], [4096, 4096], [12288, 4096], [28672, 4096], [6144, 4096], [2048, 2048], [600, 1000]];
    let mut all = Vec::new();
    for m in [8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512] {
        for [n, k] in SHAPES {
            let config = config::config(atom, [m, n, k], out, &Caps::H200);
            if !all.contains(&config) {
                all.push(config);
            }
        }
    }
    all
}

/// Every configuration that is chosen for a form of atoms, whatever shape and device are, and whether weights may be rounded or not.
pub fn every(atom: Atom, out: Float) -> Vec<Config> {
    const CLUSTERS: [usize; 4] = [1, 2, 4, 8];
    let (base, narrow) = (TWO_BY_TWO, Config { strips: 1, ..TWO_BY_TWO });
    let of = Shape::new(atom, [1, 1, 1], out, &Caps::H200);
    let orders = [false, true].map(|rounded_weights| {
        let caps = Caps { rounded_weights, ..Caps::H200 };
        Shape::new(atom, [MOST_EXACT_ROWS + 1, 1, 1], out, &caps).rounds
    });
    let mut all = vec![EARLY, TWO_SETS, Config { tokens: 16, ..TWO_SETS }];
    for split in CLUSTERS {
        let paired = Config { split, ..PAIRED };
        let narrow = Config { strips: 1, ..paired };
        all.push(Config { wgmma: false, ..paired });
        all.extend([narrow, paired].map(|config| Config { tokens: 16, wgmma: false, ..config }));
        all.extend([16, 24, 32].map(|tokens| Config { tokens, ..narrow }));
    }
    for split in CLUSTERS.into_iter().take(2) {
        // Shared by a cluster, or batch-invariant.
        let few = [8, 16, 32, 48, 64, 96, 128].map(|tokens| Config { tokens, split, trigger: 0, ..narrow });
        all.extend(few);
        for early in orders {
            all.extend([96, 128].map(|tokens| Config { tokens, split, early, ..narrow }));
        }
    }
    all.extend([24, 32].map(|tokens| Config { tokens, trigger: 0, ..base }));
    all.extend([48, 64].into_iter().flat_map(|tokens| [narrow, base].map(|config| Config { tokens, ..config })));
    all.extend([96, 128].map(|tokens| Config { tokens, ..narrow }));
    for early in orders {
        all.extend([192, 256].map(|tokens| Config { tokens, early, boxes: 1, ..narrow }));
    }
    let mut unlike = Vec::new();
    if atom.is_wide() {
        all.retain(|config| config.boxes == 2);
        all.extend([1, 2].map(|split| Config { tokens: LEAST_APART, split, trigger: 0, ..narrow }));
    }
    for config in all.into_iter().map(|config| of.wide(of.small(config)).fitted(atom, out)) {
        if !unlike.contains(&config) {
            unlike.push(config);
        }
    }
    unlike
}
