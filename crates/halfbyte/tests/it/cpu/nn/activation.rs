use super::*;
use halfbyte::kernel::CAPS;

#[test]
fn swiglu_is_within_its_bound() {
    for (m, inner) in sizes() {
        let mut gate_up = noise(4, m * 2 * inner);
        for (i, x) in gate_up.iter_mut().enumerate() {
            *x *= [1.0, 10.0, 86.9, 1e-4, 1e4][i % 5];
        }
        for row in gate_up.chunks_mut(2 * inner) {
            row[..inner].iter_mut().for_each(|gate| *gate = gate.max(-87.0));
        }
        let expected: Vec<f64> = gate_up
            .chunks(2 * inner)
            .flat_map(|row| (0..inner).map(|i| (f64::from(row[i]), f64::from(row[inner + i]))))
            .map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up)
            .collect();
        on_every_cpu(
            |cpu| {
                let mut out = vec![7.0; m * inner];
                swiglu(cpu, &gate_up, inner, &mut out).unwrap();
                out
            },
            |isa, got| assert_close(isa, got, &expected, |i| expected[i].abs() * 8.0 * U + 1e-36),
        );
    }
}

#[test]
fn swiglu_at_the_ends() {
    let gates = [-88.0, -90.0, -1e4, f32::MIN, 0.0, 1e4, f32::MAX, f32::INFINITY, f32::NAN];
    let gate_up: Vec<f32> = gates.iter().copied().chain([1.0; 9]).collect();
    on_every_cpu(
        |cpu| {
            let mut out = vec![7.0; 9];
            swiglu(cpu, &gate_up, 9, &mut out).unwrap();
            out
        },
        |isa, got| {
            assert!(got[..4].iter().all(|x| x.abs() < 1e-35), "{isa:?}: {got:?}");
            assert_eq!(got[4..8], [0.0, 1e4, f32::MAX, f32::INFINITY], "{isa:?}");
            assert!(got[8].is_nan(), "{isa:?}: {got:?}");
        },
    );
}

/// Gates over the range of both, dense around 0, and their number is no multiple of a vector.
fn gates() -> Vec<f32> {
    let wide = (0..8_001).map(|i| (i as f32 - 4_000.0) / 300.0);
    wide.chain((0..101).map(|i| (i as f32 - 50.0) * 1e-4)).chain([1e-30, -1e-30, 1e4, 1e20]).collect()
}

/// `x·Φ(x)` and its relative bound.
fn gelu_in_f64(x: f32) -> (f64, f64) {
    let x = f64::from(x);
    (x * 0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2), (16.0 + x.min(0.0).powi(2)) * U)
}

