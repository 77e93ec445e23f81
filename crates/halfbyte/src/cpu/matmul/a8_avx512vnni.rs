//! Tiles of int8 dot products with AVX-512 VNNI.
//!
//! ```text
//! for each span:
//!     acc[r][p] = −zero·ΣqA                                 16 outputs of a panel in a register, one a row of x
//!     for each 64-byte tile of codes of each panel p:
//!         for each field i:  codes = (tile >> i·bits) & mask          unsigned bytes, 4 columns of 16 outputs; or, of numbers,
//!                                                                    what a table has for them: vpshufb
//!             for each row r:  acc[r][p] += dot4(codes, x[r][4 columns])          vpdpbusd
//!     y[r][p] += scaleB·scaleA·acc [+ scaleB·offsetA·ΣqB'] [+ offsetB·ΣxA]
//! ```
//!
//! Codes in planes (3, 5 and 6 bits) that several panels of rows meet become bytes before, once, in the driver's buffer.
//!
//! One row is multiplied by one panel after the other, so that a thread reads one stream: memory brings it faster than four.
//!
//! The zero point goes in as the accumulator's first value, exact in int32. A tile of 12 rows × 2 panels holds 24 sums
//! in registers and does 48 dot products for each 128 bytes of codes, which cost two loads and six shifts and masks.

use super::quantized_act::{AsBytesFn, Tile, TileFn, Tiles};
use crate::layout::cpu_n16::TABLE;

pub(super) const TILES: Tiles = Tiles { heights: &[1, 2, 4, 6, 8, 10, 12], panels, tile, as_bytes };

fn panels(height: usize) -> usize {
    if height <= 6 { 4 } else { 2 }
}

fn tile(form: u32, height: usize, panels: usize) -> TileFn {
    fn of_form<const FORM: u32>(height: usize, panels: usize) -> TileFn {
        match (height, panels) {
            (1, 4) => x86::row::<FORM, 4>,
            (2, 4) => x86::tile::<FORM, 2, 4>,
            (4, 4) => x86::tile::<FORM, 4, 4>,
            (6, 4) => x86::tile::<FORM, 6, 4>,
            (8, 2) => x86::tile::<FORM, 8, 2>,
            (10, 2) => x86::tile::<FORM, 10, 2>,
            (12, 2) => x86::tile::<FORM, 12, 2>,
            (1, 1) => x86::row::<FORM, 1>,
            (2, 1) => x86::tile::<FORM, 2, 1>,
            (4, 1) => x86::tile::<FORM, 4, 1>,
            (6, 1) => x86::tile::<FORM, 6, 1>,
            (8, 1) => x86::tile::<FORM, 8, 1>,
            (10, 1) => x86::tile::<FORM, 10, 1>,
            (12, 1) => x86::tile::<FORM, 12, 1>,
            _ => unreachable!("no tile of {height} rows × {panels} panels"),
        }
    }
    // Whatever a table's values are.
    for_form!(form, of_form(height, panels), TABLE.. => TABLE)
}

/// Those in planes, which take 2 to 4 loads, shifts and joins for each 64 bytes.
fn as_bytes(form: u32) -> Option<AsBytesFn> {
    match form {
        3 => Some(x86::as_bytes::<3>),
        5 => Some(x86::as_bytes::<5>),
        6 => Some(x86::as_bytes::<6>),
        _ => None,
    }
}

pub(super) use x86::add_tiles;

mod x86 {
    use super::Tile;
    use crate::cpu::matmul::blocking::SPANS_TOGETHER;
    use crate::cpu::matmul::quantized_act::RowSpan;
    use crate::cpu::x86::avx512::{
        Numbers, RUN, as_floats, codes_as_bytes, load_f16, load_f32, load_u16, quad, room, table,
    };
    use crate::layout::cpu_n16::{CpuN16, PANEL, PackedZeros, PerGroup, TABLE, planes, quads, tile_bytes};
    use half::f16;
    use std::arch::x86_64::*;
    use std::ops::Range;

