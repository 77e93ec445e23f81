//! What a mixture of experts does beside its products.

use super::{Bench, TYPES, bits, close, single, whole};
use crate::cuda::{gpus, half_of};
use crate::data::{Random, parse, rounded, with_zeros_in_bytes};
use crate::layout::types_of_files::Fewer;
use halfbyte::cuda::driver::Buffer;
use halfbyte::cuda::matmul::{Packed, Packer};
use halfbyte::cuda::nn::{self, ChosenRows, ExpertsGemv, Gate};
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

/// The product of a row of weights and x, and how far it may be off: sums in f32 in some order, of products that are exact, and of x that
/// are off themselves.
fn product(w: &[f64], x: &[(f64, f64)], bias: f64) -> (f64, f64) {
    let terms = w.iter().zip(x).map(|(w, (x, off))| (w * x, w.abs() * off));
    let (sum, most, off) = terms.fold((0.0, 0.0, 0.0), |(a, b, c), (term, off)| (a + term, b + term.abs(), c + off));
    let sum = sum + bias;
    (sum, off + (w.len() as f64 / 16.0 + 32.0) * 2f64.powi(-24) * (most + off + sum.abs()))
}

/// Rows of gates and of what they let through, as they are packed.
/// Of gates and others eight in turn.
pub(in super::super) fn interleaved([gate, up]: &[Vec<f32>; 2]) -> Vec<f32> {
    gate.chunks(8).zip(up.chunks(8)).flat_map(|(a, b)| [a, b].concat()).collect()
}

#[test]
fn rows_go_through_the_experts_that_they_chose() {
    for gpu in gpus().into_iter().filter(|gpu| gpu.caps().arch.multiplies(Float::F16)) {
        let (bench, mut random) = (Bench::new(&gpu), Random(33));
        let formats = [
            "w4a16-g128",
            "w4a16-g32-asym",
            "w8a16-g64",
            "w8a16-g128-asym",
            "w4a16-g64",
            "w2a16-g64",
            "w3a16-g128-asym",
        ];
        for case in 0..36 {
            let (name, fewer) = match formats.get(case % (formats.len() + 2)) {
                Some(&name) => (name, None),
                None => ("w8a16-g32", Some([Fewer::FiveBits, Fewer::Table][case % 2])),
            };
            let (format, dtype) = (parse(name), half_of(&gpu, [Float::F16, Float::BF16][case / 9 % 2]));
            let group = format.weight.group.len(128).max(8);
            let [hidden, width] = [(); 2].map(|()| group * (2 + random.below([4, 20][case % 2] * 128 / group)));
            let (count, rows) = (1 + random.below(6), 1 + random.below([4, 17][case / 2 % 2]));
            let top_k = 1 + random.below(count.min(4));
            let weight = halfbyte::WeightFormat { scale: dtype, ..format.weight };
            let mut draw = |shape| {
                let w = with_zeros_in_bytes(random.qtensor(weight, shape, false));
                fewer.map_or(w.clone(), |fewer| fewer.of(&w))
            };
            let stored = |w: &QTensor| fewer.map_or_else(|| w.clone().into(), |fewer| fewer.stored(w));
            let experts: Vec<[QTensor; 3]> =
                (0..count).map(|_| [draw([width, hidden]), draw([width, hidden]), draw([hidden, width])]).collect();
            let mut packer = Packer::new(&gpu, &bench.stream);
            let packed: Vec<[Packed; 2]> = experts
                .iter()
                .map(|[gate, up, down]| {
                    let of_up = packer.pack_gated([&stored(gate), &stored(up)], format.act, Gate::SWIGLU).unwrap();
                    [of_up, packer.pack(&[&stored(down)], format.act, dtype).unwrap()]
                })
                .collect();
            let with = case % 3 > 0;
            let mut normals = |len| if with { random.normals(len) } else { vec![0.0; len] };
            let biases: Vec<([Vec<f32>; 2], Vec<f32>)> =
                (0..count).map(|_| ([normals(width), normals(width)], normals(hidden))).collect();
            let of_biases: Vec<[Buffer<f32>; 2]> =
                biases.iter().map(|(up, down)| [bench.upload(&interleaved(up)), bench.upload(down)]).collect();
            let [up, down] = [0, 1].map(|i| {
                let all = packed.iter().zip(&of_biases);
                all.map(|(w, bias)| (&w[i], with.then(|| bias[i].view()))).collect::<Vec<_>>()
            });
            let kernel = ExpertsGemv::new(&gpu, &bench.stream, [&up, &down], top_k, dtype);
            let kernel = kernel.unwrap().unwrap();
            // Not the same expert twice for a row.
            let mut choose = || {
                let first = random.below(count);
                (0..top_k).map(|i| ((first + i) % count) as u32).collect::<Vec<_>>()
            };
            let ids: Vec<u32> = (0..rows).flat_map(|_| choose()).collect();
            let (x, shares) = (rounded(&random.normals(rows * hidden), dtype), random.normals(rows * top_k));
            let (of_ids, of_x, of_shares) = (bench.upload(&ids), bench.floats(&x, dtype), bench.upload(&shares));
            let mut inner = bench.floats(&vec![0.0; kernel.inner(rows)], dtype);
            let mut counters = bench.upload(&vec![0u32; ExpertsGemv::counters(rows)]);
            let mut run = |of: std::ops::Range<usize>| {
                let chosen = of.start * top_k..of.end * top_k;
                bench.output(Float::F32, of.len() * hidden, &mut |out| {
                    let rows = ChosenRows {
                        x: of_x.view(of.start * hidden..of.end * hidden),
                        ids: of_ids.view().slice(chosen.clone()),
                        shares: of_shares.view().slice(chosen.clone()),
                    };
                    let counters = counters.view_mut().slice(0..ExpertsGemv::counters(of.len()));
                    let between = (inner.view_mut(0..kernel.inner(of.len())), counters);
                    kernel.forward(&gpu, &bench.stream, rows, between, single(out)).unwrap();
                })
            };
            let got = run(0..rows);
            let dense: Vec<[Vec<f64>; 3]> = experts.iter().map(|of| of.each_ref().map(dequantize)).collect();
            let what = format!("{}, {width} × {hidden}, {rows} rows of {count}", name);
            for row in 0..rows {
                let exact: Vec<(f64, f64)> = x[row * hidden..][..hidden].iter().map(|&x| (x.into(), 0.0)).collect();
                let mut want = vec![(0.0, 0.0); hidden];
                for choice in row * top_k..(row + 1) * top_k {
                    let (id, share) = (ids[choice] as usize, f64::from(shares[choice]));
                    let ([gate_bias, up_bias], down_bias) = &biases[id];
                    let between: Vec<(f64, f64)> = (0..width)
                        .map(|i| {
                            let of = |which: usize, bias: &[f32]| {
                                product(&dense[id][which][i * hidden..][..hidden], &exact, bias[i].into())
                            };
                            let ((gate, off), (up, up_off)) = (of(0, gate_bias), of(1, up_bias));
                            let silu = gate / (1.0 + (-gate).exp());
                            // No derivative is above 1.2.
                            let off =
                                1.2 * off * (up.abs() + up_off) + silu.abs() * (up_off + 2f64.powi(-20) * up.abs());
                            (silu * up, off + dtype.unit_roundoff() * ((silu * up).abs() + off) + 2f64.powi(-25))
                        })
                        .collect();
                    for (i, want) in want.iter_mut().enumerate() {
                        let (sum, off) = product(&dense[id][2][i * width..][..width], &between, down_bias[i].into());
                        *want = (want.0 + share * sum, want.1 + share.abs() * (off + 2f64.powi(-22) * sum.abs()));
                    }
                }
                for (i, (want, off)) in want.into_iter().enumerate() {
                    close(&[got[row * hidden + i]], &[want], Float::F32, 1.1 * off, 0.0, &what);
                }
            }
            // A row alone has the same bits.
            assert_eq!(bits(&run(rows - 1..rows)), bits(&got[(rows - 1) * hidden..]));
        }
    }
}