/// The approximation by the hyperbolic tangent, and its relative bound.
fn gelu_tanh_in_f64(x: f32) -> (f64, f64) {
    let x = f64::from(x);
    let a = (8.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
    (x / (1.0 + (-a).exp()), (16.0 + 6.0 * a.min(0.0).abs()) * U)
}

type Plain = fn(&Cpu, &mut [f32]);
type Exact = fn(f32) -> (f64, f64);
type Gated = fn(&Cpu, &[f32], usize, &mut [f32]) -> Result<()>;

#[test]
fn gelus_are_within_their_bounds_plain_and_gated() {
    let forms: [(Plain, Gated, Exact, f32); 2] =
        [(gelu, geglu, gelu_in_f64, -13.0), (gelu_tanh, geglu_tanh, gelu_tanh_in_f64, -10.0)];
    for (plain, gated, expected, end) in forms {
        let x = gates();
        let want: Vec<(f64, f64)> = x.iter().map(|&x| expected(x)).collect();
        on_every_cpu(
            |cpu| {
                let mut out = x.clone();
                plain(cpu, &mut out);
                out
            },
            |isa, got| {
                for ((&x, &got), &(want, bound)) in x.iter().zip(got).zip(&want) {
                    let error = (f64::from(got) - want).abs();
                    let allowed = if x > end { bound * want.abs() + 1e-44 } else { 1e-35 };
                    assert!(
                        error <= allowed,
                        "{isa:?}, {x}: {got:e}, expected {want:e}, off by {error:e} > {allowed:e}"
                    );
                }
            },
        );
        let inner = x.len() / 3;
        let (rows, up) = (x.chunks_exact(inner), noise(31, inner));
        let gate_up: Vec<f32> = rows.clone().flat_map(|gate| [gate, &up].concat()).collect();
        on_every_cpu(
            |cpu| {
                let mut out = vec![7.0; gate_up.len() / 2];
                gated(cpu, &gate_up, inner, &mut out).unwrap();
                out
            },
            |isa, got| {
                for (i, &got) in got.iter().enumerate() {
                    let (up, (gelu, bound)) = (f64::from(up[i % inner]), want[i]);
                    let (error, want) = ((f64::from(got) - gelu * up).abs(), (gelu * up).abs());
                    let allowed = if x[i] > end { (bound + U) * want * (1.0 + U) + 1e-44 } else { 1e-35 };
                    assert!(error <= allowed, "{isa:?}, {}: {got:e}, off by {error:e} > {allowed:e}", x[i]);
                }
            },
        );
    }
}

#[test]
fn gelus_at_the_ends() {
    let x = [0.0, f32::MAX, f32::INFINITY, -1e4, f32::MIN, f32::NAN, f32::NEG_INFINITY];
    for plain in [gelu as Plain, gelu_tanh] {
        on_every_cpu(
            |cpu| {
                let mut out = x.to_vec();
                plain(cpu, &mut out);
                // NaN has many bits.
                out.iter_mut().filter(|x| x.is_nan()).for_each(|x| *x = f32::NAN);
                out
            },
            |isa, got| {
                assert_eq!(got[..5], [0.0, f32::MAX, f32::INFINITY, 0.0, 0.0], "{isa:?}");
                assert!(got[5..].iter().all(|x| x.is_nan()), "{isa:?}: {got:?}");
            },
        );
    }
}

/// `gate · σ(alpha · gate) · (up + 1)` of a gate and up within a limit.
fn clamped_in_f64(gate: f32, up: f32, alpha: f64, limit: f64) -> f64 {
    let (gate, up) = (f64::from(gate).min(limit), f64::from(up).clamp(-limit, limit));
    gate / (1.0 + (-alpha * gate).exp()) * (up + 1.0)
}

#[test]
fn clamped_gates_are_within_their_bound_and_keep_nan() {
    let (alpha, limit, inner) = (1.702f32, 7.0f32, 37);
    let gate_up: Vec<f32> = noise(41, 4 * 2 * inner).iter().map(|x| x * 15.0).collect();
    on_every_cpu(
        |cpu| {
            let mut out = vec![7.0; gate_up.len() / 2];
            clamped_swiglu(cpu, &gate_up, inner, (alpha, limit), &mut out).unwrap();
            out
        },
        |isa, got| {
            for (i, &got) in got.iter().enumerate() {
                let row = &gate_up[i / inner * 2 * inner..];
                let (gate, up) = (row[i % inner], row[i % inner + inner]);
                let want = clamped_in_f64(gate, up, alpha.into(), limit.into());
                // Where up is near −1, what rounding leaves of the sum.
                let bound = 8.0 * U * want.abs() + 2.0 * U * f64::from(gate.abs()) + 1e-35;
                assert!((f64::from(got) - want).abs() <= bound, "{isa:?}, {gate}, {up}: {got}, expected {want}");
            }
        },
    );
    let mut odd = vec![0.5; 2 * inner];
    (odd[3], odd[inner + 5]) = (f32::NAN, f32::NAN);
    on_every_cpu(
        |cpu| {
            let mut out = vec![7.0; inner];
            clamped_swiglu(cpu, &odd, inner, (alpha, limit), &mut out).unwrap();
            out.iter().map(|v| f32::from(v.is_nan())).collect()
        },
        |isa, nan| assert!(nan.iter().enumerate().all(|(i, &nan)| (nan == 1.0) == (i == 3 || i == 5)), "{isa:?}"),
    );
}

#[test]
fn gates_without_rows_are_of_any_size() {
    let cpu = Cpu::new(1).unwrap();
    for inner in [1, 1 << 63, usize::MAX] {
        swiglu(&cpu, &[], inner, &mut []).unwrap();
        geglu(&cpu, &[], inner, &mut []).unwrap();
        geglu_tanh(&cpu, &[], inner, &mut []).unwrap();
        clamped_swiglu(&cpu, &[], inner, (1.7, 7.0), &mut []).unwrap();
        softmax_in_place(&cpu, &mut [], inner).unwrap();
    }
}

#[test]
fn soft_caps_are_within_their_bound() {
    for limit in [0.5f32, 30.0, 50.0, 1e30, *CAPS.end(), *CAPS.start()] {
        let x: Vec<f32> = gates().into_iter().chain([f32::INFINITY, f32::NEG_INFINITY]).collect();
        on_every_cpu(
            |cpu| {
                let mut out = x.clone();
                soft_cap(cpu, &mut out, limit).unwrap();
                out
            },
            |isa, got| {
                for (&x, &got) in x.iter().zip(got) {
                    let want = f64::from(limit) * (f64::from(x) / f64::from(limit)).tanh();
                    let error = (f64::from(got) - want).abs();
                    let least = f64::from(f32::MIN_POSITIVE);
                    let normal = want.abs() >= least && f64::from(x).abs() >= least * f64::from(limit);
                    let bound = if normal { 32.0 * U * want.abs() } else { least * f64::from(limit.max(1.0)) };
                    assert!(error <= bound, "{isa:?}, {x} of {limit}: {got}, expected {want}");
                }
            },
        );
        let mut nan = [f32::NAN];
        soft_cap(&Cpu::new(1).unwrap(), &mut nan, limit).unwrap();
        assert!(nan[0].is_nan());
    }
    for limit in [0.0, -1.0, 1e-39, f32::MAX, f32::INFINITY, f32::NAN] {
        let mut x = [0.0, 1.0];
        assert!(matches!(soft_cap(&Cpu::new(1).unwrap(), &mut x, limit), Err(Error::Invalid { .. })), "{limit:e}");
        assert_eq!(x, [0.0, 1.0]);
    }
}
