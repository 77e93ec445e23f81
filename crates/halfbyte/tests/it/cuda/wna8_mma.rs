//! The kernel for quantised activations from sm_75 on: against the reference, and what the tests of all kernels do not reach.

use super::gpus;
use super::products::{Bench, TYPES, WIDE, caps, check, formats_of_atoms, reference_of};
use super::quantized::{MOST, products_are_within_the_bound, repetitions_have_the_same_bits};
use crate::data::{Random, parse, rounded, with_zeros_in_bytes};
use halfbyte::cuda::Caps;
use halfbyte::cuda::matmul::wna8_mma::config;
use halfbyte::cuda::matmul::wna8_sm90::{self, config::Terms};
use halfbyte::cuda::matmul::{self, Configuration, Epilogue, KERNELS, Kernel};
use halfbyte::cuda::tiled::{Form, Tile};
use halfbyte::format::reference::Bound;
use halfbyte::kernel::{Activation, Problem};
use halfbyte::layout::cuda_wna16::Atom;
use halfbyte::{Act, Float, Format};

fn kernel() -> &'static Kernel {
    KERNELS.iter().find(|kernel| kernel.name == "wna8_mma").unwrap()
}

/// What the kernel is made for: the form of a format's atoms, and what its activations have beside codes.
fn form(name: &str, k: usize) -> (Atom, Terms) {
    let format = parse(name);
    let problem = Problem { format: Some(format), x: Float::F16, y: Float::F16, m: 1, n: 1, k };
    wna8_sm90::form(None, &problem).unwrap()
}

#[test]
fn products_are_within_the_bound_of_their_specification() {
    products_are_within_the_bound(kernel());
}

/// Stages of the ring are written again while others are read: whatever the timing, the bits are the same.
#[test]
fn many_repetitions_have_the_same_bits() {
    repetitions_have_the_same_bits(kernel());
}

/// Every configuration, also where another would be chosen, with tiles whole and cut either way.
#[test]
fn every_configuration_and_cut_is_within_the_bound() {
    for gpu in gpus().into_iter().filter(|gpu| (kernel().serves)(gpu.caps().arch)) {
        let stream = gpu.stream().unwrap();
        let mut random = Random(31);
        for (name, x_type) in [
            ("w4a8-g128", Float::F16),
            ("w4a8-g64-asym-xasym", Float::BF16),
            ("w8a8-g32-asym-sbf16-xasym", Float::F16),
            ("w4a8-g256", Float::BF16),
            ("w8a8", Float::F32),
            ("w8a8-asym-xasym", Float::BF16),
            ("w2a8-g32", Float::F16),
            ("w3a8-g128-asym", Float::BF16),
            ("w4a8-g128-asym-si8", Float::F16),
            ("w4a8-g32-xasym-sbf16-si8", Float::BF16),
            ("w4a8-g16-asym-xasym", Float::F16),
            ("w8a8-g16-sf32", Float::BF16),
            ("w2a8-g16-float-xasym-sf32", Float::F16),
            ("w3a8-g48-sbf16", Float::F32),
        ] {
            let format = parse(name);
            let out = if x_type == Float::F32 { Float::F16 } else { x_type };
            for [n, k, most] in [[1100, 4104, 300], [2048, 520, 500]] {
                let (atom, terms) = form(name, k);
                let w = with_zeros_in_bytes(random.qtensor(format.weight, [n, k], false));
                let packed = matmul::pack_for(kernel(), &gpu, &stream, &w, format.act).unwrap();
                let x = rounded(&random.activations(most * k), x_type);
                let reference = reference_of(&x, most, &w, format.act);
                let configs = config::all(atom, terms, out, &gpu.caps());
                let instances: Vec<_> = configs
                    .iter()
                    .map(|config| config.instance(&Form::codes(atom, terms, out), Activation::None))
                    .collect();
                gpu.prepare(&instances, |_| ()).unwrap();
                for (config, batch_invariant) in configs.into_iter().flat_map(|c| [(c, false), (c, true)]) {
                    let bench = Bench::new(kernel(), &gpu, &stream);
                    let bench = Bench { configuration: Some(config.into()), batch_invariant, ..bench };
                    let tokens = config.tokens;
                    for m in [1, tokens - 1, tokens, tokens + 1, most] {
                        let y = bench.forward(&packed, &x[..m * k], [x_type, out], m, Epilogue::default());
                        let what = format!("{name} m={m} n={n} k={k} {config:?} {batch_invariant}");
                        check(&y, &reference, Bound::new(out, k), &what);
                    }
                }
            }
        }
    }
}