#[test]
fn experts_of_other_shapes_and_forms_are_refused() {
    for gpu in gpus().into_iter().filter(|gpu| gpu.caps().arch.multiplies(Float::F16)) {
        let (bench, mut random) = (Bench::new(&gpu), Random(34));
        let mut draw = |name: &str, shape, dtype: Float| {
            let format = parse(name);
            (random.qtensor(halfbyte::WeightFormat { scale: dtype, ..format.weight }, shape, false), format.act)
        };
        let mut pair = |name: &str, [width, hidden]: [usize; 2]| {
            let [(gate, act), (up, _)] = [(); 2].map(|()| draw(name, [width, hidden], Float::F16));
            let (down, _) = draw(name, [hidden, width], Float::F16);
            let mut packer = Packer::new(&gpu, &bench.stream);
            let of_up = packer.pack_gated([&(&gate).into(), &(&up).into()], act, Gate::SWIGLU).unwrap();
            [of_up, packer.pack(&[&(&down).into()], act, Float::F16).unwrap()]
        };
        let one = pair("w4a16-g128", [256, 512]);
        let others = [pair("w4a16-g128", [512, 512]), pair("w4a16-g64", [256, 512]), pair("w8a16-g128", [256, 512])];
        let new = |all: &[&[Packed; 2]], top_k, dtype| {
            let [up, down] = [0, 1].map(|i| all.iter().map(|of| (&of[i], None)).collect::<Vec<_>>());
            ExpertsGemv::new(&gpu, &bench.stream, [&up, &down], top_k, dtype).unwrap()
        };
        assert!(new(&[&one], 1, Float::F16).is_ok() && new(&[&one, &one], 2, Float::F16).is_ok());
        assert!(new(&[&one], 1, Float::BF16).is_err() && new(&[&one], 1, Float::F32).is_err());
        assert!(new(&[], 1, Float::F16).is_err() && new(&[&one], 0, Float::F16).is_err());
        assert!(new(&[&one], 2, Float::F16).is_err() && new(&[&one; 20], 17, Float::F16).is_err());
        for other in &others {
            assert!(new(&[&one, other], 1, Float::F16).is_err());
        }
        assert!(new(&[&pair("w8a16", [256, 512])], 1, Float::F16).is_err());
        let swapped = (&one[1], None);
        let all = [&[swapped][..], &[swapped][..]];
        assert!(ExpertsGemv::new(&gpu, &bench.stream, all, 1, Float::F16).unwrap().is_err());
    }
}
