//! Loads of 16 numbers with AVX-512.

use super::in_order::in_order;
use crate::layout::cpu_n16::{
    CpuN16, PANEL, PackedZeros, PanelMultiples, PerGroup, Sixteen, TABLE, planes, quads, tile_bytes,
};
use half::{bf16, f16};
use std::arch::x86_64::*;
use std::ops::Range;

/// 16 halfs, widened.
#[inline]
#[target_feature(enable = "avx512f,f16c")]
pub(in crate::cpu) fn load_f16(v: &[f16]) -> __m512 {
    let v = &v[..16];
    // SAFETY: 32 bytes, checked above.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(v.as_ptr().cast()) })
}

/// 16 brain floats, widened.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu) fn load_bf16(v: &[bf16]) -> __m512 {
    let v = &v[..16];
    // SAFETY: 32 bytes, checked above.
    let words = _mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(v.as_ptr().cast()) });
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
}

/// 16 singles.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu) fn load_f32(v: &[f32]) -> __m512 {
    let v = &v[..16];
    // SAFETY: 64 bytes, checked above.
    unsafe { _mm512_loadu_ps(v.as_ptr()) }
}

/// 16 words, widened to int32.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu) fn load_u16(v: &[u16]) -> __m512i {
    let v = &v[..16];
    // SAFETY: 32 bytes, checked above.
    _mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(v.as_ptr().cast()) })
}

/// The table of a form with numbers, four times; of others nothing.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu) fn table(w: &CpuN16) -> __m512i {
    let values = w.table().unwrap_or_default();
    // SAFETY: 16 bytes.
    _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(values.as_ptr().cast()) })
}

/// Codes of some places of a panel, whole tiles, as bytes, from each of which `less` is taken: `[place / 4][16][4]`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(in crate::cpu) fn codes_as_bytes<const FORM: u32>(
    w: &CpuN16,
    panel: usize,
    places: Range<usize>,
    less: __m512i,
    out: &mut [u8],
) {
    let (bits, planes) = const { (planes(FORM).0, planes(FORM).1 > 0) };
    let (quads, tile_bytes) = const { (quads(FORM), tile_bytes(FORM)) };
    let tiles = places.start / (quads * 4)..places.end / (quads * 4);
    let codes = &w.codes()[(panel * w.tiles() + tiles.start) * tile_bytes..][..tiles.len() * tile_bytes];
    assert_eq!(out.len(), tiles.len() * quads * 64);
    let table = table(w);
    let mask = _mm512_set1_epi8(((1u32 << bits) - 1) as u8 as i8);
    let (codes, out) = (codes.as_ptr(), out.as_mut_ptr());
    for tile in 0..tiles.len() {
        // SAFETY: the first 64 bytes of each tile.
        let raw = unsafe { _mm512_loadu_si512(codes.add(tile * tile_bytes).cast()) };
        for at in (0..tile_bytes).step_by(64) {
            // The same tile of the panel that is converted next but one; a prefetch never faults.
            let ahead = (tile + 2 * w.tiles()) * tile_bytes + at;
            _mm_prefetch::<_MM_HINT_T0>(codes.wrapping_add(ahead).cast());
        }
        for i in 0..quads {
            let codes = if planes {
                // SAFETY: a whole tile.
                unsafe { quad::<FORM>(codes.add(tile * tile_bytes), i) }
            } else {
                _mm512_srl_epi32(raw, _mm_cvtsi32_si128((i as u32 * bits) as i32))
            };
            let codes = if bits < 8 && !planes { _mm512_and_si512(codes, mask) } else { codes };
            let codes = if FORM >= TABLE { _mm512_shuffle_epi8(table, codes) } else { codes };
            // SAFETY: 64 bytes of `out`, which has as many for each quad of each tile, as asserted.
            unsafe { _mm512_storeu_si512(out.add((tile * quads + i) * 64).cast(), _mm512_sub_epi8(codes, less)) };
        }
    }
}

in_order!("avx512f,f16c", __m512);

/// Numbers of up to [`RUN`] groups of a panel as floats, of which the first is row `first` of `[panel][group]`, a multiple of `RUN` in its panel.
#[target_feature(enable = "avx512f,f16c")]
pub(in crate::cpu) fn as_floats<'a>(
    numbers: &PerGroup,
    first: usize,
    len: usize,
    room: &'a mut Made<1>,
) -> &'a [[f32; PANEL]] {
    if let PerGroup::Multiples(multiples) = numbers {
        make(multiples, [first], len, room);
    } else {
        for (i, out) in room[0][..len].iter_mut().enumerate() {
            store_f32(load_per_group(numbers, (first + i) * PANEL), out.write([0.0; PANEL]));
        }
    }
    let made = &room[0][..len];
    // SAFETY: the numbers of `len` groups were written.
    unsafe { std::slice::from_raw_parts(made.as_ptr().cast(), len) }
}

