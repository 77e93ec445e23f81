//! A step of one token in one kernel against f64, with the roundings that it makes.

mod model;

use super::Bench;
use crate::cuda::gpus;
use crate::data::{Random, parse, rounded};
use crate::layout::types_of_files::Fewer;
use halfbyte::Float;
use halfbyte::cuda::Gpu;
use halfbyte::cuda::matmul;
use halfbyte::cuda::nn::{
    Gate, KvCache, PersistentDecode, PersistentLayers, PersistentPlan, Rope, StepExperts, StepLayer, StepMlp,
    StepOfText, StepSizes, StreamNorm,
};
use halfbyte::kernel::{Activation, Heads};
use halfbyte::kv_pages::PAGE_LENGTH;
use model::{Activations, Case, EPS, Layer, Mixture, Norm, round};
use std::sync::Arc;

/// A router times this has logits that no word of the kernel holds.
const BEYOND: f32 = 1e30;

/// Runs some steps, which are compared. Gives how many were: where two experts are about as good as each other, either may be chosen, and
/// what follows in the text hangs on it.
fn run(gpu: &Gpu, case: &Case, random: &mut Random) -> usize {
    const LAYERS: usize = 2;
    const VOCAB: usize = 32;
    let bench = Bench::new(gpu);
    let StepSizes { hidden, heads, pairs, ropes, .. } = case.sizes;
    // In turns of each kind of rotations.
    let mut layers: Vec<Layer> = (0..LAYERS).map(|i| Layer::new(&bench, random, case, i % ropes)).collect();
    let scale = (heads.head_size as f32).powf(-0.5);
    let of_base = |base: f64| -> Vec<f64> { (0..pairs).map(|i| base.powf(-(i as f64) / pairs as f64)).collect() };
    let frequencies: Vec<Vec<f64>> = [10_000.0, 300.0].into_iter().take(ropes).map(of_base).collect();
    let ropes: Vec<Rope> = frequencies.iter().map(|of| Rope::new(gpu, &bench.stream, of).unwrap()).collect();
    let steps = case.before + 3;
    // Every other page, the last one first.
    let pages: Vec<u32> = (0..steps.div_ceil(PAGE_LENGTH) as u32).rev().map(|page| 2 * page + 1).collect();
    let capacity = if case.paged { 2 * pages.len() * PAGE_LENGTH } else { steps };
    let pages_on_device = bench.upload(&pages);
    let mut cache = KvCache::new(gpu, LAYERS, heads, capacity, case.dtype.into()).unwrap();
    let embedding_values = rounded(&random.normals(VOCAB * hidden), case.dtype);
    let embedding = bench.floats(&embedding_values, case.dtype);
    let last = Norm::new(&bench, random, hidden, case.layer_norm);
    let of_layers: Vec<_> = layers.iter().map(|layer| layer.step_layer(case, scale)).collect();
    let plan = PersistentPlan::of(&gpu.caps(), case.sizes, &of_layers, case.dtype).unwrap();
    let of_model = Arc::new(PersistentLayers::new(gpu, &bench.stream, plan, &of_layers).unwrap());
    let kernel = PersistentDecode::new(gpu, &bench.stream, &of_model, &cache, case.paged).unwrap();
    let mut normed = bench.floats(&vec![0.0; hidden], case.dtype);
    // Squares: of the kernel's distance from f64, and of what codes lose.
    let (mut error, mut lost, mut compared) = (0.0, 0.0, steps);
    for position in 0..steps {
        let token = random.below(VOCAB);
        let [token_on_device, position_on_device] = [token, position].map(|n| bench.upload(&[n as u32]));
        let step = StepOfText {
            behind: Some(embedding.view(0..embedding.len())),
            token: token_on_device.view(),
            position: position_on_device.view(),
            pages: case.paged.then(|| pages_on_device.view()),
            embedding: embedding.view(0..embedding.len()),
            first_token: 0,
            norm: last.of_step(),
            ropes: &ropes.iter().collect::<Vec<_>>(),
            cache: &mut cache,
            normed: normed.view_mut(0..hidden),
        };
        kernel.step(gpu, &bench.stream, step).unwrap();
        let got = bench.widened(normed.view(0..hidden));
        if case.mixture.is_some_and(|mixture| mixture.scale >= BEYOND) {
            assert!(got.iter().all(|v| v.is_nan()), "{:?} {:?}: logits are finite", case.sizes, case.mixture);
            continue;
        }
        let mut stream: Vec<f64> = embedding_values[token * hidden..][..hidden].iter().map(|&v| f64::from(v)).collect();
        let mut exact = stream.clone();
        let as_it_is = Activations::AsTheFormatHas;
        let margins = layers.iter_mut().map(|layer| layer.step(case, &frequencies, scale, as_it_is, &mut stream));
        let uncertain = if parse(case.format).act.is_quantized() { 0.1 } else { 4.0 * case.dtype.unit_roundoff() };
        if margins.fold(f64::INFINITY, f64::min) < uncertain {
            compared = position;
            break;
        }
        let want: Vec<f64> = last.apply(&stream).into_iter().map(|v| round(v, case.dtype)).collect();
        if parse(case.format).act.is_quantized() {
            // Where a number lies at the middle between two codes, or two halves, the kernel may take the other, and with it other
            // codes of later layers and steps. Its text is compared as a whole, below.
            for layer in &mut layers {
                layer.step(case, &frequencies, scale, Activations::Exact, &mut exact);
            }
            let square = |(a, b): (f64, f64)| (a - b).powi(2);
            error += got.iter().map(|&got| got.into()).zip(want.iter().copied()).map(square).sum::<f64>();
            lost += last.apply(&exact).into_iter().zip(want).map(square).sum::<f64>();
            continue;
        }
        // Where a sum of f32 lies at the middle between two halves, the kernel may round the other way, and what follows differs
        // by a unit or two: of normed numbers, whose mean square is about 1.
        let allowed = 8.0 * case.dtype.unit_roundoff();
        for (i, (&got, &want)) in got.iter().zip(&want).enumerate() {
            let error = (f64::from(got) - want).abs();
            assert!(
                error <= allowed * want.abs().max(1.0),
                "{:?} {} position {position}: element {i} is {got}, expected {want}",
                case.sizes,
                case.format
            );
        }
    }
    // What other codes give is as far from what exact activations give as these are: as errors that have nothing to do with each other,
    // twice their square apart.
    assert!(error <= 2.0 * lost, "{:?} {}: off by {error}, codes lose {lost}", case.sizes, case.format);
    compared
}

