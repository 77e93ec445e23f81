//! Which configuration a product takes: of those that are compiled the one that the model of the machine expects to be the fastest.

use super::candidates::compiles;
use super::config::{Config, EARLY, LEAST_APART, PAIRED, TWO_BY_TWO, TWO_SETS, most_tokens_of_groups};
use super::cost::Timed;
use crate::cuda::Caps;
use crate::cuda::matmul::plans::{EACH, STEP as ROWS, alike};
use crate::cuda::tiled::Form;
use crate::layout::cuda_wna16::{Atom, STEP, STRIP};
use crate::tensor::Float;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// Tokens of a tile.
pub(super) const TOKENS: [usize; 12] = [8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256];

/// Blocks that may share the columns of a tile; those of few rows in clusters, of which a round should take as many as find room.
pub(super) const SPLITS: [usize; 4] = [1, 2, 4, 8];
const SPLITS_OF_FEW: [usize; 6] = [2, 3, 4, 5, 6, 8];

/// Rows beyond which weights are scaled and rounded where y is a half float or the weight allows it: tiles of 256 tokens leave no registers for the sums
/// of a group, and with narrower ones 256 rows take 9 % longer, 1024 rows 8 %. Up to here the cost of exact weights in groups of 128 is at
/// most 3 %. Sums of smaller groups cost more: 80 rows of (5056, 18816) in groups of 32 take 45 µs, and 35 with rounded weights.
const MOST_EXACT_ROWS: usize = 128;
const MOST_EXACT_ROWS_OF_SMALL_GROUPS: usize = 64;

/// Whether scales and offsets may be applied to weights, which are then rounded: where y is as coarse as what that rounds and weights cannot
/// lie outside the range of x, or the weight allows it.
pub(super) fn may_round(&Form { atom, x, out, .. }: &Form, caps: &Caps) -> bool {
    let within_range = x == Float::BF16 || atom.scale == Float::F16;
    caps.rounded_weights || within_range && out.unit_roundoff() >= x.unit_roundoff()
}

/// Whether weights may be scaled and rounded for so many rows.
pub(super) fn rounds(form: &Form, m: usize, caps: &Caps) -> bool {
    let most_exact = if form.atom.group < 128 { MOST_EXACT_ROWS_OF_SMALL_GROUPS } else { MOST_EXACT_ROWS };
    form.atom.group > 0 && m > most_exact && may_round(form, caps)
}

/// Rows that one tile should have, if one can: several narrower ones read weights more often, and were slower for all products of 49 to 64
/// rows that were timed.
const ONE_TILE: usize = 64;

/// Tokens of tiles for a number of rows: as many as there are up to `ONE_TILE`; of more, no more than it takes, no less than half of that, or
/// of 128, and such as have rings apart. Scales in f32 and offsets have fewer forms: tiles for few rows may be half as large.
pub(super) fn tokens_for(m: usize, is_wide: bool) -> impl Iterator<Item = usize> {
    let most = TOKENS.into_iter().find(|&tokens| tokens >= m).unwrap_or(256);
    let least = match most {
        ..=ONE_TILE if !is_wide => most,
        ..LEAST_APART => most / 2,
        _ => LEAST_APART.max(most.min(128) / 2),
    };
    TOKENS.into_iter().filter(move |tokens| (least..=most).contains(tokens))
}

/// Each in so many blocks.
fn split(bases: &[Config], splits: &[usize]) -> Vec<Config> {
    bases.iter().flat_map(|&base| splits.iter().map(move |&split| Config { split, ..base })).collect()
}

/// What may be chosen for few rows. Blocks of clusters are small, and two share a multiprocessor, so that what one waits for is another's
/// time; the next launch may start at once: between the kernels of a model forms that hold it back are slower, though beside themselves they
/// are faster. Of wide tiles there are clusters of two; in larger ones narrow tiles, in clusters half as large, are as many blocks. Blocks that
/// share all tiles have a multiprocessor each: where a norm still runs two of them would come to lie on one, and end twice as late.
pub(super) fn of_few_tokens(tokens: usize, is_wide: bool) -> Vec<Config> {
    let (by_wgmma, by_mma) = (Config { tokens, ..PAIRED }, Config { tokens, wgmma: false, ..PAIRED });
    let narrow = |config| Config { strips: 1, ..config };
    if is_wide {
        let mut all = split(&[narrow(by_mma), by_mma], &SPLITS[1..]);
        all.extend(split(&[Config { tokens, ..EARLY }], &SPLITS));
        return all;
    }
    let mut all = split(&[narrow(by_wgmma)], &SPLITS_OF_FEW);
    match tokens {
        ..=8 => all.extend([Config { split: 2, ..by_mma }, Config { tokens, ..TWO_SETS }]),
        9..=16 => all.extend([Config { split: 2, ..by_wgmma }, Config { tokens, ..TWO_SETS }]),
        _ => all.extend(split(&[narrow(Config { tokens, ..TWO_BY_TWO })], &SPLITS)),
    }
    all.push(Config { tokens, ..TWO_BY_TWO });
    all
}

