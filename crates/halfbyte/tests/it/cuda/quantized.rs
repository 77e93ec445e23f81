//! Products with quantised activations, and the quantising itself, against the CPU and the reference.

use super::gpus;
use super::products::{Bench, caps, check, formats_of_atoms, prepare, reference_of};
use crate::data::{Random, parse, rounded, with_zeros_in_bytes};
use halfbyte::cpu::Cpu;
use halfbyte::cuda::Caps;
use halfbyte::cuda::driver::FloatView;
use halfbyte::cuda::matmul::wna8_sm90::{self, config};
use halfbyte::cuda::matmul::{self, Epilogue, KERNELS, Kernel, QuantizedForm, quantize_activations};
use halfbyte::cuda::tiled::{Form, Tile};
use halfbyte::format::reference::Bound;
use halfbyte::kernel::{Activation, Problem};
use halfbyte::layout::cuda_wna16::Atom;
use halfbyte::ops::{Linear, Weight};
use halfbyte::quantize::activations::{ActCodes, quantize_activations as on_cpu};
use halfbyte::{Act, Float, Floats, FloatsMut, Format, QTensor, Zeros};

const ROWS: &[usize] = &[0, 1, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 300];
pub(super) const MOST: usize = 300;

fn kernel() -> &'static Kernel {
    KERNELS.iter().find(|kernel| kernel.name == "wna8_sm90").unwrap()
}

#[test]
fn codes_scales_and_offsets_are_those_of_the_cpu_bit_for_bit() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut random = Random(21);
        for (i, name) in [
            "w8a8-g32",
            "w4a8-g128-asym",
            "w8a8",
            "w4a8-g64",
            "w4a8-g256",
            "w8a8-g512",
            "w4a8-g1024",
            "w8a8-g96",
            "w4a8-g32-si8",
        ]
        .into_iter()
        .enumerate()
        {
            for (s, [m, k]) in
                [[1, 128], [5, 1000], [33, 40], [3, 4100], [2, 1], [37, 64], [70, 192]].into_iter().enumerate()
            {
                let weight = parse(name).weight;
                let w = random.qtensor(weight, [1, k], (i + s) % 3 == 2);
                let mut x = random.activations(m * k);
                // Rows without a range, with a tiny one, with NaN and with infinity.
                if m > 3 {
                    x[..k].fill(0.0);
                    x[k..2 * k].iter_mut().for_each(|v| *v *= 1e-31);
                    x[2 * k] = f32::NAN;
                    x[4 * k - 1] = f32::INFINITY;
                }
                let group = weight.activation_group().len(k);
                let parts = [16, 32, 64, 128].into_iter().filter(|part| group > *part && group.is_multiple_of(*part));
                let pieces = [group].into_iter().chain(parts);
                let forms = pieces.flat_map(|piece| [(Act::A8, piece), (Act::A8Asym, piece)]);
                let forms = forms.flat_map(|(act, piece)| [false, true].map(|pixels| (act, piece, pixels)));
                for (act, piece, pixels) in forms {
                    let form = QuantizedForm { m, k, group, piece, sums: true, offsets: act == Act::A8Asym, pixels };
                    let order: Option<Vec<u32>> = w.group_index().map(|index| {
                        let mut order: Vec<u32> = (0..k as u32).collect();
                        order.sort_by_key(|&j| index[j as usize]);
                        order
                    });
                    let on_device = {
                        let mut buffer = gpu.context().allocate::<f32>(m * k).unwrap();
                        stream.upload(&x, buffer.view_mut()).unwrap();
                        buffer
                    };
                    let order_there = order.as_ref().map(|order| {
                        let mut buffer = gpu.context().allocate::<u32>(k).unwrap();
                        stream.upload(order, buffer.view_mut()).unwrap();
                        buffer
                    });
                    let mut codes = gpu.context().allocate::<u8>(form.codes_bytes()).unwrap();
                    let mut terms = gpu.context().allocate::<f32>(form.terms_bytes() / 4).unwrap();
                    stream.fill(codes.view_mut(), 0x55).unwrap();
                    stream.fill(terms.view_mut(), 0x55).unwrap();
                    let view = FloatView::F32(on_device.view());
                    let order_view = order_there.as_ref().map(|order| order.view());
                    quantize_activations(&gpu, &stream, form, view, order_view, codes.view_mut(), terms.view_mut())
                        .unwrap();
                    let (mut got, mut numbers) = (vec![0u8; codes.len()], vec![0f32; terms.len()]);
                    stream.download(codes.view(), &mut got).unwrap();
                    stream.download(terms.view(), &mut numbers).unwrap();
                    let ActCodes { codes: want, scales, offsets } = on_cpu(&x, m, &w, act);
                    let of = if pixels { "pixels" } else { "rows" };
                    let what =
                        format!("{name} {act:?} m={m} {of} k={k} pieces of {piece}, act-order {}", order.is_some());
                    let column = |c: usize| order.as_ref().map_or(c, |order| order[c] as usize);
                    for r in 0..m {
                        for c in 0..form.pitch() {
                            let code = got[r * form.pitch() + QuantizedForm::place(c)] as i8;
                            let expected = if c < k { want[r * k + column(c)] } else { 0 };
                            assert_eq!(code, expected, "{what}: row {r}, column {c}");
                        }
                        for i in 0..form.pieces() {
                            let term = |t: usize| numbers[form.term_at(r, i, t)];
                            let at = r * form.groups() + i * piece / group;
                            let same = |a: f32, b: f32| a == b || (a.is_nan() && b.is_nan());
                            assert!(same(term(0), scales[at]), "{what}: scale {r} {i}: {} {}", term(0), scales[at]);
                            let columns = (i * piece..k.min((i + 1) * piece)).map(column);
                            let sum: i32 = columns.map(|j| i32::from(want[r * k + j])).sum();
                            assert_eq!(term(1), sum as f32, "{what}: sum {r} {i}");
                            if form.offsets {
                                assert!(same(term(2), offsets[at]), "{what}: offset {r} {i}");
                            }
                        }
                    }
                }
            }
        }
    }
}

