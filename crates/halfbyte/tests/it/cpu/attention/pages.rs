//! Sequences that share a cache.

use super::*;

#[test]
fn a_truncated_cache_is_as_good_as_new() {
    let heads = Heads { heads: 2, kv_heads: 2, head_size: 12 };
    let qkv = noise(6, 200 * heads.row());
    let row = heads.row();
    on_every_cpu(
        |cpu| {
            let mut cache = KvCache::new(1, heads, 400, KvType::F32).unwrap();
            let sequence = cache.begin();
            assert_eq!((cache.len(sequence), cache.bytes(), cache.capacity(), cache.free()), (0, 0, 512, 512));
            cache.append(cpu, sequence, 0, 0, &qkv[..90 * row]).unwrap();
            // What is forgotten must leave no trace, not even NaN.
            cache.append(cpu, sequence, 0, 90, &vec![f32::NAN; 200 * row]).unwrap();
            let bytes = cache.bytes();
            assert_eq!((bytes, cache.free()), (3 * 128 * 2 * (12 + 16) * 4, 128));
            cache.truncate(sequence, 90).unwrap();
            cache.truncate(sequence, 1000).unwrap();
            assert_eq!(cache.free(), 3 * 128);
            cache.append(cpu, sequence, 0, 90, &qkv[90 * row..100 * row]).unwrap();
            assert_eq!((cache.len(sequence), cache.bytes()), (100, bytes));
            let qkv = &qkv[90 * row..100 * row];
            let what = Attention {
                qkv,
                heads,
                first_position: 90,
                scale: scale(heads),
                window: None,
                alibi: None,
                cap: None,
                sinks: None,
            };
            let mut out = vec![7.0; 10 * 24];
            attention(cpu, &what, &cache, sequence, 0, &mut out).unwrap();
            out
        },
        |isa, got| {
            let expected = reference(&qkv[..100 * row], heads, ALL);
            for (&got, (expected, bound)) in got.iter().zip(&expected[90 * 24..]) {
                assert!((f64::from(got) - expected).abs() <= *bound, "{isa:?}: {got}, expected {expected}");
            }
        },
    );
}

/// A sequence in the shared cache, and the rows that it has.
struct Text {
    sequence: Sequence,
    rows: Vec<f32>,
}

const LAYERS: usize = 2;
/// Pages of the shared cache.
const PAGES: usize = 6;
const HEADS: Heads = Heads { heads: 4, kv_heads: 2, head_size: 12 };

/// What the last `m` rows of a text attend to in a layer.
fn attend_last(cpu: &Cpu, cache: &KvCache, text: (Sequence, &[f32]), layer: usize, m: usize) -> Vec<f32> {
    let (sequence, rows) = text;
    let first = rows.len() / HEADS.row() - m;
    let qkv = &rows[first * HEADS.row()..];
    let what = Attention {
        qkv,
        heads: HEADS,
        first_position: first,
        scale: scale(HEADS),
        window: None,
        alibi: None,
        cap: None,
        sinks: None,
    };
    let mut out = vec![7.0; m * HEADS.heads * HEADS.head_size];
    attention(cpu, &what, cache, sequence, layer, &mut out).unwrap();
    out
}

/// The rows of a layer: those of all layers must differ.
fn of_layer(rows: &[f32], layer: usize) -> Vec<f32> {
    rows.iter().map(|v| v * (1.0 + layer as f32)).collect()
}

/// Appends rows to a text, layer by layer. Error: the cache is full.
fn append(cpu: &Cpu, cache: &mut KvCache, text: (Sequence, &[f32]), first: usize) -> Result<()> {
    let (sequence, rows) = text;
    (0..LAYERS)
        .try_for_each(|layer| cache.append(cpu, sequence, layer, first, &of_layer(&rows[first * HEADS.row()..], layer)))
}

