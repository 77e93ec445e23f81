//! Products on a GPU: what the Hopper kernel is told apart by, and what all kernels have in common.

use super::products::{Bench, TYPES, caps, check, formats_of_atoms, reference_of};
use super::{gpus, in_child, is_child};
use crate::data::{ACTIVATIONS, Random, parse, rounded, with_zeros_in_bytes};
use half::f16;
use halfbyte::Float;
use halfbyte::cuda::cache::Cache;
use halfbyte::cuda::compile::Compiler;
use halfbyte::cuda::driver::{FloatView, FloatViewMut};
use halfbyte::cuda::matmul::wna16_sm90::{self, config};
use halfbyte::cuda::matmul::{self, Call, Epilogue, KERNELS};
use halfbyte::cuda::tiled::{Form, Tile};
use halfbyte::cuda::{Caps, Gpu, Workspace};
use halfbyte::format::FORMATS;
use halfbyte::format::reference::{self, Bound};
use halfbyte::kernel::{Activation, Problem};
use halfbyte::layout::cuda_wna16::Atom;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

pub(super) const ROWS: &[usize] = &[0, 1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 128, 129, 256, 300, 1000];
pub(super) const MOST: usize = 1000;

/// The Hopper kernel with the formats and shapes that are its own, each with the configuration that it chooses.
#[test]
fn every_form_of_atoms_and_number_of_rows_is_within_the_bound() {
    let kernel = KERNELS.iter().find(|kernel| kernel.name == "wna16_sm90").unwrap();
    for gpu in gpus().into_iter().filter(|gpu| (kernel.serves)(gpu.caps().arch)) {
        let stream = gpu.stream().unwrap();
        let shapes = [[600, 1000], [65, 136], [1, 8], [320, 2568], [16, 128]];
        let mut instances = Vec::new();
        for (i, name) in formats_of_atoms().iter().enumerate() {
            for [n, k] in shapes {
                let (weight, out) = (parse(name).weight, TYPES[i % 3]);
                let atom = Atom::of(weight, k).unwrap();
                for &m in &ROWS[1..] {
                    let shape = [m, n, k];
                    let form = Form::floats(atom, out);
                    instances.push(config::config(&form, shape, &gpu.caps()).instance(&form, Activation::None));
                }
            }
        }
        instances.sort_by_key(ToString::to_string);
        instances.dedup_by_key(|instance| instance.to_string());
        let start = Instant::now();
        gpu.prepare(&instances, |_| ()).unwrap();
        println!("{} instances in {:.1} s", instances.len(), start.elapsed().as_secs_f64());
        let mut random = Random(8);
        for (i, name) in formats_of_atoms().iter().enumerate() {
            let format = parse(name);
            let (x_type, out) = (format.weight.scale, TYPES[i % 3]);
            for (s, [n, k]) in shapes.into_iter().enumerate() {
                let act_order = (i + s) % 5 == 4;
                let w = with_zeros_in_bytes(random.qtensor(format.weight, [n, k], act_order));
                let packed = matmul::pack_for(kernel, &gpu, &stream, &w, format.act).unwrap();
                let x = rounded(&random.activations(MOST * k), x_type);
                let reference = reference_of(&x, MOST, &w, format.act);
                let bench = Bench::new(kernel, &gpu, &stream);
                for &m in ROWS {
                    let y = bench.forward(&packed, &x[..m * k], [x_type, out], m, Epilogue::default());
                    let problem = Problem { format: Some(format), x: x_type, y: out, m, n, k };
                    let bound = kernel.bound(&gpu.caps(), &problem);
                    check(&y, &reference, bound, &format!("{problem}, act-order {act_order}"));
                }
            }
        }
    }
}

