//! Tiles of int8 dot products with AVX2.
//!
//! As [`a8_avx512vnni`](super::a8_avx512vnni), 16 outputs in two registers of 8. Without a dot product of four bytes the
//! sums are made in two steps.
//!
//! * Codes of 2 to 4 bits: `vpmaddubsw` multiplies bytes and adds pairs in int16. A pair is at most 2·15·128 = 3840,
//!   so that eight of them fit in int16; they are added there, and widened to int32 (`vpmaddwd` by ones) a few tiles at
//!   a time. Nothing saturates.
//! * Codes of 8 bits: a pair is up to 2·255·128, too large for int16. Bytes are split into words of the even and of the
//!   odd columns, and `vpmaddwd` multiplies words and adds pairs in int32.
//!
//! Numbers in a table become its values by `vpshufb`: of 5 bits, as codes of 4 are multiplied; of 8 bits, less the middle, so that
//! `vpmaddubsw` has |x|, and the value with the sign of x, of which one pair fits int16.

use super::quantized_act::{TileFn, Tiles};
use crate::layout::cpu_n16::{NARROW_TABLE, WIDE_TABLE};

pub(super) const TILES: Tiles = Tiles { heights: &[1, 2, 4], panels, tile, as_bytes: |_| None };

fn panels(height: usize) -> usize {
    match height {
        1 => 4,
        2 => 2,
        _ => 1,
    }
}

fn tile(form: u32, height: usize, panels: usize) -> TileFn {
    fn of_form<const FORM: u32>(height: usize, panels: usize) -> TileFn {
        match (height, panels) {
            (1, 4) => x86::row::<FORM, 4>,
            (2, 2) => x86::tile::<FORM, 2, 2>,
            (1, 1) => x86::row::<FORM, 1>,
            (2, 1) => x86::tile::<FORM, 2, 1>,
            (4, 1) => x86::tile::<FORM, 4, 1>,
            _ => unreachable!("no tile of {height} rows × {panels} panels"),
        }
    }
    for_form!(form, of_form(height, panels), NARROW_TABLE => NARROW_TABLE, WIDE_TABLE => WIDE_TABLE)
}

mod x86 {
    use crate::cpu::isa::AHEAD;
    use crate::cpu::matmul::a8_ymm::tiles;
    use crate::cpu::matmul::blocking::SPANS_TOGETHER;
    use crate::cpu::matmul::quantized_act::{RowSpan, Tile};
    use crate::cpu::x86::avx2::{Numbers, load_f32, load_u16, quad, room, store_f32, table};
    use crate::layout::cpu_n16::{NARROW_TABLE, PANEL, PackedZeros, WIDE_TABLE, quads, tile_bytes, value_bits};
    use std::arch::x86_64::*;

    tiles!("avx2,fma,f16c", wide_tables_are_signed: true);

