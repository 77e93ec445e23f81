//! What a mixture of experts does beside its products.

use super::{Bench, TYPES, bits, close, single, whole};
use crate::cuda::gpus;
use crate::data::{Random, rounded};
use halfbyte::Float;
use halfbyte::cuda::nn;

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