/// A product of the sweep: the format, whether its columns lie in an order of their own, types of x and y, and sizes.
struct Case {
    format: Format,
    act_order: bool,
    problem: Problem,
}

/// Groups of 16, alone or with others of a longer one, which one kernel multiplies.
const SIXTEENS: [&str; 8] = [
    "w4a16-g16",
    "w8a16-g16-asym-sf32",
    "w2a16-g16-float-sf32",
    "w3a16-g48-sbf16",
    "w8a16-g16-sf32",
    "w4a16-g80-asym",
    "w8a16-g112-float",
    "w3a16-g16-asym-sbf16",
];

/// Every form of atoms with both kinds of quantised activations; rows of one weight lie behind each other.
fn cases() -> Vec<Vec<Case>> {
    let types = [Float::F16, Float::BF16, Float::F32];
    let shapes = [[600, 1000], [65, 136], [1, 8], [320, 2568], [4200, 512], [37, 20]];
    let mut all = Vec::new();
    // Groups of several atoms too.
    let longer =
        ["w4a16-g256", "w8a16-g384-asym", "w4a16-g512-asym", "w4a16-g192-asym", "w8a16-g160"].map(str::to_owned);
    // Factors of every kind of group, with zero points and without.
    let factors = ["-g128", "-g64-asym", "-g32-sbf16", "-g128-asym-sbf16", "-g256-asym", "-g96"];
    let factors = factors.map(|group| format!("w4a16{group}-si8"));
    let sixteens = SIXTEENS.map(str::to_owned);
    for (i, name) in formats_of_atoms().iter().chain(&longer).chain(&factors).chain(&sixteens).enumerate() {
        for (s, [n, k]) in shapes.into_iter().enumerate() {
            // The widest one with every third form.
            if n > 4000 && i % 3 != 0 {
                continue;
            }
            let act = if (i + s) % 2 == 0 { Act::A8 } else { Act::A8Asym };
            let format = Format { act, ..parse(name) };
            let x = types[(i + s) % 3];
            let case = |(j, &m): (usize, &usize)| Case {
                format,
                act_order: (i + s) % 5 == 4,
                problem: Problem { format: Some(format), x, y: types[(i + j) % 3], m, n, k },
            };
            all.push(ROWS.iter().enumerate().map(case).collect());
        }
    }
    all
}