#[test]
fn sequences_that_share_a_cache_have_the_bits_of_each_alone() {
    for seed in 0..8 {
        let kv = KvType::ALL[seed as usize % 4];
        on_every_cpu(
            |cpu| {
                let mut state = seed * 977 + 1;
                let mut below = |n: usize| {
                    state = u64::wrapping_mul(state, 6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    (state >> 33) as usize % n
                };
                let mut cache = KvCache::new(LAYERS, HEADS, (PAGES - 1) * PAGE_LENGTH + 1, kv).unwrap();
                let (mut texts, mut outputs, mut refused) = (Vec::<Text>::new(), Vec::new(), 0);
                for step in 0..120 {
                    let at = below(texts.len().max(1));
                    match below(8) {
                        _ if texts.is_empty() => texts.push(Text { sequence: cache.begin(), rows: Vec::new() }),
                        0 => texts.push(Text { sequence: cache.begin(), rows: Vec::new() }),
                        1 => cache.end(texts.swap_remove(at).sequence).unwrap(),
                        2 => {
                            let text = &mut texts[at];
                            let len = below(text.rows.len() / HEADS.row() + 2);
                            cache.truncate(text.sequence, len).unwrap();
                            text.rows.truncate(len * HEADS.row());
                        }
                        _ => {
                            let (text, m) = (&mut texts[at], [1, 1, 3, 40, 150][below(5)]);
                            let (sequence, before) = (text.sequence, text.rows.len() / HEADS.row());
                            text.rows.extend(noise(step, m * HEADS.row()));
                            match append(cpu, &mut cache, (sequence, &text.rows), before) {
                                Ok(()) => {}
                                Err(Error::CacheFull { needed, free }) => {
                                    assert!(needed > free && free == cache.free());
                                    text.rows.truncate(before * HEADS.row());
                                    refused += 1;
                                    continue;
                                }
                                Err(other) => panic!("{other}"),
                            }
                            let mut alone = KvCache::new(LAYERS, HEADS, before + m, kv).unwrap();
                            let only = alone.begin();
                            append(cpu, &mut alone, (only, &text.rows), 0).unwrap();
                            for layer in 0..LAYERS {
                                let rows = of_layer(&text.rows, layer);
                                let got = attend_last(cpu, &cache, (sequence, &rows), layer, m);
                                let want = attend_last(cpu, &alone, (only, &rows), layer, m);
                                assert!(got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()), "step {step}");
                                outputs.extend(got);
                            }
                        }
                    }
                    let lens = texts.iter().map(|text| text.rows.len() / HEADS.row());
                    assert!(texts.iter().zip(lens.clone()).all(|(text, len)| cache.len(text.sequence) == len));
                    let taken: usize = lens.map(|len| len.next_multiple_of(PAGE_LENGTH)).sum();
                    assert_eq!((cache.capacity(), cache.free() + taken), (PAGES * PAGE_LENGTH, PAGES * PAGE_LENGTH));
                    assert!(cache.bytes() <= PAGES * LAYERS * PAGE_LENGTH * 2 * (12 + 16) * 4);
                }
                assert!(outputs.len() > 10_000 && refused < 60, "{} outputs, {refused} refused", outputs.len());
                outputs
            },
            |_, _| {},
        );
    }
}

#[test]
fn a_full_cache_refuses_and_stays_as_it_is() {
    let (cpu, row) = (Cpu::new(1).unwrap(), HEADS.row());
    let mut cache = KvCache::new(1, HEADS, 2 * PAGE_LENGTH, KvType::F32).unwrap();
    let (a, b) = (cache.begin(), cache.begin());
    cache.append(&cpu, a, 0, 0, &vec![0.5; row]).unwrap();
    cache.append(&cpu, b, 0, 0, &vec![0.5; 128 * row]).unwrap();
    let error = cache.append(&cpu, b, 0, 128, &vec![0.5; row]).unwrap_err();
    assert!(matches!(error, Error::CacheFull { needed: 128, free: 0 }), "{error}");
    assert_eq!(error.to_string(), "kv cache: expected room for 128 more positions, got 0");
    assert_eq!((cache.len(a), cache.len(b)), (1, 128));
    // The first still has room in its page.
    cache.append(&cpu, a, 0, 1, &vec![0.5; 127 * row]).unwrap();
    cache.end(a).unwrap();
    cache.append(&cpu, b, 0, 128, &vec![0.5; row]).unwrap();
    assert_eq!((cache.len(a), cache.len(b), cache.free()), (0, 129, 0));
    cache.truncate(b, 128).unwrap();
    assert_eq!(cache.free(), 128);
}