/// Halves times 16 bytes with sign.
#[inline]
#[target_feature(enable = "avx512f")]
fn product(halves: __m512, bytes: __m128i) -> __m512 {
    _mm512_mul_ps(halves, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)))
}

/// Writes 16 singles.
#[inline]
#[target_feature(enable = "avx512f")]
fn store_f32(v: __m512, out: &mut [f32; PANEL]) {
    // SAFETY: 64 bytes.
    unsafe { _mm512_storeu_ps(out.as_mut_ptr(), v) };
}

/// The two planes of a tile of 3 bits: bits 0 and 1 of codes, and bit 2 of those of either tile of 4 bits that it is made of, in bits 2
/// and 6 of each byte or 3 and 7.
///
/// # Safety
/// `tile` is that of a tile of codes of 3 bits.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn planes_of_3(tile: *const u8) -> [__m512i; 2] {
    // SAFETY: the 64 bytes that hold bits 0 and 1, and the 32 that hold bit 2.
    let (low, high) = unsafe { (_mm512_loadu_si512(tile.cast()), _mm256_loadu_si256(tile.add(64).cast())) };
    let high = _mm512_cvtepu16_epi32(high);
    [low, _mm512_or_si512(high, _mm512_slli_epi32::<18>(high))]
}

/// A tile of 3 bits as two tiles of 4 bits, of whose codes the highest bits mean nothing.
///
/// # Safety
/// `tile` is that of a tile of codes of 3 bits.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu) unsafe fn nibbles(tile: *const u8) -> [__m512i; 2] {
    // SAFETY: promised to this function.
    let [low, high] = unsafe { planes_of_3(tile) };
    // mask ? high : low
    let joined = |low, high| _mm512_ternarylogic_epi32::<0xca>(_mm512_set1_epi32(0x4444_4444), high, low);
    [joined(low, high), joined(_mm512_srli_epi32::<2>(low), _mm512_srli_epi32::<1>(high))]
}

/// Quad `i` of a tile whose codes lie in two planes: four columns of 16 outputs, a byte each.
///
/// # Safety
/// `tile` is that of a tile of codes of BITS bits.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu) unsafe fn quad<const BITS: u32>(tile: *const u8, i: usize) -> __m512i {
    if BITS == 3 {
        // SAFETY: promised to this function.
        let [low, high] = unsafe { planes_of_3(tile) };
        let low = _mm512_srl_epi32(low, _mm_cvtsi32_si128((i % 2 * 4 + i / 2 * 2) as i32));
        let high = _mm512_srl_epi32(high, _mm_cvtsi32_si128((i % 2 * 4 + i / 2) as i32));
        let low = _mm512_and_si512(low, _mm512_set1_epi32(0x0303_0303));
        // low | high & mask
        return _mm512_ternarylogic_epi32::<0xf8>(low, high, _mm512_set1_epi32(0x0404_0404));
    }
    let (high, above) = const { (planes(BITS).1 as usize, tile_bytes(BITS) - 64) };
    // SAFETY: a tile of nibbles, and the plane above them.
    let (mut low, above) =
        unsafe { (_mm512_loadu_si512(tile.add(i / 2 * 64).cast()), _mm512_loadu_si512(tile.add(above).cast())) };
    if i % 2 == 1 {
        low = _mm512_srli_epi32::<4>(low);
    }
    // Bit `i · high` of each byte becomes bit 4.
    let shifted = match 4usize.checked_sub(i * high) {
        Some(up) => _mm512_sll_epi32(above, _mm_cvtsi32_si128(up as i32)),
        None => _mm512_srl_epi32(above, _mm_cvtsi32_si128((i * high - 4) as i32)),
    };
    let mask = _mm512_set1_epi32(const { (((1 << planes(BITS).1) - 1) << 4) * 0x0101_0101 });
    let low = _mm512_and_si512(low, _mm512_set1_epi32(0x0f0f_0f0f));
    // low | shifted & mask
    _mm512_ternarylogic_epi32::<0xf8>(low, shifted, mask)
}