#[test]
fn products_are_within_the_bound_of_their_specification() {
    products_are_within_the_bound(kernel());
}

/// All cases by one kernel.
pub(super) fn products_are_within_the_bound(kernel: &'static Kernel) {
    for gpu in gpus().into_iter().filter(|gpu| (kernel.serves)(gpu.caps().arch)) {
        let stream = gpu.stream().unwrap();
        let mut random = Random(22);
        let of_sixteens = |row: &Vec<Case>| Atom::of_format(row[0].format, 1 << 20).is_ok_and(|atom| atom.group == 16);
        let cases: Vec<_> = cases().into_iter().filter(|row| kernel.name == "wna8_mma" || !of_sixteens(row)).collect();
        prepare(&gpu, kernel, cases.iter().flatten().map(|case| case.problem));
        for rows in cases {
            let Case { format, act_order, problem: Problem { x: x_type, n, k, .. } } = rows[0];
            let w = with_zeros_in_bytes(random.qtensor(format.weight, [n, k], act_order));
            let packed = matmul::pack_for(kernel, &gpu, &stream, &w, format.act).unwrap();
            let x = rounded(&random.activations(MOST * k), x_type);
            let reference = reference_of(&x, MOST, &w, format.act);
            let bench = Bench::new(kernel, &gpu, &stream);
            for Case { problem, .. } in rows {
                let Problem { y, m, .. } = problem;
                let got = bench.forward(&packed, &x[..m * k], [x_type, y], m, Epilogue::default());
                check(&got, &reference, Bound::new(y, k), &format!("{problem}, act-order {act_order}"));
            }
        }
    }
}

/// Every configuration, also where another would be chosen.
#[test]
fn every_configuration_is_within_the_bound() {
    for gpu in gpus().into_iter().filter(|gpu| (kernel().serves)(gpu.caps().arch)) {
        let stream = gpu.stream().unwrap();
        let mut random = Random(25);
        for (name, x_type) in [
            ("w4a8-g128", Float::F16),
            ("w4a8-g64-asym-xasym", Float::BF16),
            ("w8a8-g32-asym-sbf16-xasym", Float::F16),
            ("w4a8-g128-asym-si8", Float::BF16),
            ("w4a8", Float::F32),
            ("w8a8-asym-xasym", Float::BF16),
            ("w4a8-g32-float-sf32", Float::F16),
            ("w8a8-g64-float-xasym-sbf16", Float::BF16),
            ("w4a8-g128-asym-xasym-sf32", Float::F32),
            ("w2a8-g128", Float::F16),
            ("w3a8-g32-asym", Float::BF16),
        ] {
            let format = parse(name);
            let out = if x_type == Float::F32 { Float::F16 } else { x_type };
            for [n, k, most] in [[1100, 4104, 300], [2048, 2056, 500]] {
                let problem = Problem { format: Some(format), x: x_type, y: out, m: most, n, k };
                let (atom, terms) = wna8_sm90::form(None, &problem).unwrap();
                let w = with_zeros_in_bytes(random.qtensor(format.weight, [n, k], false));
                let packed = matmul::pack_for(kernel(), &gpu, &stream, &w, format.act).unwrap();
                let x = rounded(&random.activations(most * k), x_type);
                let reference = reference_of(&x, most, &w, format.act);
                let mut configs = Vec::new();
                for config in [8, 64, most].into_iter().flat_map(|m| config::candidates(atom, terms, m, out)) {
                    if !configs.contains(&config) {
                        configs.push(config);
                    }
                }
                let instances: Vec<_> = configs
                    .iter()
                    .map(|config| config.instance(&Form::codes(atom, terms, out), Activation::None))
                    .collect();
                gpu.prepare(&instances, |_| ()).unwrap();
                for config in configs {
                    let bench = Bench { configuration: Some(config.into()), ..Bench::new(kernel(), &gpu, &stream) };
                    let tokens = config.tokens;
                    for m in [1, tokens - 1, tokens, tokens + 1, most] {
                        let y = bench.forward(&packed, &x[..m * k], [x_type, out], m, Epilogue::default());
                        check(&y, &reference, Bound::new(out, k), &format!("{name} m={m} n={n} k={k} {config:?}"));
                    }
                }
            }
        }
    }
}