#[test]
fn steps_of_random_models_are_those_of_f64() {
    for gpu in gpus() {
        if !gpu.caps().arch.is_hopper() {
            continue;
        }
        let mut random = Random(77);
        for round in 0..32 {
            let head_size = [64, 128][random.below(2)];
            let kv_heads = 1 + random.below(4);
            let heads = Heads { heads: kv_heads * (1 + random.below(8)), kv_heads, head_size };
            // Whole steps of 128 columns for what attention gives, and more than one: a row has several groups then.
            let whole = (heads.heads * head_size).is_multiple_of(128) && heads.heads * head_size > 128;
            let heads = if whole { heads } else { Heads { heads: 4 * kv_heads, kv_heads: 2 * kv_heads, ..heads } };
            let sizes = StepSizes {
                hidden: 128 * (2 + random.below(7)),
                inner: 128 * (2 + random.below(9)),
                heads,
                pairs: head_size / [2, 4][random.below(2)],
                ropes: 1,
            };
            let formats = [
                "w4a16-g128",
                "w4a16-g64",
                "w4a16-g32-asym",
                "w2a16-g64",
                "w3a16-g32-asym",
                "w4a16",
                "w8a16-g128",
                "w8a16-g32-asym",
                "w8a16",
                "w4a8-g128-asym",
                "w4a8-g128-si8",
                "w4a8-g32-asym-si8",
                "w4a8",
                "w8a8",
            ];
            let (format, fewer) = match formats.get(round % (formats.len() + 2)) {
                Some(&format) => (format, None),
                None => ("w8a16-g32", Some([Fewer::FiveBits, Fewer::Table][round % 2])),
            };
            let case = Case {
                fewer,
                dtype: [Float::F16, Float::BF16][random.below(2)],
                beside: random.below(2) == 0,
                before: [0, 20, 150][random.below(3)],
                window: [None, Some(17)][random.below(2)],
                head_norms: random.below(2) == 0,
                biases: random.below(2) == 0,
                paged: random.below(2) == 0,
                ..Case::new(sizes, format)
            };
            println!("{round}: {sizes:?} {} {} {:?} {}", case.format, case.dtype, case.window, case.paged);
            run(&gpu, &case, &mut random);
        }
    }
}

