//! Loads of 16 numbers with AVX-512.

use crate::layout::cpu_n16::{PANEL, PerGroup, Sixteen, planes, tile_bytes};
use half::{bf16, f16};
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

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

/// 16 factors, widened to int32.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_factors(v: Sixteen<'_>) -> __m512i {
    let factors = &v.factors[..16];
    // SAFETY: 16 bytes, checked above.
    let bytes = unsafe { _mm_loadu_si128(factors.as_ptr().cast()) };
    let bytes = _mm_srl_epi16(bytes, _mm_cvtsi32_si128(v.shift as i32));
    _mm512_cvtepi8_epi32(_mm_and_si128(bytes, _mm_set1_epi8(v.mask as i8)))
}

/// The numbers of a panel's group, from element `at` on.
#[inline]
#[target_feature(enable = "avx512f,f16c")]
pub(in crate::cpu) fn load_per_group(v: &PerGroup, at: usize) -> __m512 {
    match v {
        PerGroup::F16(v) => load_f16(&v[at..]),
        PerGroup::BF16(v) => load_bf16(&v[at..]),
        PerGroup::F32(v) => load_f32(&v[at..]),
        PerGroup::Multiples(multiples) => {
            let sixteen = multiples.sixteen(at);
            _mm512_mul_ps(load_f16(sixteen.halves), _mm512_cvtepi32_ps(load_factors(sixteen)))
        }
    }
}

/// Numbers of `P` panels' groups, read one group after the other: a run of groups is made at once.
pub(in crate::cpu) struct InOrder<'a, const P: usize> {
    numbers: &'a PerGroup,
    groups: usize,
    /// Where the groups of each panel begin.
    rows: [usize; P],
    /// The first group of the run that is made; none if it is the last that there can be.
    first: usize,
    made: Made<P>,
}

/// A run of each of `P` panels.
type Made<const P: usize> = [[MaybeUninit<[f32; PANEL]>; RUN]; P];

/// Groups of a run.
const RUN: usize = 16;

impl<'a, const P: usize> InOrder<'a, P> {
    /// From panel `panel` on, of `groups` groups each.
    pub fn new(numbers: &'a PerGroup, panel: usize, groups: usize) -> Self {
        let rows = std::array::from_fn(|p| (panel + p) * groups);
        Self { numbers, groups, rows, first: usize::MAX, made: [[MaybeUninit::uninit(); RUN]; P] }
    }

    /// Those of a group.
    #[inline]
    #[target_feature(enable = "avx512f,f16c")]
    pub fn load(&mut self, group: usize) -> [__m512; P] {
        assert!(group < self.groups);
        let within = group % RUN;
        if self.first != group - within {
            self.first = group - within;
            let len = RUN.min(self.groups - self.first);
            make(self.numbers, self.rows.map(|row| row + group - within), len, &mut self.made);
        }
        let mut out = [_mm512_setzero_ps(); P];
        for p in 0..P {
            // SAFETY: `make` has written as many groups of the run as there are.
            out[p] = load_f32(unsafe { self.made[p][within].assume_init_ref() });
        }
        out
    }
}

/// Makes `len` groups from some rows of `[panel][group]` on.
#[inline(never)]
#[target_feature(enable = "avx512f,f16c")]
fn make<const P: usize>(numbers: &PerGroup, rows: [usize; P], len: usize, made: &mut Made<P>) {
    for (made, row) in made.iter_mut().zip(rows) {
        let made = &mut made[..len];
        macro_rules! each {
            ($v:ident, $load:ident) => {{
                for (made, v) in made.iter_mut().zip($v[row * PANEL..].as_chunks::<PANEL>().0) {
                    store_f32($load(v), made.write([0.0; PANEL]));
                }
                continue;
            }};
        }
        let multiples = match numbers {
            PerGroup::F16(v) => each!(v, load_f16),
            PerGroup::BF16(v) => each!(v, load_bf16),
            PerGroup::F32(v) => each!(v, load_f32),
            PerGroup::Multiples(multiples) => multiples,
        };
        let run = multiples.run();
        assert!(len.is_multiple_of(run));
        for (made, row) in made.chunks_exact_mut(run).zip((row..).step_by(run)) {
            let (halves, factors, nibbles) = multiples.run_at(row);
            for (line, ahead) in
                [(halves.as_ptr().cast::<i8>(), 64), (factors.as_ptr().cast(), 256), (factors.as_ptr().cast(), 320)]
            {
                // Groups that come soon; a prefetch never faults.
                _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(ahead));
            }
            let halves = load_f16(halves);
            // SAFETY: 16 bytes.
            let load = |bytes: &[u8; PANEL]| unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
            let factors = factors.as_chunks::<PANEL>().0;
            if nibbles {
                let mask = _mm_set1_epi8(15);
                for (two, bytes) in made.as_chunks_mut::<2>().0.iter_mut().zip(factors) {
                    let bytes = load(bytes);
                    let [low, high] = [_mm_and_si128(bytes, mask), _mm_and_si128(_mm_srli_epi16::<4>(bytes), mask)];
                    store_f32(product(halves, low), two[0].write([0.0; PANEL]));
                    store_f32(product(halves, high), two[1].write([0.0; PANEL]));
                }
            } else {
                for (out, bytes) in made.iter_mut().zip(factors) {
                    store_f32(product(halves, load(bytes)), out.write([0.0; PANEL]));
                }
            }
        }
    }
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

/// Quad `i` of a tile whose codes lie in two planes: four columns of 16 outputs, a byte each.
///
/// # Safety
/// `tile` is that of a tile of codes of BITS bits.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu) unsafe fn quad<const BITS: u32>(tile: *const u8, i: usize) -> __m512i {
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