/// From x of f32 both make the same codes, so that only the sums' rounding differs.
#[test]
fn cpu_and_gpu_are_within_both_bounds_of_each_other() {
    let cpu = Cpu::new(2).unwrap();
    for gpu in gpus().into_iter().filter(|gpu| (kernel().serves)(gpu.caps().arch)) {
        let stream = gpu.stream().unwrap();
        let mut random = Random(24);
        let names =
            ["w4a8-g128", "w8a8", "w8a8-g32-asym-xasym", "w4a8-g64-xasym", "w4a8", "w8a8-tensor", "w4a8-g512-asym"];
        let shapes = [[1, 600, 1000], [17, 65, 136], [300, 320, 2568]];
        let of = |name: &str| {
            let format = Some(parse(name));
            shapes.map(|[m, n, k]| Problem { format, x: Float::F32, y: Float::F32, m, n, k })
        };
        let problems = names.iter().flat_map(|name| of(name));
        let instances: Vec<_> = problems.flat_map(|problem| kernel().instances_of(&gpu.caps(), &problem)).collect();
        gpu.prepare(&instances, |_| ()).unwrap();
        for (i, name) in names.into_iter().enumerate() {
            for (s, [m, n, k]) in shapes.into_iter().enumerate() {
                let (format, act_order) = (parse(name), (i + s) % 4 == 3);
                let w = with_zeros_in_bytes(random.qtensor(format.weight, [n, k], act_order));
                let x = random.activations(m * k);
                let linear = Linear::new(Weight::Quantized(&w, format.act)).unwrap();
                let mut on_host = vec![0.0; m * n];
                linear.forward(&cpu, Floats::F32(&x), m, FloatsMut::F32(&mut on_host)).unwrap();
                let packed = matmul::pack_for(kernel(), &gpu, &stream, &w, format.act).unwrap();
                let types = [Float::F32, Float::F32];
                let bench = Bench::new(kernel(), &gpu, &stream);
                let on_device = bench.forward(&packed, &x, types, m, Epilogue::default());
                let (reference, bound) = (reference_of(&x, m, &w, format.act), Bound::new(Float::F32, k));
                for (i, (a, b)) in on_device.iter().zip(&on_host).enumerate() {
                    let (error, allowed) = (f64::from(a - b).abs(), 2.0 * bound.allowed(reference.magnitude[i]));
                    let what = format!("{name} m={m} n={n} k={k}, act-order {act_order}: element {i}");
                    assert!(error <= allowed, "{what} is {a} there, {b} here, off by {error:e}, allowed {allowed:e}");
                }
            }
        }
    }
}

#[test]
fn what_is_not_multiplied_is_told() {
    let caps = caps("sm_90a");
    let of = |name: &str, k| {
        let problem = Problem { format: Some(parse(name)), x: Float::F16, y: Float::F16, m: 3, n: 70, k };
        kernel().supports(&caps, &problem).map_err(|why| why.to_string())
    };
    assert_eq!(of("w8a8-g384", 1000), Ok(()));
    assert_eq!(of("w8a8-g128-asym", 1000), Ok(()));
    assert_eq!(of("w8a8-g384-asym", 1000), Ok(()));
    assert_eq!(of("w4a8-g64-asym-si8", 1000), Ok(()));
    assert!(of("w4a8-g48-si8", 1000).unwrap_err().contains("groups"));
    assert!(of("w4a8-g128-si8", 1 << 17).unwrap_err().contains("one scale"));
    assert!(of("w8a8-g48", 1000).unwrap_err().contains("groups"));
    assert!(of("w4a16-g128", 1000).unwrap_err().contains("quantised activations"));
    assert!(of("w8a8", 1 << 17).unwrap_err().contains("one scale"));
}

