//! Matrices of 32, 16 and 8 bits an element, transposed.
//!
//! ```text
//! 32 bits:  for each 16 rows, for each 16 columns (8 with AVX2):
//!               load vectors along the rows; bring pairs, fours, and lanes of each two vectors side by side; store
//! others:   for each 16 rows, for each 16 columns (8 for 16 bits):
//!               log₂ times:  vectors 2i and 2i + 1 = vectors i and i + half, their elements in turn
//! ```
//!
//! What is left over at the edges is masked away, or goes element by element.

use super::isa::Isa;

/// `to[c · to_stride + r] = from[r · from_stride + c]` for rows and columns of `shape`.
pub(crate) fn transpose(isa: Isa, [rows, columns]: [usize; 2], from: (&[u32], usize), to: (&mut [u32], usize)) {
    let ((from, from_stride), (to, to_stride)) = (from, to);
    if rows == 0 || columns == 0 {
        return;
    }
    assert!((rows - 1) * from_stride + columns <= from.len() && (columns - 1) * to_stride + rows <= to.len());
    #[cfg(target_arch = "x86_64")]
    {
        let matrices = x86::Matrices { from: from.as_ptr(), from_stride, to: to.as_mut_ptr(), to_stride };
        match isa {
            // SAFETY: a device with this family is made only where the processor has it; both slices hold the matrices, as
            // asserted.
            Isa::Avx512 | Isa::Amx => return unsafe { x86::avx512(&matrices, [rows, columns]) },
            // SAFETY: as above.
            Isa::Avx2 | Isa::AvxVnni => return unsafe { x86::avx2(&matrices, [rows, columns]) },
            Isa::Plain => {}
        }
    }
    let _ = isa;
    for c in 0..columns {
        for r in 0..rows {
            to[c * to_stride + r] = from[r * from_stride + c];
        }
    }
}

/// The same for 16 bits an element.
pub(crate) fn transpose_16(shape: [usize; 2], from: (&[u16], usize), to: (&mut [u16], usize)) {
    #[cfg(target_arch = "x86_64")]
    squares(shape, from, to, x86::square_16);
    #[cfg(not(target_arch = "x86_64"))]
    squares(shape, from, to, plain::<u16, 8>);
}

/// The same for 8 bits an element.
pub(crate) fn transpose_8(shape: [usize; 2], from: (&[u8], usize), to: (&mut [u8], usize)) {
    #[cfg(target_arch = "x86_64")]
    squares(shape, from, to, x86::square_8);
    #[cfg(not(target_arch = "x86_64"))]
    squares(shape, from, to, plain::<u8, 16>);
}

#[cfg_attr(target_arch = "x86_64", expect(dead_code, reason = "vectors do this"))]
fn plain<T: Copy, const SIDE: usize>(square: [[T; SIDE]; SIDE]) -> [[T; SIDE]; SIDE] {
    std::array::from_fn(|i| std::array::from_fn(|j| square[j][i]))
}