    /// Bytes ahead that are prefetched of several panels.
    const AHEAD: usize = 1024;

    /// See [`super::AsBytesFn`].
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn as_bytes<const FORM: u32>(w: &CpuN16, panel: usize, places: Range<usize>, out: &mut [u8]) {
        codes_as_bytes::<FORM>(w, panel, places, _mm512_setzero_si512(), out);
    }

    /// See [`super::TileFn`]; FORM is that of the codes of the weight, or 8 where they are bytes already.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c")]
    pub(super) fn tile<const FORM: u32, const R: usize, const P: usize>(t: &Tile<'_>, c: &mut [f32]) {
        let w = t.w;
        let (per_tile, mut panel_bytes, mut first) = (w.columns_per_tile(), w.panel_bytes(), 0);
        let mut codes = &w.codes()[t.panel * panel_bytes..(t.panel + P) * panel_bytes];
        let mut tile_bytes = const { tile_bytes(FORM) };
        if !t.bytes.is_empty() {
            (codes, panel_bytes, tile_bytes) = (t.bytes, t.bytes.len() / P, per_tile * PANEL);
            first = w.spans()[t.spans.start].tile;
        }
        let middle = _mm512_set1_epi32(w.middle() as i32);
        let per_span = |s: usize, p: usize| ((t.panel + p) * w.spans().len() + s) * PANEL;

        let mut room = room();
        let mut numbers = Numbers::<P>::new(w, t.panel, &mut room);
        for (s, span) in t.spans.clone().zip(&w.spans()[t.spans.clone()]) {
            let per_group = |p: usize| ((t.panel + p) * w.groups() + span.group) * PANEL;
            let rows: &[RowSpan; R] = t.rows[s * R..].first_chunk().unwrap_or_else(|| unreachable!("R rows a span"));
            numbers.to(span.group);
            let mut scales = [_mm512_setzero_ps(); P];
            for p in 0..P {
                scales[p] = numbers.scale(p, per_group(p));
            }
            let mut zeros = [middle; P];
            match w.zeros() {
                PackedZeros::Symmetric => {}
                PackedZeros::Integer(z) => {
                    for p in 0..P {
                        zeros[p] = load_u16(&z[per_group(p)..]);
                    }
                }
                PackedZeros::Float(_) => zeros = [_mm512_setzero_si512(); P],
            }
            let operands = Operands {
                codes: &codes[(span.tile - first) * tile_bytes..],
                panel_bytes,
                x: &t.x[span.tile * per_tile * R..(span.tile + span.tiles) * per_tile * R],
                rows,
                zeros,
                scales,
                table: table(w),
            };
            add_product::<FORM, R, P>(&operands, c);

            if t.x_offsets {
                for p in 0..P {
                    let sums = _mm512_mul_ps(scales[p], load_f32(&w.code_sums()[per_span(s, p)..]));
                    add_outer::<R, P>(c, p, sums, |r| rows[r].offset);
                }
            }
            for p in 0..P {
                if let Some(offset) = numbers.offset(p, per_group(p)) {
                    add_outer::<R, P>(c, p, offset, |r| rows[r].total);
                }
            }
        }
    }

    /// Sums of one row and one panel, to which quads are added in turn: each would wait for the one before it.
    const SUMS: usize = 4;

    /// As [`tile`], of one row, panel by panel: what it reads is one stream, which memory brings fastest, and its sums stay in registers.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c")]
    pub(super) fn row<const FORM: u32, const P: usize>(t: &Tile<'_>, c: &mut [f32]) {
        assert!(t.bytes.is_empty(), "codes of one row are not made bytes before");
        for (panel, c) in (t.panel..t.panel + P).zip(c.as_chunks_mut().0) {
            match (t.w.scales(), t.w.zeros()) {
                (PerGroup::F16(scales), PackedZeros::Float(PerGroup::F16(offsets))) => {
                    row_of::<FORM, true>((t, panel), [scales, offsets], c);
                }
                (PerGroup::F16(scales), PackedZeros::Symmetric | PackedZeros::Integer(_)) => {
                    row_of::<FORM, true>((t, panel), [scales, &[]], c);
                }
                _ => row_of::<FORM, false>((t, panel), [&[], &[]], c),
            }
        }
    }

