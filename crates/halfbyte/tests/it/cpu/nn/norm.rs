use super::*;

fn norm_in_f64(x: &[f64], weight: &[f32], eps: f32) -> Vec<f64> {
    let normed = x.chunks(weight.len()).flat_map(|row| {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
        row.iter().zip(weight).map(move |(x, &w)| x / (mean + f64::from(eps)).sqrt() * f64::from(w))
    });
    normed.collect()
}

#[test]
fn norms_are_within_their_bounds() {
    for (m, d) in sizes() {
        let (x, delta, weight) = (noise(1, m * d), noise(2, m * d), noise(3, d));
        let relative = (d as f64 / 8.0 + 16.0) * U;
        let expected = norm_in_f64(&wide(&x), &weight, 1e-5);
        on_every_cpu(
            |cpu| {
                let mut out = vec![7.0; m * d];
                rms_norm(cpu, &x, &weight, 1e-5, &mut out).unwrap();
                out
            },
            |isa, got| assert_close(isa, got, &expected, |i| relative * expected[i].abs()),
        );
        let sum: Vec<f32> = x.iter().zip(&delta).map(|(x, y)| x + y).collect();
        let expected = norm_in_f64(&wide(&sum), &weight, 1e-5);
        on_every_cpu(
            |cpu| {
                let (mut residual, mut added, mut out) = (x.clone(), x.clone(), vec![7.0; m * d]);
                add_rms_norm(cpu, &mut residual, &delta, &weight, 1e-5, &mut out).unwrap();
                assert_eq!(residual, sum);
                add(cpu, &mut added, &delta).unwrap();
                assert_eq!(added, sum);
                out
            },
            |isa, got| assert_close(isa, got, &expected, |i| relative * expected[i].abs()),
        );
    }
}

#[test]
fn head_norms_are_within_the_bound_and_leave_values() {
    for (heads, kv_heads, head_size) in [(1, 1, 1), (6, 2, 64), (4, 4, 20), (3, 1, 131)] {
        let heads = Heads { heads, kv_heads, head_size };
        for m in [0, 1, 3, 150] {
            let (x, weights) = (noise(13, m * heads.row()), [noise(14, head_size), noise(15, head_size)]);
            let values = (heads.heads + heads.kv_heads) * head_size;
            let expected: Vec<f64> = x
                .chunks(heads.row())
                .flat_map(|row| {
                    let [queries, keys, values] =
                        [0..heads.heads * head_size, heads.heads * head_size..values, values..row.len()]
                            .map(|range| wide(&row[range]));
                    [norm_in_f64(&queries, &weights[0], 1e-6), norm_in_f64(&keys, &weights[1], 1e-6), values].concat()
                })
                .collect();
            let relative = (head_size as f64 / 8.0 + 16.0) * U;
            let bound = |i: usize| if i % heads.row() < values { relative * expected[i].abs() } else { 0.0 };
            on_every_cpu(
                |cpu| {
                    let mut out = x.clone();
                    head_rms_norm(cpu, &mut out, heads, &weights[0], &weights[1], 1e-6).unwrap();
                    out
                },
                |isa, got| assert_close(isa, got, &expected, bound),
            );
        }
    }
}

/// Normed rows, and what each element's error is measured by.
fn layer_norm_in_f64(x: &[f32], weight: &[f32], bias: Option<&[f32]>, eps: f32) -> (Vec<f64>, Vec<f64>) {
    let d = weight.len();
    let normed = x.chunks(d).flat_map(|row| {
        let row = wide(row);
        let mean = row.iter().sum::<f64>() / d as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / d as f64;
        row.into_iter().enumerate().map(move |(i, x)| {
            let (z, weight) = ((x - mean) / (variance + f64::from(eps)).sqrt(), f64::from(weight[i]));
            let bias = bias.map_or(0.0, |bias| f64::from(bias[i]));
            (z * weight + bias, weight.abs() * (z.abs() + 1.0) + bias.abs())
        })
    });
    normed.unzip()
}

#[test]
fn layer_norms_are_within_their_bounds() {
    for (m, d) in sizes() {
        let (noise_of, delta, weight, bias) = (noise(21, m * d), noise(22, m * d), noise(23, d), noise(24, d));
        // Rows around 0, and rows far from it.
        for offset in [0.0, 100.0] {
            let x: Vec<f32> = noise_of.iter().map(|x| x + offset).collect();
            let bias = (offset == 0.0 || m % 2 == 0).then_some(&bias[..]);
            let relative = (d as f64 / 8.0 + 16.0) * U;
            let (expected, measure) = layer_norm_in_f64(&x, &weight, bias, 1e-5);
            on_every_cpu(
                |cpu| {
                    let mut out = vec![7.0; m * d];
                    layer_norm(cpu, &x, &weight, bias, 1e-5, &mut out).unwrap();
                    out
                },
                |isa, got| assert_close(isa, got, &expected, |i| relative * measure[i]),
            );
            let sum: Vec<f32> = x.iter().zip(&delta).map(|(x, y)| x + y).collect();
            let (expected, measure) = layer_norm_in_f64(&sum, &weight, bias, 1e-5);
            on_every_cpu(
                |cpu| {
                    let (mut residual, mut out) = (x.clone(), vec![7.0; m * d]);
                    add_layer_norm(cpu, &mut residual, &delta, &weight, bias, 1e-5, &mut out).unwrap();
                    assert_eq!(residual, sum);
                    out
                },
                |isa, got| assert_close(isa, got, &expected, |i| relative * measure[i]),
            );
        }
    }
}

#[test]
fn equal_elements_have_no_deviation() {
    on_every_cpu(
        |cpu| {
            let mut out = vec![7.0; 100];
            layer_norm(cpu, &[3.5; 100], &[2.0; 100], Some(&[0.25; 100]), 1e-5, &mut out).unwrap();
            out
        },
        |isa, got| assert!(got.iter().all(|&x| x == 0.25), "{isa:?}: {got:?}"),
    );
}