/// Square by square, and the edges element by element.
fn squares<T: Copy + Default, const SIDE: usize>(
    [rows, columns]: [usize; 2],
    (from, from_stride): (&[T], usize),
    (to, to_stride): (&mut [T], usize),
    transposed: impl Fn([[T; SIDE]; SIDE]) -> [[T; SIDE]; SIDE],
) {
    for r in (0..rows).step_by(SIDE) {
        for c in (0..columns).step_by(SIDE) {
            let (high, wide) = ((rows - r).min(SIDE), (columns - c).min(SIDE));
            if high < SIDE || wide < SIDE {
                for (i, j) in (r..r + high).flat_map(|i| (c..c + wide).map(move |j| (i, j))) {
                    to[j * to_stride + i] = from[i * from_stride + j];
                }
                continue;
            }
            let mut square = [[T::default(); SIDE]; SIDE];
            for (i, line) in square.iter_mut().enumerate() {
                line.copy_from_slice(&from[(r + i) * from_stride + c..][..SIDE]);
            }
            for (j, line) in transposed(square).iter().enumerate() {
                to[(c + j) * to_stride + r..][..SIDE].copy_from_slice(line);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    macro_rules! square {
        ($(#[$meta:meta])* $name:ident, $element:ty, $side:literal, $low:ident, $high:ident) => {
            $(#[$meta])*
            #[inline]
            pub(super) fn $name(square: [[$element; $side]; $side]) -> [[$element; $side]; $side] {
                // SAFETY: both are as many vectors of 16 bytes, of which any pattern is valid.
                let mut v: [__m128i; $side] = unsafe { std::mem::transmute(square) };
                for _ in 0..$side.trailing_zeros() {
                    let mut next = v;
                    for i in 0..$side / 2 {
                        // SAFETY: SSE2, which every such processor has.
                        unsafe {
                            next[2 * i] = $low(v[i], v[i + $side / 2]);
                            next[2 * i + 1] = $high(v[i], v[i + $side / 2]);
                        }
                    }
                    v = next;
                }
                // SAFETY: as above.
                unsafe { std::mem::transmute(v) }
            }
        };
    }

    square!(
        /// 8 × 8.
        square_16, u16, 8usize, _mm_unpacklo_epi16, _mm_unpackhi_epi16
    );
    square!(
        /// 16 × 16.
        square_8, u8, 16usize, _mm_unpacklo_epi8, _mm_unpackhi_epi8
    );

    /// Where the matrices lie.
    pub(super) struct Matrices {
        pub from: *const u32,
        pub from_stride: usize,
        pub to: *mut u32,
        pub to_stride: usize,
    }

    /// # Safety
    /// The processor has AVX-512; both matrices may be accessed.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn avx512(m: &Matrices, [rows, columns]: [usize; 2]) {
        let lanes = |count: usize| ((1u32 << count.min(16)) - 1) as __mmask16;
        for r in (0..rows).step_by(16) {
            for c in (0..columns).step_by(16) {
                let (high, wide) = ((rows - r).min(16), (columns - c).min(16));
                // Loops over all 16 with a test inside: the compiler unrolls them, and the vectors stay in registers.
                let mut v = [_mm512_setzero_si512(); 16];
                for i in 0..16 {
                    if i < high {
                        let row = m.from.wrapping_add((r + i) * m.from_stride + c);
                        // SAFETY: `wide` elements of a row within the matrix (promised by the caller).
                        v[i] = unsafe { _mm512_maskz_loadu_epi32(lanes(wide), row.cast()) };
                    }
                }
                let v = square16(v);
                // Rows of the result that follow each other without a gap: what a whole vector writes too much of the
                // next ones is written over. Masked stores take several times as long.
                let gapless = m.to_stride == rows && rows < 16;
                let whole = if gapless { wide.min((columns - c).saturating_sub(15usize.div_ceil(rows))) } else { 0 };
                for i in 0..16 {
                    let row = m.to.wrapping_add((c + i) * m.to_stride + r);
                    // SAFETY: `high` elements of a row within the matrix (promised by the caller), and at least 16 elements
                    // of the matrix where it is gapless.
                    unsafe {
                        if i < whole {
                            _mm512_storeu_epi32(row.cast(), v[i]);
                        } else if i < wide {
                            _mm512_mask_storeu_epi32(row.cast(), lanes(high), v[i]);
                        }
                    }
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn square16(v: [__m512i; 16]) -> [__m512i; 16] {
        let (mut pairs, mut fours, mut out) = (v, v, v);
        for i in 0..8 {
            pairs[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
            pairs[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
        }
        // Lane l of fours[4i + j]: column 4l + j of rows 4i to 4i + 3.
        for i in 0..4 {
            for j in 0..2 {
                let (low, high) = (pairs[4 * i + j], pairs[4 * i + 2 + j]);
                fours[4 * i + 2 * j] = _mm512_unpacklo_epi64(low, high);
                fours[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(low, high);
            }
        }
        for j in 0..4 {
            let even = [0, 8].map(|i| _mm512_shuffle_i32x4::<0x88>(fours[i + j], fours[i + 4 + j]));
            let odd = [0, 8].map(|i| _mm512_shuffle_i32x4::<0xdd>(fours[i + j], fours[i + 4 + j]));
            out[j] = _mm512_shuffle_i32x4::<0x88>(even[0], even[1]);
            out[4 + j] = _mm512_shuffle_i32x4::<0x88>(odd[0], odd[1]);
            out[8 + j] = _mm512_shuffle_i32x4::<0xdd>(even[0], even[1]);
            out[12 + j] = _mm512_shuffle_i32x4::<0xdd>(odd[0], odd[1]);
        }
        out
    }

    /// # Safety
    /// The processor has AVX2; both matrices may be accessed.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn avx2(m: &Matrices, [rows, columns]: [usize; 2]) {
        for r in (0..rows).step_by(8) {
            let high = (rows - r).min(8);
            let whole = columns - columns % 8;
            for c in (0..whole).step_by(8) {
                let mut v = [_mm256_setzero_si256(); 8];
                for i in 0..high {
                    // SAFETY: 8 elements of a row within the matrix (promised by the caller).
                    v[i] = unsafe { _mm256_loadu_si256(m.from.add((r + i) * m.from_stride + c).cast()) };
                }
                let v = square8(v);
                for i in 0..8 {
                    let to = m.to.wrapping_add((c + i) * m.to_stride + r);
                    // SAFETY: `high` elements of a row within the matrix (promised by the caller).
                    unsafe {
                        if high == 8 {
                            _mm256_storeu_si256(to.cast(), v[i]);
                        } else {
                            let line: [u32; 8] = std::mem::transmute(v[i]);
                            std::ptr::copy_nonoverlapping(line.as_ptr(), to, high);
                        }
                    }
                }
            }
            for c in whole..columns {
                for i in r..r + high {
                    // SAFETY: an element of each matrix (promised by the caller).
                    unsafe { *m.to.add(c * m.to_stride + i) = *m.from.add(i * m.from_stride + c) };
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn square8(v: [__m256i; 8]) -> [__m256i; 8] {
        let (mut pairs, mut fours, mut out) = (v, v, v);
        for i in 0..4 {
            pairs[2 * i] = _mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
            pairs[2 * i + 1] = _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
        }
        for i in 0..2 {
            for j in 0..2 {
                let (low, high) = (pairs[4 * i + j], pairs[4 * i + 2 + j]);
                fours[4 * i + 2 * j] = _mm256_unpacklo_epi64(low, high);
                fours[4 * i + 2 * j + 1] = _mm256_unpackhi_epi64(low, high);
            }
        }
        for j in 0..4 {
            out[j] = _mm256_permute2x128_si256::<0x20>(fours[j], fours[4 + j]);
            out[4 + j] = _mm256_permute2x128_si256::<0x31>(fours[j], fours[4 + j]);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::Caps;

    const SHAPES: [[usize; 2]; 9] = [[1, 1], [12, 16], [16, 48], [7, 33], [8, 8], [17, 5], [33, 40], [0, 4], [3, 0]];

    #[test]
    fn every_element_comes_to_its_place_and_nothing_else_is_written() {
        let found = Caps::detect();
        for isa in Isa::ALL.into_iter().filter(|&isa| found.limited_to(isa).is_ok()) {
            for [rows, columns] in SHAPES {
                let (from_stride, to_stride) = (columns + 3, rows + 2);
                let from: Vec<u32> = (0..(rows * from_stride) as u32).collect();
                let mut to = vec![u32::MAX; columns * to_stride];
                transpose(isa, [rows, columns], (&from, from_stride), (&mut to, to_stride));
                for (i, &got) in to.iter().enumerate() {
                    let (c, r) = (i / to_stride, i % to_stride);
                    let want = if r < rows { (r * from_stride + c) as u32 } else { u32::MAX };
                    assert_eq!(got, want, "{isa:?} {rows} × {columns}: row {r}, column {c}");
                }
            }
        }
    }

    #[test]
    fn narrow_elements_too() {
        for [rows, columns] in SHAPES {
            let (from_stride, to_stride) = (columns + 3, rows + 2);
            let from: Vec<u16> = (0..(rows * from_stride) as u16).collect();
            let mut to = vec![u16::MAX; columns * to_stride];
            transpose_16([rows, columns], (&from, from_stride), (&mut to, to_stride));
            let bytes: Vec<u8> = from.iter().map(|&v| (v % 251) as u8).collect();
            let mut to_bytes = vec![u8::MAX; columns * to_stride];
            transpose_8([rows, columns], (&bytes, from_stride), (&mut to_bytes, to_stride));
            for (i, (&wide, &narrow)) in to.iter().zip(&to_bytes).enumerate() {
                let (c, r) = (i / to_stride, i % to_stride);
                let want = (r < rows).then_some((r * from_stride + c) as u16);
                assert_eq!(wide, want.unwrap_or(u16::MAX), "{rows} × {columns}: row {r}, column {c}");
                assert_eq!(
                    narrow,
                    want.map_or(u8::MAX, |v| (v % 251) as u8),
                    "{rows} × {columns}: row {r}, column {c}"
                );
            }
        }
    }
}