#[test]
fn pages_that_are_shared_are_copied_by_who_writes() {
    KvType::ALL.into_iter().for_each(share_and_write);
}

fn share_and_write(kv: KvType) {
    let cpu = Cpu::new(1).unwrap();
    let mut cache = KvCache::new(LAYERS, HEADS, PAGES * PAGE_LENGTH, kv).unwrap();
    let row = HEADS.row();
    let mut a = noise(1, 300 * row);
    let first = cache.begin();
    append(&cpu, &mut cache, (first, &a), 0).unwrap();
    let (second, third) = (cache.share(first, 300).unwrap(), cache.share(first, 200).unwrap());
    let taken = |cache: &KvCache| PAGES - cache.free() / PAGE_LENGTH;
    assert_eq!((taken(&cache), cache.len(second), cache.len(third)), (3, 300, 200));
    assert!(cache.share(first, 301).is_err());
    let check = |cache: &KvCache, sequence: Sequence, rows: &[f32]| {
        let mut alone = KvCache::new(LAYERS, HEADS, rows.len() / row, kv).unwrap();
        let only = alone.begin();
        append(&cpu, &mut alone, (only, rows), 0).unwrap();
        for layer in 0..LAYERS {
            let rows = of_layer(rows, layer);
            let got = attend_last(&cpu, cache, (sequence, &rows), layer, 1);
            assert_eq!(got, attend_last(&cpu, &alone, (only, &rows), layer, 1), "layer {layer}");
        }
    };
    // The second and the first go on differently in what was one page; the third within the page before.
    let (mut b, mut c) = (a.clone(), a[..200 * row].to_vec());
    b.extend(noise(2, 5 * row));
    assert_eq!(cache.missing_pages(second, 305), 1);
    append(&cpu, &mut cache, (second, &b), 300).unwrap();
    assert_eq!(taken(&cache), 4);
    a.extend(noise(3, 40 * row));
    assert_eq!(cache.missing_pages(first, 340), 0);
    append(&cpu, &mut cache, (first, &a), 300).unwrap();
    c.extend(noise(4, 7 * row));
    append(&cpu, &mut cache, (third, &c), 200).unwrap();
    assert_eq!(taken(&cache), 5);
    for (sequence, rows) in [(first, &a), (second, &b), (third, &c)] {
        check(&cache, sequence, rows);
    }
    // One page is free: the first page's copy and another do not fit, and nothing changes.
    cache.truncate(third, 60).unwrap();
    c.truncate(60 * row);
    assert_eq!(taken(&cache), 4);
    c.extend(noise(5, 210 * row));
    let full = append(&cpu, &mut cache, (third, &c), 60).unwrap_err();
    assert!(matches!(full, Error::CacheFull { needed: 384, free: 256 }), "{full}");
    assert!(cache.reserve(third, 270).is_err() && taken(&cache) == 4);
    c.truncate(150 * row);
    cache.reserve(third, 150).unwrap();
    assert_eq!(taken(&cache), 6);
    append(&cpu, &mut cache, (third, &c), 60).unwrap();
    cache.end(first).unwrap();
    for (sequence, rows) in [(second, &b), (third, &c)] {
        check(&cache, sequence, rows);
        cache.end(sequence).unwrap();
    }
    assert_eq!(taken(&cache), 0);
}
