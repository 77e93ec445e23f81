//! Single rows of many texts at once.

use super::*;

#[test]
fn one_row_of_each_of_many_texts_is_within_the_bound() {
    for gpu in gpus() {
        let (mut random, mut appended) = (Random(24), 0);
        for case in 0..28 {
            let head_size = [128, 64, 80, 256, 20, 8 * (1 + random.below(32))][case % 6];
            if head_size > 128 && gpu.caps().shared_bytes < 100_000 {
                continue;
            }
            let kv_heads = 1 + random.below(4);
            let heads = Heads { heads: kv_heads * (1 + random.below(12)), kv_heads, head_size };
            let (texts, kv) = (1 + random.below([3, MOST_TEXTS][case % 2]), KvType::ALL[case / 2 % 4]);
            let lengths: Vec<usize> = (0..texts).map(|i| 1 + random.below([60, 700][i % 2])).collect();
            let of_text = lengths.iter().max().map_or(0, |length| length.div_ceil(PAGE_LENGTH)) + random.below(2);
            let rotated = [0, head_size / 2 * 2, 2 * random.below(head_size / 2 + 1)][case % 3];
            let mut text = Text::with_capacity(&gpu, heads, rotated, kv, texts * of_text * PAGE_LENGTH);
            text = text.shuffled(&mut random);
            if case % 7 < 3 {
                text = text.with_norms(&mut random);
            }
            text.window = (case % 4 == 3).then(|| 1 + random.below(300));
            text.cap = (case % 5 == 0).then(|| 0.5 + random.below(50) as f32);
            if case % 3 == 0 {
                text.slopes = text.of_heads((1..=heads.heads).map(|h| 0.8f32.powi(h as i32)).collect());
            }
            if case % 3 == 1 {
                text.sinks = text.of_heads(random.normals(heads.heads).iter().map(|v| 3.0 * v).collect());
            }
            let tables = text.pages.take().unwrap();
            let (mut rows, mut queries, mut seen) = (Vec::new(), Vec::new(), Vec::new());
            for (pages, &length) in tables.chunks_exact(of_text).zip(&lengths) {
                (text.seen, text.pages) = (Default::default(), Some(pages.to_vec()));
                if length > 1 {
                    text.append(&random.normals((length - 1) * heads.row()));
                }
                let row = random.normals(heads.row());
                queries.push(text.append(&row).0);
                rows.extend(row);
                seen.push(std::mem::take(&mut text.seen));
            }
            let positions: Vec<u32> = lengths.iter().map(|&length| length as u32 - 1).collect();
            let (qkv, positions) = (text.bench.upload(&queries.concat()), text.bench.upload(&positions));
            let as_projected = text.bench.upload(&rows);
            let (pages, longest) = (text.bench.upload(&tables), *lengths.iter().max().unwrap());
            let attend = |text: &mut Text<'_>, longest: usize, kernels: Kernels, appends: bool| {
                let Text { bench, cache, workspace, window, cap, slopes, sinks, rope, norms, .. } = text;
                let [slopes, sinks] = [slopes, sinks].map(|of| of.as_ref().map(|(_, on_device)| on_device.view()));
                bench.output(TYPES[case % 3], texts * heads.heads * head_size, &mut |out| {
                    let norms = norms.as_ref().map(|[queries, keys]| HeadNorms {
                        queries: queries.1.view(),
                        keys: keys.1.view(),
                        eps: EPS,
                    });
                    let what = Attention {
                        qkv: if appends { as_projected.view() } else { qkv.view() },
                        append: appends.then_some(Append { rope, norms }),
                        rows: Rows::OnePerText,
                        positions: positions.view(),
                        pages: Some(pages.view()),
                        fresh: 1 + case % 2 * 20,
                        longest,
                        scale: 1.0 / (head_size as f32).sqrt(),
                        window: *window,
                        cap: *cap,
                        slopes,
                        sinks,
                        kernels,
                    };
                    nn::attention(bench.gpu, &bench.stream, &what, cache, LAYER, workspace, out).unwrap();
                })
            };
            let all = of_text * PAGE_LENGTH;
            let ways = [(longest, Kernels::All), (all, Kernels::All), (longest, Kernels::OfAmpere)];
            let mut all_got = ways.map(|(longest, kernels)| attend(&mut text, longest, kernels, false)).to_vec();
            if nn::appends(&gpu, &text.cache, Rows::OnePerText, texts) {
                // The rows' own keys and values are others until they are appended, and the same afterwards.
                let before = cached::bits_of_layer(&text.bench, &text.cache);
                for (pages, &length) in tables.chunks_exact(of_text).zip(&lengths) {
                    (text.seen, text.pages) =
                        ([vec![Vec::new(); length - 1], vec![Vec::new(); length - 1]], Some(pages.to_vec()));
                    text.append(&random.normals(heads.row()));
                }
                assert_ne!(cached::bits_of_layer(&text.bench, &text.cache), before);
                all_got.push(attend(&mut text, longest, Kernels::All, true));
                assert_eq!(cached::bits_of_layer(&text.bench, &text.cache), before, "{heads:?} {kv:?}");
                appended += 1;
            }
            for got in all_got {
                let of_texts = got.chunks_exact(heads.heads * head_size).zip(queries.iter().zip(&seen));
                for ((got, (queries, seen)), &length) in of_texts.zip(&lengths) {
                    text.seen.clone_from(seen);
                    for (h, got) in got.chunks_exact(head_size).enumerate() {
                        let query = queries[h * head_size..][..head_size].iter().map(|&v| f64::from(v)).collect();
                        text.check(query, text.computed(1), h, length - 1, got, TYPES[case % 3]);
                    }
                }
            }
        }
        assert!(appended > 5 || !gpu.caps().arch.is_hopper(), "{appended}");
    }
}
