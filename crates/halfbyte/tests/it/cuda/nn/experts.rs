//! What a mixture of experts does beside its products.

use super::{Bench, TYPES, bits, close, single, whole};
use crate::cuda::gpus;
use crate::data::{Random, parse, rounded, with_zeros_in_bytes};
use halfbyte::cuda::driver::Buffer;
use halfbyte::cuda::matmul::{self, Packed, Packer};
use halfbyte::cuda::nn::{self, Choices, ExpertWeights, Gate};
use halfbyte::format::reference::dequantize;
use halfbyte::{Float, QTensor};

/// The choice and the shares of a row, in f64.
fn routed(logits: &[f32], top_k: usize, of_chosen: bool) -> (Vec<u32>, Vec<f64>) {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
    order.truncate(top_k);
    let weight = |logit: f32| f64::from(logit).exp();
    let chosen: Vec<f64> = order.iter().map(|&id| weight(logits[id as usize])).collect();
    let total: f64 = if of_chosen { chosen.iter().sum() } else { logits.iter().map(|&l| weight(l)).sum() };
    (order, chosen.iter().map(|w| w / total).collect())
}

#[test]
fn experts_are_those_with_the_greatest_logits() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(31));
        for (i, [m, experts, top_k]) in
            [[1, 1, 1], [1, 8, 2], [9, 8, 8], [70, 128, 8], [3, 33, 5], [5, 1000, 40]].into_iter().enumerate()
        {
            let mut logits: Vec<f32> = random.normals(m * experts).iter().map(|v| 4.0 * v).collect();
            // Equals, some of them greatest.
            if experts > 7 {
                (logits[3], logits[6], logits[2]) = (9.5, 9.5, 9.5);
            }
            let on_device = bench.upload(&logits);
            let mut ids = bench.upload(&vec![7u32; m * top_k]);
            let of_chosen = i % 2 == 0;
            let shares = bench.output(Float::F32, m * top_k, &mut |out| {
                let (logits, ids) = (on_device.view(), ids.view_mut());
                nn::route(&gpu, &bench.stream, logits, [experts, top_k], of_chosen, ids, single(out)).unwrap();
            });
            let ids = bench.read(ids.view());
            for (row, logits) in logits.chunks_exact(experts).enumerate() {
                let (want, of_want) = routed(logits, top_k, of_chosen);
                assert_eq!(ids[row * top_k..][..top_k], want, "row {row} of {m} × {experts}");
                let bound = (experts as f64 / 32.0 + 16.0) * 2f64.powi(-23);
                close(&shares[row * top_k..][..top_k], &of_want, Float::F32, 0.0, bound, "shares");
            }
        }
        // A logit that is not finite is its row's alone, and experts are such as there are.
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut logits = random.normals(3 * 40);
            logits[40 + 17] = odd;
            let on_device = bench.upload(&logits);
            let mut ids = bench.upload(&[99u32; 12]);
            let shares = bench.output(Float::F32, 12, &mut |out| {
                let ids = ids.view_mut();
                nn::route(&gpu, &bench.stream, on_device.view(), [40, 4], true, ids, single(out)).unwrap();
            });
            assert!(bench.read(ids.view()).iter().all(|&id| id < 40));
            assert!(shares.iter().enumerate().all(|(i, share)| share.is_nan() == (4..8).contains(&i)), "{shares:?}");
        }
        let (logits, mut ids) = (bench.upload(&[0.0; 8]), bench.upload(&[0u32; 9]));
        let mut shares = bench.upload(&[0.0; 9]);
        for [experts, top_k] in [[8, 0], [8, 9], [3, 1]] {
            let (ids, shares) = (ids.view_mut().slice(0..top_k), shares.view_mut().slice(0..top_k));
            assert!(nn::route(&gpu, &bench.stream, logits.view(), [experts, top_k], true, ids, shares).is_err());
        }
    }
}

#[test]
fn what_rounding_takes_off_is_what_is_left() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(35));
        for (len, dtype) in [(1, Float::F16), (1000, Float::BF16), (70_001, Float::F16)] {
            let x = random.activations(len);
            let on_device = bench.upload(&x);
            let got = bench.output(dtype, len, &mut |out| {
                nn::rounding_error(&gpu, &bench.stream, on_device.view(), out).unwrap();
            });
            let want: Vec<f32> = x.iter().map(|&v| dtype.round(v - dtype.round(v))).collect();
            assert_eq!(bits(&got), bits(&want));
        }
        let (x, mut out) = (bench.upload(&[1.0; 2]), bench.upload(&[0.0; 2]));
        assert!(nn::rounding_error(&gpu, &bench.stream, x.view(), out.view_mut().into()).is_err());
    }
}

