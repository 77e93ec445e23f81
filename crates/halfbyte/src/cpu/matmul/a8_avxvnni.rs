//! Tiles of int8 dot products with AVX-VNNI.
//!
//! As [`a8_avx512vnni`](super::a8_avx512vnni), 16 outputs in two registers of 8: 6 rows of one panel are 12 sums in registers, and 12 dot
//! products for 6 loads and what unpacks two registers of codes.

use super::quantized_act::{TileFn, Tiles};
use crate::layout::cpu_n16::TABLE;

pub(super) const TILES: Tiles = Tiles { heights: &[1, 2, 4, 5], panels, tile, as_bytes: |_| None };

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
            (5, 1) => x86::tile::<FORM, 5, 1>,
            _ => unreachable!("no tile of {height} rows × {panels} panels"),
        }
    }
    // Whatever a table's values are.
    for_form!(form, of_form(height, panels), TABLE.. => TABLE)
}

mod x86 {
    use crate::cpu::isa::AHEAD;
    use crate::cpu::matmul::a8_ymm::tiles;
    use crate::cpu::matmul::blocking::SPANS_TOGETHER;
    use crate::cpu::matmul::quantized_act::{RowSpan, Tile};
    use crate::cpu::x86::avx2::{Numbers, load_f32, load_u16, quad, room, store_f32, table};
    use crate::layout::cpu_n16::{PANEL, PackedZeros, WIDE_TABLE, quads, tile_bytes};
    use std::arch::x86_64::*;

    tiles!("avx2,fma,f16c,avxvnni", wide_tables_are_signed: false);

    /// Sums of one row and one panel, to which quads are added in turn: each would wait for the one before it.
    const SUMS: usize = 4;

    /// Adds the dot products of a span's codes, of panels that lie so many bytes apart and are prefetched so many ahead (0: not; a prefetch
    /// never faults), or of what a table has for them, with x `[place / 4][R][4]` to `acc`.
    #[inline]
    #[target_feature(enable = "avx2,avxvnni")]
    fn dot<const FORM: u32, const R: usize, const P: usize>(
        (codes, panel_bytes, ahead): (&[u8], usize, usize),
        table: __m256i,
        x: &[i8],
        acc: &mut Sums<R, P>,
    ) {
        let (tile_bytes, quads) = const { (tile_bytes(FORM), quads(FORM)) };
        let in_turn = const { if R * P == 1 { SUMS } else { 1 } };
        let tiles = x.len() / (quads * R * 4);
        assert!(tiles * tile_bytes + (P - 1) * panel_bytes <= codes.len());
        let (mut tile, mut x) = (codes.as_ptr(), x.as_ptr());
        let mut sums: [Sums<R, P>; SUMS] = [[[[_mm256_setzero_si256(); 2]; P]; R]; SUMS];
        sums[0] = *acc;
        for _ in 0..tiles {
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
                    let four = _mm256_set1_epi32(unsafe { x.add((i * R + r) * 4).cast::<i32>().read_unaligned() });
                    for p in 0..P {
                        for h in 0..2 {
                            let sum = &mut sums[i % in_turn][r][p][h];
                            *sum = _mm256_dpbusd_avx_epi32(*sum, codes[p][h], four);
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
        *acc = sums[0];
        for others in &sums[1..in_turn] {
            for r in 0..R {
                for p in 0..P {
                    for h in 0..2 {
                        acc[r][p][h] = _mm256_add_epi32(acc[r][p][h], others[r][p][h]);
                    }
                }
            }
        }
    }
}