    /// Adds the dot products of a span's codes, of panels that lie so many bytes apart and are prefetched so many ahead (0: not; a prefetch
    /// never faults), or of what a table has for them, with x `[place / 4][R][4]` to `acc`.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn dot<const FORM: u32, const R: usize, const P: usize>(
        codes: (&[u8], usize, usize),
        table: __m256i,
        x: &[i8],
        acc: &mut Sums<R, P>,
    ) {
        match FORM {
            8 => dot_bytes::<R, P>(codes, x, acc),
            WIDE_TABLE => dot_signed::<R, P>(codes, table, x, acc),
            5 | 6 => dot_planes::<FORM, R, P>(codes, x, acc),
            _ => dot_nibbles::<FORM, R, P>(codes, table, x, acc),
        }
    }

    /// Codes of 2 to 4 bits, and a table's values of 5.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn dot_nibbles<const FORM: u32, const R: usize, const P: usize>(
        (codes, panel_bytes, ahead): (&[u8], usize, usize),
        table: __m256i,
        x: &[i8],
        acc: &mut Sums<R, P>,
    ) {
        // Sums of this many tiles stay within int16. (Others go to `dot_planes` and `dot_bytes`.)
        let chunk = const {
            let pair = 2 * ((1 << value_bits(FORM)) - 1) * 128;
            let tiles = match FORM {
                2 => 8,
                NARROW_TABLE => 2,
                _ => 4,
            };
            assert!(value_bits(FORM) > 5 || FORM == 5 || tiles * quads(FORM) as i32 * pair <= i16::MAX as i32);
            tiles as usize
        };
        let (tile_bytes, quads) = const { (tile_bytes(FORM), quads(FORM)) };
        let tiles = x.len() / (quads * R * 4);
        assert!(tiles * tile_bytes + (P - 1) * panel_bytes <= codes.len());
        let ones = _mm256_set1_epi16(1);
        let (mut tile, mut x) = (codes.as_ptr(), x.as_ptr());
        let mut left = tiles;
        while left > 0 {
            let count = left.min(chunk);
            left -= count;
            let mut sums: Sums<R, P> = [[[_mm256_setzero_si256(); 2]; P]; R];
            for _ in 0..count {
                for i in 0..quads {
                    let mut codes = [[_mm256_setzero_si256(); 2]; P];
                    for p in 0..P {
                        for h in 0..2 {
                            // SAFETY: panel p's tile, within `codes` as asserted.
                            codes[p][h] = unsafe { quad::<FORM>(tile.add(p * panel_bytes), i, h, table) };
                        }
                    }
                    for r in 0..R {
                        // SAFETY: 4 codes of row r, within x, from whose length `tiles` comes; any alignment.
                        let quad = _mm256_set1_epi32(unsafe { x.add((i * R + r) * 4).cast::<i32>().read_unaligned() });
                        for p in 0..P {
                            for h in 0..2 {
                                let pairs = _mm256_maddubs_epi16(codes[p][h], quad);
                                sums[r][p][h] = _mm256_add_epi16(sums[r][p][h], pairs);
                            }
                        }
                    }
                }
                if ahead > 0 {
                    for at in (0..tile_bytes).step_by(64) {
                        for p in 0..P {
                            _mm_prefetch::<_MM_HINT_T0>(tile.wrapping_add(p * panel_bytes + at + ahead).cast());
                        }
                    }
                }
                x = x.wrapping_add(quads * R * 4);
                tile = tile.wrapping_add(tile_bytes);
            }
            for r in 0..R {
                for p in 0..P {
                    for h in 0..2 {
                        let wide = _mm256_madd_epi16(sums[r][p][h], ones);
                        acc[r][p][h] = _mm256_add_epi32(acc[r][p][h], wide);
                    }
                }
            }
        }
    }

    /// Codes in two planes.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn dot_planes<const FORM: u32, const R: usize, const P: usize>(
        (codes, panel_bytes, ahead): (&[u8], usize, usize),
        x: &[i8],
        acc: &mut Sums<R, P>,
    ) {
        // Sums of half of a tile's quads stay within int16.
        let chunk = const {
            let pair = 2 * ((1 << value_bits(FORM)) - 1) * 128;
            assert!(FORM <= 4 || FORM >= 8 || quads(FORM) as i32 / 2 * pair <= i16::MAX as i32);
            quads(FORM) / 2
        };
        let (tile_bytes, quads) = const { (tile_bytes(FORM), quads(FORM)) };
        let tiles = x.len() / (quads * R * 4);
        assert!(tiles * tile_bytes + (P - 1) * panel_bytes <= codes.len());
        let ones = _mm256_set1_epi16(1);
        let (mut wide, none) = (*acc, _mm256_setzero_si256());
        let (mut tile, mut x) = (codes.as_ptr(), x.as_ptr());
        for _ in 0..tiles {
            if FORM == 6 {
                // Halves of the outputs one after the other: few sums stay in registers. With 5 bits both at once are faster.
                for (first, h) in [(0, 0), (0, 1), (chunk, 0), (chunk, 1)] {
                    let mut sums = [[_mm256_setzero_si256(); P]; R];
                    for i in first..first + chunk {
                        let mut codes = [_mm256_setzero_si256(); P];
                        for p in 0..P {
                            // SAFETY: panel p's tile, within `codes` as asserted.
                            codes[p] = unsafe { quad::<FORM>(tile.add(p * panel_bytes), i, h, none) };
                        }
                        for r in 0..R {
                            // SAFETY: 4 codes of row r, within x, from whose length `tiles` comes; any alignment.
                            let four =
                                _mm256_set1_epi32(unsafe { x.add((i * R + r) * 4).cast::<i32>().read_unaligned() });
                            for p in 0..P {
                                sums[r][p] = _mm256_add_epi16(sums[r][p], _mm256_maddubs_epi16(codes[p], four));
                            }
                        }
                    }
                    for r in 0..R {
                        for p in 0..P {
                            wide[r][p][h] = _mm256_add_epi32(wide[r][p][h], _mm256_madd_epi16(sums[r][p], ones));
                        }
                    }
                }
            } else {
                for first in [0, chunk] {
                    let mut sums: Sums<R, P> = [[[_mm256_setzero_si256(); 2]; P]; R];
                    for i in first..first + chunk {
                        let mut codes = [[_mm256_setzero_si256(); 2]; P];
                        for p in 0..P {
                            for h in 0..2 {
                                // SAFETY: panel p's tile, within `codes` as asserted.
                                codes[p][h] = unsafe { quad::<FORM>(tile.add(p * panel_bytes), i, h, none) };
                            }
                        }
                        for r in 0..R {
                            // SAFETY: 4 codes of row r, within x, from whose length `tiles` comes; any alignment.
                            let four =
                                _mm256_set1_epi32(unsafe { x.add((i * R + r) * 4).cast::<i32>().read_unaligned() });
                            for p in 0..P {
                                for h in 0..2 {
                                    let pairs = _mm256_maddubs_epi16(codes[p][h], four);
                                    sums[r][p][h] = _mm256_add_epi16(sums[r][p][h], pairs);
                                }
                            }
                        }
                    }
                    for r in 0..R {
                        for p in 0..P {
                            for h in 0..2 {
                                wide[r][p][h] = _mm256_add_epi32(wide[r][p][h], _mm256_madd_epi16(sums[r][p][h], ones));
                            }
                        }
                    }
                }
            }
            if ahead > 0 {
                for at in (0..tile_bytes).step_by(64) {
                    for p in 0..P {
                        _mm_prefetch::<_MM_HINT_T0>(tile.wrapping_add(p * panel_bytes + at + ahead).cast());
                    }
                }
            }
            x = x.wrapping_add(quads * R * 4);
            tile = tile.wrapping_add(tile_bytes);
        }
        *acc = wide;
    }

    /// A table's values of 8 bits, less 128: products of |x| with such as have taken its sign fit int16 in pairs,
    /// as -128 is none of them.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn dot_signed<const R: usize, const P: usize>(
        (codes, panel_bytes, ahead): (&[u8], usize, usize),
        table: __m256i,
        x: &[i8],
        acc: &mut Sums<R, P>,
    ) {
        const QUADS: usize = quads(WIDE_TABLE);
        let tiles = x.len() / (QUADS * R * 4);
        assert!(tiles * 64 + (P - 1) * panel_bytes <= codes.len());
        let (ones, table) = (_mm256_set1_epi16(1), _mm256_xor_si256(table, _mm256_set1_epi8(-128)));
        let mut sums = *acc;
        let (mut tile, mut x) = (codes.as_ptr(), x.as_ptr());
        for _ in 0..tiles {
            for i in 0..QUADS {
                let mut values = [[_mm256_setzero_si256(); 2]; P];
                for p in 0..P {
                    for h in 0..2 {
                        // SAFETY: panel p's tile, within `codes` as asserted.
                        values[p][h] = unsafe { quad::<WIDE_TABLE>(tile.add(p * panel_bytes), i, h, table) };
                    }
                }
                for r in 0..R {
                    // SAFETY: 4 codes of row r, within x, from whose length `tiles` comes; any alignment.
                    let four = _mm256_set1_epi32(unsafe { x.add((i * R + r) * 4).cast::<i32>().read_unaligned() });
                    let magnitude = _mm256_abs_epi8(four);
                    for p in 0..P {
                        for h in 0..2 {
                            let pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(values[p][h], four));
                            sums[r][p][h] = _mm256_add_epi32(sums[r][p][h], _mm256_madd_epi16(pairs, ones));
                        }
                    }
                }
            }
            if ahead > 0 {
                for p in 0..P {
                    _mm_prefetch::<_MM_HINT_T0>(tile.wrapping_add(p * panel_bytes + ahead).cast());
                }
            }
            x = x.wrapping_add(QUADS * R * 4);
            tile = tile.wrapping_add(64);
        }
        *acc = sums;
    }

    /// Codes of 8 bits.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn dot_bytes<const R: usize, const P: usize>(
        (codes, panel_bytes, ahead): (&[u8], usize, usize),
        x: &[i8],
        acc: &mut Sums<R, P>,
    ) {
        let tiles = x.len() / (R * 4);
        assert!(tiles * 64 + (P - 1) * panel_bytes <= codes.len());
        let low = _mm256_set1_epi16(0xff);
        let mut sums = *acc;
        let (mut tile, mut x) = (codes.as_ptr(), x.as_ptr());
        for _ in 0..tiles {
            let mut even = [[_mm256_setzero_si256(); 2]; P];
            let mut odd = even;
            for p in 0..P {
                for h in 0..2 {
                    // SAFETY: half of the 64 bytes of panel p's tile, within `codes` as asserted.
                    let raw = unsafe { _mm256_loadu_si256(tile.add(p * panel_bytes + h * 32).cast()) };
                    even[p][h] = _mm256_and_si256(raw, low);
                    odd[p][h] = _mm256_srli_epi16::<8>(raw);
                }
                if ahead > 0 {
                    _mm_prefetch::<_MM_HINT_T0>(tile.wrapping_add(p * panel_bytes + ahead).cast());
                }
            }
            for r in 0..R {
                // SAFETY: 4 codes of row r, within x, from whose length `tiles` comes; any alignment.
                let quad = _mm256_set1_epi32(unsafe { x.add(r * 4).cast::<i32>().read_unaligned() });
                let x_even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(quad));
                let x_odd = _mm256_srai_epi16::<8>(quad);
                for p in 0..P {
                    for h in 0..2 {
                        let evens = _mm256_madd_epi16(even[p][h], x_even);
                        let odds = _mm256_madd_epi16(odd[p][h], x_odd);
                        sums[r][p][h] = _mm256_add_epi32(sums[r][p][h], _mm256_add_epi32(evens, odds));
                    }
                }
            }
            x = x.wrapping_add(R * 4);
            tile = tile.wrapping_add(64);
        }
        *acc = sums;
    }
}
