//! One row of exact activations by products of int16 with AVX2.
//!
//! As [`exact_row`](super::exact_row) says. An integer of x is two words with sign; codes of four columns are words of the even and of
//! the odd ones, and `vpmaddwd` adds pairs of products in int32.
//!
//! ```text
//! X = low + high·2^16, low from −2^15 to 2^15 − 1
//! acc[low], acc[high] = −zero·Σ low, −zero·Σ high
//! for each 4 columns:  acc[low]  += dot2(even codes, low) + dot2(odd codes, low)                             vpmaddwd
//!                      acc[high] += dot2(even codes, high) + dot2(odd codes, high)
//! ```

use super::exact_row::{Functions, PanelsFn};
use super::exact_row_ymm;
use crate::cpu::isa::AHEAD;
use crate::layout::cpu_n16::TABLE;

pub(super) const FUNCTIONS: Functions =
    Functions { add_block: exact_row_ymm::add_block::<2>, panels, ahead: |_, _| AHEAD };

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

    /// Words of an integer.
    const DIGITS: usize = 2;

    panels!("avx2,fma,f16c");

    /// Adds the products of some tiles of a panel with digits of as many places to sums of either digit, of eight outputs each, and
    /// prefetches codes `ahead` bytes ahead; a prefetch never faults.
    ///
    /// # Safety
    /// The panel's codes and x are as long.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn add_tiles<const FORM: u32>(
        (mut tile, ahead): (*const u8, usize),
        mut x: *const i32,
        tiles: usize,
        table: __m256i,
        sums: &mut [[__m256i; 2]; 2],
    ) {
        let (tile_bytes, quads) = const { (tile_bytes(FORM), quads(FORM)) };
        // Sums of a block are below 2³⁰: 64 products of at most 255 · 2¹⁵.
        let mut acc = *sums;
        for _ in 0..tiles {
            if ahead > 0 {
                for at in (0..tile_bytes).step_by(64) {
                    _mm_prefetch::<_MM_HINT_T0>(tile.wrapping_add(at + ahead).cast());
                }
            }
            for i in 0..quads {
                let mut of_x = [[_mm256_setzero_si256(); 2]; 2];
                for digit in 0..2 {
                    for odd in 0..2 {
                        // SAFETY: digits of four places.
                        of_x[digit][odd] = _mm256_set1_epi32(unsafe { x.add(i * 4 + digit * 2 + odd).read() });
                    }
                }
                for h in 0..2 {
                    // SAFETY: a tile of the panel.
                    let codes = unsafe { quad::<FORM>(tile, i, h, table) };
                    let (even, odd) = (_mm256_and_si256(codes, _mm256_set1_epi16(0xff)), _mm256_srli_epi16::<8>(codes));
                    for digit in 0..2 {
                        let evens = _mm256_madd_epi16(even, of_x[digit][0]);
                        let odds = _mm256_madd_epi16(odd, of_x[digit][1]);
                        acc[digit][h] = _mm256_add_epi32(acc[digit][h], _mm256_add_epi32(evens, odds));
                    }
                }
            }
            x = x.wrapping_add(quads * 4);
            tile = tile.wrapping_add(tile_bytes);
        }
        *sums = acc;
    }
}
