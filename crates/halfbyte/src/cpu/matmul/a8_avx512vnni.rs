//! Tiles of int8 dot products with AVX-512 VNNI.
//!
//! ```text
//! for each span:
//!     acc[r][p] = −zero·ΣqA                                 16 outputs of a panel in a register, one a row of x
//!     for each 64-byte tile of codes of each panel p:
//!         for each field i:  codes = (tile >> i·bits) & mask          unsigned bytes, 4 columns of 16 outputs
//!             for each row r:  acc[r][p] += dot4(codes, x[r][4 columns])          vpdpbusd
//!     y[r][p] += scaleB · (scaleA·acc + offsetA·ΣqB') [+ offsetB·ΣxA]
//! ```
//!
//! The zero point goes in as the accumulator's first value, exact in int32. A tile of 12 rows × 2 panels holds 24 sums
//! in registers and does 48 dot products for each 128 bytes of codes, which cost two loads and six shifts and masks.

#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]

use super::quantized_act::{Tile, TileFn, Tiles};

pub(super) static TILES: Tiles = Tiles { heights: &[1, 2, 4, 6, 8, 10, 12], panels, tile };

fn panels(height: usize) -> usize {
    if height <= 6 { 4 } else { 2 }
}

#[cfg(not(target_arch = "x86_64"))]
fn tile(_: u32, _: usize, _: usize) -> TileFn {
    unreachable!("selected on x86-64 only")
}