/// Every configuration of the Hopper kernel, also on shapes for which it would choose another: tiles whole and cut.
#[test]
fn every_configuration_is_within_the_bound() {
    let kernel = KERNELS.iter().find(|kernel| kernel.name == "wna16_sm90").unwrap();
    for gpu in gpus().into_iter().filter(|gpu| (kernel.serves)(gpu.caps().arch)) {
        let stream = gpu.stream().unwrap();
        let mut random = Random(9);
        let forms = [
            ("w4a16-g128", Float::F16),
            ("w8a16-g32-asym-sbf16", Float::BF16),
            ("w4a16", Float::F16),
            ("w4a16-g32-float", Float::F16),
            ("w4a16-g64-asym", Float::BF16),
            ("w8a16-g32-float-sf32", Float::BF16),
        ];
        for (name, x_type) in forms {
            let format = parse(name);
            for [n, k, most] in [[1100, 4104, 300], [2048, 520, 1000]] {
                let atom = Atom::of_any(format.weight, k).unwrap();
                let w = with_zeros_in_bytes(random.qtensor(format.weight, [n, k], false));
                let packed = matmul::pack_for(kernel, &gpu, &stream, &w, format.act).unwrap();
                let x = rounded(&random.activations(most * k), x_type);
                let reference = reference_of(&x, most, &w, format.act);
                let form = Form { x: x_type, ..Form::floats(atom, x_type) };
                let configs = config::all(&form);
                let instances: Vec<_> = configs.iter().map(|config| config.instance(&form, Activation::None)).collect();
                gpu.prepare(&instances, |_| ()).unwrap();
                for config in configs.into_iter().filter(|config| k.div_ceil(128) >= config.split) {
                    let configuration = Some(config.into());
                    let bench = Bench { configuration, ..Bench::new(kernel, &gpu, &stream) };
                    for m in [1, config.tokens - 1, config.tokens, config.tokens + 1, most] {
                        if m > most {
                            continue;
                        }
                        let y = bench.forward(&packed, &x[..m * k], [x_type; 2], m, Epilogue::default());
                        let what = format!("{name} m={m} n={n} k={k} {config:?}");
                        let rounded_weights = config.early.then_some(x_type);
                        let bound = Bound { rounded_weights, ..Bound::new(x_type, k) };
                        check(&y, &reference, bound, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn kernels_that_are_kept_are_there_at_once_and_without_a_compiler() {
    const TEST: &str = "cuda::matmul::kernels_that_are_kept_are_there_at_once_and_without_a_compiler";
    let instances = |gpu: &Gpu| -> Vec<_> {
        let served = KERNELS.iter().filter(|kernel| (kernel.serves)(gpu.caps().arch));
        served.flat_map(|kernel| (kernel.instances)(gpu.caps().arch)).collect()
    };
    if !is_child() {
        let folder = tempfile::tempdir().unwrap();
        for gpu in gpus() {
            let driver = gpu.context().driver().version();
            let compiler = Compiler::with_cache(gpu.caps().arch, driver, Some(Cache::at(folder.path())));
            let gpu = Gpu::with_compiler(gpu.context().clone(), compiler);
            let (instances, most) = (instances(&gpu), AtomicUsize::new(0));
            let progress = |done| {
                most.fetch_max(done, Ordering::Relaxed);
            };
            gpu.prepare(&instances, progress).unwrap();
            assert_eq!(most.into_inner(), instances.len());
            assert_eq!(gpu.compiler().refusal(), None);
            let folder = folder.path().to_str().unwrap();
            in_child(TEST, &[("HALFBYTE_NVRTC", "/nonexistent"), ("HALFBYTE_CACHE", folder)]);
        }
        return;
    }
    for gpu in gpus() {
        let start = Instant::now();
        gpu.prepare(&instances(&gpu), |_| ()).unwrap();
        let seconds = start.elapsed().as_secs_f64();
        println!("{} loaded in {:.1} ms", instances(&gpu).len(), seconds * 1e3);
    }
}

#[test]
fn long_reductions_and_many_rows_cross_every_block() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut random = Random(2);
        for (name, n, k, m) in [
            ("w4a16-g128-asym", 300, 1400, 100),
            ("w4a16", 40, 9001, 50),
            ("w8a16-g32-asym", 70, 1100, 300),
            ("w2a16-g32-float", 530, 700, 130),
            ("w3a16-g128", 1000, 384, 70),
        ] {
            let format = parse(name);
            let w = with_zeros_in_bytes(random.qtensor(format.weight, [n, k], false));
            for (kernel, x_type) in KERNELS.iter().flat_map(|kernel| TYPES.map(|x_type| (kernel, x_type))) {
                let problem = Problem { format: Some(format), x: x_type, y: Float::F32, m, n, k };
                if kernel.supports(&gpu.caps(), &problem).is_err() {
                    continue;
                }
                let packed = matmul::pack_for(kernel, &gpu, &stream, &w, format.act).unwrap();
                let bench = Bench::new(kernel, &gpu, &stream);
                let x = rounded(&random.activations(m * k), x_type);
                let y = bench.forward(&packed, &x, [x_type, Float::F32], m, Epilogue::default());
                let what = format!("{}: {problem}", kernel.name);
                let reference = reference_of(&x, m, &w, format.act);
                check(&y, &reference, kernel.bound(&gpu.caps(), &problem), &what);
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_whatever_m_is() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut random = Random(3);
        let formats = ["w4a16-g128", "w4a16-g64-asym", "w8a16-g32-asym-sbf16", "w8a16", "w3a16-g128"];
        // With tiles that a cluster shares, and with so many that none does.
        for (name, [n, k]) in formats.iter().flat_map(|name| [[100, 648], [9000, 260]].map(|shape| (name, shape))) {
            let format = parse(name);
            let w = with_zeros_in_bytes(random.qtensor(format.weight, [n, k], false));
            let x_type = format.weight.scale;
            let x = rounded(&random.activations(200 * k), x_type);
            for kernel in KERNELS.iter().filter(|kernel| kernel.batch_invariant) {
                let problem = Problem { format: Some(format), x: x_type, y: x_type, m: 1, n, k };
                if kernel.supports(&gpu.caps(), &problem).and_then(|()| kernel.holds(&(&w).into(), format.act)).is_err()
                {
                    continue;
                }
                let packed = matmul::pack_for(kernel, &gpu, &stream, &w, format.act).unwrap();
                let bench = Bench { batch_invariant: true, ..Bench::new(kernel, &gpu, &stream) };
                for out in [x_type, Float::F32] {
                    let all = bench.forward(&packed, &x, [x_type, out], 200, Epilogue::default());
                    let reference = reference_of(&x[..8 * k], 8, &w, format.act);
                    check(&all[..8 * n], &reference, Bound::new(out, k), name);
                    for m in [1, 4, 9, 17, 33, 65, 129] {
                        let y = bench.forward(&packed, &x[..m * k], [x_type, out], m, Epilogue::default());
                        assert!(y == all[..m * n], "{} {name} [{n}, {k}]: rows depend on m = {m}", kernel.name);
                    }
                }
            }
        }
    }
}

/// Stages of the rings are written again while others are read: whatever the timing, the bits are the same.
#[test]
fn many_repetitions_have_the_same_bits() {
    let kernel = KERNELS.iter().find(|kernel| kernel.name == "wna16_sm90").unwrap();
    for gpu in gpus().into_iter().filter(|gpu| (kernel.serves)(gpu.caps().arch)) {
        let stream = gpu.stream().unwrap();
        let mut random = Random(10);
        for (name, [n, k]) in [("w8a16-asym", [320, 2568]), ("w4a16-g128", [640, 4096]), ("w8a16-g32", [192, 4096])] {
            let format = parse(name);
            let w = random.qtensor(format.weight, [n, k], false);
            let packed = matmul::pack_for(kernel, &gpu, &stream, &with_zeros_in_bytes(w), format.act).unwrap();
            let bench = Bench::new(kernel, &gpu, &stream);
            for m in [1, 16, 32, 64, 129, 300] {
                let values: Vec<f16> = random.activations(m * k).into_iter().map(f16::from_f32).collect();
                let x = bench.upload(&values);
                let problem = Problem { format: Some(format), x: Float::F16, y: Float::F16, m, n, k };
                let bytes = matmul::workspace_bytes(&gpu.caps(), &problem, packed.layout()).unwrap();
                let mut workspace = bench.workspace(bytes);
                const TIMES: usize = 64;
                let mut y = gpu.context().allocate::<f16>(TIMES * m * n).unwrap();
                for i in 0..TIMES {
                    let call = Call {
                        x: FloatView::F16(x.view()),
                        m,
                        w: &packed,
                        epilogue: Epilogue::default(),
                        y: y.view_mut().slice(i * m * n..(i + 1) * m * n).into(),
                        workspace: Some(&mut workspace),
                        batch_invariant: false,
                    };
                    matmul::run_with(kernel, &gpu, &stream, call).unwrap();
                }
                let mut all = vec![f16::ZERO; TIMES * m * n];
                stream.download(y.view(), &mut all).unwrap();
                let (first, others) = all.split_at(m * n);
                for (i, other) in others.chunks(m * n).enumerate() {
                    let differ = (0..m * n).find(|&j| first[j].to_bits() != other[j].to_bits());
                    assert_eq!(differ, None, "{name} m={m} n={n} k={k}: repetition {i} differs");
                }
            }
        }
    }
}

#[test]
fn bias_and_activation_come_last() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut random = Random(5);
        let format = parse("w4a16-g32-asym");
        let w = random.qtensor(format.weight, [21, 64], false);
        let (bias, x) = (random.normals(21), rounded(&random.normals(6 * 64), Float::F16));
        let plain = reference::linear(&x, 6, &w, format.act);
        for (kernel, x_type) in KERNELS.iter().flat_map(|kernel| [(kernel, Float::F32), (kernel, Float::F16)]) {
            let problem = Problem { format: Some(format), x: x_type, y: Float::F32, m: 6, n: 21, k: 64 };
            if kernel.supports(&gpu.caps(), &problem).is_err() {
                continue;
            }
            let bench = Bench::new(kernel, &gpu, &stream);
            let packed = matmul::pack_for(kernel, &gpu, &stream, &w, format.act).unwrap();
            let on_device = bench.upload(&bias);
            for activation in ACTIVATIONS {
                let epilogue = Epilogue { bias: Some(on_device.view()), activation };
                let y = bench.forward(&packed, &x, [x_type, Float::F32], 6, epilogue);
                for (i, &y) in y.iter().enumerate() {
                    let v = (plain.value[i] + f64::from(bias[i % 21])) as f32;
                    let want = activation.apply(v);
                    assert!((y - want).abs() < 2e-5, "{} {activation:?}: {y} and {want}", kernel.name);
                }
            }
        }
    }
}

#[test]
fn nan_and_infinity_in_x_reach_y_and_only_their_row() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut random = Random(6);
        let hopper = KERNELS.iter().map(|kernel| (kernel, "w4a16-g32-asym-sbf16".to_owned()));
        let of_groups = FORMATS.iter().filter(|name| name.contains("g32"));
        let cases = of_groups.flat_map(|name| KERNELS.iter().map(move |kernel| (kernel, (*name).to_owned())));
        for (kernel, name) in cases.chain(hopper) {
            let format = parse(&name);
            let w = with_zeros_in_bytes(random.qtensor(format.weight, [33, 96], false));
            let problem = Problem { format: Some(format), x: Float::BF16, y: Float::BF16, m: 20, n: 33, k: 96 };
            if kernel.supports(&gpu.caps(), &problem).is_err() {
                continue;
            }
            let bench = Bench::new(kernel, &gpu, &stream);
            let packed = matmul::pack_for(kernel, &gpu, &stream, &w, format.act).unwrap();
            for bad in [f32::NAN, f32::INFINITY] {
                for m in [1, 20] {
                    let mut x = rounded(&random.normals(m * 96), Float::BF16);
                    x[(m - 1) * 96 + 40] = bad;
                    for out in TYPES {
                        let epilogue = Epilogue { bias: None, activation: Activation::Relu };
                        let y = bench.forward(&packed, &x, [Float::BF16, out], m, epilogue);
                        let (others, row) = y.split_at((m - 1) * 33);
                        let what = format!("{} {name} {bad} to {out}", kernel.name);
                        assert!(others.iter().all(|v| v.is_finite()), "{what}: leaked into other rows");
                        if bad.is_nan() {
                            assert!(row.iter().all(|v| v.is_nan()), "{what}: {row:?}");
                        } else {
                            assert!(row.iter().any(|v| !v.is_finite()), "{what}: {row:?}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn wrong_lengths_and_problems_are_errors() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut random = Random(7);
        let format = parse("w4a16-g32");
        let w = random.qtensor(format.weight, [4, 32], false);
        let packed = matmul::pack(&gpu, &stream, &w, format.act, Float::F32).unwrap();
        assert!(packed.bytes() >= 4 * 32 / 2);
        let x = gpu.context().allocate::<f32>(64).unwrap();
        let mut y = gpu.context().allocate::<f32>(8).unwrap();
        let bias = gpu.context().allocate::<f32>(3).unwrap();
        let problem = Problem { format: Some(format), x: Float::F32, y: Float::F32, m: 2, n: 4, k: 32 };
        let bytes = matmul::workspace_bytes(&gpu.caps(), &problem, packed.layout()).unwrap();
        let mut workspace = Workspace::new(&gpu, &stream, bytes).unwrap();
        let mut run = |x_len: usize, m: usize, y_len: usize, bias| {
            let (x, y) = (FloatView::F32(x.view().slice(0..x_len)), FloatViewMut::F32(y.view_mut().slice(0..y_len)));
            let epilogue = Epilogue { bias, activation: Activation::None };
            matmul::run(
                &gpu,
                &stream,
                Call { x, m, w: &packed, epilogue, y, workspace: Some(&mut workspace), batch_invariant: false },
            )
        };
        run(64, 2, 8, None).unwrap();
        run(0, 0, 0, None).unwrap();
        assert_eq!(run(63, 2, 8, None).unwrap_err().to_string(), "matmul: expected x of 2 × 32, got 63 elements");
        assert_eq!(run(64, 2, 7, None).unwrap_err().to_string(), "matmul: expected y of 2 × 4, got 7 elements");
        let error = run(64, 2, 8, Some(bias.view())).unwrap_err().to_string();
        assert_eq!(error, "matmul: expected a bias of 1 × 4, got 3 elements");
        assert!(run(64, usize::MAX, 8, None).is_err());
        stream.synchronize().unwrap();
    }
}

/// Shared memory and stages of whatever is chosen.
#[test]
fn configurations_fit_the_device() {
    for name in formats_of_atoms() {
        let weight = parse(&name).weight;
        for [n, k] in [[1, 8], [63, 136], [600, 1000], [4096, 4096], [6144, 4096], [21504, 14336], [1 << 20, 256]] {
            let atom = Atom::of(weight, k).unwrap();
            let types = TYPES.into_iter().flat_map(|out| [Float::F16, Float::BF16].map(|x| (x, out)));
            let forms: Vec<Form> = types.map(|(x, out)| Form { x, ..Form::floats(atom, out) }).collect();
            let sizes = (1..=300).chain([512, 1024, 4096, 1 << 20]);
            for (m, form) in sizes.flat_map(|m| forms.iter().map(move |form| (m, form))) {
                let c = config::config(form, [m, n, k], &Caps::H200);
                let (what, shared) = (format!("{name} {m} {n} {k}, x {}: {c:?}", form.x), c.shared_bytes(form));
                assert!(shared <= if c.blocks == 2 { 115_712 } else { 232_448 }, "{what}: {shared} bytes");
                assert!(c.stages_w >= 2 && c.stages_x >= 2 && c.stages_w.is_multiple_of(c.sets), "{what}");
                assert!(k.div_ceil(128) >= c.split, "{what}");
                let coarse = form.out.unit_roundoff() >= form.x.unit_roundoff();
                let may_round = m > if atom.group < 128 { 64 } else { 128 }
                    && coarse
                    && (form.x == Float::BF16 || atom.scale == Float::F16);
                assert!(!c.early || may_round, "{what}: rounds weights");
                let invariant = config::batch_invariant(form, [m, n, k], &Caps::H200);
                let one = config::batch_invariant(form, [1, n, k], &Caps::H200);
                assert!(!invariant.early && invariant.split == one.split && invariant.sets == 1, "{what}");
                for config in [c, invariant] {
                    assert!(wna16_sm90::compiles(config, form), "{what}: {config}");
                }
                let s = config::Schedule::new(c, [m, n, k], 132);
                let tiles = m.div_ceil(c.tokens) * n.div_ceil(64).div_ceil(c.tile_strips());
                assert!(s.workers >= 1 && s.rows * s.columns == tiles, "{what}: {s:?}");
                let whole = if c.split == 1 { s.waves * s.workers } else { 0 };
                assert_eq!(whole + s.cut, tiles, "{what}: {s:?}");
                assert!(c.parts_bytes(&s) <= 64 << 20, "{what}: {s:?}");
            }
        }
    }
}

#[test]
fn the_choice_is_pure_and_explained() {
    let problem =
        |name: &str, m| Problem { format: Some(parse(name)), x: Float::F16, y: Float::F16, m, n: 4096, k: 4096 };
    for arch in ["sm_75", "sm_80", "sm_89", "sm_90a", "sm_120a"] {
        for name in FORMATS {
            for m in [0, 1, 16, 4096] {
                let chosen = matmul::select(&caps(arch), &problem(name, m), None).unwrap();
                let reasons = matmul::explain(&caps(arch), &problem(name, m), None);
                assert_eq!(reasons.len(), KERNELS.len());
                assert_eq!(reasons.iter().find(|(_, reason)| reason.is_none()).unwrap().0.name, chosen.name);
                // Weights packed for one row are multiplied by thousands.
                let layout = matmul::select(&caps(arch), &problem(name, 1), None).unwrap().layout;
                matmul::select(&caps(arch), &problem(name, m), Some(layout)).unwrap();
            }
        }
        let dense = Problem { format: None, ..problem("w4a16", 1) };
        let error = matmul::select(&caps(arch), &dense, None).err().unwrap();
        assert!(error.to_string().contains("simt: multiplies codes, the weights are dense"), "{error}");
        let huge = Problem { n: usize::MAX / 2, ..problem("w4a16", 1) };
        assert!(matmul::select(&caps(arch), &huge, None).is_err());
        assert!(matmul::select(&caps(arch), &problem("w4a16", 1), Some("of nobody")).is_err());
    }
    assert!(matmul::select(&caps("sm_70"), &problem("w4a16", 1), None).is_err());
}
