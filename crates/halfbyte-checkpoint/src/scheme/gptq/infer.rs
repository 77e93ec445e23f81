//! Bits and group size of a module that no config describes, from the shapes of its tensors alone.
//!
//! `qzeros` has a code for each output, which gives the bits; these give k for the rows of `qweight`; and k with the rows of
//! `scales` the group size. The last group may be short, so that two sizes can fit: 192 inputs in two groups are twice 96, or
//! 128 and 64.

/// Sizes that programs write where k is no multiple of them. Others are believed only where they divide k.
const USUAL: [usize; 8] = [16, 32, 64, 128, 256, 512, 1024, 2048];

/// Bits of a code, of which `n` lie in this many columns of 32 bits; None: no number of bits that is read.
pub(super) fn bits(columns: usize, n: usize) -> Option<u32> {
    match columns.checked_mul(32) {
        Some(total) if n > 0 && total % n == 0 && matches!(total / n, 2 | 3 | 4 | 8) => Some((total / n) as u32),
        _ => None,
    }
}

/// Codes of so many bits in rows of 32 bits; None: they hold no whole number of codes.
pub(super) fn inputs(rows: usize, bits: u32) -> Option<usize> {
    let total = rows.checked_mul(32)?;
    total.is_multiple_of(bits as usize).then_some(total / bits as usize)
}

/// Every group size that makes this many groups of k columns, smallest first; of one group, which is one scale a channel, k
/// itself.
pub(super) fn group_sizes(k: usize, groups: usize) -> Vec<usize> {
    if groups == 0 || k == 0 {
        return Vec::new();
    }
    if groups == 1 {
        return vec![k];
    }
    let mut sizes: Vec<usize> = USUAL.into_iter().filter(|&size| k.div_ceil(size) == groups).collect();
    if k.is_multiple_of(groups) {
        sizes.push(k / groups);
    }
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;
    use halfbyte::random::splitmix64;

    #[test]
    fn shapes_give_back_the_settings_that_made_them_or_all_that_fit() {
        let mut state = 20261122u64;
        let mut below = |bound: usize| splitmix64(&mut state) as usize % bound;
        let (mut sure, mut unsure) = (0, 0);
        for _ in 0..20_000 {
            let b = [2, 3, 4, 8][below(4)];
            // What packers take: multiples of 32 along both.
            let (n, k) = (32 * (1 + below(400)), 32 * (1 + below(600)));
            let size = [Some(32), Some(64), Some(128), None][below(4)];
            let groups = size.map_or(1, |size| k.div_ceil(size));
            // The shapes that a packer makes of these, and nothing else, go into the inference.
            let (rows, columns) = (k * b / 32, n * b / 32);
            let told = bits(columns, n).unwrap();
            assert_eq!(told, b as u32);
            assert_eq!(inputs(rows, told), Some(k));
            let sizes = group_sizes(k, groups);
            let is = if groups == 1 { k } else { size.unwrap() };
            assert!(sizes.contains(&is), "{k} inputs, {groups} groups: {sizes:?}");
            assert!(sizes.iter().all(|&size| k.div_ceil(size) == groups));
            if sizes.len() == 1 {
                sure += 1
            } else {
                unsure += 1
            }
            // Where the size divides k and is usual, another reading needs another usual size or a last group cut short.
            assert!(sizes.len() == 1 || sizes.iter().any(|&size| k % size != 0) || sizes.len() > 2);
        }
        assert!(sure > 15_000 && unsure > 20, "{sure} {unsure}");
    }

    #[test]
    fn real_layers_have_one_reading() {
        for k in [2048, 2560, 4096, 5120, 6656, 8192, 11008, 13824, 14336, 17920, 22016, 28672] {
            for size in [32, 64, 128] {
                assert_eq!(group_sizes(k, k.div_ceil(size)), [size], "{k} in groups of {size}");
            }
            assert_eq!(group_sizes(k, 1), [k]);
        }
    }

    #[test]
    fn shapes_that_no_setting_makes_have_no_reading() {
        assert_eq!(group_sizes(192, 2), [96, 128]);
        assert_eq!(group_sizes(96, 2), [48, 64]);
        assert_eq!(group_sizes(160, 3), [64]);
        assert!(group_sizes(128, 7).is_empty() && group_sizes(128, 0).is_empty() && group_sizes(0, 2).is_empty());
        assert!(group_sizes(128, 200).is_empty());
        assert_eq!((bits(5, 32), bits(4, 0), bits(usize::MAX, 32)), (None, None, None));
        assert_eq!((inputs(4, 3), inputs(3, 3), inputs(usize::MAX, 4)), (None, Some(32), None));
    }
}