#[test]
fn rows_are_gathered_and_what_experts_leave_is_added_up() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(32));
        for (i, [m, top_k, width]) in [[1, 1, 1], [5, 2, 37], [64, 8, 256], [3, 4, 1000]].into_iter().enumerate() {
            let (dtype, chosen) = (TYPES[i % 3], m * top_k);
            let from = rounded(&random.normals(m * width), dtype);
            let rows: Vec<u32> = (0..chosen).map(|_| random.below(m) as u32).collect();
            let (on_device, of_rows) = (bench.floats(&from, dtype), bench.upload(&rows));
            let got = bench.output(dtype, chosen * width, &mut |out| {
                nn::gather(&gpu, &bench.stream, whole(&on_device), width, of_rows.view(), out).unwrap();
            });
            let want: Vec<f32> = rows.iter().flat_map(|&r| from[r as usize * width..][..width].to_vec()).collect();
            assert_eq!(bits(&got), bits(&want));

            let (left, shares) = (random.normals(chosen * width), random.normals(chosen));
            let mut places: Vec<u32> = (0..chosen as u32).collect();
            places.reverse();
            let [of_left, of_shares] = [&left, &shares].map(|values| bench.upload(values));
            let of_places = bench.upload(&places);
            let got = bench.output(Float::F32, m * width, &mut |out| {
                let by = (of_places.view(), of_shares.view());
                nn::combine_experts(&gpu, &bench.stream, of_left.view(), width, by, single(out)).unwrap();
            });
            for (at, &got) in got.iter().enumerate() {
                let (row, column) = (at / width, at % width);
                let terms = (row * top_k..(row + 1) * top_k)
                    .map(|k| f64::from(shares[k]) * f64::from(left[places[k] as usize * width + column]));
                let (want, most) = terms.fold((0.0, 0.0), |(sum, most), term| (sum + term, most + term.abs()));
                let bound = top_k as f64 * 2f64.powi(-24) * most;
                close(&[got], &[want], Float::F32, bound, 0.0, "combined");
            }
        }
    }
}

/// Sums in f32 in some order, of products that are exact.
fn bound(k: usize, most: f64) -> f64 {
    (k as f64 / 16.0 + 32.0) * 2f64.powi(-24) * most
}