/// What may be chosen with tiles of so many tokens, more than a few, and scales that apply to weights or not.
pub(super) fn of_tokens(tokens: usize, early: bool) -> Vec<Config> {
    let narrow = Config { tokens, early, strips: 1, ..TWO_BY_TWO };
    let mut all = match tokens {
        ..=128 => {
            let mut all = split(&[narrow], &SPLITS);
            all.push(Config { tokens, early, ..TWO_BY_TWO });
            all
        }
        129..=192 => split(&[Config { boxes: 1, ..narrow }], &SPLITS[..2]),
        _ => vec![Config { boxes: 1, ..narrow }],
    };
    let uncut = |config: &&Config| config.split == 1;
    let whole: Vec<Config> = all.iter().filter(uncut).map(|&config| Config { whole: true, ..config }).collect();
    all.extend(whole);
    all
}

/// What may be chosen for a form: of that what compiles.
fn choices(form: &Form) -> impl Iterator<Item = Config> {
    let rounding = rounds(form, usize::MAX, &Caps { rounded_weights: true, ..Caps::H200 });
    let all = TOKENS.into_iter().flat_map(move |tokens| of_any_tokens(tokens, form.atom, rounding));
    all.map(|config| config.fitted(form)).filter(|&config| compiles(config, form))
}

/// What may be chosen with tiles of so many tokens, where scales may also apply to weights.
pub(super) fn of_any_tokens(tokens: usize, atom: Atom, rounding: bool) -> Vec<Config> {
    match tokens {
        ..LEAST_APART => of_few_tokens(tokens, atom.is_wide()),
        // Weights are not rounded for few rows, whose tiles have few tokens.
        _ if rounding && tokens >= 64 => [false, true].into_iter().flat_map(|early| of_tokens(tokens, early)).collect(),
        _ => of_tokens(tokens, false),
    }
}

/// The configurations for a form, and what their units take, found once.
fn known(form: &Form) -> Arc<[Timed]> {
    type Known = HashMap<(Atom, [Float; 2]), Arc<[Timed]>>;
    static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let find = || choices(form).map(|config| Timed::new(config, form)).collect();
    Arc::clone(known.entry((form.atom, [form.x, form.out])).or_insert_with(find))
}

/// Units of four strips a multiprocessor from which on a product of few rows is a stream of weights.
const STREAM: f64 = 40.0;

/// Codes in such a unit, of each bit, and the clocks in which a multiprocessor converts and multiplies it for up to 8 rows, with
/// what it waits between. Where memory brings it sooner, blocks keep in step and end together, so that the next kernel may start before.
/// The number lies between the 870 clocks of memory on an H200, where they do, and the 1280 on an H100, where they do not
/// (`docs/decisions/0014-choices-and-devices.md`).
const UNIT_BYTES: usize = 4 * STRIP * STEP / 8;
const UNIT_CLOCKS: f64 = 1100.0;

/// What up to 8 rows of a large weight take: how blocks keep up with memory decides, not what each does.
fn streaming(atom: Atom, [m, n, k]: [usize; 3], caps: &Caps) -> Option<Config> {
    let units = n.div_ceil(4 * STRIP) as f64 * k.div_ceil(STEP) as f64 / f64::from(caps.multiprocessors.max(1));
    if units <= STREAM || m > 8 || atom.field_bits() == 8 || atom.is_wide() {
        return None;
    }
    let waits = caps.clocks_of_memory(UNIT_BYTES * atom.bits as usize) > UNIT_CLOCKS;
    Some(if waits { TWO_SETS } else { EARLY })
}

/// The configurations for a shape on a device, of many after each other, with the microseconds that each is expected to take; none where a rule says
/// which one it is.
pub fn expected(form: &Form, [m, n, k]: [usize; 3], caps: &Caps) -> Vec<(Config, f64)> {
    let atom = form.atom;
    if streaming(atom, [m, n, k], caps).is_some() {
        return Vec::new();
    }
    let (steps, [first, seen]) = (k.div_ceil(STEP).max(1), alike(m, n, caps));
    let rounds = rounds(form, m, caps);
    // Scales in f32 and offsets have fewer forms for few rows. Of many rows plans tell multiples of 32 apart.
    let is_wide = atom.is_wide();
    let of = tokens_for(seen, is_wide).chain((is_wide && seen <= LEAST_APART).then_some(LEAST_APART));
    let tokens: Vec<usize> = of.filter(|tokens| m <= EACH || tokens.is_multiple_of(ROWS)).collect();
    let known = known(form);
    let fitting = known.iter().filter(|Timed { config, .. }| {
        tokens.contains(&config.tokens) && config.split <= steps && (rounds || !config.early)
    });
    let microseconds = |timed: &Timed| {
        let of = |m: usize| timed.microseconds([m, n.max(1), k.max(1)], caps);
        if first == seen { of(seen) } else { (of(first) + of(seen)) / 2.0 }
    };
    fitting.map(|timed| (timed.config, microseconds(timed))).collect()
}

