//! Tiles of int8 dot products of 16 outputs in two registers of 256 bits, but for the dot products themselves.

/// For a module that has `dot` of its instruction set, which adds the products of a span to sums, and says whether a table's values of 8 bits
/// are less their middle there: the tile functions `row` and `tile`.
macro_rules! tiles {
    ($features:literal, wide_tables_are_signed: $wide_tables_are_signed:literal) => {
        /// Sums of `R` rows by `P` panels, each in two registers of 8 outputs.
        type Sums<const R: usize, const P: usize> = [[[__m256i; 2]; P]; R];

        /// As [`tile`], of one row, panel by panel: what it reads is one stream, which memory brings fastest.
        #[target_feature(enable = $features)]
        pub(super) fn row<const FORM: u32, const P: usize>(t: &Tile<'_>, c: &mut [f32]) {
            for (panel, c) in (t.panel..t.panel + P).zip(c.as_chunks_mut::<PANEL>().0) {
                for first in t.spans.clone().step_by(SPANS_TOGETHER) {
                    let mut sums = [0.0; PANEL];
                    let spans = first..t.spans.end.min(first + SPANS_TOGETHER);
                    tile::<FORM, 1, 1>(&Tile { panel, spans, ..*t }, &mut sums);
                    let (mut y, sums) = (load_f32(c), load_f32(&sums));
                    for h in 0..2 {
                        y[h] = _mm256_add_ps(y[h], sums[h]);
                    }
                    store_f32(y, c);
                }
            }
        }

        #[target_feature(enable = $features)]
        pub(super) fn tile<const FORM: u32, const R: usize, const P: usize>(t: &Tile<'_>, c: &mut [f32]) {
            let w = t.w;
            let panel_bytes = w.panel_bytes();
            let (tile_bytes, quads) = const { (tile_bytes(FORM), quads(FORM)) };
            let codes = &w.codes()[t.panel * panel_bytes..(t.panel + P) * panel_bytes];
            let middle = match w.zeros() {
                // The table has taken it off.
                PackedZeros::Symmetric if $wide_tables_are_signed && FORM == WIDE_TABLE => 0,
                PackedZeros::Symmetric => w.middle() as i32,
                PackedZeros::Integer(_) | PackedZeros::Float(_) => 0,
            };
            let (middle, table) = (_mm256_set1_epi32(middle), table(w));
            // Far enough to hide memory behind other tiles.
            let ahead = if R == 1 { AHEAD } else { 2048 };
            let per_span = |s: usize, p: usize| ((t.panel + p) * w.spans().len() + s) * PANEL;

            let mut room = room();
            let mut numbers = Numbers::<P>::new(w, t.panel, &mut room);
            for (s, span) in t.spans.clone().zip(&w.spans()[t.spans.clone()]) {
                let per_group = |p: usize| ((t.panel + p) * w.groups() + span.group) * PANEL;
                let rows: &[RowSpan; R] =
                    t.rows[s * R..].first_chunk().unwrap_or_else(|| unreachable!("R rows a span"));
                numbers.to(span.group);
                let mut scales = [[_mm256_setzero_ps(); 2]; P];
                for p in 0..P {
                    scales[p] = numbers.scale(p, per_group(p));
                }
                let mut zeros = [[middle; 2]; P];
                if let PackedZeros::Integer(z) = w.zeros() {
                    for p in 0..P {
                        zeros[p] = load_u16(&z[per_group(p)..]);
                    }
                }
                let operands = Operands {
                    codes: (&codes[span.tile * tile_bytes..], panel_bytes, ahead),
                    x: &t.x[span.tile * quads * R * 4..(span.tile + span.tiles) * quads * R * 4],
                    rows,
                    zeros,
                    scales,
                    table,
                };
                // Of one row spans are short: in groups of 32 a call takes a sixth of its time.
                match R * P {
                    1 => add_product::<FORM, R, P>(&operands, c),
                    _ => add_product_apart::<FORM, R, P>(&operands, c),
                }
                if t.x_offsets {
                    for p in 0..P {
                        let mut sums = load_f32(&w.code_sums()[per_span(s, p)..]);
                        for h in 0..2 {
                            sums[h] = _mm256_mul_ps(scales[p][h], sums[h]);
                        }
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

        /// A span of one tile.
        struct Operands<'a, const R: usize, const P: usize> {
            /// Codes of the panels, how many bytes these lie apart, and how many ahead they are prefetched.
            codes: (&'a [u8], usize, usize),
            /// Codes of x, `[place / 4][R][4]`.
            x: &'a [i8],
            rows: &'a [RowSpan; R],
            /// Zero points of the panels.
            zeros: [[__m256i; 2]; P],
            /// Scales of the panels.
            scales: [[__m256; 2]; P],
            table: __m256i,
        }

        /// Sums of so many codes of x, of 128 at most, are int16.
        const SHORT: usize = 255;

        /// [`add_product`] as a function of its own, so that the sums stay in registers all through the inner loop.
        #[inline(never)]
        #[target_feature(enable = $features)]
        fn add_product_apart<const FORM: u32, const R: usize, const P: usize>(o: &Operands<'_, R, P>, c: &mut [f32]) {
            add_product::<FORM, R, P>(o, c);
        }

        /// Adds `scaleB·scaleA·Σ qA·(qB − zB)` to `c`.
        #[inline]
        #[target_feature(enable = $features)]
        fn add_product<const FORM: u32, const R: usize, const P: usize>(o: &Operands<'_, R, P>, c: &mut [f32]) {
            assert!(c.len() >= R * P * PANEL);
            let mut sums: Sums<R, P> = [[[_mm256_setzero_si256(); 2]; P]; R];
            let short = o.x.len() <= SHORT * R;
            for r in 0..R {
                let minus_sum = _mm256_set1_epi32(o.rows[r].minus_sum);
                for p in 0..P {
                    for h in 0..2 {
                        // Products of int16 take half as long: zero points have no upper halves.
                        sums[r][p][h] = match short {
                            true => _mm256_madd_epi16(o.zeros[p][h], minus_sum),
                            false => _mm256_mullo_epi32(o.zeros[p][h], minus_sum),
                        };
                    }
                }
            }
            dot::<FORM, R, P>(o.codes, o.table, o.x, &mut sums);
            let c = c.as_mut_ptr();
            for r in 0..R {
                let scale = _mm256_set1_ps(o.rows[r].scale);
                for p in 0..P {
                    for h in 0..2 {
                        let sum = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[r][p][h]), scale);
                        // SAFETY: 8 floats at this place of c, whose length was asserted.
                        unsafe {
                            let c = c.add((r * P + p) * PANEL + h * 8);
                            _mm256_storeu_ps(c, _mm256_fmadd_ps(sum, o.scales[p][h], _mm256_loadu_ps(c)));
                        }
                    }
                }
            }
        }

        /// Adds `column · row(r)` to panel `p` of every row of `c`.
        #[inline]
        #[target_feature(enable = $features)]
        fn add_outer<const R: usize, const P: usize>(
            c: &mut [f32],
            p: usize,
            column: [__m256; 2],
            row: impl Fn(usize) -> f32,
        ) {
            for r in 0..R {
                let c = &mut c[(r * P + p) * PANEL..][..PANEL];
                let (mut y, row) = (load_f32(c), _mm256_set1_ps(row(r)));
                for h in 0..2 {
                    y[h] = _mm256_fmadd_ps(column[h], row, y[h]);
                }
                store_f32(y, c);
            }
        }
    };
}

pub(super) use tiles;