#[test]
fn rows_are_multiplied_by_the_experts_that_they_chose() {
    for gpu in gpus().into_iter().filter(|gpu| gpu.caps().arch.number >= 80) {
        let (bench, mut random) = (Bench::new(&gpu), Random(33));
        let formats = ["w4a16-g128", "w4a16-g32-asym", "w8a16-g64", "w8a16-g128-asym", "w4a16-g64"];
        for case in 0..30 {
            let (format, dtype) = (parse(formats[case % 5]), [Float::F16, Float::BF16][case / 5 % 2]);
            let (n, k) = (8 * (1 + random.below(90)), 128 * (1 + random.below(20)) - [0, 32, 64][case % 3] % 128);
            let k = if case % 4 == 0 { 4096 } else { k.next_multiple_of(format.weight.group.len(k).max(1)) };
            let (count, top_k, rows) = (1 + random.below(6), 1 + random.below(4), 1 + random.below(4));
            let mut weight = format.weight;
            weight.scale = dtype;
            let mut draw = || with_zeros_in_bytes(random.qtensor(weight, [n, k], false));
            let experts: Vec<[QTensor; 2]> = (0..count).map(|_| [draw(), draw()]).collect();
            let gated = case % 2 == 1;
            let mut packer = Packer::new(&gpu, &bench.stream);
            let packed: Vec<Packed> = experts
                .iter()
                .map(|[gate, up]| match gated {
                    true => packer.pack_gated(&gate.into(), &up.into(), format.act).unwrap(),
                    false => packer.pack(&[&gate.into()], format.act, dtype).unwrap(),
                })
                .collect();
            let biases: Vec<[Vec<f32>; 2]> = (0..count).map(|_| [(); 2].map(|()| random.normals(n))).collect();
            let of_biases: Vec<Buffer<f32>> = biases
                .iter()
                .map(|[gate, up]| match gated {
                    true => bench.upload(
                        &gate.chunks(8).zip(up.chunks(8)).flat_map(|(a, b)| [a, b].concat()).collect::<Vec<_>>(),
                    ),
                    false => bench.upload(gate),
                })
                .collect();
            let with = case % 3 > 0;
            let all: Vec<_> = packed.iter().zip(&of_biases).map(|(w, bias)| (w, with.then(|| bias.view()))).collect();
            let gate = gated.then_some(Gate::SWIGLU);
            let weights = ExpertWeights::new(&gpu, &bench.stream, &all, gate, dtype).unwrap().unwrap();
            let ids: Vec<u32> = (0..rows * top_k).map(|_| random.below(count) as u32).collect();
            let rows_of_x = if gated { rows } else { rows * top_k };
            let (x, shares) = (rounded(&random.normals(rows_of_x * k), dtype), random.normals(rows * top_k));
            let (of_ids, of_x, of_shares) = (bench.upload(&ids), bench.floats(&x, dtype), bench.upload(&shares));
            let run = |rows: std::ops::Range<usize>| {
                let each = if gated { 1 } else { top_k };
                let chosen = rows.start * top_k..rows.end * top_k;
                let choices = Choices { ids: of_ids.view().slice(chosen.clone()), top_k };
                let x = of_x.view(rows.start * each * k..rows.end * each * k);
                let stream = &bench.stream;
                if gated {
                    return bench.output(dtype, chosen.len() * n, &mut |out| {
                        weights.gated(&gpu, stream, choices, x, out).unwrap();
                    });
                }
                bench.output(Float::F32, rows.len() * n, &mut |out| {
                    let by = (choices, of_shares.view().slice(chosen.clone()));
                    weights.combined(&gpu, stream, by, x, single(out)).unwrap();
                })
            };
            let got = run(0..rows);
            let dense: Vec<[Vec<f64>; 2]> = experts.iter().map(|pair| pair.each_ref().map(dequantize)).collect();
            // A product of a choice, and how far it may be off.
            let product = |choice: usize, which: usize, output: usize| {
                let (id, row) = (ids[choice] as usize, if gated { choice / top_k } else { choice });
                let terms = dense[id][which][output * k..][..k].iter().zip(&x[row * k..][..k]);
                let terms = terms.map(|(w, &x)| w * f64::from(x));
                let (sum, most) = terms.fold((0.0, 0.0), |(sum, most), term| (sum + term, most + term.abs()));
                let sum = sum + if with { f64::from(biases[id][which][output]) } else { 0.0 };
                (sum, bound(k, most + sum.abs()))
            };
            let what = format!("{}, {n} × {k}, {rows} rows of {count}", formats[case % 5]);
            for row in 0..rows {
                let choices = row * top_k..(row + 1) * top_k;
                for output in 0..n {
                    if gated {
                        for choice in choices.clone() {
                            let [(gate, off), (up, up_off)] = [0, 1].map(|which| product(choice, which, output));
                            let silu = gate / (1.0 + (-gate).exp());
                            let bound =
                                1.2 * off * (up.abs() + up_off) + silu.abs() * (up_off + 2f64.powi(-20) * up.abs());
                            close(&[got[choice * n + output]], &[silu * up], dtype, bound, 0.0, &what);
                        }
                        continue;
                    }
                    let of_row = choices.clone().map(|choice| {
                        let ((sum, off), share) = (product(choice, 0, output), f64::from(shares[choice]));
                        (share * sum, share.abs() * (off + 2f64.powi(-22) * sum.abs()))
                    });
                    let (want, off) = of_row.fold((0.0, 0.0), |(a, b), (c, d)| (a + c, b + d));
                    close(&[got[row * n + output]], &[want], Float::F32, 2.0 * off, 0.0, &what);
                }
            }
            // A row alone has the same bits.
            let of_last = got.len() / rows * (rows - 1);
            assert_eq!(bits(&run(rows - 1..rows)), bits(&got[of_last..]));
        }
    }
}

#[test]
fn experts_of_other_shapes_and_forms_are_refused() {
    for gpu in gpus().into_iter().filter(|gpu| gpu.caps().arch.number >= 80) {
        let (bench, mut random) = (Bench::new(&gpu), Random(34));
        let mut pack = |name: &str, shape, dtype: Float| {
            let format = parse(name);
            let weight = halfbyte::WeightFormat { scale: dtype, ..format.weight };
            matmul::pack(&gpu, &bench.stream, &random.qtensor(weight, shape, false), format.act, dtype).unwrap()
        };
        let one = pack("w4a16-g128", [64, 256], Float::F16);
        let others = [
            pack("w4a16-g128", [128, 256], Float::F16),
            pack("w4a16-g64", [64, 256], Float::F16),
            pack("w8a16", [64, 256], Float::F16),
            pack("w3a16-g32", [64, 256], Float::F16),
        ];
        let new =
            |all: &[(&Packed, Option<_>)], dtype| ExpertWeights::new(&gpu, &bench.stream, all, None, dtype).unwrap();
        assert!(new(&[(&one, None)], Float::F16).is_ok());
        assert!(new(&[(&one, None)], Float::BF16).is_err() && new(&[(&one, None)], Float::F32).is_err());
        assert!(new(&[], Float::F16).is_err());
        for other in &others {
            assert!(new(&[(&one, None), (other, None)], Float::F16).is_err());
        }
        assert!(new(&[(&others[2], None)], Float::F16).is_err() && new(&[(&others[3], None)], Float::F16).is_err());
    }
}