/// Stages of the ring are written again while others are read: whatever the timing, the bits are the same.
#[test]
fn many_repetitions_have_the_same_bits() {
    repetitions_have_the_same_bits(kernel());
}

pub(super) fn repetitions_have_the_same_bits(kernel: &'static Kernel) {
    for gpu in gpus().into_iter().filter(|gpu| (kernel.serves)(gpu.caps().arch)) {
        let stream = gpu.stream().unwrap();
        let mut random = Random(23);
        for (name, [n, k]) in [
            ("w8a8-g32-asym", [320, 2568]),
            ("w4a8-g128", [640, 4096]),
            ("w8a8", [192, 4096]),
            ("w4a8-g64-asym-si8", [640, 4096]),
            ("w4a8-g32-float-sf32", [640, 4096]),
        ] {
            let format = parse(name);
            let w = with_zeros_in_bytes(random.qtensor(format.weight, [n, k], false));
            let packed = matmul::pack_for(kernel, &gpu, &stream, &w, format.act).unwrap();
            let bench = Bench::new(kernel, &gpu, &stream);
            for m in [1, 16, 32, 64, 129, 300] {
                let x = rounded(&random.activations(m * k), Float::F16);
                let first = bench.forward(&packed, &x, [Float::F16; 2], m, Epilogue::default());
                for i in 1..32 {
                    let again = bench.forward(&packed, &x, [Float::F16; 2], m, Epilogue::default());
                    assert!(first == again, "{name} m={m}: repetition {i} differs");
                }
            }
        }
    }
}

/// What tensor cores are given for factors are the bytes of a weight with a scale a channel, exactly: only sums of pieces of k may
/// differ, by the order of their additions.
#[test]
fn factors_and_the_bytes_that_they_stand_for_have_the_same_product() {
    for gpu in gpus().into_iter().filter(|gpu| (kernel().serves)(gpu.caps().arch)) {
        let stream = gpu.stream().unwrap();
        let mut random = Random(24);
        let [n, k] = [192, 1024];
        for name in ["w4a8-g128-si8", "w4a8-g32-asym-si8", "w4a8-g64-asym-xasym-si8"] {
            let format = parse(name);
            let w = random.qtensor(format.weight, [n, k], false);
            let (factors, groups) = (w.factors().unwrap(), w.groups());
            let byte = |at: usize| {
                let (i, g) = (at / k, w.group_of(at % k));
                let code = i32::from(w.codes()[at]) - w.zero_point(i, g).unwrap() as i32;
                (code * i32::from(factors[i * groups + g]) + 128) as u8
            };
            let (codes, scales) = ((0..n * k).map(byte).collect(), w.channel_scales().unwrap().to_vec());
            let wide = QTensor::new(parse("w8a8").weight, [n, k], codes, scales, Zeros::Symmetric, None).unwrap();
            let [two, one] = [&w, &wide].map(|w| matmul::pack_for(kernel(), &gpu, &stream, w, format.act).unwrap());
            let bench = Bench::new(kernel(), &gpu, &stream);
            for m in [1, 16, 33, 128, 300] {
                let x = rounded(&random.activations(m * k), Float::F16);
                let [two, one] =
                    [&two, &one].map(|w| bench.forward(w, &x, [Float::F16, Float::F32], m, Epilogue::default()));
                // A weight that is one off is a hundred times this.
                let most = one.iter().fold(0f32, |most, y| most.max(y.abs()));
                for (i, (two, one)) in two.iter().zip(&one).enumerate() {
                    let near = (two - one).abs() <= 2e-6 * most;
                    assert!(near, "{name} m={m}: element {i} is {two} from factors, {one} from bytes");
                }
            }
        }
    }
}

