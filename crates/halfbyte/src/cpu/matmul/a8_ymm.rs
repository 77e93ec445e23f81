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
                tile::<FORM, 1, 1>(&Tile { panel, spans: t.spans.clone(), ..*t }, c);
            }
        }

        #[target_feature(enable = $features)]
        pub(super) fn tile<const FORM: u32, const R: usize, const P: usize>(t: &Tile<'_>, c: &mut [f32]) {
            let w = t.w;
            let panel_bytes = w.panel_bytes();
            let (tile_bytes, quads) = const { (tile_bytes(FORM), quads(FORM)) };
            let spans = &w.spans()[t.spans.clone()];
            let codes = &w.codes()[t.panel * panel_bytes..(t.panel + P) * panel_bytes];
            let (middle, table) = (w.middle() as i32, table(w));
            // Far enough to hide memory behind other tiles.
            let ahead = match R {
                1 => AHEAD,
                2 => 1024,
                _ => 0,
            };

            let mut room = room();
            let mut numbers = Numbers::<P>::new(w, t.panel, &mut room);
            for (s, span) in t.spans.clone().zip(spans) {
                let rows = &t.rows[s * R..(s + 1) * R];
                let mut group_at = [0; P];
                for p in 0..P {
                    group_at[p] = ((t.panel + p) * w.groups() + span.group) * PANEL;
                }
                let mut acc: Sums<R, P> = [[[_mm256_setzero_si256(); 2]; P]; R];
                match w.zeros() {
                    // The table has taken it off.
                    PackedZeros::Symmetric if $wide_tables_are_signed && FORM == WIDE_TABLE => {}
                    PackedZeros::Symmetric => {
                        for r in 0..R {
                            acc[r] = [[_mm256_set1_epi32(middle * rows[r].minus_sum); 2]; P];
                        }
                    }
                    PackedZeros::Integer(zeros) => {
                        for p in 0..P {
                            let zero = load_u16(&zeros[group_at[p]..]);
                            for r in 0..R {
                                let minus_sum = _mm256_set1_epi32(rows[r].minus_sum);
                                for h in 0..2 {
                                    acc[r][p][h] = _mm256_mullo_epi32(zero[h], minus_sum);
                                }
                            }
                        }
                    }
                    PackedZeros::Float(_) => {}
                }

                let x = &t.x[span.tile * quads * R * 4..(span.tile + span.tiles) * quads * R * 4];
                let codes = &codes[span.tile * tile_bytes..];
                let codes = (codes, panel_bytes, ahead);
                // Of one row spans are short: in groups of 32 a call takes a sixth of its time.
                match R * P {
                    1 => dot::<FORM, R, P>(codes, table, x, &mut acc),
                    _ => dot_apart::<FORM, R, P>(codes, table, x, &mut acc),
                }

                numbers.to(span.group);
                for p in 0..P {
                    let (scale, offset) = (numbers.scale(p, group_at[p]), numbers.offset(p, group_at[p]));
                    let code_sums = if t.x_offsets {
                        load_f32(&w.code_sums()[((t.panel + p) * w.spans().len() + s) * PANEL..])
                    } else {
                        [_mm256_setzero_ps(); 2]
                    };
                    for r in 0..R {
                        let row = rows[r];
                        let out = &mut c[(r * P + p) * PANEL..][..PANEL];
                        let mut y = load_f32(out);
                        for h in 0..2 {
                            let mut sum = _mm256_mul_ps(_mm256_cvtepi32_ps(acc[r][p][h]), _mm256_set1_ps(row.scale));
                            if t.x_offsets {
                                sum = _mm256_fmadd_ps(code_sums[h], _mm256_set1_ps(row.offset), sum);
                            }
                            y[h] = _mm256_fmadd_ps(sum, scale[h], y[h]);
                            if let Some(offset) = offset {
                                y[h] = _mm256_fmadd_ps(offset[h], _mm256_set1_ps(row.total), y[h]);
                            }
                        }
                        store_f32(y, out);
                    }
                }
            }
        }

        /// [`dot`] as a function of its own, so that the sums stay in registers all through the inner loop.
        #[inline(never)]
        #[target_feature(enable = $features)]
        fn dot_apart<const FORM: u32, const R: usize, const P: usize>(
            codes: (&[u8], usize, usize),
            table: __m256i,
            x: &[i8],
            acc: &mut Sums<R, P>,
        ) {
            dot::<FORM, R, P>(codes, table, x, acc);
        }
    };
}

pub(super) use tiles;