#[test]
fn an_invariant_row_has_the_same_bits_whatever_m_and_the_configuration_are() {
    for gpu in gpus().into_iter().filter(|gpu| (kernel().serves)(gpu.caps().arch)) {
        let stream = gpu.stream().unwrap();
        let mut random = Random(32);
        for (name, [n, k], act_order) in [
            ("w4a8-g128", [1100, 4104], false),
            ("w8a8-g32-asym-xasym", [600, 2560], true),
            ("w4a8-xasym", [300, 1000], false),
            ("w8a8-g64", [70, 264], false),
            ("w8a8-g16-xasym-sf32", [600, 2560], true),
        ] {
            let format = parse(name);
            let (atom, terms) = form(name, k);
            let w = with_zeros_in_bytes(random.qtensor(format.weight, [n, k], act_order));
            let packed = matmul::pack_for(kernel(), &gpu, &stream, &w, format.act).unwrap();
            let x = rounded(&random.activations(MOST * k), Float::F16);
            let types = [Float::F16, Float::F32];
            let run = |configuration: Option<Configuration>, m: usize| {
                let bench = Bench { configuration, batch_invariant: true, ..Bench::new(kernel(), &gpu, &stream) };
                bench.forward(&packed, &x[..m * k], types, m, Epilogue::default())
            };
            let all = run(None, MOST);
            let reference = reference_of(&x, MOST, &w, format.act);
            check(&all, &reference, Bound::new(Float::F32, k), name);
            for m in [1, 7, 16, 17, 33, 64, 65, 129, 257] {
                let y = run(None, m);
                assert!(y == all[..m * n], "{name} m={m}");
            }
            for config in config::all(atom, terms, Float::F32, &gpu.caps()) {
                let y = run(Some(config.into()), 40);
                assert!(y == all[..40 * n], "{name} {config:?}");
            }
        }
    }
}

/// Bias and activation, and a row with NaN or infinity, which reaches no other.
#[test]
fn the_epilogue_is_applied_and_nan_stays_in_its_row() {
    for gpu in gpus().into_iter().filter(|gpu| (kernel().serves)(gpu.caps().arch)) {
        let stream = gpu.stream().unwrap();
        let mut random = Random(33);
        for name in ["w4a8-g128", "w8a8-g64-asym-xasym", "w8a8-asym"] {
            let (format, [n, k]) = (parse(name), [140, 1000]);
            let w = with_zeros_in_bytes(random.qtensor(format.weight, [n, k], false));
            let packed = matmul::pack_for(kernel(), &gpu, &stream, &w, format.act).unwrap();
            let bias = random.activations(n);
            let mut on_device = gpu.context().allocate::<f32>(n).unwrap();
            stream.upload(&bias, on_device.view_mut()).unwrap();
            let epilogue = Epilogue { bias: Some(on_device.view()), activation: Activation::Relu };
            let bench = Bench::new(kernel(), &gpu, &stream);
            for m in [5, 20, 40, 70, 130] {
                let mut x = rounded(&random.activations(m * k), Float::F16);
                let plain = bench.forward(&packed, &x, [Float::F16, Float::F32], m, Epilogue::default());
                let y = bench.forward(&packed, &x, [Float::F16, Float::F32], m, epilogue);
                for (i, (y, plain)) in y.iter().zip(&plain).enumerate() {
                    let want = (plain + bias[i % n]).max(0.0);
                    // The sums of rows of one scale get their scale and the bias in one rounding.
                    let near = (y - want).abs() <= 4e-7 * (plain.abs() + bias[i % n].abs());
                    assert!(near, "{name} m={m}: element {i} is {y}, expected {want}");
                }
                (x[k + 3], x[3 * k]) = (f32::NAN, f32::INFINITY);
                let spoilt = bench.forward(&packed, &x, [Float::F16, Float::F32], m, Epilogue::default());
                for (r, (row, plain)) in spoilt.chunks(n).zip(plain.chunks(n)).enumerate() {
                    match r {
                        1 | 3 => assert!(row.iter().all(|y| !y.is_finite()), "{name} m={m}: row {r} has numbers"),
                        _ => assert!(row == plain, "{name} m={m}: row {r} is another"),
                    }
                }
            }
        }
    }
}