/// What is chosen fits a multiprocessor and is compiled, and its blocks compute every unit of every tile once, as the kernel goes through its
/// schedule: rounds of whole tiles, then a run of units of those that are left.
#[test]
fn what_is_chosen_fits_and_covers_every_unit_once() {
    let mut random = Random(29);
    let names = [
        "w8a8",
        "w4a8-g128",
        "w8a8-g64",
        "w4a8-g32-asym",
        "w4a8-g128-si8",
        "w8a8-g32-asym-xasym",
        "w2a8-g64",
        "w8a8-asym",
        "w3a8-g32-asym",
        "w4a8-g32-float-sf32",
        "w8a8-g64-float-xasym-sbf16",
        "w4a8-g128-asym-xasym-sf32",
        "w8a8-xasym",
    ];
    for round in 0..650 {
        let (name, format) = (names[round % names.len()], Some(parse(names[round % names.len()])));
        let up_to = |most: usize, random: &mut Random| {
            let bits = 1 + random.below(most);
            1 + random.below(1 << bits)
        };
        let [m, n, k] = [11, 14, 13].map(|most| up_to(most, &mut random));
        let y = [Float::F16, Float::F32][round / names.len() % 2];
        let (atom, terms) = wna8_sm90::form(None, &Problem { format, x: Float::F16, y, m, n, k }).unwrap();
        let caps = Caps { multiprocessors: [132, 114, 78][round % 3], ..Caps::H200 };
        let form = Form::codes(atom, terms, y);
        let config = config::config(&form, [m, n, k], &caps);
        let what = format!("{name} {m} {n} {k} on {}: {config}", caps.multiprocessors);
        assert!(
            config.stages >= 2 && config.shared_bytes(&form) <= if config.blocks == 2 { 115_712 } else { 232_448 },
            "{what}"
        );
        assert!(config::every(atom, terms, y).contains(&config::Config { whole: false, ..config }), "{what}");
        let s = config.schedule([m, n, k], caps.multiprocessors as usize);
        let mut seen = vec![0u8; s.rows * s.columns * s.steps];
        for worker in 0..s.workers {
            if config.split > 1 {
                seen[worker * s.steps..][..s.steps].iter_mut().for_each(|seen| *seen += 1);
                continue;
            }
            for wave in 0..s.waves {
                seen[(wave * s.workers + worker) * s.steps..][..s.steps].iter_mut().for_each(|seen| *seen += 1);
            }
            if worker < s.sharers {
                let [from, to] =
                    [worker, worker + 1].map(|i| s.waves * s.workers * s.steps + i * s.cut * s.steps / s.sharers);
                seen[from..to].iter_mut().for_each(|seen| *seen += 1);
            }
        }
        assert!(seen.iter().all(|&seen| seen == 1), "{what}: {s:?}");
        assert!(!config.whole || s.cut == 0 || s.sharers == s.cut, "{what}: {s:?}");
    }
}

/// More groups of a row than a launch has warps for: what none had rounded would be NaN.
#[test]
fn a_row_of_millions_of_columns_in_short_groups_is_rounded() {
    let simt = KERNELS.iter().find(|kernel| kernel.name == "simt").unwrap();
    for gpu in gpus() {
        let (stream, mut random) = (gpu.stream().unwrap(), Random(31));
        let (format, k) = (parse("w8a8-g16"), 16 * 8 * 65_535 + 40);
        let w = random.qtensor(format.weight, [1, k], false);
        let x = random.activations(k);
        let reference = reference_of(&x, 1, &w, format.act);
        let packed = matmul::pack_for(simt, &gpu, &stream, &w, format.act).unwrap();
        let problem = Problem { format: Some(format), x: Float::F32, y: Float::F32, m: 1, n: 1, k };
        Bench::new(simt, &gpu, &stream).check(&packed, &x, &problem, &reference, "a long row");
    }
}