/// Tensors of several K types, values among them in a tensor of their own.
#[test]
fn steps_of_models_in_k_types_are_those_of_f64() {
    const K_TYPES: [&[&str]; 7] = [
        &["w4a16-g32-float-sf32", "w8a16-g16-sf32"],
        &["w8a16-g32-float-sf32", "w8a16-g16-sf32"],
        &["w4a16-g32-float-sf32"],
        &["w8a16-g16-sf32"],
        &["w3a16-g16-sf32", "w4a16-g32-float-sf32"],
        &["w3a16-g16-sf32"],
        &["w3a16-g16-sf32", "w4a16-g32-float-sf32", "w8a16-g16-sf32", "w8a16-g32-float-sf32"],
    ];
    for gpu in gpus() {
        if !gpu.caps().arch.is_hopper() {
            continue;
        }
        let mut random = Random(78);
        for round in 0..14 {
            let head_size = [64, 128][random.below(2)];
            let kv_heads = 256 / head_size * (1 + random.below(2));
            let heads = Heads { heads: kv_heads * (1 + random.below(4)), kv_heads, head_size };
            let sizes = StepSizes {
                hidden: 256 * (1 + random.below(5)),
                inner: 256 * (1 + random.below(5)),
                heads,
                pairs: head_size / 2,
                ropes: 1,
            };
            let case = Case {
                k_types: K_TYPES[round % K_TYPES.len()],
                dtype: [Float::F16, Float::BF16][random.below(2)],
                beside: random.below(2) == 0,
                before: [0, 20][random.below(2)],
                biases: random.below(2) == 0,
                paged: random.below(2) == 0,
                ..Case::new(sizes, "w4a16-g32")
            };
            println!("{round}: {sizes:?} {:?} {} {}", case.k_types, case.dtype, case.paged);
            run(&gpu, &case, &mut random);
        }
    }
}

#[test]
fn steps_of_mixtures_of_experts_are_those_of_f64() {
    for gpu in gpus() {
        if !gpu.caps().arch.is_hopper() {
            continue;
        }
        let (mut random, mut compared) = (Random(79), [0; 2]);
        for round in 0..16 {
            let kv_heads = 2 * (1 + random.below(2));
            let heads = Heads { heads: kv_heads * (2 + random.below(3)), kv_heads, head_size: 64 };
            let sizes = StepSizes {
                hidden: 128 * (2 + random.below(5)),
                // A row has several groups.
                inner: 128 * (2 + random.below(3)),
                heads,
                pairs: [16, 32][random.below(2)],
                ropes: 1,
            };
            let formats = [
                "w4a16-g128",
                "w4a16-g32-asym",
                "w8a16-g128",
                "w4a16-g64",
                "w2a16-g32-asym",
                "w3a16-g128",
                "w8a16-g32-asym",
                "w4a8-g128",
                "w8a8-g128-asym",
            ];
            // More than there are multiprocessors, too.
            let experts = [2, 8, 33, 160][round % 4];
            let mixture = Mixture {
                experts,
                top_k: 1 + random.below(experts.min(8)),
                of_chosen: random.below(2) == 0,
                router: [Float::F16, Float::BF16, Float::F32][random.below(3)],
                scale: 1.0,
            };
            let case = Case {
                mixture: Some(mixture),
                dtype: [Float::F16, Float::BF16][random.below(2)],
                beside: random.below(2) == 0,
                before: [0, 8][random.below(2)],
                head_norms: random.below(2) == 0,
                paged: random.below(2) == 0,
                ..Case::new(sizes, formats[round % formats.len()])
            };
            println!("{round}: {sizes:?} {mixture:?} {} {} {}", case.format, case.dtype, case.paged);
            compared[0] += run(&gpu, &case, &mut random);
            compared[1] += case.before + 3;
        }
        assert!(2 * compared[0] >= compared[1], "{} of {} steps were compared", compared[0], compared[1]);
    }
}

/// Logits to which terms of both words give, then those of the second word alone, then those that neither holds.
#[test]
fn experts_are_chosen_by_logits_of_any_size() {
    for gpu in gpus() {
        if !gpu.caps().arch.is_hopper() {
            continue;
        }
        let (mut random, mut compared) = (Random(82), [0; 2]);
        for round in 0..12 {
            let heads = Heads { heads: 4, kv_heads: 2, head_size: 64 };
            let hidden = 128 * (2 + random.below(7));
            let sizes = StepSizes { hidden, inner: 128 * (2 + random.below(3)), heads, pairs: 32, ropes: 1 };
            // A block of rows gives terms of about 8 / √hidden times the scale, and the first word holds those below this.
            let bits = (hidden / 16).ilog2() + 1;
            let held = (31.0 - 2.0 * bits as f32).exp2();
            let scale = held * (hidden as f32).sqrt() / 8.0;
            let mixture = Mixture {
                experts: [3, 16, 40][round % 3],
                top_k: 1 + random.below(3),
                of_chosen: random.below(2) == 0,
                router: [Float::BF16, Float::F32][random.below(2)],
                scale: [scale / 4.0, scale, 256.0 * scale, BEYOND][round / 3],
            };
            let case = Case {
                mixture: Some(mixture),
                dtype: [Float::F16, Float::BF16][random.below(2)],
                before: 1,
                paged: random.below(2) == 0,
                ..Case::new(sizes, "w4a16-g128")
            };
            println!("{round}: {sizes:?} {mixture:?} {} {}", case.dtype, case.paged);
            compared[0] += run(&gpu, &case, &mut random);
            compared[1] += case.before + 3;
        }
        assert!(2 * compared[0] >= compared[1], "{} of {} steps were compared", compared[0], compared[1]);
    }
}