/// The configuration for a shape on a device.
pub fn config(form: &Form, shape @ [m, n, k]: [usize; 3], caps: &Caps) -> Config {
    if let Some(config) = streaming(form.atom, [m, n, k], caps) {
        return config.fitted(form);
    }
    let least = expected(form, shape, caps).into_iter().min_by(|(_, one), (_, other)| one.total_cmp(other));
    least.map_or_else(|| batch_invariant(form, shape, caps), |(config, _)| config)
}

/// The configuration for a shape with which a row of y has the same bits whatever the number of rows is: exact, with tiles that are
/// never cut, and shared by a cluster or not as n and k alone tell.
pub fn batch_invariant(form: &Form, [m, n, k]: [usize; 3], caps: &Caps) -> Config {
    let atom = form.atom;
    let tokens = match m {
        ..=LEAST_APART if atom.is_wide() => LEAST_APART,
        ..=8 => 8,
        9..=16 => 16,
        17..=32 => 32,
        33..=64 => 64,
        _ => most_tokens_of_groups(atom),
    };
    let config = Config { tokens, strips: 1, trigger: 0, ..TWO_BY_TWO };
    let tiles = n.div_ceil(STRIP).max(1).div_ceil(config.tile_strips());
    let split = if tiles * 2 <= caps.multiprocessors.max(1) as usize { 2 } else { 1 };
    Config { split: split.min(k.div_ceil(STEP).max(1)), ..config }.fitted(form)
}

/// Every configuration that is compiled for a form, whatever shape and device are, and whether weights may be rounded or not.
pub fn every(form: &Form) -> Vec<Config> {
    let mut every: Vec<Config> = choices(form).filter(|config| !config.whole).collect();
    // What streams take besides.
    let early = EARLY.fitted(form);
    if compiles(early, form) && !every.contains(&early) {
        every.push(early);
    }
    for m in [8, 16, 32, LEAST_APART, 64, 128] {
        for n in [1, usize::MAX >> 1] {
            let config = batch_invariant(form, [m, n, usize::MAX >> 1], &Caps::H200);
            if !every.contains(&config) {
                every.push(config);
            }
        }
    }
    every
}

/// Whether scales of several weights apply to these, of many rows: where they are of the type of x.
fn rounds_grouped(form: &Form) -> bool {
    form.x == form.atom.scale && rounds(form, usize::MAX, &Caps::H200)
}

/// Rows of tiles where there are several weights.
pub(super) fn grouped_tiles(form: &Form) -> Vec<usize> {
    let exact = form.atom.group != 0 && !rounds_grouped(form);
    let most = if exact { most_tokens_of_groups(form.atom) } else { 256 };
    [8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256].into_iter().filter(|&tokens| tokens <= most).collect()
}

/// Tokens of a tile of several weights from which on scales of small groups apply to weights, where that may be: by then there are hundreds of
/// rows, and groups of 32 take sums of 64 rows a fifth longer, of 128 a third.
const EARLY_OF_SMALL_GROUPS: usize = 64;

/// The configuration for such a tile: tiles are cut among all blocks, two on each multiprocessor for few rows.
pub(super) fn grouped(form: &Form, tokens: usize) -> Config {
    let atom = form.atom;
    // What codes that become bytes are made of takes registers too.
    let widened = atom.field_bits() == 8 && atom.bits < 8;
    let rounds = rounds_grouped(form);
    let small_groups = !matches!(atom.group, 0 | 128);
    let config = match tokens {
        9..=16 if widened => Config { tokens, wgmma: false, strips: 1, ..PAIRED },
        ..=16 => Config { tokens, wgmma: false, ..PAIRED },
        17..=24 => Config { tokens, strips: 1, ..PAIRED },
        25..=32 => Config { tokens, trigger: 0, ..TWO_BY_TWO },
        _ if rounds && small_groups && (EARLY_OF_SMALL_GROUPS..=128).contains(&tokens) => {
            Config { tokens, strips: 1, early: true, ..TWO_BY_TWO }
        }
        33..=64 => Config { tokens, strips: if atom.field_bits() == 8 { 1 } else { 2 }, ..TWO_BY_TWO },
        65..=128 => Config { tokens, strips: 1, ..TWO_BY_TWO },
        _ => Config { tokens, strips: 1, early: rounds, boxes: 1, ..TWO_BY_TWO },
    };
    // The sums of small groups take registers.
    let config = match !config.wgmma || config.early || !small_groups {
        true => config,
        false => Config { strips: 1, tokens: config.tokens.min(most_tokens_of_groups(atom)), ..config },
    };
    config.fitted(form)
}
