//! One row of exact activations by int8 dot products with AVX-VNNI.
//!
//! As [`a16_avx512vnni`](super::a16_avx512vnni), 16 outputs in two registers of 8.

use super::exact_row::{Functions, PanelsFn};
use super::exact_row_ymm;
use crate::cpu::isa::AHEAD;
use crate::layout::cpu_n16::TABLE;

pub(super) const FUNCTIONS: Functions =
    Functions { add_block: exact_row_ymm::add_block::<4>, panels, ahead: |_, _| AHEAD };

fn panels(form: u32) -> PanelsFn {
    fn of_form<const FORM: u32>() -> PanelsFn {
        x86::panels::<FORM>
    }
    // Whatever a table's values are.
    for_form!(form, of_form(), TABLE.. => TABLE)
}

mod x86 {
    use crate::cpu::matmul::blocking::SPANS_TOGETHER;
    use crate::cpu::matmul::exact_row::FixedPoint;
    use crate::cpu::matmul::exact_row_ymm::{centre, panels};
    use crate::cpu::x86::avx2::{Numbers, load_u16, quad, room, store_f32, table};
    use crate::layout::cpu_n16::{CpuN16, PANEL, PackedZeros, quads, tile_bytes};
    use std::arch::x86_64::*;

    /// Bytes of an integer.
    const DIGITS: usize = 4;

    panels!("avx2,fma,f16c,avxvnni");

    /// Adds the products of some tiles of a panel with digits of as many places to sums of either digit, of eight outputs each, and
    /// prefetches codes `ahead` bytes ahead; a prefetch never faults.
    ///
    /// # Safety
    /// The panel's codes and x are as long.
    #[inline]
    #[target_feature(enable = "avx2,avxvnni")]
    unsafe fn add_tiles<const FORM: u32>(
        (mut tile, ahead): (*const u8, usize),
        mut x: *const i32,
        tiles: usize,
        table: __m256i,
        sums: &mut [[__m256i; 2]; DIGITS],
    ) {
        let (tile_bytes, quads) = const { (tile_bytes(FORM), quads(FORM)) };
        let mut acc = *sums;
        for _ in 0..tiles {
            if ahead > 0 {
                for at in (0..tile_bytes).step_by(64) {
                    _mm_prefetch::<_MM_HINT_T0>(tile.wrapping_add(at + ahead).cast());
                }
            }
            for i in 0..quads {
                let mut codes = [_mm256_setzero_si256(); 2];
                for h in 0..2 {
                    // SAFETY: a tile of the panel.
                    codes[h] = unsafe { quad::<FORM>(tile, i, h, table) };
                }
                for digit in 0..DIGITS {
                    // SAFETY: a digit of four places.
                    let of_x = _mm256_set1_epi32(unsafe { x.add(i * 4 + digit).read() });
                    for h in 0..2 {
                        acc[digit][h] = _mm256_dpbusd_avx_epi32(acc[digit][h], codes[h], of_x);
                    }
                }
            }
            x = x.wrapping_add(quads * 4);
            tile = tile.wrapping_add(tile_bytes);
        }
        *sums = acc;
    }
}