/// LayerNorms, scores that fall with the distance, MLPs without gates, gates by other functions: each by itself and with others.
#[test]
fn steps_of_other_layers_are_those_of_f64() {
    for gpu in gpus() {
        if !gpu.caps().arch.is_hopper() {
            continue;
        }
        let mut random = Random(80);
        for round in 0..16 {
            let kv_heads = 2 * (1 + random.below(4));
            let heads =
                Heads { heads: kv_heads * (2 + random.below(2)), kv_heads, head_size: [64, 128][random.below(2)] };
            // Norms of few columns, and of more than registers hold beside their weights.
            let hidden = [128 * (2 + random.below(5)), 6400][usize::from(round % 8 == 7)];
            let sizes =
                StepSizes { hidden, inner: 128 * (2 + random.below(6)), heads, pairs: 32 * random.below(2), ropes: 1 };
            let formats = ["w4a16-g128", "w8a16-g32-asym", "w4a8-g128", "w8a8", "w4a16", "w4a16-g64"];
            let gate = Gate {
                activation: [Activation::GeluTanh, Activation::Relu, Activation::Silu][random.below(3)],
                gated: random.below(3) == 0,
                clamp: None,
            };
            let case = Case {
                layer_norm: round % 4 != 3 || hidden == 6400,
                alibi: random.below(3) > 0,
                gate,
                dtype: [Float::F16, Float::BF16][random.below(2)],
                beside: random.below(2) == 0,
                before: [0, 20, 150][random.below(3)],
                window: [None, Some(17)][random.below(2)],
                biases: random.below(2) == 0,
                paged: random.below(2) == 0,
                ..Case::new(sizes, formats[round % formats.len()])
            };
            println!("{round}: {sizes:?} {} {} {gate:?} {:?} {}", case.format, case.dtype, case.window, case.paged);
            run(&gpu, &case, &mut random);
        }
    }
}

/// Norms of what is added to the stream, scores with caps, two kinds of rotations, heads of 256: each by itself and with others.
#[test]
fn steps_of_layers_with_norms_behind_are_those_of_f64() {
    for gpu in gpus() {
        if !gpu.caps().arch.is_hopper() {
            continue;
        }
        let mut random = Random(81);
        for round in 0..20 {
            let head_size = [256, 128, 256, 64][round % 4];
            let kv_heads = 1 + random.below(3);
            let k_types: &[&str] = if round % 8 == 7 { &["w4a16-g32-float-sf32", "w8a16-g16-sf32"] } else { &[] };
            let steps = if k_types.is_empty() { 128 } else { 256 };
            // Whole steps of columns for what attention gives, and more than one.
            let per_key = 2 * steps / head_size.min(steps) * (1 + random.below(2));
            let heads = Heads { heads: kv_heads * per_key.min(8), kv_heads, head_size };
            let formats = ["w4a16-g128", "w8a16-g32-asym", "w4a8-g128", "w8a8", "w4a16-g64", "w4a16", "w2a16-g32"];
            let sizes = StepSizes {
                // More than a thread has four words of, too.
                hidden: if round % 6 == 5 { 5376 } else { steps * (2 + random.below(6)) },
                inner: steps * (2 + random.below(8)),
                heads,
                pairs: head_size / [2, 4][random.below(2)],
                ropes: 1 + random.below(2),
            };
            let mixture = (round % 10 == 9).then(|| Mixture {
                experts: 8,
                top_k: 2,
                of_chosen: true,
                router: [Float::F16, Float::F32][random.below(2)],
                scale: 1.0,
            });
            let case = Case {
                k_types,
                mixture,
                norms_behind: round % 5 != 4,
                cap: (random.below(2) == 0).then_some(3.0),
                gate: Gate {
                    activation: Activation::GeluTanh,
                    gated: mixture.is_some() || round % 7 != 6,
                    clamp: None,
                },
                dtype: [Float::F16, Float::BF16][random.below(2)],
                beside: random.below(2) == 0,
                before: [0, 20, 150][random.below(3)],
                window: [None, Some(17)][random.below(2)],
                head_norms: random.below(2) == 0,
                biases: mixture.is_none() && random.below(2) == 0,
                paged: random.below(2) == 0,
                ..Case::new(sizes, if mixture.is_some() { "w4a16-g128" } else { formats[round % formats.len()] })
            };
            println!(
                "{round}: {sizes:?} {} {k_types:?} {} {:?} {:?} {}",
                case.format, case.dtype, case.window, case.cap, case.paged
            );
            run(&gpu, &case, &mut random);
        }
    }
}