    /// With `HALVES` the scales and offsets are these. While a processor waits for memory it looks only some hundred instructions ahead: the fewer
    /// a span takes, the more of the stream it asks for.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c")]
    fn row_of<const FORM: u32, const HALVES: bool>(
        (t, panel): (&Tile<'_>, usize),
        [scales, offsets]: [&[f16]; 2],
        c: &mut [f32; PANEL],
    ) {
        let w = t.w;
        let (tile_bytes, per_tile) = const { (tile_bytes(FORM), quads(FORM) * 4) };
        let (spans, alike) = (&w.spans()[t.spans.clone()], t.tiles_of_group);
        let (Some(first), Some(last)) = (spans.first(), spans.last()) else { return };
        let tiles = first.tile..last.tile + last.tiles;
        let codes = &w.codes()[panel * w.panel_bytes()..(panel + 1) * w.panel_bytes()];
        let mut tile = codes[tiles.start * tile_bytes..tiles.end * tile_bytes].as_ptr();
        let mut x = t.x[tiles.start * per_tile..tiles.end * per_tile].as_ptr();

        let of_panel = panel * w.groups() * PANEL..(panel + 1) * w.groups() * PANEL;
        let scales = if HALVES { &scales[of_panel.clone()] } else { scales };
        let offsets = if offsets.is_empty() { offsets } else { &offsets[of_panel.clone()] };
        let zeros = if let PackedZeros::Integer(zeros) = w.zeros() { &zeros[of_panel.clone()] } else { &[] };
        let of_spans = panel * w.spans().len() * PANEL..(panel + 1) * w.spans().len() * PANEL;
        let code_sums = if t.x_offsets { &w.code_sums()[of_spans] } else { &[] };
        let has_offsets = matches!(w.zeros(), PackedZeros::Float(_));
        let middle = if let PackedZeros::Symmetric = w.zeros() { w.middle() as i32 } else { 0 };
        let [mut of_scales, mut of_offsets] = room::<1>();
        // Spans are read only where it is not known what they say: the first cache is better used for x.
        let span = |number: usize| match alike {
            Some(tiles) => (tiles, number),
            None => (w.spans()[number].tiles, w.spans()[number].group),
        };
        let (table, mut total, mut sum) = (table(w), load_f32(c), _mm512_setzero_ps());
        let mut from = t.spans.start;
        while from < t.spans.end {
            let (mut to, mut first) = (t.spans.end.min(from - from % SPANS_TOGETHER + SPANS_TOGETHER), 0);
            let [mut scales_made, mut offsets_made]: [&[[f32; PANEL]]; 2] = [&[], &[]];
            if !HALVES {
                // Before the spans of a run: a call among them would bring the sum to memory and back.
                first = span(from).1 / RUN * RUN;
                let len = RUN.min(w.groups() - first);
                to = from + (from..to).take_while(|&number| span(number).1 < first + len).count();
                scales_made = as_floats(w.scales(), panel * w.groups() + first, len, &mut of_scales);
                if let PackedZeros::Float(offsets) = w.zeros() {
                    offsets_made = as_floats(offsets, panel * w.groups() + first, len, &mut of_offsets);
                }
            }
            for (number, row) in (from..to).zip(&t.rows[from..to]) {
                let (tiles, group) = span(number);
                let mut sums = [[[_mm512_setzero_si512()]]; SUMS];
                sums[SUMS - 1][0][0] = if zeros.is_empty() {
                    _mm512_set1_epi32(middle * row.minus_sum)
                } else {
                    _mm512_mullo_epi32(load_u16(&zeros[group * PANEL..]), _mm512_set1_epi32(row.minus_sum))
                };
                // SAFETY: spans lie one after the other; those of these spans are `tiles` of the panel, and of x.
                unsafe { add_tiles::<FORM, 1, 1, SUMS>((tile, 0, t.ahead), x, tiles, table, &mut sums) };
                (tile, x) = (tile.wrapping_add(tiles * tile_bytes), x.wrapping_add(tiles * per_tile));
                let [[[a]], [[b]], [[c]], [[d]]] = sums;
                let dot = _mm512_add_epi32(_mm512_add_epi32(a, b), _mm512_add_epi32(c, d));
                let of_span = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), _mm512_set1_ps(row.scale));
                let number_of = |halves: &[f16], made: &[[f32; PANEL]]| match HALVES {
                    true => load_f16(&halves[group * PANEL..]),
                    false => load_f32(&made[group - first]),
                };
                let scale = number_of(scales, scales_made);
                sum = _mm512_fmadd_ps(of_span, scale, sum);
                if !code_sums.is_empty() {
                    let of_codes = _mm512_mul_ps(scale, load_f32(&code_sums[number * PANEL..]));
                    sum = _mm512_fmadd_ps(of_codes, _mm512_set1_ps(row.offset), sum);
                }
                if has_offsets {
                    sum = _mm512_fmadd_ps(number_of(offsets, offsets_made), _mm512_set1_ps(row.total), sum);
                }
            }
            from = to;
            if to.is_multiple_of(SPANS_TOGETHER) {
                (total, sum) = (_mm512_add_ps(total, sum), _mm512_setzero_ps());
            }
        }
        // SAFETY: 16 floats.
        unsafe { _mm512_storeu_ps(c.as_mut_ptr(), _mm512_add_ps(total, sum)) };
    }

    /// A span of one tile.
    struct Operands<'a, const R: usize, const P: usize> {
        /// Codes of the panels, `panel_bytes` apart.
        codes: &'a [u8],
        panel_bytes: usize,
        /// Codes of x, `[place / 4][R][4]`.
        x: &'a [i8],
        rows: &'a [RowSpan; R],
        /// Zero points of the panels.
        zeros: [__m512i; P],
        /// Scales of the panels.
        scales: [__m512; P],
        table: __m512i,
    }

    /// Sums of so many codes of x, of 128 at most, are int16.
    const SHORT: usize = 255;

    /// Adds `scaleB·scaleA·Σ qA·(qB − zB)` to `c`.
    ///
    /// A function of its own, not inlined, and short enough that the compiler unrolls all its loops over rows and
    /// panels: only then do the sums stay in registers.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    fn add_product<const FORM: u32, const R: usize, const P: usize>(o: &Operands<'_, R, P>, c: &mut [f32]) {
        let (tile_bytes, quads) = const { (tile_bytes(FORM), quads(FORM)) };
        let tiles = o.x.len() / (quads * R * 4);
        assert!(tiles * tile_bytes + (P - 1) * o.panel_bytes <= o.codes.len() && c.len() >= R * P * PANEL);
        let mut sums = [[[_mm512_setzero_si512(); P]; R]];
        if tiles * quads * 4 <= SHORT {
            for r in 0..R {
                for p in 0..P {
                    // Products of int16, which take half as long: zero points have no upper halves.
                    sums[0][r][p] = _mm512_madd_epi16(o.zeros[p], _mm512_set1_epi32(o.rows[r].minus_sum));
                }
            }
        } else {
            for r in 0..R {
                for p in 0..P {
                    sums[0][r][p] = _mm512_mullo_epi32(o.zeros[p], _mm512_set1_epi32(o.rows[r].minus_sum));
                }
            }
        }
        // Far enough ahead to hide memory behind other tiles. One stream comes by itself.
        let ahead = if P > 1 && R <= 8 { AHEAD } else { 0 };
        // SAFETY: `tiles` tiles of each panel and places of x, as asserted.
        unsafe {
            add_tiles::<FORM, R, P, 1>(
                (o.codes.as_ptr(), o.panel_bytes, ahead),
                o.x.as_ptr(),
                tiles,
                o.table,
                &mut sums,
            )
        };
        let c = c.as_mut_ptr();
        for r in 0..R {
            let scale = _mm512_set1_ps(o.rows[r].scale);
            for p in 0..P {
                let sum = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[0][r][p]), scale);
                // SAFETY: `PANEL` floats at this place of c, whose length was asserted.
                unsafe {
                    let c = c.add((r * P + p) * PANEL);
                    _mm512_storeu_ps(c, _mm512_fmadd_ps(sum, o.scales[p], _mm512_loadu_ps(c)));
                }
            }
        }
    }

    /// Adds the dot products of so many tiles of `P` panels, `panel_bytes` apart, with as many places of x `[place / 4][R][4]`, quad by quad to
    /// `S` sums in turn, and prefetches codes `ahead` bytes ahead (0: none); a prefetch never faults.
    ///
    /// # Safety
    /// The codes of these panels and x are as long.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    pub(in crate::cpu::matmul) unsafe fn add_tiles<const FORM: u32, const R: usize, const P: usize, const S: usize>(
        (mut tile, panel_bytes, ahead): (*const u8, usize, usize),
        mut x: *const i8,
        tiles: usize,
        table: __m512i,
        sums: &mut [[[__m512i; P]; R]; S],
    ) {
        let (tile_bytes, quads) = const { (tile_bytes(FORM), quads(FORM)) };
        let (bits, planes) = const { (planes(FORM).0, planes(FORM).1 > 0) };
        let mask = _mm512_set1_epi8(((1u32 << bits) - 1) as u8 as i8);
        for _ in 0..tiles {
            let mut raw = [_mm512_setzero_si512(); P];
            for p in 0..P {
                // SAFETY: 64 bytes of panel p's tile, promised to this function.
                raw[p] = unsafe { _mm512_loadu_si512(tile.add(p * panel_bytes).cast()) };
                if ahead > 0 {
                    for at in (0..tile_bytes).step_by(64) {
                        _mm_prefetch::<_MM_HINT_T0>(tile.wrapping_add(p * panel_bytes + at + ahead).cast());
                    }
                }
            }
            for i in 0..quads {
                let mut codes = raw;
                for p in 0..P {
                    if planes {
                        // SAFETY: panel p's tile, as above.
                        codes[p] = unsafe { quad::<FORM>(tile.add(p * panel_bytes), i) };
                        continue;
                    }
                    if i > 0 {
                        codes[p] = _mm512_srl_epi32(raw[p], _mm_cvtsi32_si128((i as u32 * bits) as i32));
                    }
                    if bits < 8 {
                        codes[p] = _mm512_and_si512(codes[p], mask);
                    }
                    if FORM >= TABLE {
                        codes[p] = _mm512_shuffle_epi8(table, codes[p]);
                    }
                }
                for r in 0..R {
                    // SAFETY: 4 codes of row r, of as many places of x, promised too; any alignment.
                    let quad = _mm512_set1_epi32(unsafe { x.add((i * R + r) * 4).cast::<i32>().read_unaligned() });
                    for p in 0..P {
                        sums[i % S][r][p] = _mm512_dpbusd_epi32(sums[i % S][r][p], codes[p], quad);
                    }
                }
            }
            x = x.wrapping_add(quads * R * 4);
            tile = tile.wrapping_add(tile_bytes);
        }
    }

    /// Adds `column · row(r)` to panel `p` of every row of `c`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn add_outer<const R: usize, const P: usize>(c: &mut [f32], p: usize, column: __m512, row: impl Fn(usize) -> f32) {
        for r in 0..R {
            let c = &mut c[(r * P + p) * PANEL..][..PANEL];
            let sum = _mm512_fmadd_ps(column, _mm512_set1_ps(row(r)), load_f32(c));
            // SAFETY: `c` is 16 floats.
            unsafe { _mm512_storeu_ps(c.as_mut_ptr(), sum) };
        }
    }
}
