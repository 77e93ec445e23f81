use super::*;

/// Ids and weights of a row by the definition.
fn routed(logits: &[f32], top_k: usize, normalise: RouteWeights) -> (Vec<u32>, Vec<f64>) {
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    // The sort is stable: of equals the lower id stays first.
    ids.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    ids.truncate(top_k);
    let exp = |logit: f32| (f64::from(logit) - f64::from(logits[ids[0] as usize])).exp();
    let chosen: Vec<f64> = ids.iter().map(|&id| exp(logits[id as usize])).collect();
    let total: f64 = match normalise {
        RouteWeights::OfAll => logits.iter().map(|&logit| exp(logit)).sum(),
        RouteWeights::OfChosen => chosen.iter().sum(),
    };
    (ids, chosen.iter().map(|e| e / total).collect())
}

#[test]
fn experts_are_those_of_the_definition() {
    for (m, experts) in [(0, 4), (1, 1), (3, 8), (17, 60), (2, 128), (900, 64)] {
        for (seed, scale, step) in [(41, 1.0, 0.0), (42, 20.0, 0.0), (43, 2.0, 0.5)] {
            // With a step there are many equals.
            let quantised = |x: f32| if step > 0.0 { (x / step).round() * step + 0.0 } else { x };
            let logits: Vec<f32> = noise(seed, m * experts).iter().map(|x| quantised(x * scale)).collect();
            for top_k in [1, 2, 6, experts].into_iter().filter(|&k| k <= experts) {
                for normalise in [RouteWeights::OfAll, RouteWeights::OfChosen] {
                    on_every_cpu(
                        |cpu| {
                            let (mut ids, mut weights) = (vec![u32::MAX; m * top_k], vec![7.0; m * top_k]);
                            route(cpu, &logits, experts, top_k, normalise, &mut ids, &mut weights).unwrap();
                            for (i, row) in logits.chunks(experts).enumerate() {
                                let (want, shares) = routed(row, top_k, normalise);
                                assert_eq!(ids[i * top_k..][..top_k], want, "row {i}: {row:?}");
                                for (&got, want) in weights[i * top_k..][..top_k].iter().zip(shares) {
                                    assert!((f64::from(got) - want).abs() <= 2.0 * U * want, "{got}, expected {want}");
                                }
                            }
                            weights
                        },
                        |_, _| {},
                    );
                }
            }
        }
    }
}

#[test]
fn zeros_of_both_signs_are_equals() {
    let (cpu, mut ids, mut weights) = (Cpu::new(1).unwrap(), [9; 2], [7.0; 2]);
    route(&cpu, &[-1.0, -0.0, 0.0, -0.0], 4, 2, RouteWeights::OfChosen, &mut ids, &mut weights).unwrap();
    assert_eq!((ids, weights), ([1, 2], [0.5, 0.5]));
}

#[test]
fn bad_routes_are_refused() {
    let cpu = Cpu::new(1).unwrap();
    let run = |logits: &[f32], experts, top_k, [ids, weights]: [usize; 2]| {
        route(&cpu, logits, experts, top_k, RouteWeights::OfAll, &mut vec![0; ids], &mut vec![0.0; weights])
    };
    run(&[0.0; 8], 4, 2, [4, 4]).unwrap();
    for (logits, experts, top_k, lens) in [
        (7, 4, 2, [4, 4]),
        (8, 0, 2, [4, 4]),
        (8, 4, 0, [0, 0]),
        (8, 4, 5, [10, 10]),
        (8, 4, 2, [3, 4]),
        (8, 4, 2, [4, 5]),
    ] {
        let error = run(&vec![0.0; logits], experts, top_k, lens).unwrap_err();
        assert!(matches!(error, Error::Invalid { op: "route", .. }), "{error}");
    }
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error = run(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, bad, 7.0], 4, 2, [4, 4]).unwrap_err();
        assert!(matches!(error, Error::NotFinite { op: "route", row: 1, column: 2, .. }), "{error}");
    }
}
