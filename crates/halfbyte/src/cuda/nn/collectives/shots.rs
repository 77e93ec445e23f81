//! How ranks divide values among them that they add up or give each other in shots: in the first each rank gets its part from all others, in
//! the second all get each rank's part.

use std::ops::Range;

/// Ranks at most, as in `ranks.cuh`.
pub(super) const MOST_RANKS: usize = 16;
/// Values of a norm that adds up by itself, and columns of a rank that are gathered, at most.
pub(super) const IN_NORM: usize = 1 << 20;
/// Values that every rank sends to all others, at most: of more each rank adds up a part, in two shots.
pub(super) const ONE_SHOT: usize = 1 << 18;

/// Bits of shots, as in the source.
pub(super) const FIRST: u32 = 1;
pub(super) const SECOND: u32 = 2;

/// Words of a rank that an inbox of so many ranks has room for in a slot (64 MiB of up to 8 ranks): those of a launch; more go in several.
pub(super) const fn capacity(size: usize) -> usize {
    let even = (1 << 23) / size;
    if even < IN_NORM { IN_NORM } else { even / 8 * 8 }
}

/// How many launches a part of so many elements takes in shots, and elements of each.
pub(super) fn launches(part: usize, size: usize, shots: u32) -> (usize, usize) {
    let count = part.div_ceil(capacity(size) / shots.count_ones() as usize).max(1);
    (count, part.div_ceil(count).next_multiple_of(4))
}

/// A rank's rows, where ranks divide them.
pub(super) fn rows_of(rank: usize, size: usize, [m, length]: [usize; 2]) -> Option<Range<usize>> {
    let each = m.div_ceil(size);
    let many = m.checked_mul(length)? > IN_NORM && size > 1 && length.is_multiple_of(8);
    // The last rank has rows, and something in each launch.
    let (count, most) = launches(each.checked_mul(length)?, size, FIRST);
    let last = m.checked_sub((size - 1) * each)?;
    let all_have = last * length > (count - 1) * most;
    (many && all_have).then(|| rank * each..((rank + 1) * each).min(m))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows that ranks divide are all rows, and every rank has some of its part in each launch: of sums, and of rows in halves.
    #[test]
    fn every_rank_has_something_in_each_launch() {
        let mut divided = 0;
        for size in 2..=MOST_RANKS {
            for m in [1, 2, 15, 16, 17, 100, 511, 512, 513, 1000, 2047, 2048] {
                for length in [8, 1000, 2048, 4096, 5120, 14_336, 16_384, 28_672, 100_000] {
                    let rows: Vec<_> = (0..size).filter_map(|rank| rows_of(rank, size, [m, length])).collect();
                    if rows.is_empty() {
                        continue;
                    }
                    divided += 1;
                    assert!(rows.iter().flat_map(Clone::clone).eq(0..m), "{size} ranks, {m} rows");
                    for words in [length, length / 2] {
                        let (count, most) = launches(rows[0].len() * words, size, FIRST);
                        assert!(most <= capacity(size) && count * most >= rows[0].len() * words);
                        assert!(
                            rows.iter().all(|rows| rows.len() * words > (count - 1) * most),
                            "{size}, {m}, {length}"
                        );
                    }
                }
            }
        }
        assert!(divided > 200, "{divided}");
    }

    /// Parts of values that are summed whole differ by few elements.
    #[test]
    fn parts_of_values_end_in_the_last_launch() {
        for size in 1..=MOST_RANKS {
            for elements in
                [ONE_SHOT + 1, 8_388_600, capacity(size) / 2 * size - 3, ONE_SHOT + 63, IN_NORM, 7_340_032, 29_360_131]
            {
                let part = elements.div_ceil(4 * size) * 4;
                let (count, most) = launches(part, size, FIRST | SECOND);
                assert!(2 * most <= capacity(size), "{size} ranks, {elements}");
                let last = elements - (size - 1) * part;
                assert!(last > (count - 1) * most && count * most >= part, "{size} ranks, {elements}");
            }
        }
    }
}