/// A text that is divided into parts, which blocks join.
#[test]
fn long_texts_are_those_of_f64() {
    for gpu in gpus() {
        if !gpu.caps().arch.is_hopper() {
            continue;
        }
        for (paged, window, head_size) in
            [(false, None, 128), (true, None, 128), (true, Some(701), 128), (true, None, 256)]
        {
            let heads = Heads { heads: 8, kv_heads: 2, head_size };
            let sizes = StepSizes { hidden: 256, inner: 384, heads, pairs: 64, ropes: 1 };
            let case = Case { beside: paged, before: 900, window, paged, ..Case::new(sizes, "w4a16-g128") };
            run(&gpu, &case, &mut Random(5));
        }
    }
}

#[test]
fn models_that_it_does_not_take_are_refused_with_the_reason() {
    for gpu in gpus() {
        if !gpu.caps().arch.is_hopper() {
            continue;
        }
        let bench = Bench::new(&gpu);
        let sizes = StepSizes {
            hidden: 128,
            inner: 128,
            heads: Heads { heads: 2, kv_heads: 1, head_size: 64 },
            pairs: 32,
            ropes: 1,
        };
        let w = Random(1).qtensor(parse("w4a16-g32").weight, [128, 128], false);
        let packed = matmul::pack(&gpu, &bench.stream, &w, halfbyte::Act::A16, Float::F16).unwrap();
        let weight = bench.upload(&[1.0; 128]);
        let norms = [(); 2].map(|()| StreamNorm { weight: weight.view(), bias: None, eps: EPS });
        let of = |w| StepLayer {
            products: [(w, None); 2],
            mlp: StepMlp::Dense([(w, None); 2]),
            gate: Gate::SWIGLU,
            values: None,
            norms,
            norms_behind: None,
            head_norms: None,
            alibi: None,
            rope: 0,
            scale: 1.0,
            cap: None,
            window: None,
        };
        let refused = |layers: &[StepLayer<'_>]| {
            PersistentPlan::of(&gpu.caps(), sizes, layers, Float::F16).unwrap_err().to_string()
        };
        let why = refused(&[of(&packed)]);
        assert!(why.contains("a product of [256, 128]"), "{why}");
        let apart = StepLayer { values: Some((&packed, None)), ..of(&packed) };
        let why = refused(&[apart]);
        assert!(why.contains("a product of [192, 128]"), "{why}");
        assert!(PersistentPlan::of(&gpu.caps(), sizes, &[], Float::F16).is_err());
        // Experts that are no such: gates and what they let through do not take turns, and a router of fewer.
        let wide = Random(2).qtensor(parse("w4a16-g32").weight, [256, 128], false);
        let wide = matmul::pack(&gpu, &bench.stream, &wide, halfbyte::Act::A16, Float::F16).unwrap();
        let router = bench.floats(&vec![0.0; 3 * 128], Float::F16);
        let experts = |count| StepExperts {
            experts: vec![[&wide, &packed]; count],
            router: router.view(0..3 * 128),
            top_k: 2,
            of_chosen: true,
        };
        let of = |count| StepLayer {
            products: [(&wide, None), (&packed, None)],
            mlp: StepMlp::Experts(experts(count)),
            ..of(&packed)
        };
        let why = refused(&[of(3)]);
        assert!(why.contains("take turns"), "{why}");
        let why = refused(&[of(4)]);
        assert!(why.contains("a router of all experts"), "{why}");
        let why = refused(&[of(3), StepLayer { mlp: StepMlp::Dense([(&wide, None), (&packed, None)]), ..of(3) }]);
        assert!(why.contains("as many experts in all layers"), "{why}");
    }
}