#[test]
fn configurations_fit_every_processor_and_cuts_follow_n_and_k() {
    let devices = [
        caps("sm_90a"),
        Caps { multiprocessors: 108, shared_bytes: 166_912, l2_bytes: 40 << 20, ..caps("sm_80") },
        Caps { multiprocessors: 128, shared_bytes: 101_376, l2_bytes: 72 << 20, ..caps("sm_89") },
    ];
    let atoms = formats_of_atoms();
    let atoms = atoms.iter().map(String::as_str);
    let multiplied = |name: &&str| {
        let format = Format { act: Act::A8, ..parse(name) };
        Atom::of_format(format, 1 << 20).is_ok_and(|atom| !atom.factors)
    };
    for name in atoms
        .chain(WIDE.iter().copied().filter(multiplied))
        .flat_map(|name| [name.replace("a16", "a8"), name.replace("a16", "a8") + "-xasym"])
    {
        for [n, k] in [[1, 8], [63, 136], [600, 1000], [4096, 4096], [21504, 14336], [1 << 20, 256]] {
            let (atom, terms) = form(&name, k);
            for (m, out) in [1, 7, 8, 9, 16, 17, 32, 33, 64, 65, 96, 128, 129, 300, 1024, 4096, 1 << 20]
                .into_iter()
                .flat_map(|m| TYPES.map(|out| (m, out)))
            {
                for caps in &devices {
                    let shape = [m, n, k];
                    let c = config::config(atom, terms, shape, out, caps);
                    let (what, shared) =
                        (format!("{name} {m} {n} {k}: {c:?}"), c.shared_bytes(&Form::codes(atom, terms, out)));
                    assert!(config::all(atom, terms, out, caps).contains(&c), "{what}");
                    assert!(shared <= caps.shared_bytes as usize && c.stages >= 3, "{what}: {shared} bytes");
                    let s = c.schedule(shape, c.workers(atom, terms, out, caps));
                    let tiles = m.div_ceil(c.tokens) * n.div_ceil(64).div_ceil(c.tile_strips());
                    assert!(s.workers >= 1 && s.rows * s.columns == tiles, "{what}: {s:?}");
                    assert_eq!(s.waves * s.workers + s.cut, tiles, "{what}: {s:?}");
                    assert!(s.sharers <= s.workers && (s.cut == 0) == (s.sharers == 0), "{what}: {s:?}");
                    assert!(c.parts_bytes(&s) <= 64 << 20, "{what}: {s:?}");
                }
            }
        }
    }
}

#[test]
fn it_serves_what_the_kernel_for_hopper_does_on_all_other_processors() {
    let of = |arch: &str, name: &str, k| {
        let problem = Problem { format: Some(parse(name)), x: Float::F16, y: Float::F16, m: 3, n: 70, k };
        matmul::select(&caps(arch), &problem, None).map(|kernel| kernel.name).map_err(|why| why.to_string())
    };
    for name in ["w4a8-g128", "w8a8", "w4a8-g32-asym-xasym", "w8a8-g384", "w8a8-g384-asym"] {
        for arch in ["sm_75", "sm_80", "sm_86", "sm_89", "sm_100a", "sm_120a"] {
            assert_eq!(of(arch, name, 1000).as_deref(), Ok("wna8_mma"), "{arch} {name}");
        }
        assert_eq!(of("sm_90a", name, 1000).as_deref(), Ok("wna8_sm90"), "{name}");
    }
    for name in ["w4a8-g32-float-sf32", "w3a8-g64-asym", "w8a8-float-xasym", "w2a8-g64-asym"] {
        assert_eq!(of("sm_89", name, 1000).as_deref(), Ok("wna8_mma"), "{name}");
    }
    for name in ["w4a8-g20", "w4a8-g100-asym"] {
        assert_eq!(of("sm_89", name, 1000).as_deref(), Ok("simt"), "{name}");
    }
    // Groups of 16 by this kernel on Hopper too.
    for name in ["w8a8-g16-sf32", "w4a8-g16", "w3a8-g48-asym", "w2a8-g16-float-xasym-sf32"] {
        for arch in ["sm_75", "sm_80", "sm_89", "sm_90a"] {
            assert_eq!(of(arch, name, 1000).as_deref(), Ok("wna8_mma"), "{arch} {name}");
        }
    }
    assert_eq!(of("sm_80", "w8a8", 1 << 17).as_deref(), Ok("simt"));
    let problem = Problem { format: Some(parse("w4a16-g128")), x: Float::F16, y: Float::F16, m: 3, n: 70, k: 1000 };
    assert!(kernel().supports(&caps("sm_80"), &problem).unwrap_err().to_string().contains("quantised activations"));
}