#[cfg(target_arch = "x86_64")]
fn tile(field_bits: u32, height: usize, panels: usize) -> TileFn {
    fn of_field<const FIELD: u32>(height: usize, panels: usize) -> TileFn {
        match (height, panels) {
            (1, 4) => x86::tile::<FIELD, 1, 4>,
            (2, 4) => x86::tile::<FIELD, 2, 4>,
            (4, 4) => x86::tile::<FIELD, 4, 4>,
            (6, 4) => x86::tile::<FIELD, 6, 4>,
            (8, 2) => x86::tile::<FIELD, 8, 2>,
            (10, 2) => x86::tile::<FIELD, 10, 2>,
            (12, 2) => x86::tile::<FIELD, 12, 2>,
            (1, 1) => x86::tile::<FIELD, 1, 1>,
            (2, 1) => x86::tile::<FIELD, 2, 1>,
            (4, 1) => x86::tile::<FIELD, 4, 1>,
            (6, 1) => x86::tile::<FIELD, 6, 1>,
            (8, 1) => x86::tile::<FIELD, 8, 1>,
            (10, 1) => x86::tile::<FIELD, 10, 1>,
            (12, 1) => x86::tile::<FIELD, 12, 1>,
            _ => unreachable!("no tile of {height} rows × {panels} panels"),
        }
    }
    match field_bits {
        2 => of_field::<2>(height, panels),
        4 => of_field::<4>(height, panels),
        8 => of_field::<8>(height, panels),
        _ => unreachable!("no fields of {field_bits} bits"),
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Tile;
    use crate::cpu::x86::avx512::{load_per_group, load_u16};
    use crate::layout::cpu_n16::{PANEL, PackedZeros};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c")]
    pub(super) fn tile<const FIELD: u32, const R: usize, const P: usize>(t: &Tile<'_>, c: &mut [f32]) {
        let w = t.w;
        let panel_bytes = w.tiles() * 64;
        let fields = (8 / FIELD) as usize;
        let spans = &w.spans()[t.spans.clone()];
        let Some(last) = spans.last() else { return };
        let end = last.tile + last.tiles;
        // Every pointer below stays within these.
        let codes = &w.codes()[t.panel * panel_bytes..(t.panel + P) * panel_bytes];
        assert!(t.x.len() >= end * fields * R * 4 && c.len() >= R * P * PANEL && end * 64 <= panel_bytes);
        assert!(t.rows.len() >= t.spans.end * R);
        let mask = _mm512_set1_epi8(((1u32 << FIELD) - 1) as u8 as i8);
        let middle = w.format().middle() as i32;

        for (s, span) in t.spans.clone().zip(spans) {
            let rows = &t.rows[s * R..(s + 1) * R];
            let mut group_at = [0; P];
            for p in 0..P {
                group_at[p] = ((t.panel + p) * w.groups() + span.group) * PANEL;
            }
            let mut acc = [[_mm512_setzero_si512(); P]; R];
            match w.zeros() {
                PackedZeros::Symmetric => {
                    for r in 0..R {
                        acc[r] = [_mm512_set1_epi32(middle * rows[r].minus_sum); P];
                    }
                }
                PackedZeros::Integer(zeros) => {
                    for p in 0..P {
                        let zero = load_u16(&zeros[group_at[p]..]);
                        for r in 0..R {
                            acc[r][p] = _mm512_mullo_epi32(zero, _mm512_set1_epi32(rows[r].minus_sum));
                        }
                    }
                }
                PackedZeros::Float(_) => {}
            }

            let mut x = t.x[span.tile * fields * R * 4..].as_ptr();
            let mut tile = codes[span.tile * 64..].as_ptr();
            for _ in 0..span.tiles {
                let mut raw = [_mm512_setzero_si512(); P];
                for p in 0..P {
                    // SAFETY: 64 bytes of panel p's tile, within `codes` as asserted.
                    raw[p] = unsafe { _mm512_load_si512(tile.add(p * panel_bytes).cast()) };
                    // Far enough ahead to hide memory behind other tiles; a prefetch never faults.
                    if R <= 8 {
                        _mm_prefetch::<_MM_HINT_T0>(tile.wrapping_add(p * panel_bytes + 1024).cast());
                    }
                }
                for i in 0..fields {
                    let mut codes = raw;
                    for p in 0..P {
                        if i > 0 {
                            codes[p] = _mm512_srl_epi32(raw[p], _mm_cvtsi32_si128((i as u32 * FIELD) as i32));
                        }
                        if FIELD < 8 {
                            codes[p] = _mm512_and_si512(codes[p], mask);
                        }
                    }
                    for r in 0..R {
                        // SAFETY: 4 codes of row r, within `t.x` as asserted; any alignment.
                        let quad = unsafe { x.add((i * R + r) * 4).cast::<i32>().read_unaligned() };
                        let quad = _mm512_set1_epi32(quad);
                        for p in 0..P {
                            acc[r][p] = _mm512_dpbusd_epi32(acc[r][p], codes[p], quad);
                        }
                    }
                }
                x = x.wrapping_add(fields * R * 4);
                tile = tile.wrapping_add(64);
            }

            for p in 0..P {
                let scale = load_per_group(w.scales(), group_at[p]);
                let sums = if t.x_offsets {
                    let at = ((t.panel + p) * w.spans().len() + s) * PANEL;
                    // SAFETY: `PANEL` sums from `at`, checked by the slice.
                    unsafe { _mm512_loadu_ps(w.code_sums()[at..at + PANEL].as_ptr()) }
                } else {
                    _mm512_setzero_ps()
                };
                let offset = match w.zeros() {
                    PackedZeros::Float(offsets) => Some(load_per_group(offsets, group_at[p])),
                    _ => None,
                };
                for r in 0..R {
                    let row = rows[r];
                    let mut sum = _mm512_mul_ps(_mm512_cvtepi32_ps(acc[r][p]), _mm512_set1_ps(row.scale));
                    if t.x_offsets {
                        sum = _mm512_fmadd_ps(sums, _mm512_set1_ps(row.offset), sum);
                    }
                    let out = &mut c[(r * P + p) * PANEL..][..PANEL];
                    // SAFETY: `out` is `PANEL` floats.
                    let mut y = _mm512_fmadd_ps(sum, scale, unsafe { _mm512_loadu_ps(out.as_ptr()) });
                    if let Some(offset) = offset {
                        y = _mm512_fmadd_ps(offset, _mm512_set1_ps(row.total), y);
                    }
                    // SAFETY: as above.
                    unsafe { _mm512_storeu_ps(out.as_mut_ptr(), y) };
                }
            }
        }
    }
}
